"""The items by the caller's names for them: ids, titles, and a search over both."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Container, Iterable, Sequence
from copy import copy
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recprune.data.identifiers import (
    CatalogueIds,
    ExternalId,
    coerce_ids,
)
from recprune.data.titles import read_titles, reading
from recprune.live.notes import NO_NOTES
from recprune.live.snapshot import LiveSnapshot
from recprune.live.snapshot_ids import SnapshotIds
from recprune.recommender.item_notes import has_name, noted_name
from recprune.serve.engine.posted_names import PostedNames
from recprune.serve.engine.texts import TextFiles, folded, shared_texts, write_texts
from recprune.types import Int64Array, StorageError


class Catalogue:
    """Items, their names, and how popular they are. Safe to share between threads."""

    def __init__(
        self,
        ids: CatalogueIds,
        popularity: Int64Array | None,
        names_file: Path | None,
        *,
        version: str = "",
        scratch: Path | None = None,
    ) -> None:
        """Names are read from a file with a column of ids and a column of names.

        Workers that have the folder `scratch` share the names and what is searched for words;
        `version` is that of the items.
        """
        self.ids: CatalogueIds | SnapshotIds = ids
        self.popularity = popularity  # of the items that were trained with
        self._given_ids = ids
        self._notes = NO_NOTES  # which may say other names
        self._posted = PostedNames()  # of all moments

        state = _state(names_file)
        key = None if state is None else hashlib.sha256(f"{version} {state}".encode()).hexdigest()

        def write(files: TextFiles) -> None:
            names = self._named(names_file) if names_file else None
            if key is not None and _state(names_file) != state:  # they are not what the key says
                raise StorageError(f"{names_file}: was replaced while it was read: try again")
            write_texts(files, ids, popularity, names)

        self._texts = shared_texts(scratch, key, write)

    def at(self, snapshot: LiveSnapshot) -> Catalogue:
        """Return it as it is at one moment, with the names that were posted until then."""
        moment = copy(self)
        moment.ids = SnapshotIds(snapshot)
        moment._notes = snapshot.notes
        return moment

    @property
    def has_names(self) -> bool:
        return self._texts.has_names

    def coerce(self, external_ids: Iterable[ExternalId]) -> list[ExternalId]:
        """Return ids in the type that the catalogue has: what is a number may be given as text."""
        return coerce_ids(self._given_ids, external_ids)

    def find_all(self, external_ids: Iterable[ExternalId]) -> Int64Array:
        """Return the internal ids, −1 where there is none; numbers may be given as text."""
        return self.ids.find_all(self.coerce(external_ids))

    def find(self, external_id: ExternalId) -> int:
        """Do as `find_all` does, for one."""
        return int(self.find_all([external_id])[0])

    def external_id(self, item: int) -> ExternalId:
        """Return what the caller calls an item."""
        return self.ids[item]

    def external_ids(self, items: Sequence[int]) -> Sequence[ExternalId]:
        """Do as `external_id` does, for several."""
        return self.ids.take(items)

    def name(self, item: int) -> str | None:
        """Return the name of an item, None where it has none."""
        note = self._notes.get(item) if self._notes else None
        if note is not None and has_name(note):
            return noted_name(note)
        return self._texts.name(item) if item < len(self._given_ids) else None

    def popularity_of(self, item: int) -> int | None:
        """Return the interactions that an item was trained on, None where that is not known."""
        if self.popularity is None:
            return None
        return int(self.popularity[item]) if item < len(self.popularity) else 0

    def search(self, words: str, most: int) -> list[int]:
        """Return items whose id or name contains the words, popular ones first."""
        exact = self.find(words)
        found = self._named_so(words, most)
        return ([exact] + [item for item in found if item != exact])[:most] if exact >= 0 else found

    def _named_so(self, words: str, most: int) -> list[int]:
        """Return items that are there whose line contains the words, popular ones first."""
        if not isinstance(self.ids, SnapshotIds):
            return self._texts.find(words, most)
        snapshot = self.ids.snapshot
        lines = self._posted.lines(snapshot)
        wanted = folded(words)
        posted = [item for item, line in lines.items() if wanted and wanted in line]
        if not lines:
            return self._present(words, most, snapshot, lines)
        found = [*posted, *self._present(words, most, snapshot, lines)]
        return sorted(found, key=lambda item: (-(self.popularity_of(item) or 0), item))[:most]

    def _present(
        self, words: str, most: int, snapshot: LiveSnapshot, other_lines: Container[int]
    ) -> list[int]:
        """Return items that are there whose line in the shared files counts, and has the words."""
        wanted = most
        while True:
            found = self._texts.find(words, wanted)
            there = snapshot.are_there(np.array(found, np.int64))
            present = [
                item
                for item, is_there in zip(found, there, strict=True)
                if is_there and item not in other_lines
            ]
            if len(present) >= most or len(found) < wanted:
                return present[:most]
            wanted *= 4  # looked for anew: the more, the fewer times

    def item_set(self, path: Path) -> NDArray[np.uint64]:
        """Read a file with an id a line: which items these are, as bits; unknown ones are not."""
        with reading(path), path.open(encoding="utf-8-sig") as file:
            found = self.find_all([line.strip() for line in file if line.strip()])
        return self.bits(found[found >= 0])

    def bits(self, items: Int64Array) -> NDArray[np.uint64]:
        """Return a set of items as bits over the catalogue."""
        words = np.zeros(-(-len(self.ids) // 64), np.uint64)
        chosen = items.astype(np.uint64)
        np.bitwise_or.at(words, chosen // np.uint64(64), np.uint64(1) << chosen % np.uint64(64))
        return words

    def _named(self, path: Path) -> list[str]:
        """Return the names of all items, empty where the file has none."""
        names = [""] * len(self.ids)
        rows = list(read_titles(path))
        found = self.find_all([external_id for external_id, _ in rows])
        for item, (_, name) in zip(found.tolist(), rows, strict=True):
            if item >= 0:
                names[item] = " ".join(name.split())
        return names


def _state(names_file: Path | None) -> tuple[int, ...] | None:
    """Return what tells a file of names from others; None where it cannot be told, as of a pipe."""
    if names_file is None:
        return ()
    with reading(names_file):
        found = names_file.stat()
    if not stat.S_ISREG(found.st_mode):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
