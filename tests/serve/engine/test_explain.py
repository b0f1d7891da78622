"""An explanation says what the oracle says, and what the engines really did."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from recprune import Index, InputError, RecJPQPrune, Scan, TopK, build_posting_lists
from recprune._native import instruction_sets
from recprune.search import reference
from recprune.search.index_arrays import Layout
from recprune.search.methods import METHODS
from recprune.serve.engine.explain import Explanation, TracePoint, _identical, explain
from recprune.types import Boosts, Float32Array
from tests.support.search_cases import some_boosts

# Six items of two splits; with ones as the sequence embedding, these are the sub-item scores.
TOY_SCORES = np.array([[1, 5, 0, 3], [4, 2, 1, 0]], np.float32)
TOY_CODES = np.array([[1, 3], [3, 1], [1, 0], [2, 0], [0, 2], [2, 3]], np.uint8)  # 5 5 9 4 2 0
ONES = np.ones(2, np.float32)


def toy() -> Index:
    return Index.build(TOY_CODES, TOY_SCORES[:, :, None])


def run_of(explanation: Explanation, method: str) -> Any:
    return next(run for run in explanation.methods if run.method == method)


def test_a_toy_that_can_be_followed_by_hand() -> None:
    told = explain(toy(), ONES, 2)
    assert [(item.item_id, item.rank, item.score) for item in told.top] == [(2, 1, 9), (0, 2, 5)]
    assert told.top[1].contributions == [5, 0]
    assert told.top[1].sub_item_ids == [1, 3]
    assert told.top[1].sub_item_ranks == [0, 3]
    assert told.middle is not None
    assert told.bottom is not None
    assert (told.middle.item_id, told.middle.rank) == (3, 4)
    assert (told.middle.sub_item_ids, told.middle.sub_item_ranks) == ([2, 0], [3, 0])
    assert (told.bottom.item_id, told.bottom.rank, told.bottom.score) == (5, 6, 0)
    assert told.heat_map.first_ranks == [0, 1, 2, 3]
    assert told.heat_map.scores == [[5, 3, 1, 0], [4, 2, 1, 0]]
    # Sub-item 1 of split 0 brings items 0 and 2, then sub-item 0 of split 1 items 2 and 3; an
    # unseen item could still tie, and item 1 does, with a higher id.
    assert told.trace.points == [
        TracePoint(0, None, 9, 0, [0, 0]),
        TracePoint(1, 5, 7, 2, [1, 0]),
        TracePoint(2, 5, 5, 4, [1, 1]),
        TracePoint(3, 5, 3, 5, [2, 1]),
    ]
    assert told.trace.stop == "upper_bound_below_threshold"
    assert (told.trace.steps, told.trace.sub_items_visited, told.trace.items_seen) == (3, 3, 4)
    # Eight at a time are more than a split has.
    assert run_of(told, "recjpqprune").visited == [4, 0]


def test_whoever_asks_for_one_sees_less() -> None:
    trace = explain(toy(), ONES, 1).trace
    assert trace.points[-1] == TracePoint(1, 9, 7, 2, [1, 0])
    assert trace.items_seen == 2


def test_excluded_items_are_not_ranked() -> None:
    allow = np.array([True, True, True, True, True, False])
    told = explain(toy(), ONES, 10, exclude=[2, 3], allow=allow)
    assert [item.item_id for item in told.top] == [0, 1, 4]
    assert told.num_eligible == 3
    assert told.bottom == told.top[-1]
    assert told.trace.stop == "lists_used_up", "the tenth best never comes"
    assert told.trace.points[-1].upper_bound is None
    assert told.trace.points[-1].threshold is None
    assert all(run.identical for run in told.methods if run.unavailable is None)


def test_a_boost_is_a_part_of_the_score() -> None:
    told = explain(toy(), ONES, 2, boosts=boosts_of({5: 6.5, 2: -9.0, 4: 0.5}))
    found = [(item.item_id, item.score, item.boost) for item in told.top]
    assert found == [(5, 6.5, 6.5), (0, 5.0, None)]
    assert told.bottom is not None
    assert (told.bottom.item_id, told.bottom.score, told.bottom.boost) == (2, 0.0, -9.0)
    # Three items are scored before the first step: with 6.5, 2.5 and 0.
    assert told.trace.points[:2] == [
        TracePoint(0, 2.5, 9, 3, [0, 0]),
        TracePoint(1, 5, 7, 5, [1, 0]),
    ]
    assert all(run.identical for run in told.methods if run.unavailable is None)
    at_once = explain(toy(), ONES, 1, boosts=boosts_of({5: 20.0})).trace
    assert at_once.points == [TracePoint(0, 20, 9, 1, [0, 0])]
    assert (at_once.steps, at_once.stop) == (0, "upper_bound_below_threshold")


def test_what_a_model_repeats_and_what_a_query_boosts_are_told_apart() -> None:
    told = explain(
        toy(),
        ONES,
        2,
        boosts=boosts_of({5: 6.5, 4: 1.0}),
        repeats=boosts_of({4: 3.5, 0: 1.0}),
        transitions=boosts_of({4: 2.0}),
    )
    found = [
        (item.item_id, item.score, item.repeat, item.transition, item.boost) for item in told.top
    ]
    assert found == [(2, 9.0, None, None, None), (4, 8.5, 3.5, 2.0, 1.0)]
    assert told.middle is not None
    assert (told.middle.item_id, told.middle.repeat) == (0, 1.0)
    assert all(run.identical for run in told.methods if run.unavailable is None)


def boosts_of(given: dict[int, float]) -> Boosts:
    return np.array([*given]), np.array([*given.values()], np.float32)


def test_nothing_may_be_returned() -> None:
    told = explain(toy(), ONES, 3, allow=np.zeros(6, np.bool_))
    assert (told.top, told.middle, told.bottom) == ([], None, None)


@dataclass
class Case:
    codes: NDArray[Any]
    embeddings: Float32Array
    query: Float32Array
    bias: Float32Array | None
    exclude: list[int] | None
    allow: NDArray[np.bool_] | None
    boosts: tuple[NDArray[np.int64], Float32Array] | None

    def index(self, layout: Layout) -> Index:
        return Index.build(self.codes, self.embeddings, item_bias=self.bias, layout=layout)

    def eligible(self) -> NDArray[np.bool_]:
        mask = np.ones(len(self.codes), np.bool_) if self.allow is None else self.allow.copy()
        mask[self.exclude or []] = False
        return mask


def case(
    num_items: int, num_splits: int, num_sub_items: int, *, everything: bool, seed: int
) -> Case:
    rng = np.random.default_rng(seed)
    shape = (num_items, num_splits)
    codes = rng.integers(0, num_sub_items, shape).astype(
        np.uint8 if num_sub_items <= 256 else np.uint16
    )
    # Few values, so that ties are everywhere.
    embeddings = rng.integers(-3, 4, (num_splits, num_sub_items, 2)).astype(np.float32)
    return Case(
        codes,
        embeddings + np.float32(0.1) * rng.integers(0, 3, embeddings.shape).astype(np.float32),
        rng.standard_normal(2 * num_splits).astype(np.float32),
        rng.standard_normal(num_items).astype(np.float32) if everything else None,
        rng.integers(0, num_items, 5).tolist() if everything else None,
        rng.random(num_items) < 0.8 if everything else None,
        some_boosts(rng, num_items, 0.05) if everything else None,
    )


SHAPES: list[tuple[int, int, int, Layout]] = [
    (3000, 8, 256, "full"),
    (3000, 8, 256, "compact"),
    (3000, 8, 20, "slim"),
    (500, 4, 16, "full"),
    (40, 3, 2, "compact"),
    (700, 1, 700, "full"),
    (900, 2, 300, "full"),
    (300, 20, 5, "full"),
]


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("k", [1, 10, 5000])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_agrees_with_the_oracle(
    shape: tuple[int, int, int, Layout], k: int, everything: bool
) -> None:
    *sizes, layout = shape
    given = case(*sizes, everything=everything, seed=k)
    index = given.index(layout)
    told = explain(
        index, given.query, k, exclude=given.exclude, allow=given.allow, boosts=given.boosts
    )
    table = reference.sub_item_scores(given.query, given.embeddings)
    mask = given.eligible()
    ids, scores = reference.exhaustive(
        table, given.codes, k, bias=given.bias, eligible=mask, boosts=given.boosts
    )
    assert [item.item_id for item in told.top] == ids.tolist()
    assert [item.score for item in told.top] == scores.tolist()
    everybody, _ = reference.exhaustive(
        table, given.codes, len(mask), bias=given.bias, eligible=mask, boosts=given.boosts
    )
    for item in (told.middle, told.bottom):
        assert item is not None
        assert item.item_id == everybody[item.rank - 1]
    assert told.bottom is not None
    assert told.bottom.rank == told.num_eligible == mask.sum()
    for item in told.top:
        total = np.float32(item.contributions[0])
        for contribution in item.contributions[1:]:
            total = total + np.float32(contribution)
        for added in (item.bias, item.boost):
            total = total if added is None else total + np.float32(added)
        assert item.score == total
        assert item.sub_item_ids == given.codes[item.item_id].tolist()
        better = table[np.arange(index.num_splits), item.sub_item_ids][:, None] < table
        assert (better.sum(axis=1) <= item.sub_item_ranks).all(), "ties may come before"
    ran = [run for run in told.methods if run.unavailable is None]
    assert all(run.identical and run.exact for run in ran)
    assert [run.method for run in told.methods] == list(METHODS)
    assert {"auto", "pqtopk", "default"} <= {run.method for run in ran}
    assert ("recjpqprune" in {run.method for run in ran}) == (layout != "compact")
    json.dumps(asdict(told), allow_nan=False)


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_trace_is_the_engines_own(
    shape: tuple[int, int, int, Layout], everything: bool
) -> None:
    *sizes, layout = shape
    given = case(*sizes, everything=everything, seed=3)
    index = given.index(layout)
    told = explain(
        index, given.query, 4, exclude=given.exclude, allow=given.allow, boosts=given.boosts
    )
    trace, points = told.trace, told.trace.points
    assert trace.method == ("recjpqprune" if layout != "compact" else "scan")
    assert [point.step for point in points] == sorted({point.step for point in points})
    assert (points[0].step, points[-1].step) == (0, trace.steps)
    thresholds = [point.threshold for point in points if point.threshold is not None]
    bounds = [point.upper_bound for point in points if point.upper_bound is not None]
    assert thresholds == sorted(thresholds)
    assert bounds == sorted(bounds, reverse=True)
    for point in points[:-1]:
        assert point.threshold is None or point.upper_bound is None or trace.method == "scan" or (
            point.upper_bound >= point.threshold
        ), "else it would have stopped"  # fmt: skip
    if trace.stop == "upper_bound_below_threshold":
        assert points[-1].upper_bound is not None
        assert points[-1].threshold is not None
        assert points[-1].upper_bound < points[-1].threshold
    else:
        assert index.num_sub_items in points[-1].visited
    # The same from the engine itself, and which items that leaves unseen.
    table = index.sub_item_scores(given.query)
    for point in points[1:-1]:
        stopped: RecJPQPrune | Scan = Scan(max_steps=point.step)
        if trace.method == "recjpqprune":
            stopped = RecJPQPrune(max_steps=point.step, sub_items_per_step=1)
        stats = index.search(
            given.query,
            4,
            method=stopped,
            exclude=given.exclude,
            allow=given.allow,
            boosts=given.boosts,
        ).stats
        assert sum(point.visited) == stats.steps[0] == point.step
        assert point.items_scored == stats.items_scored[0]
        if trace.method == "recjpqprune" and point.upper_bound is not None:
            assert stats.upper_bound[0] == point.upper_bound
    seen = np.zeros(index.num_items, np.bool_)
    for split, count in enumerate(points[-1].visited):
        best = np.argsort(-table[split], kind="stable")[:count]
        seen |= np.isin(given.codes[:, split], best)
    assert trace.items_seen == seen.sum()
    assert trace.sub_items_visited == sum(points[-1].visited)
    if layout == "full" and not everything:
        lists = build_posting_lists(given.codes, index.num_sub_items)
        _, _, steps = reference.recjpqprune(table, given.codes, lists, 4, 1)
        assert trace.steps == steps


def test_many_steps_are_sampled() -> None:
    given = case(20_000, 8, 256, everything=False, seed=1)
    trace = explain(given.index("full"), given.query, 500).trace
    assert trace.steps > 64
    assert 60 < len(trace.points) <= 65


def test_a_wide_heat_map_is_thinned_out() -> None:
    given = case(3000, 1, 3000, everything=False, seed=1)
    index = given.index("full")
    heat_map = explain(index, given.query, 3).heat_map
    table = np.sort(index.sub_item_scores(given.query)[0])[::-1]
    assert len(heat_map.first_ranks) == 512
    assert heat_map.scores[0] == table[heat_map.first_ranks].tolist()
    assert heat_map.first_ranks[-1] < 3000


def test_one_bit_is_a_difference() -> None:
    right = np.array([4, 2]), np.array([1.5, 1.5], np.float32)
    stats = toy().search(ONES, 2).stats
    padded = np.array([4, 2, -1]), np.array([1.5, 1.5, -np.inf], np.float32)
    assert _identical(TopK(*right, stats), right)
    assert _identical(TopK(*padded, stats), right)
    assert not _identical(TopK(right[0][::-1], right[1], stats), right)
    nearly = np.nextafter(right[1], np.float32(2))
    assert not _identical(TopK(right[0], nearly, stats), right)


def test_what_would_cost_too_much_is_left_out() -> None:
    codes = np.zeros((70_000, 1), np.uint8)
    index = Index.build(codes, np.ones((1, 2, 256), np.float32))
    told = explain(index, np.ones(256, np.float32), 2)
    assert run_of(told, "default").unavailable == (
        "needs 71,680,000 bytes in each worker, and the service allows 67,108,864: "
        "--max-method-bytes"
    )
    assert run_of(told, "cells").unavailable.startswith("needs the full or slim layout")


def test_what_is_allowed_decides_what_is_traced() -> None:
    rng = np.random.default_rng(0)
    embeddings = rng.standard_normal((8, 256, 1)).astype(np.float32)
    codes = rng.integers(0, 256, (1000, 8))
    query = np.ones(8, np.float32)
    narrow = Index.build(codes.astype(np.uint8), embeddings)
    assert explain(narrow, query, 5, max_bytes=32_000).trace.method == "recjpqprune"
    assert explain(narrow, query, 5, max_bytes=31_999).trace.method == "scan"
    wide = Index.build(codes.astype(np.uint16), np.ones((8, 300, 1), np.float32))
    with pytest.raises(InputError, match="method recjpqprune needs 32,000 bytes"):
        explain(wide, query, 5, max_bytes=31_999)


def test_one_query_at_a_time() -> None:
    with pytest.raises(InputError, match=r"shape \[2, 2\], expected \[2\]: one query"):
        explain(toy(), np.ones((2, 2), np.float32))
    with pytest.raises(InputError, match="expected a finite number"):
        explain(toy(), np.array([1, np.nan], np.float32))


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("method", ["auto", "cells", "scan", "recjpqprune"])
def test_the_engines_mark_what_they_visit(
    method: str, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECPRUNE_ISA", isa)
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 256, (60_000, 8)).astype(np.uint8)
    embeddings = rng.standard_normal((8, 256, 2)).astype(np.float32)
    index, query = Index.build(codes, embeddings), rng.standard_normal(16).astype(np.float32)
    top, visited = index.search_visibly(query, 10, method=method)
    plain = index.search(query, 10, method=method)
    assert np.array_equal(top.ids, plain.ids)
    assert top.stats.steps == plain.stats.steps
    if top.stats.method == ["pqtopk"]:  # taken for small catalogues, and goes by no sub-item id
        assert method == "auto"
        assert not visited.any()
        return
    # Every other engine takes the best sub-item ids of a split first.
    best_first = np.take_along_axis(
        visited, np.argsort(-index.sub_item_scores(query), axis=1, kind="stable"), axis=1
    )
    counts = visited.sum(axis=1)
    assert (best_first == (np.arange(256) < counts[:, None])).all()
    found = visited[np.arange(8), codes[top.ids]]
    assert found.any(axis=1).all(), "whoever is returned was come upon somewhere"
    ran = top.stats.method[0]
    if ran == "recjpqprune":
        assert counts.sum() == 8 * top.stats.steps[0]
    elif ran == "scan" and method == "scan":
        assert counts.tolist() == [top.stats.steps[0], 0, 0, 0, 0, 0, 0, 0]
    elif ran == "cells":
        in_a_cell = (found[:, ::2] & found[:, 1::2]).any(axis=1)
        assert (in_a_cell | found[:, 0]).all(), "the lists that are scanned first are split 0's"
        assert counts.sum() < 8 * 256


def test_a_search_that_stops_marks_no_more() -> None:
    rng = np.random.default_rng(6)
    codes = rng.integers(0, 256, (5000, 8)).astype(np.uint8)
    index = Index.build(codes, rng.standard_normal((8, 256, 2)).astype(np.float32))
    query = rng.standard_normal(16).astype(np.float32)
    _, visited = index.search_visibly(query, 10, method=RecJPQPrune(3, sub_items_per_step=2))
    assert visited.sum() == 6
    _, visited = index.search_visibly(query, 10, method=Scan(max_steps=5))
    assert visited.sum() == visited[0].sum() == 5
    _, visited = index.search_visibly(query, 10, method="pqtopk")
    assert not visited.any()
    with pytest.raises(InputError, match="one query at a time"):
        index.search_visibly(query[None])
