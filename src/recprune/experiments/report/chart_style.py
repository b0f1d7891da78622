"""How every chart looks, on a light and on a dark page: colours, scales, ticks, legends, checks.

The ground is transparent, and a style inside each picture switches its colours where the reader
prefers dark, so that a picture also works as an image of its own. Words stay words, not outlines:
they can be searched and selected, and DejaVu Sans, by which they are laid out, is wider than what a
machine without it takes instead, so that everything still fits.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recprune.search.methods import METHODS
from recprune.types import Float64Array, InputError, needs_extra

with needs_extra("demo"):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import (
        FixedLocator,
        FuncFormatter,
        Locator,
        LogLocator,
        MaxNLocator,
        NullFormatter,
        NullLocator,
    )

Values: TypeAlias = Sequence[float] | NDArray[Any]
Points: TypeAlias = tuple[Values, Values]  # x and y

INK, MUTED, _AXIS, _GRID = "#222222", "#5c6166", "#8a8f94", "#d9dcdf"
# Okabe and Ito's colours, which colour-blind readers can tell apart; those too pale for white are
# darker here, those too dark for black lighter there: a contrast of 3:1 or better on either ground.
_DARK = {
    "#0072b2": "#3aa0e6",  # blue
    "#d55e00": "#f0803c",  # vermilion
    "#009e73": "#1fbf92",  # green
    "#b8578f": "#e08fc0",  # purple
    "#4a4a4a": "#c8ccd0",  # black
    "#2e93cc": "#8fd3ff",  # sky blue
    "#b37a00": "#e69f00",  # orange
    "#8a8200": "#f0e442",  # yellow
}
COLOURS = tuple(_DARK)
_DARK |= {INK: "#e6e8ea", MUTED: "#a4abb3", _AXIS: "#7d858d", _GRID: "#353b43"}
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
# What stands out, with a black edge, anywhere on a map that runs from violet to yellow.
MAP_MARKS = (("^", "#ffffff"), ("o", "#ffb000"), ("v", "#ff8fc8"), ("s", "#9fe8ff"))
STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": _AXIS,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "figure.constrained_layout.h_pad": 0.07,
    "figure.constrained_layout.w_pad": 0.07,
    "figure.facecolor": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana"],
    "font.size": 9.5,
    "grid.color": _GRID,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "recprune",  # ids inside the file would be random otherwise
    "text.color": INK,
    "text.parse_math": False,  # a dollar sign is a dollar sign
    "xtick.color": _AXIS,
    "xtick.labelcolor": INK,
    "ytick.color": _AXIS,
    "ytick.labelcolor": INK,
}
WIDTH = 7.6  # inches, of every picture
_LETTER = 6.2  # points: the width of a letter, on average


def new_figure(height: float) -> tuple[Figure, Axes]:
    """Return a figure of the common width, and its only axes."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def places_of(names: Iterable[str]) -> dict[str, int]:
    """Number the names. A search method has the same number everywhere, others what is free."""
    unique = dict.fromkeys(names)
    own = {name: place for place, name in enumerate(METHODS) if name in unique}
    free = (place for place in itertools.count() if place not in own.values())
    return {name: own[name] if name in own else next(free) for name in unique}


