"""Queries of a batch that visit cells together: each is answered as if it were alone."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recprune import Auto, Cells, Index, InputError
from recprune._native import instruction_sets
from recprune.search import reference
from recprune.types import Float32Array
from tests.support.search_cases import AWKWARD, Case, assert_same, some_boosts

ISAS = instruction_sets()

# `make fuzz` asks for many more, and for other ones each time.
FUZZ = int(os.environ.get("RECPRUNE_FUZZ", "0"))


def tables(rng: np.random.Generator, kind: str, shape: tuple[int, int, int]) -> Float32Array:
    """Sub-item scores of a batch, [queries, splits, sub-items]."""
    if kind == "awkward":
        return rng.choice(AWKWARD, shape).astype(np.float32)
    if kind == "equal":
        return np.full(shape, 0.1, np.float32)
    if kind == "steps":
        return (rng.integers(-2, 3, shape) / 3).astype(np.float32)
    if kind == "alike":  # one user's table, over and over
        return np.repeat(rng.standard_normal((1, *shape[1:])), shape[0], axis=0).astype(np.float32)
    return (rng.standard_normal(shape) * np.exp(2 * rng.random(shape[:2]))[..., None]).astype(
        np.float32
    )


def cases_of_a_batch(
    rng: np.random.Generator, kind: str, num_queries: int, num_splits: int, num_sub_items: int
) -> list[Case]:
    """Questions to one catalogue whose cells have many lines, each with filters of its own."""
    num_items = int(rng.integers(400, 600)) * num_sub_items**2
    codes = rng.integers(0, num_sub_items, (num_items, num_splits)).astype(np.uint8)
    if rng.random() < 0.3:  # cells of a thousand lines beside empty ones
        codes[rng.random(num_items) < 0.7, :3] = 0
    bias = rng.choice([0.0, -0.0, 0.5, -3.0], num_items).astype(np.float32)
    has_bias, has_boosts = rng.random(2) < 0.4
    k = int(rng.choice([1, 2, 10, 10, 129, 1000]))
    batch = []
    for scores in tables(rng, kind, (num_queries, num_splits, num_sub_items)):
        exclude = rng.integers(0, num_items, rng.choice([0, 3, 40])).tolist()
        share = rng.choice([0.0, 0.01, 0.5, 1.0])
        case = Case(codes, scores, k, bias if has_bias else None, exclude, None)
        case.allow = rng.random(num_items) < share
        if has_boosts:
            case.boosts = some_boosts(rng, num_items, rng.choice([1e-4, 0.01]))
        case.floor = float(rng.choice([-np.inf, *scores.max(axis=1)[:1], scores.sum()]))
        batch.append(case)
    return batch


@settings(max_examples=FUZZ // 20 or 40, derandomize=not FUZZ, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["normal", "normal", "normal", "awkward", "equal", "steps", "alike"]),
    st.sampled_from([1, 7, 8, 9, 20, 64, 300]),
    st.sampled_from([8, 8, 4, 5, 10]),
    st.sampled_from([2, 4, 6]),
    st.sets(st.sampled_from(["exclude", "allow", "one mask", "boosts", "floor"])),
    st.integers(1, 4),
)
def test_a_query_in_company_is_answered_as_alone(
    seed: int,
    kind: str,
    num_queries: int,
    num_splits: int,
    num_sub_items: int,
    filters: set[str],
    threads: int,
) -> None:
    rng = np.random.default_rng(seed)
    batch = cases_of_a_batch(rng, kind, num_queries, num_splits, num_sub_items)
    asked: dict[str, Any] = {}
    for case in batch:
        if "exclude" not in filters:
            case.exclude = None
        if "boosts" not in filters:
            case.boosts = None
        if "floor" not in filters:
            case.floor = None
        if "allow" not in filters:
            case.allow = batch[0].allow if "one mask" in filters else None
    if "exclude" in filters:
        asked["exclude"] = [case.exclude for case in batch]
    if "floor" in filters:
        asked["floor"] = np.array([case.floor for case in batch], np.float32)
        for case, floor in zip(batch, asked["floor"], strict=True):
            case.floor = float(floor)
    if batch[0].boosts is not None:
        asked["boosts"] = [case.boosts for case in batch]
    if "allow" in filters:
        asked["allow"] = np.stack([case.allow for case in batch if case.allow is not None])
    elif "one mask" in filters:
        asked["allow"] = batch[0].allow
    expected = [case.expected() for case in batch]
    scores = np.stack([case.scores for case in batch])
    with pytest.MonkeyPatch.context() as patch:
        for layout in ("full", "slim"):
            index = batch[0].index(layout)
            for isa in ISAS:
                patch.setenv("RECPRUNE_ISA", isa)
                for method in ("cells", "auto"):
                    top = index.search_scores(
                        scores, batch[0].k, method=method, threads=threads, **asked
                    )
                    assert_same(
                        top,
                        (
                            np.stack([ids for ids, _ in expected]),
                            np.stack([found for _, found in expected]),
                        ),
                        (layout, isa, method),
                    )
                    assert top.stats.exact.all()


@pytest.fixture(scope="module")
def crowded() -> tuple[Index, Float32Array]:
    """A catalogue whose cells have forty lines, and users whose good cells are often the same."""
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 16, (160_000, 8)).astype(np.uint8)
    index = Index.build(codes, np.ones((8, 16, 1), np.float32))
    scores = rng.standard_normal((300, 8, 16)).astype(np.float32)
    scores[:, :, :2] += 3
    return index, scores


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("method", ["cells", "auto"])
@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_company_is_kept_where_it_pays(
    crowded: tuple[Index, Float32Array], method: str, threads: int
) -> None:
    index, scores = crowded
    codes = index.item_codes()
    top = index.search_scores(scores, 10, method=method, threads=threads)
    assert set(top.stats.together.tolist()) == {300 // threads}
    assert set(top.stats.method) == {"cells"}
    assert top.stats.exact.all()
    assert np.array_equal(top.stats.threshold, top.scores[:, -1])
    assert np.array_equal(top.stats.upper_bound, top.scores[:, -1])
    assert (top.stats.steps > 0).all()
    assert (top.stats.items_touched > 0).all()
    assert (top.stats.bytes_touched > 0).all()
    for number in range(0, 300, 13):
        one = index.search_scores(scores[number], 10, method=method)
        assert one.stats.together == 1
        assert_same(one, (top.ids[number], top.scores[number]), number)
        assert_same(one, reference.exhaustive(scores[number], codes, 10), number)


@pytest.mark.parametrize(
    "settings", [{"max_steps": 7}, {"deadline_us": 1e9}, {"over_inflation": 0.1}]
)
@pytest.mark.parametrize("kind", [Cells, Auto])
def test_who_may_be_stopped_goes_alone(
    crowded: tuple[Index, Float32Array], kind: Any, settings: dict[str, Any]
) -> None:
    index, scores = crowded
    method = kind(**settings)
    top = index.search_scores(scores, 10, method=method)
    assert set(top.stats.together.tolist()) == {1}
    for number in (0, 17, 299):
        one = index.search_scores(scores[number], 10, method=method)
        assert_same(one, (top.ids[number], top.scores[number]), number)
        assert one.stats.steps[0] == top.stats.steps[number]
        assert one.stats.upper_bound[0] == top.stats.upper_bound[number]


def test_queries_for_whom_cells_do_not_pay_stay_in_company_unharmed(
    crowded: tuple[Index, Float32Array],
) -> None:
    """Flat tables, of which no cell stands out, and masks that leave a few items."""
    index, scores = crowded
    scores = scores.copy()
    scores[::3] = np.float32(0.25)
    allow = np.ones((300, index.num_items), bool)
    allow[1::7] = np.random.default_rng(0).random((len(allow[1::7]), index.num_items)) < 1e-4
    top = index.search_scores(scores, 10, allow=allow)
    assert top.stats.together.max() > 1
    assert top.stats.together.min() == 1
    for number in range(0, 300, 7):
        for at in (number, number + 1):
            if at < 300:
                case = Case(index.item_codes(), scores[at], 10, None, None, allow[at])
                ids, found = case.expected()
                assert np.array_equal(top.ids[at], ids), at
                assert np.array_equal(top.scores[at].view(np.uint32), found.view(np.uint32)), at


# Prints by how much a batch has raised the peak of memory, and with how many they visited cells.
ONE_CELL = """
import resource
import numpy as np
from recprune import Index

index = Index.build(np.zeros((40_000, 8), np.uint8), np.ones((8, 8, 1), np.float32))
scores = np.random.default_rng(0).standard_normal((1000, 8, 8)).astype(np.float32)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
index.search_scores(scores[:7], 10, method="cells")
before = peak()
top = index.search_scores(scores, 10, method="cells")
assert (top.ids == np.arange(10)).all()
print(peak() / before, top.stats.together.max())
"""


def test_a_cell_that_has_all_items_takes_no_more_memory_than_others() -> None:
    """All of its items wait to be considered for each of a thousand queries."""
    ran = subprocess.run(
        [sys.executable, "-c", ONE_CELL], capture_output=True, text=True, check=True
    )
    growth, together = map(float, ran.stdout.split())
    assert together == 1000
    assert growth < 3


@pytest.mark.parametrize("threads", [1, 3])
def test_the_first_query_that_overflows_is_named(
    crowded: tuple[Index, Float32Array], threads: int
) -> None:
    index, scores = crowded
    scores = scores.copy()
    scores[[41, 250]] = np.float32(3e38)
    with pytest.raises(InputError, match="query 41"):
        index.search_scores(scores, 10, method="cells", threads=threads)
