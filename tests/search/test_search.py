"""One contract for every method, instruction set and layout: the oracle's ids and score bits."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recprune import (
    METHODS,
    Auto,
    Cells,
    Default,
    Index,
    InputError,
    RecJPQPrune,
    Scan,
    build_posting_lists,
    instruction_set,
)
from recprune._native import instruction_sets
from recprune.search import reference
from recprune.search.methods import Method
from recprune.types import Float32Array
from tests.support.search_cases import Case, assert_same, cases, methods_for, some_boosts

ISAS = instruction_sets()


# `make fuzz` asks for many more, and for other ones each time.
FUZZ = int(os.environ.get("RECPRUNE_FUZZ", "0"))


@settings(max_examples=FUZZ or 400, derandomize=not FUZZ)
@given(case=cases())
def test_every_method_returns_what_the_oracle_returns(case: Case) -> None:
    expected = case.expected()
    layouts = ["full", "slim", "compact"] if case.codes.dtype == np.uint8 else ["full", "slim"]
    with pytest.MonkeyPatch.context() as patch:
        for layout in layouts:
            index = case.index(layout)
            for isa in ISAS:
                patch.setenv("RECPRUNE_ISA", isa)
                for method in methods_for(index):
                    top = index.search_scores(
                        case.scores,
                        case.k,
                        method=method,
                        exclude=case.exclude,
                        allow=case.allow,
                        floor=case.floor,
                        boosts=case.boosts,
                    )
                    assert_same(top, expected, (layout, isa, method))
                    assert top.stats.exact.all()


# Catalogues that `pqtopk` filters before it scores, whole blocks of 64 items or not. Registers hold
# sixteen codes of an item: fewer, as many, more, and several times as many.
FILTERED_SIZES = [1100, 1663, 1664, 1665, 2048, 4352, 4353, 9000]
FILTERED_SPLITS = [8, 8, 8, 16, 16, 1, 2, 7, 9, 15, 17, 24, 32, 33, 63, 64]


@settings(max_examples=FUZZ // 4 or 250, derandomize=not FUZZ)
@given(case=cases(FILTERED_SIZES, FILTERED_SPLITS))
def test_scoring_only_what_a_filter_leaves_changes_nothing(case: Case) -> None:
    expected = case.expected()
    index = case.index("full")
    with pytest.MonkeyPatch.context() as patch:
        for isa in ISAS:
            patch.setenv("RECPRUNE_ISA", isa)
            for method in ("pqtopk", "auto"):
                top = index.search_scores(
                    case.scores,
                    case.k,
                    method=method,
                    exclude=case.exclude,
                    allow=case.allow,
                    floor=case.floor,
                    boosts=case.boosts,
                )
                assert_same(top, expected, (isa, method))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("num_splits", [3, 8, 16, 40])
@pytest.mark.parametrize("order", ["random", "rising", "falling"])
@pytest.mark.parametrize("magnitude", [1e-44, 1e-38, 1e-3, 1.0, 1e30])
def test_a_filter_of_a_whole_catalogue(num_splits: int, order: str, magnitude: float) -> None:
    """The threshold rises from first to last, or not at all after the first items."""
    rng = np.random.default_rng(num_splits)
    codes = rng.integers(0, 256, (20_001, num_splits)).astype(np.uint8)
    scores = (rng.standard_normal((num_splits, 256)) * magnitude).astype(np.float32)
    if order != "random":
        totals = reference.score_items(scores, codes, None)
        codes = codes[np.argsort(totals if order == "rising" else -totals, kind="stable")]
    index = Index.build(codes, np.ones((num_splits, 256, 1), np.float32))
    for k in (1, 10, 128, 129, 1000, 4000, 20_001):
        expected = reference.exhaustive(scores, codes, k)
        for method in ("pqtopk", "scan"):
            top = index.search_scores(scores, k, method=method)
            assert_same(top, expected, (method, num_splits, order, k))


def test_few_items_are_scored_where_a_filter_is(isa: str) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (100_000, 8)).astype(np.uint8)
    index = Index.build(codes, np.ones((8, 256, 1), np.float32))
    top = index.search_scores(rng.standard_normal((8, 256)).astype(np.float32), method="pqtopk")
    assert top.stats.items_touched.tolist() == [100_000]
    filtered = isa.startswith("avx")
    assert (top.stats.items_scored[0] < 10_000) == filtered


@settings(max_examples=FUZZ // 20 or 60, derandomize=not FUZZ)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([8, 8, 8, 4, 5, 6, 7, 12, 13, 16]),
    st.sampled_from([256, 100, 30]),
    st.sampled_from([1, 10, 100, 1000]),
    st.floats(0.2, 3.0),
)
def test_cells_prune_and_stay_exact_on_catalogues_worth_pruning(
    seed: int, num_splits: int, num_sub_items: int, k: int, sharpness: float
) -> None:
    rng = np.random.default_rng(seed)
    shape = (num_splits, num_sub_items)
    codes = rng.integers(0, num_sub_items, (60_000, num_splits)).astype(np.uint8)
    widths = np.exp(sharpness * rng.random((num_splits, 1)))
    scores = (rng.standard_normal(shape) * widths).astype(np.float32)
    index = Index.build(codes, np.ones((*shape, 1), np.float32))
    expected = reference.exhaustive(scores, codes, k)
    boosts = some_boosts(rng, len(codes), rng.choice([1e-4, 0.003, 0.5]))
    expected_boosted = reference.exhaustive(scores, codes, k, boosts=boosts)
    with pytest.MonkeyPatch.context() as patch:
        for isa in ISAS:
            patch.setenv("RECPRUNE_ISA", isa)
            for method in ("cells", "auto", "scan"):
                top = index.search_scores(scores, k, method=method)
                assert_same(top, expected, (isa, method))
                # Who is told the threshold need not find it.
                told = index.search_scores(scores, k, method=method, floor=expected[1][-1])
                assert_same(told, expected, (isa, method, "floor"))
                # So low that it is of no use, but a threshold.
                told = index.search_scores(scores, k, method=method, floor=scores.min())
                assert_same(told, expected, (isa, method, "low floor"))
                boosted = index.search_scores(scores, k, method=method, boosts=boosts)
                assert_same(boosted, expected_boosted, (isa, method, "boosts"))


def test_cells_serve_users_for_whom_few_sub_items_stand_out(isa: str) -> None:
    """As learnt codes have them: hardly any cell is near the best, and yet no scan is needed."""
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 256, (60_000, 8)).astype(np.uint8)
    index = Index.build(codes, np.ones((8, 256, 1), np.float32))
    for height in (5.0, 20.0, 300.0):
        scores = rng.standard_normal((8, 256)).astype(np.float32)
        scores[:, :3] += np.float32(height)
        top = index.search_scores(scores, 10, method="cells")
        assert top.stats.method == ["cells"]
        assert top.stats.items_touched[0] < len(codes) / 4
        assert_same(top, reference.exhaustive(scores, codes, 10), (isa, height))


@settings(max_examples=FUZZ // 20 or 100, derandomize=not FUZZ)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([3, 8, 12, 12]),
    st.sampled_from([1, 10, 60, 1000, 1000]),
    st.floats(0.5, 3.0),
    st.booleans(),
)
def test_a_scan_of_long_lists_changes_its_mind_and_stays_exact(
    seed: int, num_splits: int, k: int, variety: float, without_the_best: bool
) -> None:
    """Two lists of many blocks: threshold, tables and the order of the rows change inside."""
    rng = np.random.default_rng(seed)
    size = 40_000 if num_splits < 12 else 80_000  # enough to look at one row after the other
    codes = rng.integers(0, 256, (size, num_splits)).astype(np.uint8)
    codes[:, 0] %= 2
    # Splits of different shapes: which of them rejects the most depends on the threshold.
    powers = np.exp(variety * (rng.random((num_splits, 1)) - 0.5))
    scores = (-(np.abs(rng.standard_normal((num_splits, 256))) ** powers)).astype(np.float32)
    # Better and better items, so that the threshold rises all the way, also in a list's own order.
    scores[1].sort()
    best = np.argsort(np.argsort(-scores, axis=1), axis=1)[np.arange(num_splits), codes]
    codes = codes[np.argsort(-best.sum(axis=1) + rng.normal(0, 200, len(codes)))]
    index = Index.build(codes, np.ones((num_splits, 256, 1), np.float32), layout="compact")
    exclude, eligible = None, np.ones(len(codes), bool)
    if without_the_best:  # they pass every filter but the last, and may count for nothing
        exclude = rng.permutation(reference.exhaustive(scores, codes, 40)[0]).tolist()
        eligible[exclude] = False
    expected = reference.exhaustive(scores, codes, k, eligible=eligible)
    boosts = some_boosts(rng, len(codes), rng.choice([1e-4, 0.003, 0.5]))
    boosted = reference.exhaustive(scores, codes, k, eligible=eligible, boosts=boosts)
    with pytest.MonkeyPatch.context() as patch:
        for isa in ISAS:
            patch.setenv("RECPRUNE_ISA", isa)
            assert_same(index.search_scores(scores, k, exclude=exclude), expected, isa)
            top = index.search_scores(scores, k, exclude=exclude, boosts=boosts)
            assert_same(top, boosted, (isa, "boosts"))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("k", [10, 60, 1000])
def test_ties_by_the_ten_thousand(k: int) -> None:
    """More candidates than a scan lets wait, and nothing but their ids to tell them apart."""
    rng = np.random.default_rng(k)
    codes = rng.integers(0, 256, (60_000, 8)).astype(np.uint8)
    codes[rng.permutation(60_000)[:30_000]] = codes[0]
    scores = rng.standard_normal((8, 256)).astype(np.float32)
    scores[np.arange(8), codes[0]] += 2
    index = Index.build(codes, np.ones((8, 256, 1), np.float32))
    for method in ("scan", "cells", "auto", "pqtopk"):
        top = index.search_scores(scores, k, method=method)
        assert_same(top, reference.exhaustive(scores, codes, k), method)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("share", [0.8, 0.9, 0.995])
@pytest.mark.parametrize("hidden", [0, 30, 300, 3000])
def test_what_a_mask_hides_among_the_best(share: float, hidden: int) -> None:
    """More than it hides elsewhere: then counting tells of a limit that is too low."""
    rng = np.random.default_rng(8)
    codes = rng.integers(0, 256, (80_000, 8)).astype(np.uint8)
    scores = rng.standard_normal((8, 256)).astype(np.float32)
    allow = rng.random(len(codes)) < share
    allow[reference.exhaustive(scores, codes, hidden)[0]] = False
    index = Index.build(codes, np.ones((8, 256, 1), np.float32))
    for k in (48, 200, 1000):
        expected = reference.exhaustive(scores, codes, k, eligible=allow)
        for method in ("scan", "auto"):
            top = index.search_scores(scores, k, method=method, allow=allow)
            assert_same(top, expected, (method, k))
            assert top.stats.exact.all()
        for steps in (3, 300, 600):
            top = index.search_scores(scores, k, method=Scan(max_steps=steps), allow=allow)
            missing = ~np.isin(expected[0], top.ids)
            assert (expected[1][missing] <= top.stats.upper_bound[0]).all()
            assert not (top.stats.exact[0] and missing.any())


def test_where_many_are_wanted_few_others_are_scored() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (200_000, 8)).astype(np.uint8)
    index = Index.build(codes, np.ones((8, 256, 1), np.float32))
    scores = rng.standard_normal((8, 256)).astype(np.float32)
    top = index.search_scores(scores, 1000, method="scan")
    assert_same(top, reference.exhaustive(scores, codes, 1000), "scan")
    assert top.stats.items_scored[0] < 4000


@pytest.mark.usefixtures("isa")
def test_a_sub_item_as_far_away_as_a_byte_can_say() -> None:
    """Its cell is in reach of a pair that costs nothing, and no other pair finds the winner."""
    scores = np.zeros((8, 2), np.float32)
    scores[:, 1] = [-255.2, -305.0, -100.3, -1000, -76.2, -231.3, -1000, -1000]
    codes = np.zeros((4, 8), np.uint8)
    codes[0, [0, 4]] = codes[1, [2, 5]] = codes[3, 1] = 1
    index = Index.build(codes, np.ones((8, 2, 1), np.float32))
    for method in methods_for(index):
        assert index.search_scores(scores, 1, method=method, exclude=[2, 3]).ids == [0], method


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("k", [1, 10, 1000])
def test_scores_close_to_what_float32_can_hold(k: int) -> None:
    rng = np.random.default_rng(k)
    codes = rng.integers(0, 16, (2000, 8)).astype(np.uint8)
    scores = rng.standard_normal((8, 16)).astype(np.float32)
    scores[0, :2] = 3e38, -3e38  # further apart than any float32
    index = Index.build(codes, np.ones((8, 16, 1), np.float32))
    for method in methods_for(index):
        top = index.search_scores(scores, k, method=method)
        assert_same(top, reference.exhaustive(scores, codes, k), method)


@pytest.mark.usefixtures("isa")
def test_last_moment_winners() -> None:
    """The best item sits where every bound is weakest: it is only just worth looking at."""
    rng = np.random.default_rng(3)
    codes = rng.integers(1, 256, (60_000, 8)).astype(np.uint8)
    scores = -rng.random((8, 256)).astype(np.float32)
    scores[:, 0] = 0.0
    scores[:, 255] = np.float32(-1e-3)
    # Every split only just behind its best, so that no pair of splits gives the winners away.
    codes[:, :][codes == 0] = 1
    codes[59_999] = 255
    codes[59_998] = 255
    index = Index.build(codes, np.ones((8, 256, 1), np.float32))
    for method in methods_for(index):
        top = index.search_scores(scores, 2, method=method)
        assert top.ids.tolist() == [59_998, 59_999], method


def test_sub_item_scores_have_the_same_bits_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    for num_splits, num_sub_items, width in [(8, 256, 64), (3, 5, 1), (1, 300, 7), (16, 100, 33)]:
        embeddings = rng.standard_normal((num_splits, num_sub_items, width)).astype(np.float32)
        codes: Any = np.zeros((1, num_splits), np.uint8 if num_sub_items <= 256 else np.uint16)
        index = Index.build(codes, embeddings)
        phi = rng.standard_normal((4, num_splits * width)).astype(np.float32)
        expected = np.stack([reference.sub_item_scores(row, embeddings) for row in phi])
        for name in ISAS:
            monkeypatch.setenv("RECPRUNE_ISA", name)
            found = index._native.sub_item_scores(phi)
            assert np.array_equal(found.view(np.uint32), expected.view(np.uint32)), name


@pytest.mark.parametrize("method", METHODS)
def test_sequence_embeddings_by_every_method(
    trained: tuple[Index, Float32Array, Case], method: str
) -> None:
    index, phi, case = trained
    exclude = [3, 5, 7]
    top = index.search(phi[0], 10, method=method, exclude=exclude)
    case = Case(case.codes, case.scores, 10, None, exclude, None)
    assert_same(top, case.expected(), method)
    assert top.ids.shape == (10,)


@pytest.mark.parametrize("method", METHODS)
def test_a_floor_for_each_query(trained: tuple[Index, Float32Array, Case], method: str) -> None:
    index, phi, _ = trained
    whole = index.search(phi[:3], 10, method=method)
    floors = np.array([whole.scores[0, 4], -np.inf, whole.scores[2, 0] + 1], np.float32)
    top = index.search(phi[:3], 10, method=method, floor=floors)
    assert (top.ids >= 0).sum(axis=1).tolist() == [5, 10, 0]
    assert np.array_equal(top.ids[0, :5], whole.ids[0, :5])
    assert np.array_equal(top.ids[1], whole.ids[1])
    # Whatever was not returned is below the floor: that is what the threshold says.
    assert top.stats.threshold.tolist() == [floors[0], whole.scores[1, 9], floors[2]]
    assert top.stats.exact.all()
    # A floor that no float32 can hold lies between two scores, and not on one of them.
    between = float(whole.scores[0, 4]) + 1e-12
    assert (index.search(phi[0], 10, method=method, floor=between).ids >= 0).sum() == 4


@pytest.mark.parametrize(
    ("floor", "message"),
    [
        (float("nan"), "floor holds NaN"),
        (np.array([1.0, 2.0]), r"floor is float64\[2\], expected a score, or one for each of 3"),
        ("high", "floor is <U4"),
        (True, "floor is bool"),
    ],
)
def test_a_floor_that_is_none(
    trained: tuple[Index, Float32Array, Case], floor: Any, message: str
) -> None:
    index, phi, _ = trained
    with pytest.raises(InputError, match=message):
        index.search(phi[:3], 10, floor=floor)


@pytest.mark.parametrize("method", METHODS)
def test_there_is_no_threshold_where_more_are_wanted_than_there_are(method: str) -> None:
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 256, (20, 8)).astype(np.uint8)
    index = Index.build(codes, rng.standard_normal((8, 256, 2)).astype(np.float32))
    top = index.search(rng.standard_normal(16).astype(np.float32), 21, method=method)
    assert (top.ids >= 0).sum() == 20
    assert top.stats.threshold.tolist() == [-np.inf]
    assert top.stats.exact.all()


def test_batches_threads_and_single_queries_agree(
    trained: tuple[Index, Float32Array, Case],
) -> None:
    index, phi, _ = trained
    rng = np.random.default_rng(1)
    exclude = np.where(rng.random((40, 6)) < 0.3, -1, rng.integers(0, 20_000, (40, 6)))
    allow = rng.random((40, 20_000)) < 0.5
    whole = index.search(phi, 7, exclude=exclude, allow=allow, threads=4)
    assert whole.ids.shape == (40, 7)
    for query in range(40):
        one = index.search(phi[query], 7, exclude=exclude[query], allow=allow[query])
        assert np.array_equal(one.ids, whole.ids[query])
        assert np.array_equal(one.scores.view(np.uint32), whole.scores[query].view(np.uint32))
        assert allow[query][one.ids].all()
        assert not set(one.ids.tolist()) & set(exclude[query].tolist())
    words = np.packbits(allow[0], bitorder="little")
    words = np.concatenate([words, np.zeros(-len(words) % 8, np.uint8)]).view(np.uint64)
    assert np.array_equal(
        index.search(phi[0], 7, allow=words).ids, index.search(phi[0], 7, allow=allow[0]).ids
    )


def test_one_index_serves_many_threads(trained: tuple[Index, Float32Array, Case]) -> None:
    index, phi, _ = trained
    expected = index.search(phi, 10, method="pqtopk").ids
    with ThreadPoolExecutor(16) as pool:
        for number, ids in enumerate(
            pool.map(lambda q: index.search(phi[q % 40], 10).ids, range(640))
        ):
            assert np.array_equal(ids, expected[number % 40])


def test_scores_of_given_items(trained: tuple[Index, Float32Array, Case]) -> None:
    index, phi, case = trained
    items = [5, 19_999, 0, 5]
    expected = reference.score_items(case.scores, case.codes[items], None)
    assert np.array_equal(index.score(phi[0], items), expected)
    assert index.score(phi[:3], np.array(items)).shape == (3, 4)
    with pytest.raises(InputError, match=r"items\[1\] is 20000, expected 0 to 19999"):
        index.score(phi[0], [1, 20_000])


@settings(max_examples=FUZZ // 20 or 100, derandomize=not FUZZ)
@given(case=cases().filter(lambda case: case.codes.dtype == np.uint8))
def test_a_compact_index_knows_its_codes(case: Case) -> None:
    assert np.array_equal(case.index("compact").item_codes(), case.codes)


def test_a_scan_begins_where_two_splits_are_the_best() -> None:
    """One long list: whoever begins elsewhere scores far more items."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (64 * 500 - 7, 8)).astype(np.uint8)
    codes[:, 0] = 0
    scores = rng.standard_normal((8, 256)).astype(np.float32)
    scores[1] = np.linspace(0, 20, 256)
    codes[codes[:, 1] == 255, 1] = 0  # the best of all is not in the list
    index = Index.build(codes, np.ones((8, 256, 1), np.float32))
    top = index.search_scores(scores, 10, method="scan")
    assert_same(top, reference.exhaustive(scores, codes, 10), "scan")
    assert top.stats.items_touched.tolist() == [64 * 500]
    assert top.stats.items_scored[0] < 400