def looks_of(names: Iterable[str], joined: bool = True) -> dict[str, dict[str, Any]]:
    """Give each name a colour and a marker: no two names share both.

    Where colours come again, markers are hollow and lines dashed besides.
    """
    count = len(COLOURS)
    return {
        name: {
            "color": COLOURS[at % count],
            "marker": _MARKERS[(at + 3 * (at // count)) % len(_MARKERS)],
            "markerfacecolor": COLOURS[at] if at < count else "none",
            "linestyle": "" if not joined else "-" if at < count else "--",
        }
        for name, at in places_of(names).items()
    }


def add_legend(figure: Figure, looks: Mapping[str, Any], bold: str | None = None) -> None:
    """Put the names above the axes, in as many columns as there is room for."""
    if not looks:
        return
    columns = int(WIDTH * 72 // (_LETTER * max(map(len, looks)) + 42))
    handles = [Line2D([], [], **look, markersize=6) for look in looks.values()]
    legend = figure.legend(
        handles, list(looks), loc="outside upper left", ncols=max(1, min(len(looks), columns))
    )
    for text in legend.get_texts():
        if text.get_text() == bold:
            text.set_fontweight("bold")


def set_scales(axes: Axes, log_x: bool, log_y: bool, x_ticks: Locator | None = None) -> None:
    """Scale both axes, with ticks that are plain numbers."""
    axes.set(xscale="log" if log_x else "linear", yscale="log" if log_y else "linear")
    for axis, log, own in ((axes.xaxis, log_x, x_ticks), (axes.yaxis, log_y, None)):
        if log:
            low, high = axis.get_view_interval()
            axis.set_major_locator(own or _log_locator(float(np.log10(high / low))))
            axis.set_minor_locator(NullLocator() if own else LogLocator(subs=range(2, 10)))
            axis.set_minor_formatter(NullFormatter())
        axis.set_major_formatter(FuncFormatter(tick))


def own_ticks(numbers: Float64Array, room: float) -> Locator | None:
    """Return ticks at some of the numbers, if they fit a logarithmic axis of `room` points.

    And if they are round: whole, or of three digits; not measured times.
    """
    own = np.unique(numbers)
    if any(number != round(number) and number != float(f"{number:.2e}") for number in own):
        return None
    places = np.log10(own)
    widest = _LETTER * max(len(tick(number)) for number in own) + 6
    for step in (1, 2, 4):
        chosen = places[::step]
        if len(chosen) >= 3 and np.diff(chosen).min() / np.ptp(places) * room > widest:
            return FixedLocator([float(number) for number in own[::step]])
    return None


def _log_locator(decades: float) -> Locator:
    if decades < 0.7:  # not even 1, 2 and 5 would surely give two ticks
        return MaxNLocator(5)
    return LogLocator(subs=(1,) if decades >= 3 else (1, 2, 5))


def tick(value: float, _: int | None = None) -> str:
    """Write a number as a tick: 0.1, 10, 1,000."""
    rounded = float(f"{value:.9e}")
    text = f"{rounded:,.12f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text.replace("-", "−")


def three_digits(value: float) -> str:
    """Write a value to three digits, and never fewer than its whole part has."""
    return tick(round(value)) if abs(value) >= 100 else tick(float(f"{value:.2e}"))


def not_empty(series: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the series; refuse to draw none."""
    if not series:
        raise InputError("no series to draw")
    return series


def refuse_unknown(what: str, names: Iterable[str], known: Mapping[str, Any]) -> None:
    """Refuse names, of what was given as `what`, that no series has."""
    for name in names:
        if name not in known:
            raise InputError(f"{what}: there is no series {name!r}, only {', '.join(known)}")


def checked_points(
    name: str, points: Points, log_x: bool, log_y: bool
) -> tuple[Float64Array, Float64Array]:
    """Return x and y as numbers that can be drawn, as many of one as of the other."""
    xs, ys = checked_numbers(name, points[0], log_x), checked_numbers(name, points[1], log_y)
    if len(xs) != len(ys):
        raise InputError(f"series {name!r}: {len(xs)} x for {len(ys)} y")
    return xs, ys


def checked_numbers(name: str, values: Values, log: bool = False) -> Float64Array:
    """Return finite numbers, above zero for a logarithmic scale, or say which series has others."""
    try:
        numbers = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(f"series {name!r} holds something that is not a number") from None
    if numbers.ndim != 1 or len(numbers) == 0:
        raise InputError(f"series {name!r}: shape {numbers.shape}, expected one number or more")
    wrong = ~np.isfinite(numbers) | (log & (numbers <= 0))
    if wrong.any():
        at = int(np.argmax(wrong))
        expected = "a number above 0 for a logarithmic scale" if log else "a finite number"
        raise InputError(f"series {name!r} holds {numbers[at]} at {at}, expected {expected}")
    return numbers


def svg_of(figure: Figure) -> str:
    """Write the figure as SVG that switches its colours where the reader prefers dark."""
    written = io.BytesIO()
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(written, format="svg", metadata=metadata)
    svg = written.getvalue().decode()
    svg = svg[svg.index("<svg ") :]  # without declaration and DTD
    # No ancestor in the selectors: markers are drawn as clones, which none would reach.
    rules = "\n".join(
        f'[style*="{what}: {light}"] {{{what}: {dark} !important}}'
        for light, dark in _DARK.items()
        for what in ("fill", "stroke")
        if f"{what}: {light}" in svg
    )
    dark_style = f"@media screen and (prefers-color-scheme: dark) {{\n{rules}\n}}"
    # Joins are inherited from the root: a rule for everything would reach into a page around it.
    svg = svg.replace("*{stroke-linejoin: round; stroke-linecap: butt}", dark_style, 1)
    return svg.replace("<svg ", '<svg stroke-linejoin="round" ', 1)
