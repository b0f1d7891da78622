"""Which shard an item of a live index belongs to: that follows from its number alone.

So it is known of every item that comes, leaves or is replaced without looking at any other, and
stays the same for as long as the catalogue is not divided anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recprune.live.number_runs import NumberRuns
from recprune.search.checks import checked_count
from recprune.types import InputError, Int64Array, StorageError

MOST_SHARDS = 256  # each of which has a few segments, of which there is a limit too
# Successive numbers, given after the division, that belong to the same shard: few enough that the
# items of a full tail are spread over a dozen, many enough that their numbers are few runs.
_BLOCK = 4096


@dataclass(frozen=True)
class Division:
    """A range of numbers for each shard, and later numbers by blocks, to one after the other."""

    cuts: tuple[int, ...]  # where each range begins, and where the last one ends

    @classmethod
    def even(cls, num_items: int, num_shards: int) -> Division:
        """Divide the numbers that were given so far into ranges as even as possible."""
        if not 1 <= checked_count(num_shards, "num_shards") <= MOST_SHARDS:
            raise InputError(f"num_shards is {num_shards}, expected 1 to {MOST_SHARDS}")
        if num_shards == 1:
            return WHOLE
        return cls(tuple(num_items * shard // num_shards for shard in range(num_shards + 1)))

    @classmethod
    def checked(cls, cuts: object, num_items: int) -> Division:
        """Return a division that a stranger may have made; refuse what cannot be any."""
        if (
            type(cuts) is not list
            or not 3 <= len(cuts) <= MOST_SHARDS + 1
            or any(type(cut) is not int for cut in cuts)
            or cuts[0] != 0
            or cuts[-1] > num_items
            or any(after < before for before, after in pairwise(cuts))
        ):
            raise StorageError(f"cuts are not those of 2 to {MOST_SHARDS} ranges, one by one")
        return cls(tuple(cuts))

    @property
    def num_shards(self) -> int:
        return len(self.cuts) - 1

    def shards_of(self, numbers: NDArray[Any]) -> Int64Array:
        """Return the shards that items with these numbers belong to."""
        if self.num_shards == 1:
            return np.zeros(len(numbers), np.int64)
        later = numbers.astype(np.int64) // _BLOCK % self.num_shards
        return np.where(numbers < self.cuts[-1], self._ranges_of(numbers), later)

    def check(self, runs: NumberRuns, shard: int) -> None:
        """Refuse items of which one does not belong to a shard."""
        if self.num_shards == 1:
            return
        first = runs.numbers.astype(np.int64)
        last = first + runs.lengths - 1
        belongs = (self.shards_of(first) == shard) & (self.shards_of(last) == shard)
        # Two neighbours are of one shard where the ranges end and the blocks begin, and else never.
        belongs &= self._pieces_of(last) - self._pieces_of(first) <= 1
        if not belongs.all():
            number = int(first[belongs.argmin()])
            raise StorageError(f"the items from {number} on do not all belong to shard {shard}")

    def _ranges_of(self, numbers: NDArray[Any]) -> Int64Array:
        return np.searchsorted(self.cuts[1:-1], numbers, side="right").astype(np.int64)

    def _pieces_of(self, numbers: Int64Array) -> Int64Array:
        """Return which pieces numbers lie in: the ranges, then the blocks."""
        end = self.cuts[-1]
        later = self.num_shards + numbers // _BLOCK - end // _BLOCK
        return np.where(numbers < end, self._ranges_of(numbers), later)


WHOLE = Division((0, 0))  # one shard, which has all
