"""At most so many of one value: what a walk down the whole ranking takes."""

from __future__ import annotations

from collections import Counter
from itertools import count as count_from
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from recprune import METHODS, Attributes, Index, InputError, Scan
from recprune.attributes.diversity import Limit, allowed_with, search_at_most, within
from recprune.data.identifiers import RowNumbers
from recprune.search import reference
from recprune.search.methods import Method, find_method
from recprune.types import Float32Array


def walked(ranking: list[int], values: list[Any], count: int, k: int) -> list[int]:
    """Walk down a ranking: the rule itself."""
    taken: list[int] = []
    seen: Counter[Any] = Counter()
    for item in ranking:
        if len(taken) == k:
            break
        if values[item] is not None and seen[values[item]] == count:
            continue
        seen[values[item]] += 1
        taken.append(item)
    return taken


def brands_of(rng: np.random.Generator, num_items: int, num_brands: int) -> list[str | None]:
    """Return brands of which some have far more items than others, and items without one."""
    shares = rng.dirichlet(np.full(num_brands, 0.5))
    drawn = rng.choice(num_brands, num_items, p=shares).tolist()
    return [None if rng.random() < 0.1 else f"brand {brand}" for brand in drawn]


def column_of(values: list[str | None]) -> Any:
    table = {"item_id": np.arange(len(values)), "brand": pa.array(values, pa.string())}
    return Attributes.from_table(table, RowNumbers(len(values))).limited("brand", 1)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 2**32), st.sampled_from([1, 2, 60, 64, 300, 3000]), st.sampled_from([1, 2, 7, 400])
)  # fmt: skip
def test_what_is_found_is_what_a_walk_takes(seed: int, num_items: int, num_brands: int) -> None:
    """With few different scores, so that ties decide; with everything that a question may say."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 6, (num_items, 8)).astype(np.uint8)
    embeddings = rng.choice([0.0, 0.5, 1.0, -1.0], (8, 6, 1)).astype(np.float32)
    bias = rng.choice([0.0, 0.25], num_items).astype(np.float32) if rng.random() < 0.3 else None
    index = Index.build(codes, embeddings, item_bias=bias, layout=str(rng.choice(["full", "compact"])))  # type: ignore[arg-type] # fmt: skip
    brands = brands_of(rng, num_items, num_brands)
    phi = rng.choice([1.0, 0.5, -1.0], (3, 8)).astype(np.float32)
    limit = Limit(column_of(brands), int(rng.integers(1, 4)))
    k = int(rng.choice([1, 2, 10, 50]))
    allow = rng.random(num_items) < rng.choice([0.02, 0.5]) if rng.random() < 0.6 else None
    exclude = [rng.integers(0, num_items, 3).astype(np.int64) for _ in phi]
    boosts: Any = None
    if rng.random() < 0.5:
        items = rng.permutation(num_items)[: max(1, num_items // 5)]
        boosts = [(items, rng.choice([0.5, -0.5, 9.0], len(items)).astype(np.float32))] * 3
    top = search_at_most(
        index, phi, k, limit, method=lambda: METHODS["auto"], exclude=exclude, allow=allow, boosts=boosts
    )  # fmt: skip
    assert top.ids.shape == top.scores.shape == (3, k)
    for number, query in enumerate(phi):
        eligible = np.ones(num_items, np.bool_) if allow is None else allow.copy()
        eligible[exclude[number]] = False
        table = reference.sub_item_scores(query, embeddings)
        ranking, scores = reference.exhaustive(
            table, codes, num_items, bias=bias, eligible=eligible,
            boosts=None if boosts is None else boosts[number],
        )  # fmt: skip
        expected = walked(ranking.tolist(), brands, limit.count, k)
        found = top.ids[number]
        assert found[found >= 0].tolist() == expected
        assert (found[len(expected) :] == -1).all()
        by_item = dict(zip(ranking.tolist(), scores.view(np.uint32).tolist(), strict=True))
        bits = top.scores[number].view(np.uint32).tolist()
        assert bits[: len(expected)] == [by_item[item] for item in expected]
        assert top.stats.exact[number]
        assert top.stats.upper_bound[number] == top.stats.threshold[number]
        # Among these items the same are the best without a limit.
        words = None if allow is None else np.packbits(np.pad(allow, (0, -len(allow) % 64)), bitorder="little").view(np.uint64)  # fmt: skip
        again = index.search(
            query, k, exclude=exclude[number],
            allow=allowed_with(limit, found[found >= 0], words),
            boosts=None if boosts is None else boosts[number],
        )  # fmt: skip
        assert np.array_equal(again.ids, found)


def skewed(num_items: int = 2000) -> tuple[Index, Float32Array, list[str | None]]:
    """The best items are all of one brand, the next best of another, and so on."""
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 256, (num_items, 8)).astype(np.uint8)
    index = Index.build(codes, rng.standard_normal((8, 256, 1)).astype(np.float32))
    phi = rng.standard_normal((1, 8)).astype(np.float32)
    ranking = index.search(phi, num_items).ids[0]
    brands: list[str | None] = [None] * num_items
    for place, item in enumerate(ranking.tolist()):
        brands[item] = f"brand {int(np.sqrt(place))}"
    return index, phi, brands


@pytest.mark.parametrize("method", [*METHODS.values()])
def test_the_worst_order_that_brands_can_come_in(method: Method) -> None:
    index, phi, brands = skewed()
    ranking = index.search(phi, index.num_items).ids[0].tolist()
    for count, k in ((1, 30), (2, 20), (3, 100), (50, 100), (1, 45)):
        limit = Limit(column_of(brands), count)
        searches = count_from(0)
        top = search_at_most(index, phi, k, limit, method=lambda: (next(searches), method)[1])  # noqa: B023
        expected = walked(ranking, brands, count, k)
        assert top.ids[0][: len(expected)].tolist() == expected
        assert (top.ids[0][len(expected) :] == -1).all()
        assert next(searches) <= k / count + 1


def test_a_search_that_was_stopped_says_so_and_keeps_to_the_limit() -> None:
    index, phi, brands = skewed()
    limit = Limit(column_of(brands), 2)
    top = search_at_most(index, phi, 20, limit, method=lambda: Scan(max_steps=1))
    found = top.ids[0][top.ids[0] >= 0]
    assert len(found)
    assert not top.stats.exact[0]
    assert max(Counter(brands[item] for item in found.tolist()).values()) <= 2
    scores = top.scores[0][: len(found)]
    assert (np.diff(scores) <= 0).all()
    exact = search_at_most(index, phi, 20, limit, method=lambda: find_method("auto"))
    missing = exact.scores[0][~np.isin(exact.ids[0], found)]
    assert (missing <= top.stats.upper_bound[0]).all()


def test_what_a_walk_takes_by_hand() -> None:
    column = column_of(["a", "a", None, "b", "a", None, None, "b"])
    ranking = np.array([4, 2, 0, 1, 5, 7, 6, 3])
    for count, expected in (
        (1, [4, 2, 5, 7, 6]),
        (2, [4, 2, 0, 5, 7, 6, 3]),
        (3, ranking.tolist()),
    ):
        assert ranking[within(Limit(column, count), ranking)].tolist() == expected
    nothing: NDArray[np.int64] = ranking[:0]
    assert within(Limit(column, 1), nothing).tolist() == []


def test_nothing_may_be_returned_or_there_is_nothing() -> None:
    index, phi, brands = skewed(100)
    limit = Limit(column_of(brands), 1)
    method = METHODS["auto"]
    none = np.zeros(100, np.bool_)
    found = search_at_most(index, phi, 3, limit, method=lambda: method, allow=none)
    assert found.ids.tolist() == [[-1, -1, -1]]
    empty = Index.of_no_items(index.sub_item_embeddings())
    top = search_at_most(empty, phi, 3, Limit(column_of([]), 1), method=lambda: method)
    assert top.ids.tolist() == [[-1, -1, -1]]


@pytest.mark.parametrize(
    ("column", "count", "message"),
    [
        ("brnd", 1, r"at_most: no column is called 'brnd'; similar: 'brand' \(text\)"),
        ("tags", 1, "at_most: 'tags' is a list of text, expected one value for each item"),
        ("brand", 0, "at_most: the number is 0, expected an integer from 1 on"),
        ("brand", True, "at_most: the number is True"),
        ("brand", 1.5, "at_most: the number is 1.5"),
        (3, 1, "at_most: 3 is no name of a column"),
    ],
)
def test_limits_that_are_none(column: Any, count: Any, message: str) -> None:
    table = {"item_id": [0], "brand": ["a"], "tags": [["x"]]}
    attributes = Attributes.from_table(table, RowNumbers(1))
    with pytest.raises(InputError, match=message):
        attributes.limited(column, count)
