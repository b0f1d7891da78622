"""Words beside points and lines of a chart: where they stand, so that all can be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from recprune.experiments.report.chart_style import INK, MUTED
from recprune.types import Float64Array, needs_extra

with needs_extra("demo"):
    from matplotlib.axes import Axes

# All in points.
_LABEL_GAP = 12.5  # from one label at the end of a line to the next
_LONGEST_LABEL = 24  # letters
_SMALL, _SMALL_LETTER, _SMALL_HEIGHT = 7.5, 4.9, 9.0  # a label beside a point
_LABEL_HEIGHTS = (-4, 3, -11, 10, -18, 17, -25, 24, -32, 31)  # to try, from the point's own
_MARGIN = 10.0  # that a label may stand out of the axes
_BESIDE = 6.0  # higher or lower than that above its point, a label needs a line to it


@dataclass(frozen=True)
class _Box:
    """A place in a picture that is taken."""

    left: float
    bottom: float
    right: float
    top: float

    def covers(self, other: _Box) -> bool:
        """Whether the two share any place."""
        return (
            self.left < other.right
            and other.left < self.right
            and self.bottom < other.top
            and other.bottom < self.top
        )


def label_places(
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


def name_ends(axes: Axes, places: Mapping[str, float], looks: Mapping[str, Any]) -> None:
    """Write the names of the lines, each behind its marker, right of the axes."""
    for name, place in places.items():
        height = place * axes.get_figure(root=True).dpi / 72 / axes.bbox.height  # type: ignore[union-attr]
        axes.plot(
            [1.025],
            [height],
            **looks[name],
            markersize=5.5,
            clip_on=False,
            transform=axes.transAxes,
        )
        axes.annotate(
            name,
            (1.025, height),
            (7, 0),
            xycoords="axes fraction",
            textcoords="offset points",
            va="center_baseline",
            annotation_clip=False,
        )


def name_points(
    axes: Axes, labels: Sequence[tuple[str, tuple[float, float]]], points: Float64Array
) -> None:
    """Write a label beside each point, where it covers no other label and none of all `points`."""
    scale = 72 / axes.get_figure(root=True).dpi  # type: ignore[union-attr]

    def place_of(xy: Float64Array | tuple[float, float]) -> Float64Array:
        place: Float64Array = scale * np.asarray(axes.transData.transform(xy))
        return place

    inside = (scale * axes.bbox.x0, scale * axes.bbox.x1)
    taken = [_Box(x - 4, y - 4, x + 4, y + 4) for x, y in place_of(points)]
    for label, xy in labels:
        x, y = place_of(xy)
        width = _SMALL_LETTER * len(label)
        # Right of the point, then left of it; as high as the point, then ever farther off.
        candidates = [
            (
                _Box(x + side, y + up, x + side + width, y + up + _SMALL_HEIGHT)
                if side > 0
                else _Box(x + side - width, y + up, x + side, y + up + _SMALL_HEIGHT)
            )
            for up in _LABEL_HEIGHTS
            for side in (7, -7)
        ]
        free = [
            box
            for box in candidates
            if inside[0] <= box.left
            and box.right <= inside[1] + _MARGIN
            and not any(box.covers(other) for other in taken)
        ]
        box = free[0] if free else candidates[0]
        taken.append(box)
        left = box.right < x  # words end, or begin, at the side of their point
        middle = (box.bottom + box.top) / 2
        place = ((box.right if left else box.left) - x, middle - y)
        leader = {"arrowstyle": "-", "color": MUTED, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4}
        axes.annotate(
            label,
            xy,
            place,
            textcoords="offset points",
            ha="right" if left else "left",
            va="center",
            fontsize=_SMALL,
            color=MUTED,
            annotation_clip=False,
            arrowprops=leader if abs(middle - y) > _BESIDE else None,
        )


def mark_point(axes: Axes, name: str, x: float, y: float) -> None:
    """Put a ring and a name at a point, towards the side with more room."""
    axes.plot([x], [y], "o", markersize=11, markerfacecolor="none", markeredgecolor=INK)
    left = _is_right(axes, x, y)
    axes.annotate(
        name,
        (x, y),
        (-8 if left else 8, 8),
        textcoords="offset points",
        ha="right" if left else "left",
    )


def _is_right(axes: Axes, x: float, y: float) -> bool:
    """Whether a point is so far right that words beside it had better stand on its left."""
    axes.autoscale_view()  # limits are otherwise not known before something is drawn
    across, _ = axes.transAxes.inverted().transform(axes.transData.transform((x, y)))
    return bool(across > 0.6)
