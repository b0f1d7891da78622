"""A segment: an index of some of a catalogue's items, with their numbers, saved as a folder.

It never changes. Which of its items are still there is said elsewhere, by a snapshot or a
generation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recprune.live.item_names import IdKind, ItemNames, NameArray
from recprune.live.number_runs import NumberRuns
from recprune.search.index import Index
from recprune.search.index_arrays import Layout, bias_extremes
from recprune.storage import Saved, load_folder, read_manifest, save_folder
from recprune.types import Float32Array, StorageError

KIND = "live segment"
_VERSION = 1
UNSAVED = -1  # the name of one that is in memory alone


@dataclass(frozen=True, eq=False)
class Items:
    """Some items, by ascending number."""

    numbers: NDArray[np.uint32]
    codes: NDArray[Any]
    item_bias: Float32Array | None
    names: NameArray | None  # external ids

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, places: NDArray[Any]) -> Items:
        """Return some of them: by places, or by a mask."""
        return Items(
            self.numbers[places],
            self.codes[places],
            None if self.item_bias is None else self.item_bias[places],
            None if self.names is None else self.names[places],
        )


def joined(parts: list[Items]) -> Items:
    """Return several lots of items as one, sorted by their numbers; there is one lot at least."""
    if len(parts) == 1:
        return parts[0]
    biases = [part.item_bias for part in parts if part.item_bias is not None]
    names = [part.names for part in parts if part.names is not None]
    items = Items(
        np.concatenate([part.numbers for part in parts]),
        np.concatenate([part.codes for part in parts]),
        np.concatenate(biases) if biases else None,
        np.concatenate(names) if names else None,
    )
    if (items.numbers[1:] > items.numbers[:-1]).all():  # as nearly always
        return items
    return items.take(np.argsort(items.numbers, kind="stable"))


@dataclass(frozen=True, eq=False)
class Segment:
    """Some items of a catalogue, laid out for search."""

    name: int  # of its folder
    sha256: str  # of its manifest, which is that of all of it
    index: Index
    runs: NumberRuns
    names: ItemNames | None  # external ids

    @cached_property
    def extremes(self) -> tuple[float, float]:
        """The highest bias of its items, and the largest in magnitude."""
        return bias_extremes(self.index.item_bias)

    def items(self, keep: NDArray[np.bool_]) -> Items:
        """Return the items whose positions are kept."""
        places = np.flatnonzero(keep)
        bias = self.index.item_bias
        return Items(
            self.runs.all_numbers()[places],
            self.index.item_codes()[places],
            None if bias is None else bias[places],
            None if self.names is None else self.names.take(places),
        )


def build_segment(
    items: Items, sub_item_embeddings: Float32Array, layout: Layout, threads: int = 1
) -> Segment:
    """Lay out items as a segment that is in memory alone."""
    index = Index.build(
        items.codes,
        sub_item_embeddings,
        item_bias=items.item_bias,
        layout=layout,
        threads=threads,
    )
    names = None if items.names is None else ItemNames.of(items.names)
    return Segment(UNSAVED, "", index, NumberRuns.of(items.numbers), names)


def save_segment(folder: Path, name: int, segment: Segment) -> Segment:
    """Write a segment; return it by the name that it has from now on."""
    arrays: dict[str, NDArray[Any]] = {
        "run_numbers": segment.runs.numbers,
        "run_positions": segment.runs.positions,
    }
    if segment.names is not None:
        arrays |= segment.names.to_arrays()
    save_folder(folder, Saved(KIND, _VERSION, {}, arrays, {"index": segment.index.parts()}))
    checksum = read_manifest(folder, KIND)["sha256"]
    return Segment(name, checksum, segment.index, segment.runs, segment.names)


def load_segment(folder: Path, name: int, sha256: str, ids: IdKind, *, verify: bool) -> Segment:
    """Map a saved segment; everything in it is checked as if a stranger had made it."""
    saved = load_folder(folder, kind=KIND, version=_VERSION, verify=verify)
    if read_manifest(folder, KIND)["sha256"] != sha256:
        raise StorageError(f"{folder}: not the segment that its catalogue has: another checksum")
    index = Index.from_parts(saved.part("index", str(folder)), str(folder))
    try:
        runs = NumberRuns.checked(
            saved.arrays["run_numbers"], saved.arrays["run_positions"], index.num_items
        )
        names = None
        if ids != "none":
            names = ItemNames.from_arrays(saved.arrays, ids, index.num_items)
    except KeyError as error:
        raise StorageError(f"{folder}: the segment has no {error}") from None
    except StorageError as error:
        raise StorageError(f"{folder}: {error}") from None
    return Segment(name, sha256, index, runs, names)
