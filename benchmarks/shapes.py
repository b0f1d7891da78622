"""Every shape of a question: does `auto` take the method that is the fastest for it?

Shapes are sizes of the catalogue, K, and what a question asks for beside the best items: a share of
the items that are allowed, exclusions, boosts, biases. For each shape all methods answer the same
queries, in blocks that take turns in an order that changes, so that what slows the machine down slows
all. A figure is the median over blocks of a block's median call; ratios are medians over the
rounds, in each of which the methods were measured within milliseconds. Shapes in which `auto` is
slower than the best are measured once more, and named if it is so again.

Calls are whole ones from Python on one thread, sub-item scores included; the codes are random.

    python -m benchmarks.shapes                              # up to 2 million items, some minutes
    python -m benchmarks.shapes --items 100000000 --rounds 5
    RECPRUNE_ISA=avx2 python -m benchmarks.shapes --out out/shapes-avx2.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from benchmarks.measure import model_of, write_result
from recprune import Index
from recprune.commands.console import output, print_table
from recprune.experiments.framework.machine import machine
from recprune.experiments.framework.timing import NEARLY, unsuited
from recprune.experiments.report.chart_style import STYLE, WIDTH, svg_of, tick
from recprune.search.top_k import TopK
from recprune.types import Float32Array, Float64Array, Json, Progress

SIZES = (100, 1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000, 2_000_000)
CUTOFFS = (1, 10, 100, 1_000, 4_096)
SHARES = (0.0001, 0.001, 0.01, 0.03, 0.1, 0.3, 1.0)  # of the items, that are allowed
HIDDEN = 100  # ids that are excluded, or boosted
_QUERIES = 100
_HOPELESS = 10.0  # methods that take so many times as long as the fastest are timed but three times
_SLOWEST = 3.0  # ratios up to which colours differ
_ON_YELLOW = "#232323"  # not the ink of the page, which turns light where that is dark


@dataclass(frozen=True)
class Question:
    """What is asked for beside the best K items."""

    name: str
    options: Mapping[str, Any]
    biased: bool = False  # of an index with item biases


@dataclass(frozen=True)
class Timing:
    """How long blocks are, and how many of them."""

    rounds: int
    block_seconds: float  # of one method
    fewest_calls: int = 3
    most_calls: int = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--items", type=_numbers, default=SIZES, help="sizes, with commas between")
    parser.add_argument("-k", type=_numbers, default=CUTOFFS, help="cut-offs, with commas between")
    parser.add_argument("--methods", default="cells,scan,pqtopk", help="that auto is held against")
    parser.add_argument("--questions", help="names with commas between; all of them without")
    parser.add_argument("--rounds", type=int, default=7, help="blocks of each method")
    parser.add_argument("--block", type=float, default=2.0, help="milliseconds of a block")
    parser.add_argument("--out", type=Path, default=Path("out/bench-shapes.json"))
    parser.add_argument("--picture", type=Path, help="an SVG file; beside the figures without")
    parsed = parser.parse_args()
    timing = Timing(parsed.rounds, parsed.block / 1000)
    wanted = parsed.questions.split(",") if parsed.questions else None
    shapes: list[Json] = []
    for num_items in parsed.items:
        measured = measure_size(
            num_items, parsed.k, parsed.methods.split(","), wanted, timing, _say
        )
        shapes += measured
        _print_size(num_items, measured)
    slow = [shape for shape in shapes if shape["ratio"] > NEARLY]
    output.print(
        f"auto is more than {NEARLY - 1:.0%} slower than the best in {len(slow)} of {len(shapes)} "
        f"shapes{':' if slow else '.'}"
    )
    for shape in sorted(slow, key=lambda shape: -float(shape["ratio"])):
        output.print(f"  {in_words(shape)}")
    result = {"rounds": timing.rounds, "block_milliseconds": parsed.block, "shapes": shapes}
    write_result(parsed.out, result)
    picture = parsed.picture or parsed.out.with_suffix(".svg")
    picture.write_text(draw(shapes), encoding="utf-8")
    output.print(f"{parsed.out}, {picture}; {machine()['cpu']}")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _say(what: str) -> None:
    output.print(what, style="dim")


def questions(index: Index, queries: Float32Array) -> list[Question]:
    """Return all questions to an index, as quick to check as a service would ask them."""
    rng = np.random.default_rng(1)
    size = index.num_items
    asked = [Question("plain", {})]
    for share in SHARES:
        allowed = rng.permutation(size)[: max(1, round(share * size))]
        mask = np.zeros(-(-size // 64) * 64, np.bool_)
        mask[allowed] = True
        words = np.packbits(mask, bitorder="little").view(np.uint64)
        asked.append(Question(f"allow {100 * share:g} %", {"allow": words}))
    # The best items of some query: those that a user had are rarely bad ones.
    hidden = index.search(queries[0], min(HIDDEN, size // 2)).ids
    values = rng.standard_normal(len(hidden)).astype(np.float32)
    asked.append(Question(f"exclude {HIDDEN}", {"exclude": hidden}))
    asked.append(Question(f"boost {HIDDEN}", {"boosts": (hidden, values)}))
    asked.append(Question("bias", {}, biased=True))
    return asked


def measure_size(
    num_items: int,
    cutoffs: Sequence[int],
    methods: Sequence[str],
    wanted: Sequence[str] | None,
    timing: Timing,
    progress: Progress,
) -> list[Json]:
    """Return the figures of all shapes of one catalogue."""
    progress(f"{num_items:,} items")
    codes, embeddings, queries = model_of(None, num_items, _QUERIES)
    plain = Index.build(codes, embeddings, threads=2)
    bias = np.random.default_rng(2).standard_normal(num_items).astype(np.float32)
    biased = Index.build(codes, embeddings, item_bias=bias, threads=2)
    able = ["auto", *(name for name in methods if unsuited(plain, name) is None)]
    shapes = []
    for question in questions(plain, queries):
        if wanted is not None and question.name not in wanted:
            continue
        index = biased if question.biased else plain
        for k in cutoffs:
            if k > num_items:
                continue
            asks = {name: _ask(index, k, name, question) for name in able}
            figures = measure(asks, queries, timing)
            if figures["ratio"] > NEARLY:  # chance, or so again?
                figures = measure(asks, queries, replace(timing, rounds=2 * timing.rounds))
            shapes.append({"items": num_items, "k": k, "question": question.name, **figures})
    return shapes


Ask = Callable[[Float32Array], TopK]


def _ask(index: Index, k: int, method: str, question: Question) -> Ask:
    return lambda query: index.search(query, k, method=method, **question.options)


def measure(asks: Mapping[str, Ask], queries: Float32Array, timing: Timing) -> Json:
    """Return the times of all methods, the best of them, and how `auto` compares with it."""
    found = {name: ask(queries[0]) for name, ask in asks.items()}
    for name, top in found.items():
        if not np.array_equal(top.ids, found["auto"].ids):
            raise SystemExit(f"{name} disagrees with auto: this is a bug")
    pilot = {name: float(np.median(_seconds(ask, queries[:3]))) for name, ask in asks.items()}
    fastest = min(seconds for name, seconds in pilot.items() if name != "auto")
    racing = {name: ask for name, ask in asks.items() if pilot[name] < _HOPELESS * fastest}
    racing["auto"] = asks["auto"]
    calls = int(timing.block_seconds / max(pilot[name] for name in racing))
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
    rng = np.random.default_rng(0)
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


def in_words(shape: Json) -> str:
    """Say what is wrong with one shape."""
    times = shape["microseconds"]
    return (
        f"{shape['items']:,} items, K = {shape['k']:,}, {shape['question']}: auto took "
        f"{shape['taken']} and {times['auto']:,.0f} µs, {shape['best']} {times[shape['best']]:,.0f} "
        f"({shape['ratio']:.2f} ×)"
    )


def _print_size(num_items: int, shapes: Sequence[Json]) -> None:
    names = [name for name in shapes[0]["microseconds"] if name != "auto"]
    print_table(
        f"{num_items:,} items, µs",
        ("question", "K", "auto", "by", *names, "auto ÷ best"),
        [
            (
                shape["question"],
                f"{shape['k']:,}",
                f"{shape['microseconds']['auto']:,.0f}",
                shape["taken"],
                *(f"{shape['microseconds'][name]:,.0f}" for name in names),
                f"{shape['ratio']:.2f}",
            )
            for shape in shapes
        ],
    )


# The picture ---------------------------------------------------------------------------------------


def draw(shapes: Sequence[Json]) -> str:
    """Draw a map for each question: sizes by cut-offs, and how `auto` compares with the best."""
    names = list(dict.fromkeys(shape["question"] for shape in shapes))
    sizes = sorted({int(shape["items"]) for shape in shapes})
    cutoffs = sorted({int(shape["k"]) for shape in shapes})
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    norm = LogNorm(1 / NEARLY, _SLOWEST)
    with mpl.rc_context(STYLE):
        height = 0.9 + rows * (0.75 + 0.21 * len(sizes))
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat
        for axes, name in zip(
            panels, [*names, *_nothing(rows * columns - len(names))], strict=True
        ):
            if name is None:
                axes.set_axis_off()
                continue
            grid = np.full((len(sizes), len(cutoffs)), np.nan)
            own = [shape for shape in shapes if shape["question"] == name]
            for shape in own:
                row, column = sizes.index(shape["items"]), cutoffs.index(shape["k"])
                grid[row, column] = shape["ratio"]
                axes.text(
                    column,
                    row,
                    _short(shape),
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="white" if shape["ratio"] > _SLOWEST**0.5 else _ON_YELLOW,
                )
            image = axes.imshow(grid, cmap="cividis_r", norm=norm, aspect="auto")
            axes.grid(visible=False)
            axes.set_title(name)
            axes.set_xticks(range(len(cutoffs)), [tick(k) for k in cutoffs], fontsize=7)
            axes.set_yticks(range(len(sizes)), [tick(size) for size in sizes], fontsize=7)
            axes.label_outer()
            axes.tick_params(labelbottom=names.index(name) + columns >= len(names))
        figure.supxlabel("K", fontsize=9.5)
        figure.supylabel("items", fontsize=9.5)
        bar = figure.colorbar(
            image,
            ax=figure.axes,
            label="auto ÷ the best",
            location="top",
            aspect=60,
            pad=0.02,
            ticks=[1, 1.5, 2, 3],
            format=tick,
        )
        bar.minorticks_off()
        bar.outline.set_visible(False)
        if bar.solids is not None:
            bar.solids.set_rasterized(True)
        return svg_of(figure)


def _nothing(count: int) -> Iterator[None]:
    yield from [None] * count


def _short(shape: Json) -> str:
    """Return what stands in a cell: the time of `auto`, three digits of it at most."""
    microseconds = float(shape["microseconds"]["auto"])
    if microseconds < 1000:
        return f"{microseconds:.0f}"
    return f"{microseconds / 1000:.1f}m" if microseconds < 10_000 else f"{microseconds / 1000:.0f}m"


if __name__ == "__main__":
    main()
