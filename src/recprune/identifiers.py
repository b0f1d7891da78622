"""External ids: the caller's own names of users and items, beside the internal ids 0 … n−1.

Internal ids follow the order of the external ones (numbers by value, strings by their UTF-8 bytes),
so the same log gives the same internal ids whatever the order of its rows, and an external id is
found by binary search without a hash table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from recprune.types import InputError, Int32Array, Int64Array, frozen, needs_extra

if TYPE_CHECKING:
    import polars as pl

ExternalId = int | str


@dataclass(frozen=True, eq=False)
class ExternalIds(Sequence[ExternalId]):
    """Sorted, distinct external ids; position is the internal id.

    Integers are one int64 array. Strings are one UTF-8 pool: id k is the bytes
    `pool[offsets[k]:offsets[k + 1]]`. Both save and memory-map as plain arrays.
    """

    numbers: Int64Array | None = None
    offsets: Int64Array | None = None
    pool: NDArray[np.uint8] | None = None

    def __post_init__(self) -> None:
        if (self.numbers is None) == (self.offsets is None or self.pool is None):
            raise InputError("external ids are either numbers, or offsets and a pool of bytes")
        for name in ("numbers", "offsets", "pool"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, frozen(getattr(self, name)))

    def __len__(self) -> int:
        if self.numbers is not None:
            return len(self.numbers)
        assert self.offsets is not None
        return len(self.offsets) - 1

    def __getitem__(self, position: Any) -> Any:
        """Return one external id, or a list of them for a slice."""
        if isinstance(position, slice):
            return [self[k] for k in range(*position.indices(len(self)))]
        index = int(position)
        if not -len(self) <= index < len(self):
            raise IndexError(f"internal id {index} of {len(self)}")
        index %= len(self)
        if self.numbers is not None:
            return int(self.numbers[index])
        return self._bytes(index).decode()

    def __iter__(self) -> Iterator[ExternalId]:
        return (self[k] for k in range(len(self)))

    def find(self, external_id: object) -> int:
        """Return the internal id of `external_id`, or −1 where there is none."""
        if self.numbers is not None:
            if isinstance(external_id, bool) or not isinstance(external_id, int | np.integer):
                return -1
            try:
                position = int(np.searchsorted(self.numbers, np.int64(external_id)))
            except OverflowError:
                return -1
            found = position < len(self) and int(self.numbers[position]) == external_id
            return position if found else -1
        if not isinstance(external_id, str):
            return -1
        wanted = external_id.encode()
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if self._bytes(middle) < wanted:
                low = middle + 1
            else:
                high = middle
        return low if low < len(self) and self._bytes(low) == wanted else -1

    def _bytes(self, position: int) -> bytes:
        assert self.offsets is not None
        assert self.pool is not None
        return self.pool[self.offsets[position] : self.offsets[position + 1]].tobytes()

    def select(self, keep: NDArray[np.bool_]) -> ExternalIds:
        """Return only the ids where `keep` is true; they are numbered anew, in the same order."""
        if self.numbers is not None:
            return ExternalIds(numbers=self.numbers[keep])
        assert self.offsets is not None
        assert self.pool is not None
        lengths = np.diff(self.offsets)
        offsets = np.concatenate([[0], np.cumsum(lengths[keep])])
        return ExternalIds(offsets=offsets, pool=self.pool[np.repeat(keep, lengths)])

    def to_arrays(self, prefix: str) -> dict[str, NDArray[Any]]:
        """Return the plain arrays that `from_arrays` reads, named for a saved folder."""
        if self.numbers is not None:
            return {f"{prefix}_numbers": self.numbers}
        assert self.offsets is not None
        assert self.pool is not None
        return {f"{prefix}_offsets": self.offsets, f"{prefix}_pool": self.pool}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], prefix: str) -> ExternalIds | None:
        """Read what `to_arrays` wrote under `prefix`; None where nothing was."""
        fields = {name: arrays.get(f"{prefix}_{name}") for name in ("numbers", "offsets", "pool")}
        return cls(**fields) if any(part is not None for part in fields.values()) else None


def number_ids(values: pl.Series) -> tuple[ExternalIds, Int32Array]:
    """Return the distinct values, sorted, and for each value its place among them.

    `values` is a polars series of Int64 or String without nulls.
    """
    with needs_extra("data"):
        import polars as pl
    if values.dtype == pl.Int64:
        numbers = values.to_numpy()
        if _is_dense(numbers):
            return _number_dense(numbers)
    distinct = values.unique().sort()
    if len(distinct) > np.iinfo(np.int32).max:
        raise InputError(f"{len(distinct)} distinct ids; at most 2³¹ − 1 are supported")
    table = pl.DataFrame({"id": distinct, "position": np.arange(len(distinct), dtype=np.int32)})
    positions = (
        values.alias("id").to_frame().join(table, on="id", how="left", maintain_order="left")
    )
    return _external_ids(distinct), positions["position"].to_numpy()


def _external_ids(distinct: pl.Series) -> ExternalIds:
    import polars as pl

    if distinct.dtype == pl.Int64:
        return ExternalIds(numbers=distinct.to_numpy())
    import pyarrow as pa

    # Arrow's layout of large strings is our layout: take its buffers, no object per id.
    _, offsets, pool = distinct.rechunk().to_arrow().cast(pa.large_string()).buffers()
    offsets = np.frombuffer(offsets, np.int64, count=len(distinct) + 1)
    pool = np.frombuffer(pool or b"", np.uint8)[: offsets[-1]]
    return ExternalIds(offsets=offsets, pool=pool)


def _is_dense(numbers: Int64Array) -> bool:
    """Say whether a table over the whole range of `numbers` costs no more than they do."""
    if len(numbers) == 0:
        return True
    # In Python integers: the range of two int64 may not fit one.
    return int(numbers.max()) - int(numbers.min()) < max(4 * len(numbers), 1 << 20)


def _number_dense(numbers: Int64Array) -> tuple[ExternalIds, Int32Array]:
    """Number ids that lie close together by a table of their range instead of hashing."""
    if len(numbers) == 0:
        return ExternalIds(numbers=numbers), np.empty(0, np.int32)
    lowest = numbers.min()
    present = np.zeros(int(numbers.max() - lowest) + 1, np.bool_)
    places = numbers - lowest if lowest else numbers
    present[places] = True
    position_of = np.cumsum(present, dtype=np.int32)
    position_of -= 1
    return ExternalIds(numbers=np.flatnonzero(present) + lowest), position_of[places]
