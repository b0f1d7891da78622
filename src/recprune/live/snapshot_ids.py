"""The external ids of a snapshot, asked for as those of a catalogue that does not change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from recprune.data.identifiers import ExternalId, FoundIds
from recprune.live.item_names import is_name
from recprune.live.snapshot import LiveSnapshot
from recprune.types import Int64Array


@dataclass(frozen=True, eq=False)
class SnapshotIds:
    """External ids by number; what has left has none, and is not found."""

    snapshot: LiveSnapshot

    @property
    def are_strings(self) -> bool:
        return self.snapshot.id_kind == "strings"

    def __len__(self) -> int:
        """How many numbers there are, of items that have left too."""
        return self.snapshot.num_items

    def __getitem__(self, number: int) -> ExternalId:
        return self.take([number])[0]

    def find_all(self, external_ids: Sequence[object]) -> Int64Array:
        """Return the numbers, −1 where no item of that id is there, whatever is asked for."""
        if {str if self.are_strings else int}.issuperset(map(type, external_ids)):
            return self.snapshot.find(cast(Sequence[ExternalId], external_ids))  # as nearly always
        kind = self.snapshot.id_kind
        # A number and True are the same to a dictionary, and a list is refused there.
        possible = [place for place, value in enumerate(external_ids) if is_name(value, kind)]
        found = np.full(len(external_ids), -1, np.int64)
        wanted = cast(list[ExternalId], [external_ids[place] for place in possible])
        found[possible] = self.snapshot.find(wanted)
        return found

    def take(self, numbers: Iterable[int]) -> list[ExternalId]:
        """Return the external ids of items that are there."""
        names = self.snapshot.external_ids(list(numbers))
        return [name for name in names if name is not None]  # None is for −1, which no item has


def ids_at(trained: FoundIds, snapshot: LiveSnapshot | None) -> FoundIds:
    """Return the external ids of the items that can be in an answer: those of a moment, if any."""
    return trained if snapshot is None else SnapshotIds(snapshot)
