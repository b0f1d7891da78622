"""Indexes that FAISS trained answer as FAISS does, whatever it puts around their codes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recprune import Index, InputError, VectorIndex
from recprune.types import Float32Array

faiss = pytest.importorskip("faiss")

COUNT = 2000
D = 24
SPLITS = 6
IDS = np.random.default_rng(5).permutation(10**6)[:COUNT] - 1000  # some below 0


def drawn(count: int, seed: int) -> Float32Array:
    """Vectors that vary most along axes which no split has for itself."""
    rng = np.random.default_rng(9)
    turn, _ = np.linalg.qr(rng.standard_normal((D, D)))
    mixed = np.random.default_rng(seed).standard_normal((count, D)) * np.linspace(3, 0.3, D)
    found: Float32Array = (mixed @ turn).astype(np.float32)
    return found


VECTORS, QUERIES = drawn(COUNT, 1), drawn(40, 2)


def plain(width: int = D) -> Any:
    index = faiss.IndexPQ(width, SPLITS, 8, faiss.METRIC_INNER_PRODUCT)
    index.pq.cp.niter = 3
    return index


def opq(width: int = D) -> Any:
    matrix = faiss.OPQMatrix(D, SPLITS, width)
    matrix.niter, matrix.niter_pq = 3, 2
    return faiss.IndexPreTransform(matrix, plain(width))


def two_rotations() -> Any:
    index = opq()
    index.prepend_transform(faiss.RandomRotationMatrix(D, D))
    return index


KINDS: dict[str, Callable[[], Any]] = {
    "plain": plain,
    "turned": opq,
    "turned to fewer": lambda: opq(18),
    "turned twice": two_rotations,
    "ids": lambda: faiss.IndexIDMap(plain()),
    "ids of both ways": lambda: faiss.IndexIDMap2(plain()),
    "ids around turned": lambda: faiss.IndexIDMap2(opq()),
    "turned around ids": lambda: faiss.IndexPreTransform(
        faiss.RandomRotationMatrix(D, D), faiss.IndexIDMap(plain())
    ),
}


def trained(kind: str) -> Any:
    index = KINDS[kind]()
    index.train(VECTORS)
    if "ids" in kind:
        index.add_with_ids(VECTORS, IDS)
    else:
        index.add(VECTORS)
    return index


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_faiss(kind: str, tmp_path: Path) -> None:
    peer = trained(kind)
    expected_scores, expected = peer.search(QUERIES, 10)
    faiss.write_index(peer, str(tmp_path / "peer"))
    for given in (peer, faiss.read_index(str(tmp_path / "peer"))):
        index = VectorIndex.from_faiss(given, threads=2)
        index.save(tmp_path / "saved")
        for one in (index, VectorIndex.load(tmp_path / "saved")):
            top = one.search(QUERIES, 10)
            np.testing.assert_allclose(top.scores, expected_scores, rtol=1e-4, atol=1e-3)
            found = np.array(one.external_ids(top))
            # FAISS adds in another order, and turns queries in another: near ties may fall otherwise.
            assert (found == expected).mean() > 0.99
        assert (index.width, index.num_items, index.recalls) == (D, COUNT, ())


def test_positions_are_in_the_order_of_ids_and_vectors_go_along() -> None:
    peer = trained("ids around turned")
    index = VectorIndex.from_faiss(peer, vectors=VECTORS)
    assert index.vectors is not None
    assert np.array_equal(index.vectors, VECTORS[np.argsort(IDS)])
    best = np.argsort(-(QUERIES @ VECTORS.T), axis=1)[:, :5]
    top = index.search(QUERIES, 5, rerank=COUNT)
    assert np.array_equal(index.external_ids(top), IDS[best])
    with pytest.raises(InputError, match="rerank needs the vectors"):
        VectorIndex.from_faiss(peer).search(QUERIES, 5, rerank=10)
    with pytest.raises(InputError, match=r"vectors are \[3, 24\], expected \[2000, 24\]"):
        VectorIndex.from_faiss(peer, vectors=VECTORS[:3])


def test_a_rotation_by_hand() -> None:
    """Two items of four numbers; the first two of a query change places with the last two."""
    swap = faiss.LinearTransform(4, 4, False)
    swap.is_trained = True
    matrix = np.array([[0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0]], np.float32)
    faiss.copy_array_to_vector(matrix.ravel(), swap.A)
    centroids = np.zeros((2, 256, 2), np.float32)
    centroids[0, 0], centroids[0, 1], centroids[1, 7] = [1, 2], [3, 4], [10, 20]
    turned = Index.build(np.array([[0, 7], [1, 7]], np.uint8), centroids)
    top = VectorIndex.from_faiss(faiss.IndexPreTransform(swap, turned.to_faiss())).search(
        [1.0, 0.0, 0.0, 1.0], 2
    )
    # (1, 0, 0, 1) becomes (0, 1, 1, 0): 2 + 10 for item 0, and 4 + 10 for item 1.
    assert top.ids.tolist() == [1, 0]
    assert top.scores.tolist() == [14.0, 12.0]


def with_bias() -> Any:
    pca = faiss.PCAMatrix(D, D)
    index = faiss.IndexPreTransform(pca, plain())
    index.train(VECTORS)
    index.add(VECTORS)
    return index


def normalised() -> Any:
    index = faiss.IndexPreTransform(faiss.NormalizationTransform(D), plain())
    index.train(VECTORS)
    index.add(VECTORS)
    return index


def doubled() -> Any:
    index = faiss.IndexIDMap(plain())
    index.train(VECTORS)
    index.add_with_ids(VECTORS[:2], np.array([7, 7]))
    return index


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: faiss.IndexPQ(D, SPLITS, 4, faiss.METRIC_INNER_PRODUCT),
         r"has 4 bits a code, expected 8: train faiss.IndexPQ\(d, M, 8, faiss.METRIC_INNER_PRODUCT"),
        (lambda: faiss.IndexPQFastScan(D, SPLITS, 4, faiss.METRIC_INNER_PRODUCT), "has 4 bits a"),
        (lambda: faiss.index_factory(D, "OPQ6,PQ6x4fs", faiss.METRIC_INNER_PRODUCT), "has 4 bits"),
        (lambda: faiss.index_factory(D, "OPQ6,PQ6"), "make it with faiss.METRIC_INNER_PRODUCT"),
        (lambda: faiss.IndexFlatIP(D), "is an IndexFlatIP, expected a faiss.IndexPQ"),
        (lambda: faiss.IndexIDMap(faiss.IndexFlatIP(D)), "is an IndexFlatIP"),
        (lambda: "index.faiss", "is a str, expected a faiss.IndexPQ"),
        (plain, "has no vectors yet: train it, and add them"),
        (opq, "has no vectors yet"),
        (with_bias, "a PCAMatrix that adds a bias, expected rotations alone"),
        (normalised, "a NormalizationTransform, expected rotations"),
        (doubled, "item_ids.*is 7, which is there twice"),
    ],
)  # fmt: skip
def test_what_is_not_taken_says_what_would_be(make: Callable[[], Any], message: str) -> None:
    given = make()
    with pytest.raises(InputError, match=message):
        VectorIndex.from_faiss(given)


@pytest.mark.parametrize(("kind", "said"), [("turned", "turns vectors first"), ("ids", "has ids")])
def test_an_index_of_codes_alone_leaves_nothing_out(kind: str, said: str) -> None:
    with pytest.raises(InputError, match=f"{said}.*`VectorIndex.from_faiss` takes it"):
        Index.from_faiss(trained(kind))
