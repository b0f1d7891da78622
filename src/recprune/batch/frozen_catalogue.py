"""A live index as it was at one moment, while a batch takes: a copy that nobody changes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from recprune.attributes.attributes import KIND as ATTRIBUTES
from recprune.attributes.attributes import Attributes
from recprune.data.identifiers import FoundIds
from recprune.live.generation import is_live
from recprune.live.live_index import LiveIndex
from recprune.live.snapshot import LiveSnapshot
from recprune.live.snapshot_ids import ids_at
from recprune.recommender.recommender import Recommender
from recprune.storage import read_manifest, writing_to
from recprune.types import Json, StorageError


class AskedAt(NamedTuple):
    """A recommender, and the moment at which it is asked, if its catalogue changes."""

    recommender: Recommender
    snapshot: LiveSnapshot | None

    @property
    def ids(self) -> FoundIds:
        """The external ids of the items that can be in an answer."""
        return ids_at(self.recommender.item_ids, self.snapshot)

    @property
    def most(self) -> int:
        """How many items can be in an answer; one at least, as none cannot be asked for."""
        if self.snapshot is None:
            return len(self.recommender.item_ids)
        return max(1, self.snapshot.num_present)


@dataclass(frozen=True)
class FrozenCatalogue:
    """Where the copy is, and what tells it from another one."""

    folder: str
    identity: str  # of the live index
    sequence: int  # of the last change
    attributes: str | None  # folder; None: those of the recommender
    attributes_sha256: str | None  # of its manifest

    @classmethod
    def freeze(
        cls,
        live: str | Path,
        folder: Path,
        attributes: str | Path | None,
        unfinished: Json | None = None,
    ) -> FrozenCatalogue:
        """Copy a live index, or take the copy with which a run was begun that is to go on.

        `unfinished` is what the plan of that run says of its catalogue. Any other copy was left
        behind, and is of some other moment: it goes.
        """
        with LiveIndex.open(live) as index:
            if is_copy_of(folder, unfinished):
                if unfinished is not None and unfinished["identity"] != index.identity:
                    raise StorageError(
                        f"{live}: another catalogue than that of the run that is to go on"
                    )
            else:
                remove_copy(folder)
                try:
                    with writing_to(folder):
                        folder.parent.mkdir(parents=True, exist_ok=True)
                        with index.held():
                            shutil.copytree(index.folder, _aside(folder), copy_function=_linked)
                        _aside(folder).rename(folder)
                finally:
                    shutil.rmtree(_aside(folder), ignore_errors=True)
        with LiveIndex.open(folder) as copy:
            checksum = None
            if attributes is not None:
                checksum = str(read_manifest(attributes, ATTRIBUTES)["sha256"])
            return cls(
                os.path.realpath(folder),
                copy.identity,
                copy.snapshot().sequence,
                None if attributes is None else os.path.realpath(attributes),
                checksum,
            )

    def to_json(self) -> Json:
        """Return what answers depend on."""
        return {
            "identity": self.identity,
            "sequence": self.sequence,
            "attributes": self.attributes_sha256,
        }

    @contextmanager
    def opened(self, recommender: Recommender) -> Iterator[AskedAt]:
        with LiveIndex.open(self.folder) as live:
            recommender = recommender.with_live(live)
            if self.attributes is not None:
                recommender = recommender.with_attributes(Attributes.load(self.attributes))
            yield AskedAt(recommender, live.snapshot())


def is_copy_of(folder: Path, planned: Json | None) -> bool:
    """Whether a copy is there that can be read, and is of the moment that a plan names."""
    if planned is None or not is_live(folder):
        return False
    try:
        with LiveIndex.open(folder) as copy:
            moment = {"identity": copy.identity, "sequence": copy.snapshot().sequence}
    except StorageError:
        return False
    return {name: planned.get(name) for name in moment} == moment


def remove_copy(folder: Path) -> None:
    """Remove a copy, and what a run that was killed had of one; what is neither stays."""
    shutil.rmtree(_aside(folder), ignore_errors=True)
    if is_live(folder):
        folder.rename(_aside(folder))  # in one step, so that half a copy never has its name
        shutil.rmtree(_aside(folder))


def _aside(folder: Path) -> Path:
    """Return where a copy is made, and removed."""
    return folder.with_name(f"{folder.name}.begun")


def _linked(source: str, target: str) -> None:
    """Copy a file; a saved array never changes, so that another name for it will do."""
    if source.endswith(".npy"):
        try:
            os.link(source, target)
            return
        except OSError:  # on another disk
            pass
    shutil.copy2(source, target)
