"""An index of vectors is exact by its codes, honest about them, and exact among what it re-ranks."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from recprune import Index, InputError, StorageError, VectorIndex
from recprune.cli import main
from recprune.search import reference
from recprune.types import Float32Array
from recprune.vectors.rotation import balanced_rotation
from recprune.vectors.vector_index import best_products


def drawn(n: int, d: int, seed: int = 0) -> Float32Array:
    """Vectors that vary along few directions, and in no direction of an axis."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((n, d)) * np.linspace(3.0, 0.1, d)
    turn, _ = np.linalg.qr(rng.standard_normal((d, d)))
    found: Float32Array = (mixed @ turn).astype(np.float32)
    return found


@pytest.fixture(scope="module")
def vectors() -> Float32Array:
    return drawn(3000, 24)


@pytest.fixture(scope="module")
def built(vectors: Float32Array) -> VectorIndex:
    return VectorIndex.build(vectors, num_splits=8)


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(st.integers(1, 20), st.integers(1, 9), st.integers(0, 99))
def test_a_rotation_keeps_inner_products(width: int, num_splits: int, seed: int) -> None:
    sample = drawn(50, width, seed)
    rotation = balanced_rotation(sample, num_splits, np.random.default_rng(seed))
    assert rotation.shape == (-(-width // num_splits) * num_splits, width)
    assert np.allclose(rotation.T @ rotation, np.eye(width), atol=1e-5)
    turned = sample @ rotation.T
    assert np.allclose(turned @ turned.T, sample @ sample.T, atol=1e-3)


def test_splits_share_what_vectors_vary_by(vectors: Float32Array) -> None:
    rotation = balanced_rotation(vectors, 8, np.random.default_rng(0))
    variances = np.var(vectors @ rotation.T, axis=0).reshape(8, -1)
    in_order = np.linalg.eigvalsh(np.cov(vectors.T)).reshape(8, -1)
    shared, unshared = (np.ptp(np.log(each).sum(axis=1)) for each in (variances, in_order))
    assert shared < unshared / 3


def test_answers_are_exact_by_the_codes(built: VectorIndex, vectors: Float32Array) -> None:
    queries = drawn(20, 24, seed=5)
    rng = np.random.default_rng(1)
    allow = rng.random(len(vectors)) < 0.5
    exclude = [rng.integers(0, len(vectors), 5).tolist() for _ in queries]
    top = built.search(queries, 7, allow=allow, exclude=exclude)
    codes = built.index.item_codes()
    rotation = balanced_rotation(vectors, 8, np.random.default_rng([0, 8]))
    tables = built.index.sub_item_scores(np.stack([rotation @ query for query in queries]))
    for place, table in enumerate(tables):
        scores = reference.score_items(table, codes, None)
        scores[~allow] = -np.inf
        scores[exclude[place]] = -np.inf
        best = np.lexsort((np.arange(len(scores)), -scores))[:7]
        assert np.array_equal(top.ids[place], best)
        assert np.array_equal(top.scores[place].view(np.uint32), scores[best].view(np.uint32))
    one = built.search(queries[0], 7, allow=allow, exclude=exclude[0])
    assert np.array_equal(one.ids, top.ids[0])
    assert np.array_equal(one.scores, top.scores[0])
    assert built.search(queries[:0], 7).ids.shape == (0, 7)


@pytest.mark.parametrize("method", ["auto", "pqtopk", "recjpqprune"])
@pytest.mark.parametrize("rerank", [0, 40, 3000])
def test_boosts_are_added_last(
    built: VectorIndex, vectors: Float32Array, rerank: int, method: str
) -> None:
    queries = drawn(6, 24, seed=9)
    rng = np.random.default_rng(3)
    boosts: list[Any] = [
        (rng.permutation(3000)[:50], rng.normal(0, 20, 50).astype(np.float32)) for _ in queries
    ]
    boosts[2] = ([], [])
    exclude = [items[:3] for items, _ in boosts]
    top = built.search(
        queries, 7, rerank=rerank, method=method, boosts=boosts, exclude=exclude
    )  # fmt: skip
    assert top.stats.exact.all()
    codes, tables = built.index.item_codes(), built.index.sub_item_scores(built.turned(queries))
    for place, (items, values) in enumerate(boosts):
        by_codes = reference.score_items(tables[place], codes, None)
        products = (vectors * queries[place].astype(np.float64)).sum(axis=1).astype(np.float32)
        for scores in (by_codes, products):
            scores[np.array(items, np.int64)] += np.array(values, np.float32)
            scores[exclude[place]] = -np.inf
        best = np.lexsort((np.arange(3000), -by_codes))
        if rerank:
            candidates = np.sort(best[: min(rerank, 3000 - len(exclude[place]))])
            by_codes, best = products, candidates[np.argsort(-products[candidates], kind="stable")]
        assert np.array_equal(top.ids[place], best[:7])
        assert np.array_equal(top.scores[place].view(np.uint32), by_codes[best[:7]].view(np.uint32))
    one = built.search(queries[0], 7, rerank=rerank, method=method, boosts=boosts[0],
                       exclude=exclude[0])  # fmt: skip
    assert np.array_equal(one.ids, top.ids[0])
    assert np.array_equal(one.scores, top.scores[0])


def test_scores_that_float32_cannot_hold_are_refused() -> None:
    index = VectorIndex.from_codes(
        np.array([[0], [1]], np.uint8),
        np.array([[[1, 1], [2, 2]]], np.float32),
        vectors=[[1e20, 1], [2, 2]],
        rotation=[[1, 1], [0, 1]],
    )
    assert index.search([3.0, 1.0], 1).ids.tolist() == [1]
    assert index.turned([3.0, 1.0]).tolist() == [4.0, 1.0]
    with pytest.raises(InputError, match=r"queries\[1\] is more than float32 can hold, turned"):
        index.search([[1.0, 1.0], [3e38, 3e38]])
    far = [[1.0, 1.0], [1e20, 1.0]]
    assert index.search(far).ids.tolist()[1][0] == 1
    with pytest.raises(InputError, match=r"queries\[1\]: its product with a vector is more than"):
        index.search(far, rerank=2)


@pytest.mark.parametrize("k", [1, 10, 3500])
def test_ranking_all_of_them_anew_is_ranking_by_vectors(
    built: VectorIndex, vectors: Float32Array, k: int
) -> None:
    queries = drawn(5, 24, seed=6)
    top = built.search(queries, k, rerank=3000)
    for place, query in enumerate(queries):
        products = (vectors * query.astype(np.float64)).sum(axis=1).astype(np.float32)
        best = np.lexsort((np.arange(3000), -products))[:k]
        assert np.array_equal(top.ids[place, : len(best)], best)
        assert np.array_equal(top.scores[place, : len(best)], products[best])
        assert (top.ids[place, len(best) :] == -1).all()


def test_a_product_has_the_same_bits_in_any_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside its double, which comes after it."""
    rng = np.random.default_rng(2)
    doubled = np.repeat(rng.standard_normal((40, 48)).astype(np.float32), 25, axis=0)
    doubled = doubled[rng.permutation(1000)]
    index = VectorIndex.build(doubled, num_splits=8)
    for query in rng.standard_normal((50, 48)).astype(np.float32):
        scores = [
            float(np.float32(math.fsum(a * b for a, b in zip(row, query.tolist(), strict=True))))
            for row in doubled.tolist()
        ]
        for rerank in (97, 100, 1000):
            top = index.search(query, 60, rerank=rerank)
            assert top.scores.tolist() == [scores[item] for item in top.ids]
            assert np.array_equal(top.ids, top.ids[np.lexsort((top.ids, -top.scores))])
        monkeypatch.setattr("recprune.vectors.vector_index._PRODUCTS", 48 * 7)  # in parts
        again = index.search(query, 60, rerank=1000)
        assert np.array_equal(again.ids, top.ids)
        assert np.array_equal(again.scores, top.scores)
        monkeypatch.undo()


def test_equal_products_are_ranked_by_id() -> None:
    same = np.tile(drawn(1, 8), (40, 1))
    top = VectorIndex.build(same, num_splits=4).search(same[0], 5, rerank=40)
    assert top.ids.tolist() == [0, 1, 2, 3, 4]


def test_recall_is_what_answers_share_with_the_best_by_vectors(vectors: Float32Array) -> None:
    queries = drawn(40, 24, seed=7)
    index = VectorIndex.build(vectors, queries=queries, num_splits=6)
    wanted = np.argsort(-(queries @ vectors.T), axis=1, kind="stable")[:, :10]
    for rerank, said in ((0, index.recalls[0].by_codes), (100, index.recalls[0].reranked)):
        found = index.search(queries, 10, rerank=rerank).ids
        shared = [len(set(a) & set(b)) / 10 for a, b in zip(found, wanted, strict=True)]
        assert said == pytest.approx(np.mean(shared))
    assert index.recalls[0].by_codes < index.recalls[0].reranked


def test_as_many_splits_as_the_recall_takes() -> None:
    vectors = drawn(2000, 64, seed=3)
    index = VectorIndex.build(vectors, recall=0.75, keep_vectors=False)
    assert [recall.num_splits for recall in index.recalls] == [8, 16, 32, 64][: len(index.recalls)]
    assert index.index.num_splits == index.recalls[-1].num_splits
    assert all(recall.by_codes < 0.75 for recall in index.recalls[:-1])
    assert index.recalls[-1].by_codes >= 0.75
    assert len(index.recalls) > 1
    with pytest.raises(InputError, match="rerank needs the vectors"):
        index.search(vectors[0], rerank=5)


@pytest.mark.parametrize("kind", ["strings", "integers", "none"])
def test_an_index_is_saved_with_its_ids(vectors: Float32Array, kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    numbers = rng.permutation(10_000)[: len(vectors)]
    named = [f"i{number}" for number in numbers]
    ids: Any = {"strings": named, "integers": numbers, "none": None}[kind]
    index = VectorIndex.build(vectors, ids, num_splits=4)
    index.save(tmp_path / "index")
    again = VectorIndex.load(tmp_path / "index")
    query = drawn(1, 24, seed=8)[0]
    for rerank in (0, 50):
        before, after = (one.search(query, 5, rerank=rerank) for one in (index, again))
        assert np.array_equal(before.ids, after.ids)
        assert np.array_equal(before.scores, after.scores)
    assert index.recalls == again.recalls
    assert repr(again) == repr(index)
    best = int(np.argmax(vectors @ query))
    ((name, *_),) = again.external_ids(again.search(query, 5, rerank=3000))
    assert name == (best if ids is None else ids[best])
    with pytest.raises(StorageError, match="holds a saved vector index, not an index"):
        Index.load(tmp_path / "index")


def test_codes_of_ones_own_with_ids_by_hand(tmp_path: Path) -> None:
    """Three items of two splits; the query counts the first split once, and the second twice."""
    codes = np.array([[0, 1], [1, 0], [1, 1]], np.uint8)
    parts = np.array([[[1], [2]], [[10], [30]]], np.float32)
    index = VectorIndex.from_codes(codes, parts, ["pear", "apple", "fig"])
    index.save(tmp_path / "index")
    for one in (index, VectorIndex.load(tmp_path / "index")):
        top = one.search([1.0, 2.0], 3)
        # pear 1 + 60, apple 2 + 20, fig 2 + 60; positions are those of apple, fig, pear.
        assert one.external_ids(top) == [["fig", "pear", "apple"]]
        assert top.ids.tolist() == [1, 2, 0]
        assert top.scores.tolist() == [62.0, 61.0, 22.0]
        assert one.external_ids(one.search([1.0, 2.0], 3, exclude=[1])) == [["pear", "apple"]]
        fig, lowered = one.item_ids.find_all(["fig"]), np.array([-5], np.float32)
        boosted = one.index.search(np.array([1, 2], np.float32), 1, boosts=(fig, lowered))
        assert one.external_ids(boosted) == [["pear"]]
    turned = VectorIndex.from_codes(codes, parts, rotation=[[0, 1], [1, 0]])
    assert turned.search([2.0, 1.0], 3).scores.tolist() == [62.0, 61.0, 22.0]
    assert turned.external_ids(turned.search([2.0, 1.0], 1)) == [[2]]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"codes": np.full((3, 2), 4, np.uint8)}, "codes"),
        ({"item_ids": ["a", "b"]}, "2 item_ids, but 3 codes"),
        ({"item_ids": ["a", "b", "a"]}, "item_ids.*'a', which is there twice"),
        ({"rotation": np.eye(3)}, "rotation has 3 rows, expected 2"),
        ({"rotation": [[0, np.nan], [1, 0]]}, r"rotation\[0\] holds NaN"),
        ({"vectors": np.zeros((3, 4))}, r"vectors are \[3, 4\], expected \[3, 2\]"),
    ],
)
def test_what_does_not_fit_the_codes_is_refused(changed: Any, message: str) -> None:
    given: dict[str, Any] = {
        "codes": np.zeros((3, 2), np.uint8),
        "sub_item_embeddings": np.ones((2, 2, 1), np.float32),
    }
    with pytest.raises(InputError, match=message):
        VectorIndex.from_codes(**(given | changed))


def test_vectors_of_any_kind(vectors: Float32Array) -> None:
    few = vectors[:300]
    expected = VectorIndex.build(few, num_splits=4).search(few[0], 5)
    for given in (few.astype(np.float64), few.tolist(), torch.from_numpy(few.copy())):
        index = VectorIndex.build(given, num_splits=4)
        assert np.array_equal(index.search(given[0], 5).ids, expected.ids)


@pytest.mark.parametrize("rerank", [0, 50])
def test_so_many_cannot_be_searched_for(vectors: Float32Array, rerank: int) -> None:
    index = VectorIndex.build(vectors[:300], num_splits=4)
    for k in (0, -1, 10**9):
        with pytest.raises(InputError, match=f"k is {k}, expected 1 to 65836"):
            index.search(vectors[0], k, rerank=rerank)
    with pytest.raises(InputError, match="k is '5', expected an integer"):
        index.search(vectors[0], "5", rerank=rerank)  # type: ignore[arg-type]


def test_what_cannot_be_indexed_is_refused(vectors: Float32Array) -> None:
    broken = vectors[:300].copy()
    broken[7, 3] = np.nan
    for given, why in (
        (broken, r"vectors\[7\] holds NaN"),
        (broken.astype(np.float64) * 1e60, r"vectors\[0\] holds NaN, infinity or what float32"),
        (broken[0], r"vectors is float32\[24\], expected floats \[n, d\]"),
        ([[1.0], [1.0, 2.0]], "vectors cannot be read as an array"),
        (np.empty((0, 3)), "expected floats"),
        ([["a"]], "expected floats"),
    ):
        with pytest.raises(InputError, match=why):
            VectorIndex.build(given)
    with pytest.raises(InputError, match="2 item_ids, but 3000 vectors"):
        VectorIndex.build(vectors, [1, 2])
    with pytest.raises(InputError, match=r"item_ids\[0\] is 'a', which is there twice"):
        VectorIndex.build(vectors[:3], ["a", "b", "a"])
    with pytest.raises(InputError, match="all integers or all strings"):
        VectorIndex.build(vectors[:2], ["a", 1])
    with pytest.raises(InputError, match="num_splits is 25, expected 1 to d = 24"):
        VectorIndex.build(vectors, num_splits=25)
    with pytest.raises(InputError, match="queries are of width 5"):
        VectorIndex.build(vectors, queries=np.ones((2, 5)))
    with pytest.raises(InputError, match="recall is 0"):
        VectorIndex.build(vectors, recall=0)
    with pytest.raises(InputError, match=r"num_splits is 2\.5, expected an integer"):
        VectorIndex.build(vectors, num_splits=2.5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="vectors has 1 row, expected 2 or more"):
        VectorIndex.build(vectors[:1])


@pytest.mark.parametrize("rerank", [0, 50])
def test_what_cannot_be_asked_is_refused(
    built: VectorIndex, vectors: Float32Array, rerank: int
) -> None:
    infinite = np.full((2, 24), [[1e60], [1.0]])
    for queries, why in (
        (np.ones(5, np.float32), "queries has shape"),
        ([["a"] * 24], r"queries is <U1\[1, 24\], expected floats \[q, d\] or \[d\]"),
        (object(), "queries is object"),
        ([[1.0], [1.0, 2.0]], "queries cannot be read as an array"),
        (np.full(24, np.nan), r"queries\[0, 0\] is nan, expected a finite number"),
        (infinite, r"queries\[0, 0\] is inf, expected a finite number"),
    ):
        with pytest.raises(InputError, match=why):
            built.search(queries, 5, rerank=rerank)
    wrong: list[tuple[Any, str]] = [
        (-1, "k is -1, expected 1 to 68536"),
        (2.5, r"k is 2\.5, expected an integer"),
        (True, "k is True, expected an integer"),
        (10**9, "k is 1000000000, expected 1 to 68536"),
    ]
    for k, why in wrong:
        with pytest.raises(InputError, match=why):
            built.search(vectors[:2], k, rerank=rerank)
    wrong = [(-1, "rerank is -1, expected 0 or more"), (True, "rerank is True, expected an int")]
    for more, why in wrong:
        with pytest.raises(InputError, match=why):
            built.search(vectors[:2], 5, rerank=more)


def test_ids_beyond_int64_are_strings(vectors: Float32Array) -> None:
    ids = np.array([7, 2**63 + 5, 1], np.uint64)
    index = VectorIndex.build(vectors[:3], ids, num_splits=4)
    assert list(index.item_ids.take([0, 1, 2])) == ["1", "7", "9223372036854775813"]
    ((best, *_),) = index.external_ids(index.search(vectors[1], 1, rerank=3))
    assert best == str(ids[int(np.argmax(vectors[:3] @ vectors[1]))])


def test_a_strange_folder_is_refused(built: VectorIndex, tmp_path: Path) -> None:
    for name, array, why in (
        ("rotation", np.ones((3, 24), np.float32), "rotation is float32"),
        ("vectors", np.ones((3000, 7), np.float32), "different widths"),
        ("vectors", np.full((3000, 24), np.nan, np.float32), "vectors is not all finite"),
    ):
        strange = VectorIndex(built.index, built.rotation, built.item_ids, built.vectors, ())
        setattr(strange, name, array)
        strange.save(tmp_path / "strange")
        with pytest.raises(StorageError, match=why):
            VectorIndex.load(tmp_path / "strange")


@pytest.mark.parametrize(
    "changed",
    [{"num_splits": "8"}, {"bytes_per_item": True}, {"num_splits": 0}, {"by_codes": "codes"},
     {"reranked": 1.5}, {"by_codes": math.nan}],
)  # fmt: skip
def test_strange_recalls_are_refused(built: VectorIndex, changed: Any, tmp_path: Path) -> None:
    recall = replace(built.recalls[0], **changed)
    VectorIndex(built.index, built.rotation, built.item_ids, None, [recall]).save(tmp_path / "it")
    with pytest.raises(StorageError, match="a recall is .* expected counts of bytes, and shares"):
        VectorIndex.load(tmp_path / "it")


def test_best_products_in_parts(vectors: Float32Array, monkeypatch: pytest.MonkeyPatch) -> None:
    queries = drawn(11, 24, seed=9)
    monkeypatch.setattr("recprune.vectors.vector_index._PRODUCTS", 7000)
    found = np.sort(best_products(vectors, queries, 4), axis=1)
    assert np.array_equal(found, np.sort(np.argsort(-(queries @ vectors.T), axis=1)[:, :4], axis=1))


def test_the_command_line_builds_and_searches(
    vectors: Float32Array, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "items.npy", vectors)
    np.save(tmp_path / "queries.npy", vectors[:2])
    (tmp_path / "ids.txt").write_text("".join(f"item {row}\n" for row in range(len(vectors))))
    items, out = str(tmp_path / "items.npy"), str(tmp_path / "index")
    queries = str(tmp_path / "queries.npy")
    words = ["index", "build", "--vectors", items, "--item-ids", str(tmp_path / "ids.txt")]
    assert main([*words, "--splits", "4", "--out", out]) == 0
    shown = capsys.readouterr()
    assert "recall@10" in shown.out
    assert "items as queries" in shown.err
    assert main(["search", out, queries, "-k", "3", "--rerank", "3000", "--json"]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    best = np.argsort(-(vectors[:2] @ vectors.T), axis=1, kind="stable")[:, :3]
    assert [answer["external_ids"] for answer in answers] == [
        [f"item {row}" for row in rows] for rows in best
    ]
    boosted = ["--boosts", "item 17=1e6,item 4=2e6", "--method", "scan", "--json"]
    assert main(["search", out, queries, "-k", "2", *boosted]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["external_ids"] for answer in answers] == [["item 4", "item 17"]] * 2
    assert {answer["method"] for answer in answers} == {"scan"}
    assert main(["index", "info", out]) == 0
    assert "3,000 items, d = 24, 4 splits, vectors kept" in capsys.readouterr().out
    for wrong, why in (
        (["index", "build", "--out", out], "built from CODES and EMBEDDINGS, or from --vectors"),
        (["index", "build", items, items, "--recall", "0.5", "--out", out], "--recall goes with"),
        ([*words, "--live", "--out", out], "--vectors goes without"),
        ([*words, "--splits", "4", "--recall", "0.5", "--out", out], "one decides, or the other"),
        (["index", "build", "--vectors", items + "x", "--out", out], "items.npyx"),
        (["search", out, queries, "--boosts", "item 9999=1"], "'item 9999' is no item of it"),
    ):
        assert main(wrong) == 2
        assert why in capsys.readouterr().err
