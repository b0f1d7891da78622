"""Which numbers the items of a segment have: runs of successive ones, ascending.

A catalogue that was never changed is one run, 0 … n−1; every item that left begins another one. So
numbers cost next to nothing, and bits over numbers become bits over positions by the word
(native/segments.hpp).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recprune.types import Int64Array, StorageError, frozen


@dataclass(frozen=True, eq=False)
class NumberRuns:
    """The number and the position of the first item of every run."""

    numbers: NDArray[np.uint32]
    positions: NDArray[np.uint32]
    num_items: int

    def __post_init__(self) -> None:
        frozen(self.numbers)
        frozen(self.positions)

    @classmethod
    def of(cls, numbers: NDArray[Any]) -> NumberRuns:
        """Return the runs of numbers that ascend; position k has the k-th."""
        begins = np.ones(len(numbers), np.bool_)
        np.not_equal(np.diff(numbers), 1, out=begins[1:])
        positions = np.flatnonzero(begins)
        return cls(numbers[positions].astype(np.uint32), positions.astype(np.uint32), len(numbers))

    @classmethod
    def checked(cls, numbers: NDArray[Any], positions: NDArray[Any], num_items: int) -> NumberRuns:
        """Return runs that a stranger may have made; refuse what cannot be any."""
        for name, array in (("run_numbers", numbers), ("run_positions", positions)):
            if array.dtype != np.uint32 or array.ndim != 1 or len(array) != len(numbers):
                raise StorageError(
                    f"{name} is {array.dtype}{list(array.shape)}, expected uint32[{len(numbers)}]"
                )
        runs = cls(numbers, positions, num_items)
        begins, lengths = numbers.astype(np.int64), runs.lengths
        if (len(positions) > 0) != (num_items > 0) or positions[:1].any() or (lengths < 1).any():
            raise StorageError(f"run_positions does not divide {num_items} items into runs")
        if (begins[1:] < begins[:-1] + lengths[:-1]).any():
            raise StorageError("run_numbers has a run that begins before the last one's end")
        return runs

    @cached_property
    def lengths(self) -> Int64Array:
        ends = np.append(self.positions[1:].astype(np.int64), self.num_items)
        return ends[: len(self.positions)] - self.positions.astype(np.int64)

    def all_numbers(self) -> NDArray[np.uint32]:
        """Return the number of every position."""
        shifts = self.numbers - self.positions  # no number is less than its position
        return np.arange(self.num_items, dtype=np.uint32) + np.repeat(shifts, self.lengths)

    def numbers_of(self, positions: Int64Array) -> Int64Array:
        """Return the numbers of some positions."""
        run = np.searchsorted(self.positions, positions.astype(np.uint32), side="right") - 1
        return positions - self.positions[run] + self.numbers[run]

    def positions_of(self, numbers: NDArray[Any]) -> Int64Array:
        """Return the position of every number, −1 where the segment does not have it."""
        if not self.num_items:
            return np.full(len(numbers), -1, np.int64)
        # In the type of the runs: of another, these would be copied.
        run = np.searchsorted(self.numbers, numbers.astype(np.uint32), side="right") - 1
        offsets = numbers.astype(np.int64) - self.numbers[run]
        inside = (run >= 0) & (offsets < self.lengths[run])
        return np.where(inside, self.positions[run] + offsets, -1)
