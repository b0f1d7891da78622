"""The beam over a graph of items that exact decoding is compared with."""

from __future__ import annotations

import numpy as np

from benchmarks.graph_decoding import GraphDecoder, item_graph
from recprune import Index
from recprune.experiments.ours.scaling import random_model


def test_the_graph_links_items_to_those_that_are_most_like_them() -> None:
    codes, embeddings, _ = random_model(300, 4, 1, seed=1)
    graph = item_graph(codes, embeddings, 7)
    unit = embeddings / np.linalg.norm(embeddings, axis=2, keepdims=True)
    vectors = unit[np.arange(4), codes].reshape(300, -1)
    likeness = vectors @ vectors.T
    np.fill_diagonal(likeness, -np.inf)
    best = -np.sort(-likeness, axis=1)[:, :7]
    found = np.take_along_axis(likeness, graph.neighbours.astype(np.int64), 1)
    np.testing.assert_allclose(found, best, atol=1e-5)


def test_a_beam_as_wide_as_the_catalogue_is_exact() -> None:
    codes, embeddings, queries = random_model(300, 4, 5, seed=2)
    graph = item_graph(codes, embeddings, 5)
    index = Index.build(codes, embeddings)
    decoder = GraphDecoder(codes, embeddings, graph.neighbours, beam=300, rounds=1)
    for query in queries:
        ids, scores = decoder.search(query, 10)
        exact = index.search(query, 10)
        assert np.array_equal(ids, exact.ids)
        np.testing.assert_allclose(scores, exact.scores, rtol=1e-5)
        assert decoder.items_scored == 300


def test_a_walk_reaches_what_its_links_lead_to_and_nothing_else() -> None:
    """Items 0 → 1 → 2 in a chain, and 3 apart: from 0, two rounds end at 2."""
    codes = np.arange(4, dtype=np.uint8).reshape(4, 1)
    embeddings = np.array([[[1.0], [2.0], [3.0], [9.0]]], np.float32)
    neighbours = np.array([[1], [2], [1], [0]], np.int32)
    query = np.ones(1, np.float32)
    for rounds, reached in ((0, 0), (1, 1), (2, 2), (9, 2)):
        decoder = GraphDecoder(codes, embeddings, neighbours, beam=1, rounds=rounds)
        decoder._starts = np.array([0])
        ids, _ = decoder.search(query, 1)
        assert ids.tolist() == [reached]
        assert decoder.items_scored == min(rounds, 2) + 1
