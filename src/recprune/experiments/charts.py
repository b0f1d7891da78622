"""Charts of the experiments as SVG text: one look, for a light and for a dark page.

The ground is transparent, and a style inside each picture switches its colours where the reader
prefers dark, so that a picture also works as an image of its own. Words stay words, not outlines:
they can be searched and selected, and DejaVu Sans, by which they are laid out, is wider than what a
machine without it takes instead, so that everything still fits. The same numbers give the same
bytes.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recprune.types import Float64Array, InputError, needs_extra

with needs_extra("demo"):
    import matplotlib as mpl
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

_INK, _MUTED, _AXIS, _GRID = "#222222", "#5c6166", "#8a8f94", "#d9dcdf"
# Okabe and Ito's colours, which nearly everybody can tell apart; those too pale for white are
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
_COLOURS = tuple(_DARK)
_DARK |= {_INK: "#e6e8ea", _MUTED: "#a4abb3", _AXIS: "#7d858d", _GRID: "#353b43"}
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
# What stands out, with a black edge, anywhere on a map that runs from violet to yellow.
_MAP_MARKS = (("^", "#ffffff"), ("o", "#ffb000"), ("v", "#ff8fc8"), ("s", "#9fe8ff"))
_STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": _AXIS,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": _INK,
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
    "text.color": _INK,
    "text.parse_math": False,  # a dollar sign is a dollar sign
    "xtick.color": _AXIS,
    "xtick.labelcolor": _INK,
    "ytick.color": _AXIS,
    "ytick.labelcolor": _INK,
}
_WIDTH = 7.6  # inches, of every picture
_LETTER = 6.2  # points: the width of a letter, on average
_LABEL_GAP = 12.5  # points from one label at the end of a line to the next
_LONGEST_LABEL = 24  # letters
_CROWD = 60  # points that are drawn small and see-through, so that the dense places show


@dataclass(frozen=True)
class Panel:
    """Lines over one pair of axes, with a band around some of them and named points."""

    series: Mapping[str, Points]
    y_label: str
    log_y: bool = False
    bands: Mapping[str, tuple[Values, Values]] | None = None  # low and high, of a series
    title: str = ""
    mark: Mapping[str, tuple[float, float]] | None = None


def lines(
    series: Mapping[str, Points],
    *,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
    bands: Mapping[str, tuple[Values, Values]] | None = None,
    title: str = "",
    mark: Mapping[str, tuple[float, float]] | None = None,
) -> str:
    """Draw lines, each named at its end where there is room, else in a legend."""
    panel = Panel(series, y_label, log_y, bands, title, mark)
    return _draw_panels((panel,), x_label, log_x, columns=1)


def two_panels(
    first: Panel, second: Panel, *, x_label: str, log_x: bool = False, stacked: bool = False
) -> str:
    """Draw two panels over the same x axis, side by side or one above the other.

    A series of the same name looks the same in both.
    """
    return _draw_panels((first, second), x_label, log_x, columns=1 if stacked else 2)


def scatter(
    groups: Mapping[str, Points],
    *,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
    highlight: str | None = None,
    labels: Mapping[str, Sequence[str]] | None = None,
    joined: bool = True,
    title: str = "",
) -> str:
    """Draw groups of points, each joined by a thin line in the order of x.

    `labels` name the points of a group one by one, `highlight` is the group to draw heavier.
    """
    points = {name: _points(name, xy, log_x, log_y) for name, xy in _named(groups).items()}
    _refuse_strangers("highlight", [] if highlight is None else [highlight], points)
    _refuse_strangers("labels", labels or {}, points)
    with mpl.rc_context(_STYLE):
        figure, axes = _new_figure(4.4)
        looks = _looks(points, joined)
        for name, look in looks.items():
            xs, ys = points[name]
            order = np.argsort(xs, kind="stable")
            crowd = len(xs) > _CROWD
            (drawn,) = axes.plot(
                xs[order], ys[order], **look,
                linewidth=0.9, markersize=3 if crowd else 6, alpha=0.5 if crowd else None,
            )  # fmt: skip
            if name == highlight:
                drawn.set(linewidth=2.4, markersize=4 if crowd else 9, zorder=3)
            if labels is not None and name in labels:
                _name_points(axes, name, xs, ys, labels[name])
        _set_scales(axes, log_x, log_y)
        axes.set(xlabel=x_label, ylabel=y_label, title=title)
        _add_legend(figure, looks, bold=highlight)
        return _svg(figure)


def heat_map(
    scores: NDArray[Any],
    marks: Mapping[str, Sequence[tuple[int, int]]],
    *,
    x_label: str,
    y_label: str,
    score_label: str,
    title: str = "",
) -> str:
    """Draw sub-item scores, [split, rank] with the best of each split first, and marks on some.

    Each of `marks` is an item: the (split, rank) of its sub-items, both counted from 0.
    """
    grid = np.asarray(scores, dtype=np.float64)
    if grid.ndim != 2 or grid.size == 0:
        raise InputError(f"scores: shape {grid.shape}, expected [split, rank], none of them 0")
    for split, row in enumerate(grid):
        _numbers(f"scores of split {split}", row)
        if (np.diff(row) > 0).any():
            raise InputError(f"scores of split {split}: not sorted from the best to the worst")
    if len(marks) > len(_MAP_MARKS):
        raise InputError(f"marks: {len(marks)} items, expected at most {len(_MAP_MARKS)}")
    for name, places in marks.items():
        for split, rank in places:
            if not (0 <= split < grid.shape[0] and 0 <= rank < grid.shape[1]):
                raise InputError(f"marks of {name!r}: ({split}, {rank}) is outside {grid.shape}")
        if not places:
            raise InputError(f"marks of {name!r} are empty")
    with mpl.rc_context(_STYLE):
        figure, axes = _new_figure(0.9 + 0.26 * len(grid) + (0.35 if marks else 0))
        axes.grid(visible=False)
        image = axes.imshow(grid, cmap="viridis", aspect="auto", interpolation="none")
        looks: dict[str, dict[str, Any]] = {
            name: {"marker": marker, "color": colour, "markeredgecolor": "black", "linestyle": ""}
            for name, (marker, colour) in zip(marks, _MAP_MARKS, strict=False)
        }
        for name, places in marks.items():
            splits, ranks = zip(*places, strict=True)
            axes.plot(ranks, splits, **looks[name], markersize=7.5, clip_on=False)
        axes.set(xlabel=x_label, ylabel=y_label, title=title)
        axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(_tick))
        bar = figure.colorbar(image, ax=axes, label=score_label, pad=0.02, format=_tick)
        if bar.solids is not None:
            bar.solids.set_rasterized(True)  # 256 rectangles otherwise, with seams between them
        bar.outline.set_visible(False)
        _add_legend(figure, looks)
        return _svg(figure)


def bars(
    groups: Mapping[str, Mapping[str, float]],
    *,
    x_label: str,
    log_x: bool = False,
    title: str = "",
) -> str:
    """Draw groups of horizontal bars, each with its value and, if there are several, its name."""
    names = list(dict.fromkeys(name for group in _named(groups).values() for name in group))
    for group, values in groups.items():
        if not values:
            raise InputError(f"series {group!r} is empty")
        for name, value in values.items():
            number = _numbers(f"{name} of {group}", [value], log_x)[0]
            if number < 0:
                raise InputError(f"series '{name} of {group}' holds {number:g}, expected 0 or more")
    count = sum(len(values) for values in groups.values())
    with mpl.rc_context(_STYLE):
        figure, axes = _new_figure(0.8 + 0.23 * count + 0.16 * len(groups))
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        place, centres = 0.0, []
        for values in groups.values():
            centres.append(place + (len(values) - 1) / 2)
            for name, value in values.items():
                colour = _COLOURS[names.index(name) % len(_COLOURS)]
                axes.barh(place, value, 0.8, color=colour)
                text = f"{_value(value)} {name}" if len(names) > 1 else _value(value)
                axes.annotate(
                    text, (value, place), (4, 0), textcoords="offset points",
                    va="center_baseline", fontsize=8.5,
                )  # fmt: skip
                place += 1
            place += 0.7
        every = np.array([value for values in groups.values() for value in values.values()])
        _set_scales(axes, log_x, False)
        # Bars on a logarithmic scale begin at the power of ten below the shortest.
        axes.set_xlim(left=10 ** np.floor(np.log10(0.99 * every.min())) if log_x else 0)
        axes.set_yticks(centres, list(groups))
        axes.set(ylim=(place - 1.1, -0.6), xlabel=x_label, title=title)
        return _svg(figure)


def _draw_panels(panels: Sequence[Panel], x_label: str, log_x: bool, *, columns: int) -> str:
    checked = [_checked(panel, log_x) for panel in panels]
    looks = _looks([name for panel in panels for name in panel.series])
    rows = len(panels) // columns
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, 1.2 + 2.7 * rows), layout="constrained")
        grid = figure.subplots(rows, columns, sharex=True, squeeze=False)
        every_x = np.concatenate([xs for series in checked for xs, _ in series.values()])
        x_ticks = _own_ticks(every_x, room=5 * 72 / columns) if log_x else None
        for axes, panel, series in zip(grid.flat, panels, checked, strict=True):
            for name, (xs, ys) in series.items():
                axes.plot(xs, ys, **looks[name], linewidth=1.8, markersize=5.5)
            for name, (low, high) in (panel.bands or {}).items():
                colour = looks[name]["color"]
                axes.fill_between(
                    series[name][0], _numbers(name, low, panel.log_y),
                    _numbers(name, high, panel.log_y), color=colour, alpha=0.18, linewidth=0,
                )  # fmt: skip
            every_y = np.concatenate([ys for _, ys in series.values()])
            _set_scales(axes, log_x, panel.log_y, x_ticks)
            if not panel.log_y and 0 <= every_y.min() < every_y.max() / 2:
                axes.set_ylim(bottom=0)  # zero is near: lines then compare by their height
            for name, (x, y) in (panel.mark or {}).items():
                _mark(axes, name, x, y)
            axes.set(ylabel=panel.y_label, title=panel.title)
        for axes in grid[-1]:
            axes.set_xlabel(x_label)
        figure.draw_without_rendering()  # the sizes of the axes are known from here on
        ends = [
            _label_places(axes, series) for axes, series in zip(grid.flat, checked, strict=True)
        ]
        if columns == 1 and all(places is not None for places in ends):
            for axes, places in zip(grid.flat, ends, strict=True):
                _name_ends(axes, places or {}, looks)
        else:
            _add_legend(figure, looks)
        return _svg(figure)


def _checked(panel: Panel, log_x: bool) -> dict[str, tuple[Float64Array, Float64Array]]:
    series = {
        name: _points(name, xy, log_x, panel.log_y) for name, xy in _named(panel.series).items()
    }
    for name, (xs, _) in series.items():
        if (np.diff(xs) <= 0).any():
            raise InputError(f"series {name!r}: its x do not rise from point to point")
    _refuse_strangers("bands", panel.bands or {}, series)
    for name, band in (panel.bands or {}).items():
        sizes = [len(_numbers(f"band of {name}", side, panel.log_y)) for side in band]
        if sizes != [len(series[name][0])] * 2:
            raise InputError(f"band of {name!r}: {sizes} values for {len(series[name][0])} points")
    for name, point in (panel.mark or {}).items():
        _points(f"mark {name}", ([point[0]], [point[1]]), log_x, panel.log_y)
    return series


def _label_places(
    axes: Axes, series: Mapping[str, tuple[Float64Array, Float64Array]]
) -> dict[str, float] | None:
    """Return how high, in points, each line's name may stand beside its end, or None: no room."""
    last = [(float(xs[-1]), float(ys[-1])) for xs, ys in series.values()]
    if len({x for x, _ in last}) > 1 or max(map(len, series)) > _LONGEST_LABEL:
        return None
    points = 72 / axes.get_figure(root=True).dpi  # type: ignore[union-attr]
    ends = points * (axes.transData.transform(last)[:, 1] - axes.bbox.y0)
    order = np.argsort(ends, kind="stable")
    steps = _LABEL_GAP * np.arange(len(ends))
    # The nearest heights (least squares) that keep the gap: isotonic regression, by its formula.
    loose = ends[order] - steps
    count = len(loose)
    apart = steps + [
        max(min(loose[low : high + 1].mean() for high in range(at, count)) for low in range(at + 1))
        for at in range(count)
    ]
    if np.abs(apart - ends[order]).max() > 1.6 * _LABEL_GAP:
        return None
    names = list(series)
    return {names[at]: float(place) for at, place in zip(order, apart, strict=True)}


