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
from recprune.live.generation import is_live
from recprune.live.live_index import LiveIndex
from recprune.live.snapshot import LiveSnapshot
from recprune.recommender.recommender import Recommender
from recprune.storage import read_manifest, writing_to
from recprune.types import Json


class AskedAt(NamedTuple):
    """A recommender, and the moment at which it is asked, if its catalogue changes."""

    recommender: Recommender
    snapshot: LiveSnapshot | None

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
        cls, live: str | Path, folder: Path, attributes: str | Path | None
    ) -> FrozenCatalogue:
        """Copy a live index, or take the copy of an earlier run that was stopped."""
        if not is_live(folder):
            with writing_to(folder):
                folder.parent.mkdir(parents=True, exist_ok=True)
            begun = folder.with_name(f"{folder.name}.begun")
            shutil.rmtree(begun, ignore_errors=True)
            try:
                with writing_to(folder), LiveIndex.open(live) as index, index.held():
                    shutil.copytree(index.folder, begun, copy_function=_linked)
                    begun.rename(folder)
            finally:
                shutil.rmtree(begun, ignore_errors=True)
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


def _linked(source: str, target: str) -> None:
    """Copy a file; a saved array never changes, so that another name for it will do."""
    if source.endswith(".npy"):
        try:
            os.link(source, target)
            return
        except OSError:  # on another disk
            pass
    shutil.copy2(source, target)
