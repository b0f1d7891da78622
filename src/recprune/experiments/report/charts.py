"""Charts of the experiments as SVG text. The same numbers give the same bytes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recprune.experiments.report.chart_labels import (
    label_places,
    mark_point,
    name_ends,
    name_points,
)
from recprune.experiments.report.chart_style import (
    COLOURS,
    MAP_MARKS,
    STYLE,
    WIDTH,
    Points,
    Values,
    add_legend,
    checked_numbers,
    checked_points,
    looks_of,
    new_figure,
    not_empty,
    own_ticks,
    places_of,
    refuse_unknown,
    set_scales,
    svg_of,
    three_digits,
    tick,
)
from recprune.types import Float64Array, InputError, needs_extra

with needs_extra("demo"):
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

_CROWD = 60  # points from which on they are small and translucent, so that dense places show


@dataclass(frozen=True)
class Panel:
    """Lines over one pair of axes, with a band around some of them and named points."""

    series: Mapping[str, Points]
    y_label: str
    log_y: bool = False
    bands: Mapping[str, tuple[Values, Values]] | None = None  # low and high, of a series
    title: str = ""
    mark: Mapping[str, tuple[float, float]] | None = None
    # More lines of a series that may not be joined to it, as they come from another machine.
    elsewhere: Mapping[str, Sequence[Points]] | None = None
    in_order: bool = False  # join points as they are given, and not only where x rises


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
    elsewhere: Mapping[str, Sequence[Points]] | None = None,
    in_order: bool = False,
) -> str:
    """Draw lines, each named at its end where there is room, else in a legend.

    Lines of `elsewhere` have the colours of their series, hollow markers and dots.
    """
    panel = Panel(series, y_label, log_y, bands, title, mark, elsewhere, in_order)
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
    apart: Collection[str] = (),
    x_ticks: Mapping[float, str] | None = None,
    title: str = "",
) -> str:
    """Draw groups of points, each but those of `apart` joined by a thin line in the order of x.

    `labels` name the points of a group one by one, `highlight` is the group to draw heavier,
    `x_ticks` are the words at places of the x axis, where these are not plain numbers.
    """
    points = {
        name: checked_points(name, xy, log_x, log_y) for name, xy in not_empty(groups).items()
    }
    refuse_unknown("highlight", [] if highlight is None else [highlight], points)
    refuse_unknown("apart", apart, points)
    refuse_unknown("labels", labels or {}, points)
    for name, own in (labels or {}).items():
        if len(own) != len(points[name][0]):
            raise InputError(f"labels of {name!r}: {len(own)} for {len(points[name][0])} points")
    with mpl.rc_context(STYLE):
        # The legend stands above the axes: with many names, it must not take their room.
        figure, axes = new_figure(4.4 + 0.15 * max(0, len(points) - 11))
        looks = looks_of(points, joined)
        for name in apart:
            looks[name]["linestyle"] = ""
        for name, look in looks.items():
            xs, ys = points[name]
            order = np.argsort(xs, kind="stable")
            crowd = len(xs) > _CROWD
            (drawn,) = axes.plot(
                xs[order],
                ys[order],
                **look,
                linewidth=0.9,
                markersize=3 if crowd else 6,
                alpha=0.5 if crowd else None,
            )
            if name == highlight:
                drawn.set(linewidth=2.4, markersize=4 if crowd else 9, zorder=3)
        set_scales(axes, log_x, log_y)
        if x_ticks is not None:
            axes.set_xticks(list(x_ticks), list(x_ticks.values()))
        axes.set(xlabel=x_label, ylabel=y_label, title=title)
        add_legend(figure, looks, bold=highlight)
        texts = [
            (label, (float(x), float(y)))
            for name, own in (labels or {}).items()
            for label, x, y in zip(own, *points[name], strict=True)
        ]
        if texts:
            figure.draw_without_rendering()  # the sizes of the axes are known from here on
            name_points(axes, texts, np.concatenate([np.stack(xy, 1) for xy in points.values()]))
        return svg_of(figure)


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
        checked_numbers(f"scores of split {split}", row)
        if (np.diff(row) > 0).any():
            raise InputError(f"scores of split {split}: not sorted from the best to the worst")
    if len(marks) > len(MAP_MARKS):
        raise InputError(f"marks: {len(marks)} items, expected at most {len(MAP_MARKS)}")
    for name, places in marks.items():
        for split, rank in places:
            if not (0 <= split < grid.shape[0] and 0 <= rank < grid.shape[1]):
                raise InputError(f"marks of {name!r}: ({split}, {rank}) is outside {grid.shape}")
        if not places:
            raise InputError(f"marks of {name!r} are empty")
    with mpl.rc_context(STYLE):
        figure, axes = new_figure(0.9 + 0.26 * len(grid) + (0.35 if marks else 0))
        axes.grid(visible=False)
        image = axes.imshow(grid, cmap="viridis", aspect="auto", interpolation="none")
        looks: dict[str, dict[str, Any]] = {
            name: {"marker": marker, "color": colour, "markeredgecolor": "black", "linestyle": ""}
            for name, (marker, colour) in zip(marks, MAP_MARKS, strict=False)
        }
        for name, places in marks.items():
            splits, ranks = zip(*places, strict=True)
            axes.plot(ranks, splits, **looks[name], markersize=7.5, clip_on=False)
        axes.set(xlabel=x_label, ylabel=y_label, title=title)
        axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(tick))
        bar = figure.colorbar(image, ax=axes, label=score_label, pad=0.02, format=tick)
        if bar.solids is not None:
            bar.solids.set_rasterized(True)  # 256 rectangles otherwise, with seams between them
        bar.outline.set_visible(False)
        add_legend(figure, looks)
        return svg_of(figure)


def bars(
    groups: Mapping[str, Mapping[str, float]],
    *,
    x_label: str,
    log_x: bool = False,
    title: str = "",
) -> str:
    """Draw groups of horizontal bars, each with its value and, if there are several, its name."""
    names = list(dict.fromkeys(name for group in not_empty(groups).values() for name in group))
    for group, values in groups.items():
        if not values:
            raise InputError(f"series {group!r} is empty")
        for name, value in values.items():
            number = checked_numbers(f"{name} of {group}", [value], log_x)[0]
            if number < 0:
                raise InputError(f"series '{name} of {group}' holds {number:g}, expected 0 or more")
    count = sum(len(values) for values in groups.values())
    with mpl.rc_context(STYLE):
        figure, axes = new_figure(0.8 + 0.23 * count + 0.16 * len(groups))
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        places = places_of(names)
        place, centres = 0.0, []
        for values in groups.values():
            centres.append(place + (len(values) - 1) / 2)
            for name, value in values.items():
                colour = COLOURS[places[name] % len(COLOURS)]
                axes.barh(place, value, 0.8, color=colour)
                text = f"{three_digits(value)} {name}" if len(names) > 1 else three_digits(value)
                axes.annotate(
                    text,
                    (value, place),
                    (4, 0),
                    textcoords="offset points",
                    va="center_baseline",
                    fontsize=8.5,
                )
                place += 1
            place += 0.7
        every = np.array([value for values in groups.values() for value in values.values()])
        set_scales(axes, log_x, False)
        # Bars on a logarithmic scale begin at the power of ten below the shortest.
        axes.set_xlim(left=10 ** np.floor(np.log10(0.99 * every.min())) if log_x else 0)
        axes.set_yticks(centres, list(groups))
        axes.set(ylim=(place - 1.1, -0.6), xlabel=x_label, title=title)
        return svg_of(figure)


def _draw_panels(panels: Sequence[Panel], x_label: str, log_x: bool, *, columns: int) -> str:
    checked = [_checked(panel, log_x) for panel in panels]
    others = [_checked_elsewhere(panel, log_x) for panel in panels]
    every = [
        *(name for series in checked for name in series),
        *(name for other in others for name, *_ in other),
    ]
    looks = looks_of(every)
    rows = len(panels) // columns
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 1.2 + 2.7 * rows), layout="constrained")
        grid = figure.subplots(rows, columns, sharex=True, squeeze=False)
        every_x = np.concatenate(
            [xs for series in checked for xs, _ in series.values()]
            + [xs for other in others for _, xs, _ in other]
        )
        x_ticks = own_ticks(every_x, room=5 * 72 / columns) if log_x else None
        for axes, panel, series, other in zip(grid.flat, panels, checked, others, strict=True):
            for name, (xs, ys) in series.items():
                axes.plot(xs, ys, **looks[name], linewidth=1.8, markersize=5.5)
            for name, xs, ys in other:
                look = looks[name] | {"linestyle": ":", "markerfacecolor": "none"}
                axes.plot(xs, ys, **look, linewidth=1.4, markersize=5.5)
            for name, (low, high) in (panel.bands or {}).items():
                colour = looks[name]["color"]
                axes.fill_between(
                    series[name][0],
                    checked_numbers(name, low, panel.log_y),
                    checked_numbers(name, high, panel.log_y),
                    color=colour,
                    alpha=0.18,
                    linewidth=0,
                )
            every_y = np.concatenate([ys for _, ys in series.values()])
            set_scales(axes, log_x, panel.log_y, x_ticks)
            if not panel.log_y and 0 <= every_y.min() < every_y.max() / 2:
                axes.set_ylim(bottom=0)  # zero is near: lines then compare by their height
            for name, (x, y) in (panel.mark or {}).items():
                mark_point(axes, name, x, y)
            axes.set(ylabel=panel.y_label, title=panel.title)
        for axes in grid[-1]:
            axes.set_xlabel(x_label)
        figure.draw_without_rendering()  # the sizes of the axes are known from here on
        ends = [
            None if other else label_places(axes, series)
            for axes, series, other in zip(grid.flat, checked, others, strict=True)
        ]
        if columns == 1 and all(places is not None for places in ends):
            for axes, places in zip(grid.flat, ends, strict=True):
                name_ends(axes, places or {}, looks)
        else:
            add_legend(figure, looks)
        return svg_of(figure)


def _checked(panel: Panel, log_x: bool) -> dict[str, tuple[Float64Array, Float64Array]]:
    series = {
        name: checked_points(name, points, log_x, panel.log_y)
        for name, points in not_empty(panel.series).items()
    }
    for name, (xs, _) in series.items():
        if not panel.in_order and (np.diff(xs) <= 0).any():
            raise InputError(f"series {name!r}: its x do not rise from point to point")
    refuse_unknown("bands", panel.bands or {}, series)
    for name, band in (panel.bands or {}).items():
        sizes = [len(checked_numbers(f"band of {name}", side, panel.log_y)) for side in band]
        if sizes != [len(series[name][0])] * 2:
            raise InputError(f"band of {name!r}: {sizes} values for {len(series[name][0])} points")
    for name, point in (panel.mark or {}).items():
        checked_points(f"mark {name}", ([point[0]], [point[1]]), log_x, panel.log_y)
    return series


def _checked_elsewhere(panel: Panel, log_x: bool) -> list[tuple[str, Float64Array, Float64Array]]:
    return [
        (name, *checked_points(name, points, log_x, panel.log_y))
        for name, found in (panel.elsewhere or {}).items()
        for points in found
    ]
