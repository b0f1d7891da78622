"""The inverse of the codebook: for every split and sub-item id, the items that carry it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recprune import _native
from recprune.types import MAX_SUB_ITEMS, CodeArray, InputError, Int64Array, frozen


@dataclass(frozen=True, eq=False)
class PostingLists:
    """The inverted indexes L₁ … L_M of all splits, items ascending within each list."""

    offsets: Int64Array  # [num_splits, num_sub_items + 1]
    items: NDArray[np.int32 | np.int64]  # [num_splits, num_items]

    def __post_init__(self) -> None:
        frozen(self.offsets)
        frozen(self.items)

    def posting_list(self, split: int, sub_item_id: int) -> NDArray[np.int32 | np.int64]:
        """Return L_m(b): the items with this sub-item id in this split."""
        num_splits, num_sub_items = self.offsets.shape[0], self.offsets.shape[1] - 1
        if not (0 <= split < num_splits and 0 <= sub_item_id < num_sub_items):
            raise InputError(
                f"split {split}, sub-item id {sub_item_id}: expected splits 0 to {num_splits - 1} "
                f"and sub-item ids 0 to {num_sub_items - 1}"
            )
        start, stop = self.offsets[split, sub_item_id : sub_item_id + 2]
        return self.items[split, start:stop]


def build_posting_lists(codes: CodeArray, num_sub_items: int, *, threads: int = 1) -> PostingLists:
    """Invert item codes (uint8 or uint16 [num_items, num_splits]) by counting sort."""
    if codes.ndim != 2 or codes.dtype not in (np.uint8, np.uint16):
        raise InputError(
            f"codes is {codes.dtype}{list(codes.shape)}, expected uint8 or uint16 [n, M]"
        )
    if codes.shape[1] < 1:
        raise InputError("codes has no splits")
    if not 1 <= num_sub_items <= MAX_SUB_ITEMS:
        raise InputError(f"num_sub_items is {num_sub_items}, expected 1 to {MAX_SUB_ITEMS}")
    if threads < 1:
        raise InputError(f"threads is {threads}, expected at least 1")
    try:
        offsets, items = _native.posting_lists(np.ascontiguousarray(codes), num_sub_items, threads)
    except ValueError as error:
        raise InputError(str(error)) from None
    return PostingLists(offsets, items)


def items_sharing_most(
    lists: PostingLists, codes: CodeArray, item: int, k: int
) -> tuple[Int64Array, Int64Array]:
    """Return the k items that share most sub-item ids with `item`, and how many they share.

    Most shared first, ties by item id. The item itself and those that share none are left out.
    """
    if not 0 <= item < len(codes):
        raise InputError(f"item {item} of {len(codes)}")
    if k < 0:
        raise InputError(f"k is {k}, expected 0 or more")
    sharing = np.concatenate(
        [lists.posting_list(split, int(sub_item)) for split, sub_item in enumerate(codes[item])]
    )
    others, shared = np.unique(sharing[sharing != item], return_counts=True)
    best = np.lexsort((others, -shared))[:k]
    return others[best].astype(np.int64), shared[best].astype(np.int64)
