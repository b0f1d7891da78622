"""Every shape of a question: does `auto` take the method that is the fastest for it?

Shapes are sizes of the catalogue, K, and what a question asks for beside the best items: a share of
the items that are allowed, exclusions, boosts, biases. For each shape all methods answer the same
queries, in blocks that take turns in an order that changes, so that what slows the machine down
slows all. A figure is the median over blocks of a block's median call; ratios are medians over the
rounds, in each of which the methods were measured within milliseconds. Shapes in which `auto` is
slower than the best are measured once more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from recprune.experiments.framework.experiment import (
    ExperimentPart,
    Need,
    Setup,
    section_of,
)
from recprune.experiments.framework.record import Record
from recprune.experiments.framework.timing import NEARLY, unsuited
from recprune.experiments.ours.scaling import random_model
from recprune.experiments.ours.shape_section import shape_blocks
from recprune.experiments.report.document import Section
from recprune.search.index import Index, instruction_set
from recprune.search.top_k import TopK
from recprune.types import (
    Float32Array,
    Float64Array,
    Json,
    Progress,
    RecpruneError,
    random_generator,
)

_SPLITS = 8
_METHODS = ("cells", "scan", "pqtopk")  # that `auto` is held against
_SHARES = (0.0001, 0.001, 0.01, 0.03, 0.1, 0.3, 1.0)  # of the items, that are allowed
_HIDDEN = 100  # ids that are excluded, or boosted
_QUERIES = 100
_HOPELESS = 10.0  # methods that take so many times as long as the fastest are timed but three times

Ask: TypeAlias = Callable[[Float32Array], TopK]


@dataclass(frozen=True)
class QuestionKind:
    """What is asked for beside the best K items."""

    name: str
    options: Mapping[str, Any]
    biased: bool = False  # of an index with item biases


@dataclass(frozen=True)
class BlockTiming:
    """How long blocks are, and how many of them."""

    rounds: int = 7
    block_milliseconds: float = 2.0  # of one method
    fewest_calls: int = 3
    most_calls: int = 40


@dataclass(frozen=True)
class _Extent:
    """Which shapes are measured."""

    sizes: tuple[int, ...]
    cutoffs: tuple[int, ...]
    timing: BlockTiming


_FULL = _Extent(
    (100, 1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000, 2_000_000),
    (1, 10, 100, 1_000, 4_096),
    BlockTiming(),
)
_QUICK = _Extent((100, 3_000), (1, 10), BlockTiming(rounds=2, block_milliseconds=0.2))


class Shapes:
    """`auto` against each method, for many shapes of a question."""

    name = "shapes"
    title = "Shapes of a question: what auto takes"
    needs: frozenset[Need] = frozenset()

    def parts(self, setup: Setup) -> list[ExperimentPart]:
        """One for each size, measured with the instruction set in use."""
        extent = _QUICK if setup.quick else _FULL
        return [self._part(setup, size, extent) for size in extent.sizes]

    def _part(self, setup: Setup, size: int, extent: _Extent) -> ExperimentPart:
        settings = {
            "items": size,
            "cutoffs": list(extent.cutoffs),
            "shares": list(_SHARES),
            "hidden": _HIDDEN,
            "methods": list(_METHODS),
            "queries": _QUERIES,
            "timing": asdict(extent.timing),
            "seed": setup.seed,
        }
        return ExperimentPart(
            f"{size}-{instruction_set()}",
            settings,
            lambda progress: measure(size, extent.cutoffs, extent.timing, setup.seed, progress),
            minutes=0.1 + size / 4e5,
        )

    def section(self, records: Sequence[Record]) -> Section:
        """A map and the worst shapes, for each instruction set that was measured."""
        return section_of(
            self,
            f"Sizes of the catalogue, K, and what is asked for beside the best items: a share of "
            f"the items that are allowed, {_HIDDEN} that are excluded or boosted, biases. For each "
            f"of these shapes `auto` [chooses a method](search.md#which-engine), and "
            f"{', '.join(f'`{name}`' for name in _METHODS)} answer the same queries in blocks that "
            f"take turns. Random codes, M = {_SPLITS}, B = 256, d = 512, one thread, S and Python "
            "included; times are medians over blocks of a block's median, ratios medians over "
            f"rounds. A shape in which `auto` is more than {NEARLY - 1:.0%} slower than the "
            "fastest is measured once more, twice as long, and that counts: chance may hide such a "
            "shape, but hardly make one.",
            shape_blocks(records),
        )


def measure(
    num_items: int, cutoffs: Sequence[int], timing: BlockTiming, seed: int, progress: Progress
) -> Json:
    """Return the figures of all shapes of one catalogue."""
    progress("building the indexes")
    codes, embeddings, queries = random_model(num_items, _SPLITS, _QUERIES, seed)
    threads = os.cpu_count() or 1
    plain = Index.build(codes, embeddings, threads=threads)
    bias = random_generator(2).standard_normal(num_items).astype(np.float32)
    biased = Index.build(codes, embeddings, item_bias=bias, threads=threads)
    able = ["auto", *(name for name in _METHODS if unsuited(plain, name) is None)]
    shapes = []
    for question in questions(plain, queries):
        index = biased if question.biased else plain
        for k in (k for k in cutoffs if k <= num_items):
            progress(f"{question.name}, K = {k:,}")
            asks = {name: _ask(index, k, name, question) for name in able}
            figures = race(asks, queries, timing)
            if figures["ratio"] > NEARLY:  # chance, or so again?
                figures = race(asks, queries, replace(timing, rounds=2 * timing.rounds))
            shapes.append({"k": k, "question": question.name, **figures})
    return {"items": num_items, "instruction_set": instruction_set(), "shapes": shapes}


def questions(index: Index, queries: Float32Array) -> list[QuestionKind]:
    """Return all questions to an index, as quick to check as a service would ask them."""
    rng = random_generator(1)
    size = index.num_items
    asked = [QuestionKind("plain", {})]
    for share in _SHARES:
        allowed = rng.permutation(size)[: max(1, round(share * size))]
        mask = np.zeros(-(-size // 64) * 64, np.bool_)
        mask[allowed] = True
        words = np.packbits(mask, bitorder="little").view(np.uint64)
        asked.append(QuestionKind(f"allow {100 * share:g} %", {"allow": words}))
    # The best items of some query: those that a user had are rarely bad ones.
    hidden = index.search(queries[0], min(_HIDDEN, size // 2)).ids
    values = rng.standard_normal(len(hidden)).astype(np.float32)
    asked.append(QuestionKind(f"exclude {_HIDDEN}", {"exclude": hidden}))
    asked.append(QuestionKind(f"boost {_HIDDEN}", {"boosts": (hidden, values)}))
    asked.append(QuestionKind("bias", {}, biased=True))
    return asked


def _ask(index: Index, k: int, method: str, question: QuestionKind) -> Ask:
    return lambda query: index.search(query, k, method=method, **question.options)


def race(asks: Mapping[str, Ask], queries: Float32Array, timing: BlockTiming) -> Json:
    """Return the times of all methods, the best of them, and how `auto` compares with it."""
    found = {name: ask(queries[0]) for name, ask in asks.items()}
    for name, top in found.items():
        auto = found["auto"]
        if (top.ids.tobytes(), top.scores.tobytes()) != (auto.ids.tobytes(), auto.scores.tobytes()):
            raise RecpruneError(f"{name} and auto differ in their answers: this is a bug")
    pilot = {name: float(np.median(_seconds(ask, queries[:3]))) for name, ask in asks.items()}
    fastest = min(seconds for name, seconds in pilot.items() if name != "auto")
    racing = {name: ask for name, ask in asks.items() if pilot[name] < _HOPELESS * fastest}
    racing["auto"] = asks["auto"]
    calls = int(timing.block_milliseconds / 1000 / max(pilot[name] for name in racing))
    calls = min(max(calls, timing.fewest_calls), timing.most_calls)
    medians = _medians(racing, queries, timing.rounds, calls)
    times = pilot | {name: float(np.median(each)) for name, each in medians.items()}
    best = min((name for name in medians if name != "auto"), key=times.__getitem__)
    return {
        "microseconds": {name: 1e6 * seconds for name, seconds in times.items()},
        "taken": found["auto"].stats.method[0],
        "best": best,
        "ratio": float(np.median(medians["auto"] / medians[best])),
        "calls": calls,
    }


def _medians(
    asks: Mapping[str, Ask], queries: Float32Array, rounds: int, calls: int
) -> dict[str, Float64Array]:
    """Return the median call of each block, by method. All methods of a round meet its queries."""
    rng = random_generator(0)
    medians = {name: np.empty(rounds) for name in asks}
    for turn in range(rounds):
        block = queries[np.arange(turn * calls, (turn + 1) * calls) % len(queries)]
        for name in rng.permutation(list(asks)).tolist():
            asks[name](block[-1])  # finds the caches as it leaves them
            medians[name][turn] = np.median(_seconds(asks[name], block))
    return medians


def _seconds(ask: Ask, queries: Float32Array) -> Float64Array:
    seconds = np.empty(len(queries))
    for at, query in enumerate(queries):
        begun = time.perf_counter()
        ask(query)
        seconds[at] = time.perf_counter() - begun
    return seconds
