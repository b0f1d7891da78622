"""Maps of how far one thing is from the best of several, by two sizes: one map for each case."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np

from recprune.experiments.report.chart_style import STYLE, WIDTH, not_empty, svg_of, tick
from recprune.types import needs_extra

with needs_extra("demo"):
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

_COLUMNS = 3
_HIGHEST = 3.0  # ratios up to which colours differ
_ON_YELLOW = "#232323"  # not the ink of the page, which turns light where that is dark

# What stands at a column and a row: a ratio, and the words in its cell.
Cells: TypeAlias = Mapping[tuple[int, int], tuple[float, str]]


def ratio_maps(
    maps: Mapping[str, Cells], *, least: float, x_label: str, y_label: str, ratio_label: str
) -> str:
    """Draw maps over the same columns and rows, their colours from the ratio `least` on."""
    columns, rows = (
        sorted({place[axis] for cells in not_empty(maps).values() for place in cells})
        for axis in (0, 1)
    )
    across = min(_COLUMNS, len(maps))
    down = -(-len(maps) // across)
    norm = LogNorm(least, _HIGHEST)
    with mpl.rc_context(STYLE):
        height = 0.9 + down * (0.75 + 0.21 * len(rows))
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        panels = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True).flat
        images = []
        for at, (axes, (name, cells)) in enumerate(zip(panels, maps.items(), strict=False)):
            images.append(_draw(axes, cells, columns, rows, norm))
            axes.set_title(name)
            axes.set_xticks(range(len(columns)), [tick(x) for x in columns], fontsize=7)
            axes.set_yticks(range(len(rows)), [tick(y) for y in rows], fontsize=7)
            axes.label_outer()
            axes.tick_params(labelbottom=at + across >= len(maps))
        for axes in figure.axes[len(maps) :]:
            axes.set_axis_off()
        figure.supxlabel(x_label, fontsize=9.5)
        figure.supylabel(y_label, fontsize=9.5)
        bar = figure.colorbar(
            images[0],
            ax=figure.axes,
            label=ratio_label,
            location="top",
            aspect=60,
            pad=0.02,
            ticks=[1, 1.5, 2, 3],
            format=tick,
        )
        bar.minorticks_off()
        bar.outline.set_visible(False)
        if bar.solids is not None:
            bar.solids.set_rasterized(True)  # 256 rectangles otherwise, with seams between them
        return svg_of(figure)


def _draw(
    axes: Axes, cells: Cells, columns: list[int], rows: list[int], norm: LogNorm
) -> AxesImage:
    grid = np.full((len(rows), len(columns)), np.nan)
    for (x, y), (ratio, words) in cells.items():
        row, column = rows.index(y), columns.index(x)
        grid[row, column] = ratio
        colour = "white" if ratio > _HIGHEST**0.5 else _ON_YELLOW
        axes.text(column, row, words, ha="center", va="center", fontsize=7, color=colour)
    axes.grid(visible=False)
    return axes.imshow(grid, cmap="cividis_r", norm=norm, aspect="auto")
