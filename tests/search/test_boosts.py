"""Boosts: numbers that a query adds to single items, by the same contract."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from recprune import (
    METHODS,
    Auto,
    Cells,
    Index,
    RecJPQPrune,
    Scan,
)
from recprune._native import instruction_sets
from recprune.search import reference
from recprune.search.question import ScoreOverflowError
from recprune.types import Float32Array
from tests.support.search_cases import Case, assert_same, some_boosts


@pytest.mark.parametrize("method", METHODS)
def test_boosts_by_hand(method: str) -> None:
    """Five items with the scores 1 to 5: one rises to the top, one sinks, one ties."""
    codes = np.arange(5, dtype=np.uint8)[:, None]
    index = Index.build(codes, np.arange(1, 6, dtype=np.float32)[None, :, None])
    if method == "cells":
        codes = np.concatenate([codes, np.zeros((5, 7), np.uint8)], axis=1)
        embeddings = np.zeros((8, 5, 1), np.float32)
        embeddings[0, :, 0] = np.arange(1, 6)
        index = Index.build(codes, embeddings)
    phi = np.ones(index.width, np.float32)
    boosts = ([4, 0, 2], [-10.0, 9.0, 1.0])
    top = index.search(phi, 5, method=method, boosts=boosts)
    assert top.ids.tolist() == [0, 2, 3, 1, 4]
    assert top.scores.tolist() == [10.0, 4.0, 4.0, 2.0, -5.0]
    top = index.search(phi, 5, method=method, boosts=boosts, exclude=[0], floor=0.0)
    assert top.ids.tolist() == [2, 3, 1, -1, -1]
    allow = np.array([True, True, False, False, True])
    top = index.search(phi, 2, method=method, boosts=boosts, allow=allow)
    assert top.ids.tolist() == [0, 1]


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_arrays_may_lie_anywhere_in_memory(offset: int, order: str) -> None:
    """Views into a file's bytes are not aligned, and some machines write the other way round."""

    def placed(values: list[float], kind: str) -> NDArray[Any]:
        whole = np.array(values, order + kind)
        return np.frombuffer(b"." * offset + whole.tobytes(), whole.dtype, offset=offset)

    codes = np.arange(5, dtype=np.uint8)[:, None]
    index = Index.build(codes, np.arange(1, 6, dtype=np.float32)[None, :, None])
    phi = np.ones(1, np.float32)
    for kind in ("i8", "i4", "u8"):
        ids = placed([4, 2], kind)
        assert index.search(phi, 2, exclude=ids).ids.tolist() == [3, 1]
        assert index.search(phi[None], 2, exclude=[ids]).ids.tolist() == [[3, 1]]
        boosts = (ids, placed([-9.0, 9.0], "f4"))
        assert index.search(phi, 2, boosts=boosts).ids.tolist() == [2, 3]


@pytest.mark.parametrize("layout", ["full", "slim", "compact"])
@pytest.mark.parametrize("method", METHODS)
def test_boosts_of_a_batch_are_those_of_its_queries(
    trained: tuple[Index, Float32Array, Case], method: str, layout: Any
) -> None:
    index, phi, case = trained
    rng = np.random.default_rng(8)
    bias = rng.standard_normal(len(case.codes)).astype(np.float32)
    index = Index.build(case.codes, index.sub_item_embeddings(), item_bias=bias, layout=layout)
    if method in {"compact": ("cells", "recjpqprune"), "slim": ("scan",)}.get(layout, ()):
        return
    tables = index.sub_item_scores(phi[:6])
    shares = [0.0001, 0.01, 0.5, 1.0, 0.01]
    boosts: list[Any] = [some_boosts(rng, len(case.codes), share) for share in shares]
    boosts.append(([], []))
    whole = index.search(phi[:6], 30, method=method, boosts=boosts, threads=3)
    for query in range(6):
        ids, values = boosts[query]
        given = (np.array(ids, np.int64), np.array(values, np.float32))
        expected = reference.exhaustive(tables[query], case.codes, 30, bias=bias, boosts=given)
        assert np.array_equal(whole.ids[query], expected[0]), query
        bits = expected[1].view(np.uint32)
        assert np.array_equal(whole.scores[query].view(np.uint32), bits), query
        one = index.search(phi[query], 30, method=method, boosts=boosts[query])
        assert_same(one, expected, (method, query))
    assert whole.stats.exact.all()


