"""Which arrays a saved index has, of which types and shapes: what it says of itself decides.

What stands in the arrays is the native core's to check, `native/layouts/integrity.hpp`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from recprune import _native
from recprune.search.checks import MAX_ITEMS, MAX_SPLITS
from recprune.types import MAX_SUB_ITEMS, Float32Array, Json, StorageError

Layout = Literal["auto", "full", "slim", "compact"]

LIST_PARTS = (
    "list_offsets",
    "list_second_codes",
    "list_bases",
    "list_steps",
    "list_codes",
    "list_items",
)
CELL_PARTS = (
    "cell_pair_lines",
    "cell_overflow",
    "cell_lines",
    "cell_starts",
    "cell_last_keys",
    "cell_second_lines",
    "cell_items",
)

_NARROW = 256  # sub-items whose codes are bytes
CELLS_FOR_ALL = 64 * _NARROW**2  # items of a catalogue that has cells, whatever its sub-items
# Numbers of the saved format, as native/layouts and native/kernels have them.
_BLOCK_ITEMS = 64
_SORTED_SPLITS = 2  # which have no row of codes in the lists
_LINE_BYTES = 64
_LAST_KEY_PAIRS = 4  # with which a full layout has last keys; with more, there are second lines

_Shape: TypeAlias = tuple[int, ...]


class IndexSize(NamedTuple):
    """What the settings of a saved index say."""

    num_items: int
    num_sub_items: int
    layout: Layout


def bias_extremes(bias: Float32Array | None) -> tuple[float, float]:
    """Return the highest bias, and the largest in magnitude."""
    if bias is None or not len(bias):
        return 0.0, 0.0
    highest, lowest = float(bias.max()), float(bias.min())
    return highest, max(abs(highest), abs(lowest))


def checked_size(settings: Json, arrays: Mapping[str, NDArray[Any]]) -> IndexSize:
    """Return what saved settings say of an index; refuse what its arrays do not bear out."""
    unknown = settings.keys() - {*IndexSize._fields}
    missing = {*IndexSize._fields} - settings.keys()
    if unknown or missing:
        what = "has the unknown setting" if unknown else "has no"
        raise StorageError(f"the index {what} {min(unknown or missing)}")
    num_items, num_sub_items, layout = (settings[name] for name in IndexSize._fields)
    if type(num_items) is not int or not 0 <= num_items < MAX_ITEMS:
        raise StorageError(f"num_items is {num_items!r}, expected 0 to {MAX_ITEMS - 1}")
    if layout not in get_args(Layout)[1:]:
        raise StorageError(f"layout is {layout!r}, expected {', '.join(get_args(Layout)[1:])}")
    if "transposed_embeddings" not in arrays:
        raise StorageError("the index has no transposed_embeddings")
    vectors = arrays["transposed_embeddings"]
    if vectors.dtype != np.float32 or vectors.ndim != 3:
        raise StorageError(
            f"transposed_embeddings is {_form(vectors)}, expected float32[M, d/M, B]"
        )
    num_splits, width, own = vectors.shape
    if not (1 <= num_splits <= MAX_SPLITS and width and 2 <= own <= MAX_SUB_ITEMS):
        raise StorageError(
            f"transposed_embeddings is {_form(vectors)}, expected 1 to {MAX_SPLITS} splits of 2 to "
            f"{MAX_SUB_ITEMS} sub-items"
        )
    if type(num_sub_items) is not int or num_sub_items != own:
        raise StorageError(f"num_sub_items is {num_sub_items!r}, transposed_embeddings has {own}")
    size = IndexSize(num_items, num_sub_items, layout)
    _check_forms(size, num_splits, arrays)
    return size


def _check_forms(size: IndexSize, num_splits: int, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Refuse an array too many, too few, or of a wrong type or shape."""
    if not size.num_items and arrays.keys() == {"transposed_embeddings"}:
        return  # vectors alone: it finds nothing
    expected = _forms(size, num_splits, arrays)
    for name in sorted(arrays.keys() - expected.keys() - {"transposed_embeddings"}, reverse=True):
        raise StorageError(f"the index has {name}, which one of its size and layout has not")
    for name in sorted(expected.keys() - arrays.keys() - {"item_bias"}):
        raise StorageError(f"the index has no {name}")
    for name, (dtype, shape) in expected.items():
        array = arrays.get(name)
        if array is not None and (array.dtype != dtype or array.shape != shape):
            raise StorageError(f"{name} is {_form(array)}, expected {dtype}{list(shape)}")


def _forms(
    size: IndexSize, num_splits: int, arrays: Mapping[str, NDArray[Any]]
) -> dict[str, tuple[np.dtype[Any], _Shape]]:
    """Return the type and shape of every array, but for that of the vectors."""
    num_items, num_sub_items, layout = size
    narrow = num_sub_items <= _NARROW
    forms: dict[str, tuple[str, _Shape]] = {"item_bias": ("f4", (num_items,))}
    if layout != "compact":
        forms["codes"] = ("u1" if narrow else "u2", (num_items, num_splits))
    elif not narrow:
        raise StorageError(f"a compact index of {num_sub_items} sub-items, expected {_NARROW}")
    if narrow and layout != "slim":
        blocks = len(arrays["list_items"]) if np.ndim(arrays.get("list_items", 0)) else 0
        rows = max(num_splits - _SORTED_SPLITS, 0)
        forms |= {
            "list_offsets": ("i8", (num_sub_items + 1,)),
            "list_second_codes": ("u1", (num_sub_items, _NARROW)),
            "list_bases": ("u1", (blocks,)),
            "list_steps": ("u8", (blocks,)),
            "list_codes": ("u1", (rows, blocks, _BLOCK_ITEMS)),
            "list_items": ("u4", (blocks, _BLOCK_ITEMS)),
        }
    if narrow and layout != "compact" and _native.has_cells(num_items, num_splits, num_sub_items):
        pairs = (num_splits + 1) // 2
        cells = pairs * num_sub_items**2
        if num_splits % 2:
            cells += num_sub_items - num_sub_items**2
        has_last_keys = pairs == _LAST_KEY_PAIRS and layout == "full"
        lines = len(arrays["cell_lines"]) if np.ndim(arrays.get("cell_lines", 0)) else 0
        forms |= {
            "cell_pair_lines": ("i8", (pairs + 1,)),
            "cell_overflow": ("u4", (cells + pairs,)),
            "cell_lines": ("u1", (lines, _LINE_BYTES)),
            "cell_starts": ("u4", (lines + pairs,)),
            "cell_last_keys": ("u2", (pairs if has_last_keys else 0, num_items)),
            "cell_second_lines": ("u1", (lines if pairs > _LAST_KEY_PAIRS else 0, _LINE_BYTES)),
            "cell_items": ("u4", (pairs, num_items)),
        }
    return {name: (np.dtype(dtype), shape) for name, (dtype, shape) in forms.items()}


def _form(array: NDArray[Any]) -> str:
    return f"{array.dtype}{list(array.shape)}"
