"""Catalogues and questions that a careless search would get wrong, and what is right."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from recprune import (
    METHODS,
    Index,
    InputError,
)
from recprune.search import reference
from recprune.types import Float32Array


@dataclass
class Case:
    """A catalogue and a question that a careless search would get wrong."""

    codes: NDArray[Any]
    scores: Float32Array
    k: int
    bias: Float32Array | None
    exclude: list[int] | None
    allow: NDArray[np.bool_] | None
    floor: float | None = None
    boosts: tuple[NDArray[np.int64], Float32Array] | None = None

    def index(self, layout: Any = "auto") -> Index:
        num_splits, num_sub_items = self.scores.shape
        embeddings = np.ones((num_splits, num_sub_items, 1), np.float32)
        return Index.build(self.codes, embeddings, item_bias=self.bias, layout=layout)

    def expected(self) -> tuple[NDArray[np.int64], Float32Array]:
        eligible = np.ones(len(self.codes), bool) if self.allow is None else self.allow.copy()
        if self.exclude:
            eligible[self.exclude] = False
        ids, scores = reference.exhaustive(
            self.scores,
            self.codes,
            self.k,
            bias=self.bias,
            eligible=eligible,
            boosts=self.boosts,
        )
        if self.floor is not None:
            ids, scores = ids[scores >= self.floor], scores[scores >= self.floor]
        missing = self.k - len(ids)
        return (
            np.concatenate([ids, np.full(missing, -1)]),
            np.concatenate([scores, np.full(missing, -np.inf, np.float32)]),
        )


# Equal, opposite, tiny and huge values: everything that rounding and ties can trip over.
AWKWARD = [0.0, -0.0, 1.0, -1.0, 0.1, 0.3, 1e-45, -1e-45, 1e-38, 1e30, -1e30, 16777216.0, 1.0000001]


def some_boosts(
    rng: np.random.Generator, num_items: int, share: float
) -> tuple[NDArray[np.int64], Float32Array]:
    """Boosts for a share of the items, in any order: that tie, sink, raise a little or a lot."""
    items = rng.permutation(num_items)[: max(1, int(share * num_items))]
    kinds = [AWKWARD, [1 / 3, -1 / 3, 2 / 3, 0.0], [0.1, -0.1], [50.0, -50.0], [1e-7, -0.0]]
    return items, rng.choice(kinds[rng.integers(len(kinds))], len(items)).astype(np.float32)


@st.composite
def cases(
    draw: st.DrawFn,
    sizes: Sequence[int] = (0, 1, 2, 63, 64, 65, 200, 1000, 4000),
    splits: Sequence[int] = (8, 8, 8, 1, 2, 3, 4, 5, 6, 7, 9, 13, 16, 33),
) -> Case:
    num_splits = draw(st.sampled_from(splits))
    num_sub_items = draw(st.sampled_from([2, 3, 7, 20, 60, 256, 300]))
    num_items = draw(st.sampled_from(sizes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = np.uint8 if num_sub_items <= 256 else np.uint16
    codes = rng.integers(0, num_sub_items, (num_items, num_splits)).astype(dtype)
    if num_items and draw(st.booleans()):  # many items with few codes: ties by the dozen
        codes = codes[rng.integers(0, min(num_items, 4), num_items)]
    if num_splits > 1 and draw(st.booleans()):  # long lists, and few to many codes to sort them by
        codes[:, 0] = codes[:, 0] % draw(st.sampled_from([1, 2]))
        few = codes[:, 1].astype(int) % draw(st.integers(1, num_sub_items))
        codes[:, 1] = num_sub_items - 1 - few
    shape = (num_splits, num_sub_items)
    kind = draw(st.sampled_from(["normal", "awkward", "equal", "steps", "peaked", "negative"]))
    if kind == "normal":
        scores = rng.standard_normal(shape)
    elif kind == "awkward":
        scores = rng.choice(AWKWARD, shape)
    elif kind == "equal":
        scores = np.full(shape, 0.1)
    elif kind == "steps":
        scores = rng.integers(-2, 3, shape) / 3
    elif kind == "negative":
        scores = -np.exp(rng.standard_normal(shape) * 3)
    else:
        scores = rng.standard_normal(shape) - 5
        scores[:, 0] += 10
    sizes = [1, 2, 10, 128, 129, num_items // 2, num_items, num_items + 3]
    k = draw(st.sampled_from([max(1, size) for size in sizes]))
    bias = None
    if draw(st.integers(0, 3)) == 0:
        bias = rng.choice([0.0, -0.0, 0.5, -3.0, 1e-8], num_items).astype(np.float32)
    exclude = None
    if num_items and draw(st.booleans()):
        exclude = rng.integers(0, num_items, draw(st.integers(0, 30))).tolist()
    allow = None
    if draw(st.booleans()):
        allow = rng.random(num_items) < draw(st.sampled_from([0.0, 0.01, 0.3, 1.0]))
    case = Case(codes, scores.astype(np.float32), k, bias, exclude, allow)
    if num_items and draw(st.booleans()):
        case.boosts = some_boosts(rng, num_items, draw(st.sampled_from([0.01, 0.2, 0.9, 1.0])))
    found = case.expected()[1]
    found = found[np.isfinite(found)]
    if len(found) and draw(st.booleans()):  # at a score, a hair beside it, or out of reach
        score = found[draw(st.integers(0, len(found) - 1))]
        beside = [np.nextafter(score, np.float32(side)) for side in (-np.inf, np.inf)]
        case.floor = float(draw(st.sampled_from([score, *beside, -np.inf, np.inf])))
    return case


def assert_same(top: Any, expected: tuple[NDArray[np.int64], Float32Array], where: object) -> None:
    ids, scores = expected
    assert np.array_equal(top.ids, ids), where
    assert np.array_equal(top.scores.view(np.uint32), scores.view(np.uint32)), where


def methods_for(index: Index) -> list[str]:
    """All methods that this index can run on given sub-item scores."""
    scores = np.zeros((index.num_splits, index.num_sub_items), np.float32)
    able = []
    for method in METHODS:
        with suppress(InputError):
            index.search_scores(scores, 1, method=method)
            able.append(method)
    assert {"auto", "pqtopk"} <= set(able)
    return able