@pytest.mark.parametrize("k", [1, 10, 300])
@pytest.mark.parametrize("method", [RecJPQPrune, Scan, Cells, Auto])
@pytest.mark.parametrize(
    "settings",
    [
        {"max_steps": 1},
        {"max_steps": 20},
        {"over_inflation": 0.3},
        {"over_inflation": 0.9, "max_steps": 3},
        {"deadline_us": 1.0},
    ],
)
def test_bounds_of_unsafe_searches_hold_for_boosted_items_too(
    trained: tuple[Index, Float32Array, Case], method: Any, settings: dict[str, Any], k: int
) -> None:
    index, phi, case = trained
    rng = np.random.default_rng(k)
    for query in range(12):
        boosts = some_boosts(rng, len(case.codes), rng.choice([1e-4, 0.002, 0.3]))
        floor = rng.choice([-np.inf, -20.0, 20.0])
        table = index.sub_item_scores(phi[query])
        ids, scores = reference.exhaustive(table, case.codes, k, boosts=boosts)
        ids, scores = ids[scores >= floor], scores[scores >= floor]
        top = index.search(
            phi[query], k, method=method(**settings), boosts=boosts, floor=float(floor)
        )
        missed = ~np.isin(ids, top.ids)
        assert (scores[missed] <= top.stats.upper_bound[0]).all()
        if top.stats.exact[0]:
            assert np.array_equal(top.ids[top.ids >= 0], ids)
        everything, all_scores = reference.exhaustive(
            table, case.codes, len(case.codes), boosts=boosts
        )
        left_out = ~np.isin(everything, top.ids) & (all_scores >= floor)
        assert (all_scores[left_out] <= top.stats.upper_bound[0]).all()
        # Every boosted item was scored, so none that belongs there is missing.
        assert not np.isin(ids[missed], boosts[0]).any()
        assert top.stats.items_scored[0] >= len(boosts[0])


@pytest.mark.parametrize(
    "as_ids",
    [
        list,
        tuple,
        lambda ids: np.array(ids, np.int32),
        lambda ids: np.array(ids, np.uint32),
        lambda ids: np.array(ids, np.uint64),
        lambda ids: np.array(ids, np.uint16),
        lambda ids: np.array(ids, ">i8"),
        lambda ids: np.repeat(np.array(ids), 2)[::2],
        lambda ids: array("q", ids),
    ],
)
def test_ids_may_come_in_any_integer_type(
    trained: tuple[Index, Float32Array, Case], as_ids: Callable[[list[int]], Any]
) -> None:
    index, phi, case = trained
    ids, values = [*range(19, 2, -2), 11_111, 0], np.linspace(-3, 90, 11, dtype=np.float32)
    excluded = index.search(phi[0], 5).ids.tolist()
    excluded += excluded  # once or twice is all the same
    eligible = np.ones(len(case.codes), bool)
    eligible[excluded] = False
    table = index.sub_item_scores(phi[0])
    expected = reference.exhaustive(
        table, case.codes, 20, eligible=eligible, boosts=(np.array(ids), values)
    )
    boosts = (as_ids(ids), values)
    assert_same(index.search(phi[0], 20, exclude=as_ids(excluded), boosts=boosts), expected, "one")
    batch = index.search(phi[:1], 20, exclude=[as_ids(excluded)], boosts=[boosts])
    assert batch.ids[0].tolist() == expected[0].tolist()


def test_boosts_that_are_strong_or_weak_do_not_make_a_search_longer() -> None:
    """Neither they nor a low floor may pass for a threshold that is of use."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (200_000, 8)).astype(np.uint8)
    index = Index.build(codes, np.ones((8, 256, 1), np.float32))
    items = rng.permutation(200_000)[:200]
    for isa in instruction_sets():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RECPRUNE_ISA", isa)
            for _ in range(10):
                scores = rng.standard_normal((8, 256)).astype(np.float32)
                plain = index.search_scores(scores, 10, method="cells")
                weak = np.full(200, 1e-3, np.float32)
                for boosted in (weak, 40 * np.ones(200, np.float32)):
                    top = index.search_scores(scores, 10, method="cells", boosts=(items, boosted))
                    touched = int(top.stats.items_touched[0])
                    assert touched <= 1.5 * plain.stats.items_touched[0] + 1000
                low = index.search_scores(scores, 10, method="cells", floor=-40.0)
                assert low.stats.items_touched[0] <= 1.5 * plain.stats.items_touched[0] + 1000


def test_a_compact_index_may_be_asked_for_boosts_first_by_many_threads(
    trained: tuple[Index, Float32Array, Case],
) -> None:
    index, phi, case = trained
    boosts = some_boosts(np.random.default_rng(1), len(case.codes), 0.01)
    fresh = Index.build(case.codes, index.sub_item_embeddings(), layout="compact")
    expected = index.search(phi[0], 10, boosts=boosts).ids
    with ThreadPoolExecutor(8) as pool:
        asked = pool.map(lambda _: fresh.search(phi[0], 10, boosts=boosts).ids, range(32))
    assert all(np.array_equal(ids, expected) for ids in asked)


def test_boosts_that_float32_cannot_add_are_refused(
    trained: tuple[Index, Float32Array, Case],
) -> None:
    index, phi, _ = trained
    for method in METHODS:
        for value in (3e38, -3e38):
            boosts = [([], []), ([5], [1e30]), ([9], [value])]
            with pytest.raises(ScoreOverflowError, match="query 2: scores would over") as caught:
                index.search(1e36 * phi[:3], 10, method=method, boosts=boosts)
            assert caught.value.query == 2