@pytest.mark.parametrize("k", [10, 300])
def test_the_paper_s_algorithm_takes_the_specification_s_steps(
    trained: tuple[Index, Float32Array, Case], k: int
) -> None:
    index, phi, case = trained
    lists = build_posting_lists(case.codes, 256)
    for sub_items_per_step in (1, 7, 8, 256):
        ids, scores, steps = reference.recjpqprune(
            case.scores, case.codes, lists, k, sub_items_per_step
        )
        top = index.search(phi[0], k, method=RecJPQPrune(sub_items_per_step=sub_items_per_step))
        assert_same(top, (ids, scores), sub_items_per_step)
        assert top.stats.steps.tolist() == [steps]


# Unsafe settings ---------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [10, 300])
@pytest.mark.parametrize("method", [RecJPQPrune, Scan, Cells, Auto])
@pytest.mark.parametrize(
    "settings", [{"max_steps": 1}, {"max_steps": 20}, {"over_inflation": 0.3}, {"deadline_us": 1.0}]
)
def test_unsafe_searches_say_how_far_off_they_can_be(
    trained: tuple[Index, Float32Array, Case], method: Any, settings: dict[str, Any], k: int
) -> None:
    index, phi, _ = trained
    for query in range(20):
        exact = index.search(phi[query], k)
        top = index.search(phi[query], k, method=method(**settings))
        if top.stats.exact[0]:
            assert np.array_equal(top.ids, exact.ids)
        else:
            # The true K-th score lies between what was found and what could have been missed.
            assert exact.stats.threshold[0] >= top.stats.threshold[0]
            assert exact.stats.threshold[0] <= max(top.stats.upper_bound[0], top.stats.threshold[0])
            missed = set(exact.ids.tolist()) - set(top.ids.tolist())
            for item in missed:
                score = exact.scores[exact.ids == item][0]
                assert score <= top.stats.upper_bound[0]


