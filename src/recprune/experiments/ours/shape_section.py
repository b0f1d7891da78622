"""The section on shapes of a question: sentences, maps and the worst shapes, from the records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from recprune.experiments.framework.record import Record
from recprune.experiments.framework.timing import NEARLY
from recprune.experiments.report.document import Block, Picture, Table, Text
from recprune.experiments.report.ratio_maps import Cells, ratio_maps
from recprune.types import Json

_WORST = 15  # shapes that a table shows


def shape_blocks(records: Sequence[Record]) -> Iterator[Block]:
    """Return what is said of each instruction set."""
    for isa, own in _by_instruction_set(records).items():
        shapes = _shapes(own)
        yield Text(f"**{isa}**, {own[0].machine['cpu']}. {choice(shapes)}")
        yield Picture(
            f"shapes-{isa}",
            _maps(shapes),
            "Maps of sizes by K, one for each kind of question, with the time of auto and how far "
            "it is from the best.",
            "The time of `auto` in µs (m: ms), and how much longer that is than the fastest "
            "method's.",
        )
        if slow := _slow(shapes):
            yield _table(slow)


def choices(records: Sequence[Record]) -> list[str]:
    """Say in a sentence for each instruction set how well `auto` chooses."""
    return [
        f"Choice of a method, {isa}: {choice(_shapes(own))}"
        for isa, own in _by_instruction_set(records).items()
    ]


def choice(shapes: Sequence[Json]) -> str:
    """Say how far `auto` is from the fastest method."""
    behind = np.maximum([shape["ratio"] for shape in shapes], 1.0)
    average = float(np.exp(np.log(behind).mean())) - 1
    return (
        f"`auto` is the fastest, or within {NEARLY - 1:.0%} of it, in "
        f"{len(shapes) - len(_slow(shapes)):,} of {len(shapes):,} shapes of a question; it takes "
        f"{average:.1%} longer than the fastest on average, and {behind.max() - 1:.0%} at most."
    )


def _by_instruction_set(records: Sequence[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda record: int(record.figures["items"])):
        found.setdefault(record.figures["instruction_set"], []).append(record)
    return found


def _shapes(records: Sequence[Record]) -> list[Json]:
    return [
        {"items": record.figures["items"], **shape}
        for record in records
        for shape in record.figures["shapes"]
    ]


def _slow(shapes: Sequence[Json]) -> list[Json]:
    """Return the shapes in which `auto` is slower than the fastest, the worst first."""
    slow = [shape for shape in shapes if shape["ratio"] > NEARLY]
    return sorted(slow, key=lambda shape: -float(shape["ratio"]))


def _table(slow: Sequence[Json]) -> Table:
    rows = []
    for shape in slow[:_WORST]:
        times = shape["microseconds"]
        rows.append(
            (
                shape["question"],
                f"{shape['items']:,}",
                f"{shape['k']:,}",
                shape["taken"],
                f"{times['auto']:,.0f}",
                shape["best"],
                f"{times[shape['best']]:,.0f}",
                f"{shape['ratio']:.2f} ×",
            )
        )
    left = len(slow) - len(rows)
    return Table(
        ("question", "items", "K", "taken", "auto, µs", "fastest", "its µs", "auto ÷ fastest"),
        tuple(rows),
        f"The shapes in which `auto` is more than {NEARLY - 1:.0%} slower, the worst first"
        + (f"; {left} more are not shown." if left else ".")
        + " Taken: for the first query; others may be answered otherwise.",
    )


def _maps(shapes: Sequence[Json]) -> str:
    maps: dict[str, dict[tuple[int, int], tuple[float, str]]] = {}
    for shape in shapes:
        cells = maps.setdefault(shape["question"], {})
        cells[shape["k"], shape["items"]] = float(shape["ratio"]), _short(shape)
    drawn: dict[str, Cells] = dict(maps)
    return ratio_maps(
        drawn, least=1 / NEARLY, x_label="K", y_label="items", ratio_label="auto ÷ the fastest"
    )


def _short(shape: Json) -> str:
    """Return what stands in a cell: the time of `auto`, three digits of it at most."""
    microseconds = float(shape["microseconds"]["auto"])
    if microseconds < 1000:
        return f"{microseconds:.0f}"
    return f"{microseconds / 1000:.1f}m" if microseconds < 10_000 else f"{microseconds / 1000:.0f}m"
