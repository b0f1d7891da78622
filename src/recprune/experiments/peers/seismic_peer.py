"""Seismic: inverted lists in clusters, each with a summary that says whether to look; approximate.

Bruch, Nardini, Rulli and Venturini, "Efficient Inverted Indexes for Approximate Retrieval over
Learned Sparse Representations", SIGIR 2024. Candidates are scored by all of the query. Settings of
the index are those of its authors' guide, but that no list is cut short: weights of items are all
1, and do not tell which postings matter less.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

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

_LONGEST = 6  # times the average length: what is longer is cut to that
_CLUSTERS = 0.2  # of the items of a list
_SUMMARY = 0.5  # of the weight of a cluster's summary is kept
_MOST_CLUSTERS = 65_535  # of a list, numbered by two bytes
_HEAP_FACTORS = (1.0, 0.7)  # a cluster is left out if its summary is below so much of the threshold
_BUILDING = 150  # bytes for a sub-item of an item, measured


@dataclass(frozen=True, eq=False)
class SeismicPeer:
    """A Seismic index of which the lists of the heaviest terms of a query are searched."""

    lists: int
    heap_factor: float
    bytes_used: int
    build_seconds: float
    index: Any
    sub_item_embeddings: Float32Array
    terms: NDArray[np.str_]  # names of all terms
    exact: bool = False

    @property
    def family(self) -> str:
        return f"Seismic, heap factor {self.heap_factor:g}"

    @property
    def name(self) -> str:
        return f"{self.family}, {self.lists} lists"

    def search(self, sequence_embedding: Float32Array, k: int) -> Int64Array:
        num_splits, _, split_width = self.sub_item_embeddings.shape
        query = checked_query(sequence_embedding, num_splits * split_width, k)
        weights = term_weights(query, self.sub_item_embeddings)
        found = self.index.search("", self.terms, weights, k, self.lists, self.heap_factor)
        return padded(np.array([int(item) for _, _, item in found], np.int64), k)


@dataclass(frozen=True)
class Seismic:
    """One index, searched in several numbers of lists; more than all lists are all."""

    lists: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256, 65_536)

    key: ClassVar[str] = "seismic"
    package: ClassVar[str] = "seismic"

    def bytes_needed(self, shape: ModelShape) -> int:
        """Items as sparse vectors, postings and summaries, and what they are made of."""
        return _BUILDING * shape.num_items * shape.num_splits

    def settings(self, shape: ModelShape) -> str:
        return (
            f"RecJPQ's codes as {shape.num_splits * shape.num_sub_items:,} terms, lists of "
            f"{_average(shape):,} items on average and {_LONGEST} × that at most, a cluster for "
            f"every {1 / _CLUSTERS:g} of them, summary energy {_SUMMARY}"
        )

    def unsuited(self, shape: ModelShape) -> str | None:
        longest = min(shape.num_items, _LONGEST * _average(shape))
        if _CLUSTERS * longest > _MOST_CLUSTERS:
            return (
                f"{self.key} has at most {_MOST_CLUSTERS:,} clusters in a list, and a list of "
                f"{longest:,} items has more"
            )
        return too_many_terms(self.key, shape.num_splits * shape.num_sub_items)

    def build(self, model: CodesAndVectors, threads: int) -> list[Peer]:
        """Cluster all lists: a quarter of a minute for a million items."""
        with needs_extra("peers"):
            import seismic
        shape = model.shape
        num_terms = shape.num_splits * shape.num_sub_items

        def build() -> Any:
            vectors = seismic.SeismicDataset(num_terms)
            vectors.add_documents_by_id(
                [str(item) for item in range(shape.num_items)],
                terms_of(model.codes, shape.num_sub_items).ravel(),
                np.ones(model.codes.size, np.float32),
                np.arange(shape.num_items + 1) * shape.num_splits,
            )
            return seismic.SeismicIndex.build_from_dataset(
                vectors,
                n_postings=_average(shape),
                max_fraction=_LONGEST,
                centroid_fraction=_CLUSTERS,
                summary_energy=_SUMMARY,
                num_threads=threads,
            )

        with tempfile.TemporaryDirectory() as folder, _silent():
            index, seconds = timed(build)
            index.save(str(Path(folder) / "index"))
            size = sum(path.stat().st_size for path in Path(folder).iterdir())
        terms = np.array([str(term) for term in range(num_terms)], seismic.get_seismic_string())
        return [
            SeismicPeer(lists, factor, size, seconds, index, model.sub_item_embeddings, terms)
            for factor in _HEAP_FACTORS
            for lists in sorted({min(lists, num_terms) for lists in self.lists})
        ]


def _average(shape: ModelShape) -> int:
    return math.ceil(shape.num_items / shape.num_sub_items)


@contextmanager
def _silent() -> Iterator[None]:
    """Keep what Seismic tells of its work out of the standard output."""
    kept = os.dup(1)
    try:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