def test_stopping_at_once_is_told(trained: tuple[Index, Float32Array, Case]) -> None:
    index, phi, _ = trained
    assert not index.search(phi[0], 10, method=RecJPQPrune(max_steps=1)).stats.exact[0]
    assert not index.search(phi[0], 10, method=Scan(max_steps=1)).stats.exact[0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Scan(max_steps=0), "max_steps is 0"),
        (lambda: Scan(max_steps=1.5), "max_steps is 1.5"),  # type: ignore[arg-type]
        (lambda: Cells(over_inflation=1.0), "over_inflation is 1.0"),
        (lambda: Auto(deadline_us=-1), "deadline_us is -1"),
        (lambda: RecJPQPrune(sub_items_per_step=0), "sub_items_per_step is 0"),
    ],
)
def test_impossible_settings_are_refused(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


# Wrong questions ---------------------------------------------------------------------------------

PHI = np.zeros(8, np.float32)


@pytest.fixture(scope="module")
def tiny() -> Index:
    return Index.build(np.zeros((5, 8), np.uint8), np.ones((8, 4, 1), np.float32))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sequence_embeddings": PHI.astype(np.float64)}, "sequence_embeddings is float64"),
        ({"sequence_embeddings": [0.0] * 8}, "sequence_embeddings is list"),
        ({"sequence_embeddings": np.zeros(7, np.float32)}, r"shape \[7\], expected \[8\]"),
        (
            {"sequence_embeddings": np.array([0, 0, 0, np.nan, 0, 0, 0, 0], np.float32)},
            r"sequence_embeddings\[3\] is nan",
        ),
        (
            {"sequence_embeddings": np.full((2, 8), np.inf, np.float32)},
            r"sequence_embeddings\[0, 0\] is inf",
        ),
        (
            {"sequence_embeddings": np.full(8, 3e38, np.float32)},
            "query 0: scores would overflow float32",
        ),
        ({"k": -1}, "k is -1"),
        ({"k": 2.5}, "k is 2.5"),
        ({"k": 2**70}, "k is 1180591620717411303424"),
        ({"k": 0}, "k is 0, expected 1 to 65541"),
        ({"k": 10**9}, "k is 1000000000, expected 1 to 65541: the catalogue's 5 items and 65536 m"),
        ({"k": 65_542}, "k is 65542, expected 1 to 65541"),
        ({"k": 10**5000}, "k is a number of more than 40 digits"),
        ({"threads": 0}, "threads is 0"),
        ({"threads": 1.5}, "threads is 1.5"),
        ({"exclude": 5}, "exclude is an int"),
        ({"exclude": [[1], [2, 3]]}, r"exclude\[0\] is not a flat sequence"),
        ({"method": "cels"}, "method is 'cels', expected one of auto, cells"),
        ({"method": 7}, "method is 7"),
        ({"exclude": [5]}, r"exclude\[0\] holds 5, expected 0 to 4"),
        ({"exclude": ["a"]}, r"exclude\[0\] is <U1"),
        ({"exclude": np.array([1, -1, -2, 7])}, r"exclude\[0\] holds -2, expected 0 to 4, or -1"),
        ({"exclude": np.array([2**64 - 1, 0], np.uint64)}, r"exclude\[0\] holds 18446744073709551"),
        ({"exclude": np.array([1.0])}, r"exclude\[0\] is float64\[1\], expected item ids"),
        (
            {"sequence_embeddings": np.zeros((2, 8), np.float32), "exclude": [np.array([1])]},
            "exclude has 1 rows for 2 queries",
        ),
        (
            {
                "sequence_embeddings": np.zeros((2, 8), np.float32),
                "exclude": [np.array([1], np.int32), np.array([5], np.uint32)],
            },
            r"exclude\[1\] holds 5, expected 0 to 4, or -1",
        ),
        ({"allow": np.ones(4, bool)}, r"allow has shape \[4\], expected \[5\]"),
        ({"allow": [True] * 5}, "allow is list"),
        ({"boosts": 5}, "boosts is an int, expected pairs"),
        ({"boosts": [[1], [0.5], [2]]}, r"boosts\[0\] is not a pair"),
        ({"boosts": ([1, 2], [0.5])}, r"boosts\[0\] has 2 item ids and 1 values"),
        ({"boosts": ([1.0], [0.5])}, r"boosts\[0\] has float64\[1\] as items"),
        ({"boosts": (["a"], [0.5])}, r"boosts\[0\] has <U1\[1\] as items"),
        ({"boosts": ([1], ["a"])}, r"boosts\[0\] has <U1\[1\] as values"),
        ({"boosts": ([1], [True])}, r"boosts\[0\] has bool\[1\] as values"),
        ({"boosts": ([[1]], [[0.5]])}, r"boosts\[0\] has int64\[1, 1\] as items"),
        ({"boosts": ([[1], [1, 2]], [0.5])}, r"boosts\[0\] is not a pair of flat sequences"),
        ({"boosts": ([0, 5], [1, 1])}, r"boosts\[0\] holds 5, expected 0 to 4"),
        ({"boosts": ([-1], [1])}, r"boosts\[0\] holds -1, expected 0 to 4"),
        ({"boosts": ([2**64 - 1], [1])}, r"boosts\[0\] holds 18446744073709551615, expected 0"),
        (
            {"boosts": (np.array([1, 2]), np.ones(1, np.float32))},
            r"boosts\[0\] has 2 item ids and 1 values",
        ),
        ({"boosts": ([3, 1, 3], [1, 2, 3])}, r"boosts\[0\] holds item 3 twice"),
        ({"boosts": ([3, 1], [1, np.nan])}, r"boosts\[0\] adds nan to item 1, expected a fin"),
        ({"boosts": ([3, 1], [-1e39, 2])}, r"boosts\[0\] adds -inf to item 3, expected a fin"),
        (
            {"sequence_embeddings": np.zeros((2, 8), np.float32), "boosts": [([1], [1.0])]},
            "boosts has 1 rows for 2 queries",
        ),
        (
            {
                "sequence_embeddings": np.zeros((2, 8), np.float32),
                "boosts": [([1], [1.0]), ([2, 4, 2], [1.0, 1.0, 1.0])],
            },
            r"boosts\[1\] holds item 2 twice",
        ),
        (
            {"sequence_embeddings": np.zeros((2, 8), np.float32), "boosts": ([1, 2], [0.5, 0.5])},
            r"boosts\[0\] has int64\[\] as items",
        ),
        ({"method": Default(max_bytes=10)}, "needs 160 bytes for all item vectors"),
    ],
)
def test_wrong_questions_are_refused(tiny: Index, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tiny.search(**({"sequence_embeddings": PHI} | arguments))


@pytest.mark.parametrize(
    ("codes", "embeddings", "options", "message"),
    [
        (np.zeros((5, 8)), np.ones((8, 4, 1), np.float32), {}, r"codes is float64\[5, 8\]"),
        ([[0]], np.ones((1, 4, 1), np.float32), {}, "codes is a list"),
        (np.zeros((5, 8), np.uint8), np.ones((8, 4, 1)), {}, "sub_item_embeddings is float64"),
        (np.zeros((5, 8), np.uint8), np.ones((7, 4, 1), np.float32), {}, "7 splits, codes has 8"),
        (np.full((5, 8), 4, np.uint8), np.ones((8, 4, 1), np.float32), {}, r"codes\[0, 0\] is 4, expected less than 4"),
        (np.zeros((5, 65), np.uint8), np.ones((65, 4, 1), np.float32), {}, "65 splits, expected 1 to 64"),
        (np.zeros((5, 1), np.uint8), np.full((1, 4, 1), np.nan, np.float32), {}, r"sub_item_embeddings\[0, 0, 0\] is nan"),
        (np.zeros((5, 1), np.uint8), np.ones((1, 4, 1), np.float32), {"layout": "small"}, "layout is 'small'"),
        (np.zeros((5, 1), np.uint8), np.ones((1, 4, 1), np.float32), {"item_bias": np.ones(5)}, "item_bias is float64"),
        (np.zeros((5, 1), np.uint16), np.ones((1, 300, 1), np.float32), {"layout": "compact"}, "compact layout needs"),
    ],
)  # fmt: skip
def test_wrong_parts_are_refused(codes: Any, embeddings: Any, options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Index.build(codes, embeddings, **options)


def test_an_unknown_instruction_set_is_refused(
    tiny: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECPRUNE_ISA", "mmx")
    with pytest.raises(InputError, match="RECPRUNE_ISA is 'mmx', this machine has"):
        tiny.search(PHI)
    monkeypatch.delenv("RECPRUNE_ISA")
    assert instruction_set() == ISAS[0]


def test_narrow_codes_for_many_sub_items_are_widened() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (500, 8)).astype(np.uint8)
    scores = rng.standard_normal((8, 300)).astype(np.float32)
    index = Index.build(codes, np.ones((8, 300, 1), np.float32))
    assert_same(index.search_scores(scores, 5), reference.exhaustive(scores, codes, 5), "auto")


def test_scores_that_a_bias_would_overflow_are_refused() -> None:
    codes = np.zeros((20, 1), np.uint8)
    bias = np.where(np.arange(20) < 15, np.float32(-3e38), np.float32(0))
    index = Index.build(codes, np.ones((1, 2, 1), np.float32), item_bias=bias)
    for method in ("auto", "pqtopk", "scan", "default"):
        with pytest.raises(InputError, match="scores would overflow float32"):
            index.search(np.array([-1e38], np.float32), 3, method=method)


def test_an_inflated_and_stopped_scan_does_not_claim_to_be_exact() -> None:
    rng = np.random.default_rng(1)
    for _ in range(300):
        codes = rng.integers(0, 4, (400, 3)).astype(np.uint8)
        scores = rng.random((3, 4)).astype(np.float32)
        ids, best = reference.exhaustive(scores, codes, 3)
        index = Index.build(codes, np.ones((3, 4, 1), np.float32))
        for method in (
            Scan(max_steps=1, over_inflation=0.01),
            Scan(max_steps=2, over_inflation=0.3),
        ):
            top = index.search_scores(scores, 3, method=method)
            if top.stats.exact[0]:
                assert np.array_equal(top.ids, ids)
            missing = ~np.isin(ids, top.ids)
            assert (best[missing] <= top.stats.upper_bound[0]).all()


def test_the_bound_of_an_exact_answer_is_its_threshold(
    trained: tuple[Index, Float32Array, Case],
) -> None:
    index, phi, _ = trained
    for method in ("auto", "cells", "scan", "recjpqprune", "pqtopk"):
        top = index.search(phi, 10, method=method)
        assert (top.stats.upper_bound == top.stats.threshold).all(), method


def test_cells_keep_to_their_steps(trained: tuple[Index, Float32Array, Case]) -> None:
    index, phi, _ = trained
    for most in (1, 10, 40, 500):
        top = index.search(phi[0], 10, method=Cells(max_steps=most))
        assert top.stats.steps[0] <= most


def test_nothing_asked_is_nothing_answered(trained: tuple[Index, Float32Array, Case]) -> None:
    index, phi, _ = trained
    top = index.search(phi[:0], 10)
    assert top.ids.shape == (0, 10)


def test_the_paper_s_algorithm_may_be_asked_first_by_many_threads(
    trained: tuple[Index, Float32Array, Case],
) -> None:
    _, phi, case = trained
    embeddings = np.random.default_rng(5).standard_normal((8, 256, 16)).astype(np.float32)
    fresh = Index.build(case.codes, embeddings)
    with ThreadPoolExecutor(8) as pool:
        asked = pool.map(lambda _: fresh.search(phi[0], 10, method="recjpqprune").ids, range(32))
    assert len({tuple(ids.tolist()) for ids in asked}) == 1


def test_methods_that_an_index_cannot_run_are_refused() -> None:
    wide = Index.build(np.zeros((5, 2), np.uint16), np.ones((2, 300, 1), np.float32))
    query = np.zeros((2, 300), np.float32)
    for method in ("cells", "scan"):
        with pytest.raises(InputError, match=f"method {method} needs"):
            wide.search_scores(query, method=method)
    with pytest.raises(InputError, match="method default needs sequence embeddings"):
        wide.search_scores(query, method="default")


# FAISS ----------------------------------------------------------------------------------------------


def test_to_faiss_and_back(trained: tuple[Index, Float32Array, Case]) -> None:
    faiss = pytest.importorskip("faiss")
    index, phi, _ = trained
    peer = index.to_faiss()
    scores, ids = peer.search(phi, 10)
    top = index.search(phi, 10)
    np.testing.assert_allclose(scores, top.scores, rtol=1e-4, atol=1e-4)
    assert (ids == top.ids).mean() > 0.99  # FAISS adds in another order, so ties may fall otherwise
    back = Index.from_faiss(peer)
    assert np.array_equal(back.search(phi, 10).ids, top.ids)
    with pytest.raises(InputError, match="expected a faiss.IndexPQ"):
        Index.from_faiss(faiss.IndexFlatIP(8))
    with pytest.raises(InputError, match="inner product"):
        Index.from_faiss(faiss.IndexPQ(16, 2, 8))
    with pytest.raises(InputError, match="needs 256 sub-items"):
        Index.build(np.zeros((5, 2), np.uint8), np.ones((2, 4, 1), np.float32)).to_faiss()


def test_changing_the_arrays_given_changes_nothing() -> None:
    codes = np.zeros((100, 8), np.uint8)
    embeddings = np.eye(8, 4, dtype=np.float32)[:, :, None].copy()
    index = Index.build(codes, embeddings)
    before = index.search(np.ones(8, np.float32), 3).scores
    codes[:] = 1
    embeddings[:] = 7
    assert np.array_equal(index.search(np.ones(8, np.float32), 3).scores, before)


def test_method_objects_and_names_are_the_same() -> None:
    for name, method in METHODS.items():
        assert isinstance(method, Method)
        assert type(method).__name__.lower() == name


def test_what_cells_have_visited_is_counted_when_others_end_a_search() -> None:
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 16, (5000, 8)).astype(np.uint8)
    index = Index.build(codes, np.ones((8, 16, 1), np.float32), layout="slim")
    scores = rng.standard_normal((8, 16)).astype(np.float32)
    best_first = np.argsort(-reference.score_items(scores, codes, None))
    top = index.search_scores(scores, 100, method="cells", exclude=best_first[:-10])
    assert top.stats.method[0] == "pqtopk", "too few may be returned"
    assert top.stats.steps[0] > 1
    assert top.stats.items_touched[0] > 5000