def _name_ends(axes: Axes, places: Mapping[str, float], looks: Mapping[str, Any]) -> None:
    """Write the names of the lines, each behind its marker, right of the axes."""
    for name, place in places.items():
        height = place * axes.get_figure(root=True).dpi / 72 / axes.bbox.height  # type: ignore[union-attr]
        axes.plot(
            [1.025], [height], **looks[name], markersize=5.5, clip_on=False,
            transform=axes.transAxes,
        )  # fmt: skip
        axes.annotate(
            name, (1.025, height), (7, 0), xycoords="axes fraction", textcoords="offset points",
            va="center_baseline", annotation_clip=False,
        )  # fmt: skip


def _name_points(
    axes: Axes, group: str, xs: Float64Array, ys: Float64Array, labels: Sequence[str]
) -> None:
    if len(labels) != len(xs):
        raise InputError(f"labels of {group!r}: {len(labels)} for {len(xs)} points")
    for label, x, y in zip(labels, xs, ys, strict=True):
        axes.annotate(label, (x, y), (5, 4), textcoords="offset points", fontsize=7.5, color=_MUTED)


def _mark(axes: Axes, name: str, x: float, y: float) -> None:
    """Put a ring and a name at a point, towards the side with more room."""
    axes.plot([x], [y], "o", markersize=11, markerfacecolor="none", markeredgecolor=_INK)
    across, _ = axes.transAxes.inverted().transform(axes.transData.transform((x, y)))
    left = across > 0.6
    axes.annotate(
        name, (x, y), (-8 if left else 8, 8), textcoords="offset points",
        ha="right" if left else "left",
    )  # fmt: skip


