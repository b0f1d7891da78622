"""Block-Max Pruning: blocks of items by the best score that they could have; approximate here.

Mallia, Suel and Tonellotto, "Faster Learned Sparse Retrieval with Block-Max Pruning", SIGIR 2024.
With alpha = 1 it stops when no other block can hold a better item, so that it is safe, but with
respect to scores in whole numbers: it rounds the weights of a query to 32 steps. For finer ones, a
term is two terms here, one of which counts 33 times as much. Items are in the order of their codes,
as blocks of items that share sub-items have lower bounds; the paper orders documents too. Fewer
terms in a query are its beta, which would not do here: it would part the two that are one.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from recprune.experiments.peers.peer import (
    CodesAndVectors,
    ModelShape,
    Peer,
    checked_query,
    padded,
    timed,
)
from recprune.experiments.peers.sparse import term_weights, terms_of, too_many_terms
from recprune.types import Float32Array, Int64Array, needs_extra

_STEPS = 32  # BMP's, of the largest weight in a query
_COARSE = _STEPS + 1  # fine steps that one of a coarse term counts
_FINEST = _COARSE * _STEPS + _STEPS  # fine steps of the largest weight: 32 of both terms
_LARGEST_SCORE = 65_535  # two bytes
_FINE = "+"  # begins the names of fine terms
# BMP never scores the block that comes last, the one with the lowest bound: a block is added whose
# bound is just above that of any single term, below which no block is looked at to begin with.
_LAST = "last"
_FEWEST_ITEMS = 1_000  # so that the best have more than that
_ADDED_AT_A_TIME = 65_536  # items
_BUILDING = 225  # bytes for a sub-item of an item, measured: its postings, and what they grow from


@dataclass(frozen=True, eq=False)
class BmpPeer:
    """A BMP index that stops when other blocks are bounded by the threshold ÷ alpha."""

    block: int
    alpha: float
    share: float  # of the sub-items of a split, that a query names: the best
    bytes_used: int
    build_seconds: float
    searcher: Any
    num_items: int
    sub_item_embeddings: Float32Array
    exact: bool = False

    @property
    def family(self) -> str:
        return f"BMP, blocks of {self.block}"

    @property
    def name(self) -> str:
        return f"{self.family}, alpha {self.alpha:g}, {self.share:.0%} of terms"

    def search(self, sequence_embedding: Float32Array, k: int) -> Int64Array:
        num_splits, num_sub_items, split_width = self.sub_item_embeddings.shape
        query = checked_query(sequence_embedding, num_splits * split_width, k)
        weights = term_weights(query, self.sub_item_embeddings)
        if self.share < 1:
            weights = _of_the_best(weights.reshape(num_splits, num_sub_items), self.share).ravel()
        highest = weights.max()
        if highest == 0:  # all items tie, and BMP fails without a term
            return padded(np.arange(min(k, self.num_items)), k)
        # The largest weight is that of BMP's own scale, so that it scales by 1 and rounds nothing.
        coarse, fine = np.divmod(np.rint(weights * (_FINEST / highest)), _COARSE)
        asked = {_LAST: float(_STEPS), f"{_FINE}{_LAST}": 1.0}
        asked |= _named("", coarse) | _named(_FINE, fine)
        found, _ = self.searcher.search(asked, k, self.alpha, 1.0)
        return padded(np.array([int(item) for item in found if item != _LAST], np.int64), k)


def _of_the_best(weights: Float32Array, share: float) -> Float32Array:
    """Return weights, [M, B], above the best of those that are left out, and 0 for these."""
    left_out = weights.shape[1] - max(1, round(share * weights.shape[1]))
    if left_out == 0:
        return weights
    highest = np.partition(weights, left_out - 1, axis=1)[:, left_out - 1 : left_out]
    above: Float32Array = np.maximum(weights - highest, np.float32(0))
    return above


def _named(prefix: str, steps: Float32Array) -> dict[str, float]:
    """Return the terms that have any weight, by name: BMP takes nothing else."""
    terms = np.flatnonzero(steps)
    return {
        f"{prefix}{term}": weight
        for term, weight in zip(terms.tolist(), steps[terms].tolist(), strict=True)
    }


@dataclass(frozen=True)
class Bmp:
    """Small blocks, with bounds that are as close as they get."""

    alphas_and_shares: tuple[tuple[float, float], ...] = (
        (0.1, 1),
        (0.2, 1),
        (0.3, 1),
        (0.5, 1),
        (1, 1),
    )

    block: ClassVar[int] = 8
    key: ClassVar[str] = "bmp"
    package: ClassVar[str] = "bmp"

    def bytes_needed(self, shape: ModelShape) -> int:
        """Postings while they are collected, and the bounds of all blocks, once more when read."""
        bounds = _terms(shape) * -(-shape.num_items // self.block)
        return _BUILDING * shape.num_items * shape.num_splits + 2 * bounds

    def settings(self, shape: ModelShape) -> str:
        return (
            f"RecJPQ's codes as {_terms(shape):,} terms, items in the order of their codes, query "
            f"weights of {_FINEST:,} steps"
        )

    def unsuited(self, shape: ModelShape) -> str | None:
        if shape.num_items < _FEWEST_ITEMS:
            return (
                f"{self.key} wants at least {_FEWEST_ITEMS:,} items for its bounds, and there are "
                f"{shape.num_items}"
            )
        if shape.num_splits * _FINEST > _LARGEST_SCORE:
            return f"{self.key} has scores of two bytes, and {shape.num_splits} splits need more"
        return too_many_terms(self.key, _terms(shape))

    def build(self, model: CodesAndVectors, threads: int) -> list[Peer]:  # noqa: ARG002
        """Build the index, in a file, and read it: half a minute for a million items."""
        with needs_extra("peers"):
            from bmp import Searcher
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "index.bmp"

            def build() -> Any:
                _write(model, self.block, path)
                return Searcher(str(path))

            searcher, seconds = timed(build)
            size = path.stat().st_size
        num_items, embeddings = len(model.codes), model.sub_item_embeddings
        return [
            BmpPeer(self.block, alpha, share, size, seconds, searcher, num_items, embeddings)
            for alpha, share in self.alphas_and_shares
        ]


@dataclass(frozen=True)
class BmpLargeBlocks(Bmp):
    """Fewer blocks: fewer bounds to add up, and too loose ones for an alpha to matter."""

    alphas_and_shares: tuple[tuple[float, float], ...] = ((1, 0.25), (1, 0.5), (1, 0.75), (1, 1))

    block: ClassVar[int] = 64
    key: ClassVar[str] = "bmp_large"


def _terms(shape: ModelShape) -> int:
    return 2 * shape.num_splits * shape.num_sub_items


def _write(model: CodesAndVectors, block: int, path: Path) -> None:
    """Write the index, items in the order of their codes."""
    with needs_extra("peers"):
        from bmp import Indexer
    num_sub_items = model.shape.num_sub_items
    weights = [
        {f"{term}": _COARSE, f"{_FINE}{term}": 1}
        for term in range(model.shape.num_splits * num_sub_items)
    ]
    indexer = Indexer(str(path), block, False)
    order = np.lexsort(model.codes.T[::-1])
    for start in range(0, len(order), _ADDED_AT_A_TIME):
        items = order[start : start + _ADDED_AT_A_TIME]
        rows = terms_of(model.codes[items], num_sub_items).tolist()
        for item, terms in zip(items.tolist(), rows, strict=True):
            vector: dict[str, int] = {}
            for term in terms:
                vector |= weights[term]
            indexer.add_document(str(item), vector)
    for _ in range(-len(order) % block):
        indexer.add_document("", {})
    indexer.add_document(_LAST, {_LAST: _COARSE, f"{_FINE}{_LAST}": 1})
    indexer.finish()