def _new_figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _looks(names: Iterable[str], joined: bool = True) -> dict[str, dict[str, Any]]:
    """Give each name a colour, a marker and a dash; no two names share all three."""
    count = len(_COLOURS)
    return {
        name: {
            "color": _COLOURS[at % count],
            "marker": _MARKERS[(at + at // count) % len(_MARKERS)],
            "linestyle": "" if not joined else "-" if at < count else "--",
        }
        for at, name in enumerate(dict.fromkeys(names))
    }


def _add_legend(figure: Figure, looks: Mapping[str, Any], bold: str | None = None) -> None:
    """Put the names above the axes, in as many columns as there is room for."""
    if not looks:
        return
    columns = int(_WIDTH * 72 // (_LETTER * max(map(len, looks)) + 42))
    handles = [Line2D([], [], **look, markersize=6) for look in looks.values()]
    legend = figure.legend(
        handles, list(looks), loc="outside upper left", ncols=max(1, min(len(looks), columns))
    )
    for text in legend.get_texts():
        if text.get_text() == bold:
            text.set_fontweight("bold")


def _set_scales(axes: Axes, log_x: bool, log_y: bool, x_ticks: Locator | None = None) -> None:
    """Scale both axes, with ticks that are plain numbers."""
    axes.set(xscale="log" if log_x else "linear", yscale="log" if log_y else "linear")
    for axis, log, own in ((axes.xaxis, log_x, x_ticks), (axes.yaxis, log_y, None)):
        if log:
            low, high = axis.get_view_interval()
            axis.set_major_locator(own or _log_locator(float(np.log10(high / low))))
            axis.set_minor_locator(NullLocator() if own else LogLocator(subs=range(2, 10)))
            axis.set_minor_formatter(NullFormatter())
        axis.set_major_formatter(FuncFormatter(_tick))


def _own_ticks(numbers: Float64Array, room: float) -> Locator | None:
    """Return ticks at some of the numbers, if they fit a logarithmic axis of `room` points."""
    own = np.unique(numbers)
    places = np.log10(own)
    widest = _LETTER * max(len(_tick(number)) for number in own) + 6
    for step in (1, 2, 4):
        chosen = places[::step]
        if len(chosen) >= 3 and np.diff(chosen).min() / np.ptp(places) * room > widest:
            return FixedLocator([float(number) for number in own[::step]])
    return None


def _log_locator(decades: float) -> Locator:
    if decades < 0.7:  # not even 1, 2 and 5 would surely give two ticks
        return MaxNLocator(5)
    return LogLocator(subs=(1,) if decades >= 3 else (1, 2, 5))


def _tick(value: float, _: int | None = None) -> str:
    """Write a tick as people do: 0.1, 10, 1,000."""
    rounded = float(f"{value:.9e}")
    text = f"{rounded:,.12f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text.replace("-", "−")


def _value(value: float) -> str:
    """Write a value to three digits, and never fewer than its whole part has."""
    return _tick(round(value)) if abs(value) >= 100 else _tick(float(f"{value:.2e}"))


def _named(series: Mapping[str, Any]) -> Mapping[str, Any]:
    if not series:
        raise InputError("no series to draw")
    return series


def _refuse_strangers(what: str, names: Iterable[str], known: Mapping[str, Any]) -> None:
    for name in names:
        if name not in known:
            raise InputError(f"{what}: there is no series {name!r}, only {', '.join(known)}")


def _points(
    name: str, points: Points, log_x: bool, log_y: bool
) -> tuple[Float64Array, Float64Array]:
    xs, ys = _numbers(name, points[0], log_x), _numbers(name, points[1], log_y)
    if len(xs) != len(ys):
        raise InputError(f"series {name!r}: {len(xs)} x for {len(ys)} y")
    return xs, ys


def _numbers(name: str, values: Values, log: bool = False) -> Float64Array:
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


def _svg(figure: Figure) -> str:
    """Write the figure as SVG that switches its colours where the reader prefers dark."""
    written = io.BytesIO()
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(written, format="svg", metadata=metadata)
    svg = written.getvalue().decode()
    svg = svg[svg.index("<svg ") :]  # the declaration and a DTD that nobody reads
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
