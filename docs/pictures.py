"""Draw the pictures of docs/search.md and docs/catalogue.md, from one seeded example.

    python docs/pictures.py

The example is really searched. The same numbers give the same bytes: a picture changes only when
what it shows does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray

from recprune.search import reference
from recprune.types import CodeArray, Float32Array, Float64Array, Int64Array

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

FOLDER = Path(__file__).parent / "pictures"
SEED = 1
NUM_ITEMS = 2_000_000
NUM_SPLITS = 8
NUM_SUB_ITEMS = 256
SUB_ITEM_WIDTH = 8
NUM_PAIRS = NUM_SPLITS // 2
FULL_DEFICIT = 255
TARGET_LIMIT = 250
SHOWN_PAIR = 1

# Colour-blind readers can tell blue and orange apart; the page may be dark, so the ground is white.
INK, GREY, PALE = "#222222", "#8a8a8a", "#e6e6e6"
BLUE, ORANGE = "#0072b2", "#d55e00"
SHADE, BROWN = "#fbe3d3", "#a34700"  # an area in orange, and text about it
STYLE: dict[Any, Any] = {
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "figure.constrained_layout.use": True,
    "figure.facecolor": "white",
    "font.family": "DejaVu Sans",  # comes with Matplotlib: no machine draws another one
    "font.size": 9.5,
    "legend.frameon": False,
    "svg.hashsalt": "recprune",  # ids inside the file would be random otherwise
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


@dataclass(frozen=True)
class Catalogue:
    """Random codes, and the sub-item scores of one user."""

    codes: CodeArray
    scores: Float32Array  # S, [split, sub-item id]

    @classmethod
    def draw(cls) -> Catalogue:
        """Draw the same catalogue every time."""
        rng = np.random.default_rng(SEED)
        codes = rng.integers(0, NUM_SUB_ITEMS, (NUM_ITEMS, NUM_SPLITS), dtype=np.uint8)
        shape = (NUM_SPLITS, NUM_SUB_ITEMS, SUB_ITEM_WIDTH)
        embeddings = rng.standard_normal(shape, dtype=np.float32)
        user = rng.standard_normal(NUM_SPLITS * SUB_ITEM_WIDTH, dtype=np.float32)
        user *= np.abs(user)  # peaked, like the scores of a trained model
        return cls(codes, reference.sub_item_scores(user, embeddings))

    def real_deficits(self, bounds: Bounds) -> Float64Array:
        """Return the deficits of all items, in scores: [item, split]."""
        return bounds.deficits[np.arange(NUM_SPLITS), self.codes]

    def split_deficits(self, bounds: Bounds) -> Int64Array:
        """Return the quantised deficits of all items: [item, split]."""
        return bounds.quantised[np.arange(NUM_SPLITS), self.codes]

    def pair_deficits(self, bounds: Bounds) -> Int64Array:
        """Return the quantised deficits of all items, x_p: [item, pair]."""
        of_splits = self.split_deficits(bounds)
        return of_splits[:, 0::2] + of_splits[:, 1::2]


@dataclass(frozen=True)
class Bounds:
    """What the top K of the catalogue leaves as slack, in scores and in units."""

    top: Int64Array
    maxima: Float64Array
    threshold: float
    slack: float
    deficits: Float64Array  # [split, sub-item id], in scores
    units: float  # how many units one unit of score is
    quantised: Int64Array  # [split, sub-item id]
    limit: int

    @classmethod
    def of(cls, catalogue: Catalogue, k: int) -> Bounds:
        """Take the threshold from the oracle, and the rest as native/bounds/deficits.hpp does."""
        top, top_scores = reference.exhaustive(catalogue.scores, catalogue.codes, k)
        scores = catalogue.scores.astype(np.float64)
        maxima = scores.max(axis=1)
        threshold = float(top_scores[-1])
        margin = NUM_SPLITS * 2.0**-24 * 1.01 * float(np.abs(scores).max(axis=1).sum())
        slack = float(maxima.sum()) - threshold + margin
        units = TARGET_LIMIT / slack
        deficits = maxima[:, None] - scores
        floored = np.floor(deficits * units * (1 - 1e-12)).astype(np.int64)
        quantised = np.minimum(floored, FULL_DEFICIT)
        return cls(top, maxima, threshold, slack, deficits, units, quantised, int(slack * units))


def cheapest_limits(counts: Iterable[Int64Array], limit: int) -> list[int]:
    """Return limits with Σ (t + 1) = limit + 1, raised where the next step adds the least.

    Each of `counts` says how many lists or cells there are of every deficit.
    """
    counts = list(counts)
    limits = [-1] * len(counts)
    for _ in range(limit + 1):
        cheapest = min(range(len(counts)), key=lambda part: counts[part][limits[part] + 1])
        limits[cheapest] += 1
    return limits


def count_deficits(bounds: Bounds) -> list[Int64Array]:
    """Return how many sub-items of every split have which deficit."""
    return [np.bincount(split, minlength=FULL_DEFICIT + 1) for split in bounds.quantised]


def pair_limits(bounds: Bounds) -> list[int]:
    """Return the limit t_p of every pair."""
    counts = count_deficits(bounds)
    cells = (np.convolve(counts[2 * p], counts[2 * p + 1]) for p in range(NUM_PAIRS))
    return cheapest_limits(cells, bounds.limit)


def draw_deficits(catalogue: Catalogue) -> Figure:
    """Show two items' deficits split by split, and their sums beside the slack."""
    bounds = Bounds.of(catalogue, 10)
    deficits = catalogue.real_deficits(bounds)
    totals = deficits.sum(axis=1)
    inside = int(bounds.top[4])
    outside = int(np.argmin(np.abs(totals - 1.5 * bounds.slack)))

    figure, (left, right) = plt.subplots(1, 2, figsize=(8.2, 3.6), width_ratios=(2.1, 1))
    splits = np.arange(NUM_SPLITS)
    left.hlines(bounds.maxima, splits - 0.38, splits + 0.38, color=INK, linewidth=2)
    left.annotate(
        "max$_m$", (splits[0], bounds.maxima[0]), (0, 5), textcoords="offset points", ha="center"
    )
    for item, colour, shift in ((inside, BLUE, -0.19), (outside, ORANGE, 0.19)):
        left.bar(splits + shift, -deficits[item], 0.3, bounds.maxima, color=colour, alpha=0.85)
    left.set(
        xlabel="split m",
        ylabel="sub-item score S[m, code$_m$]",
        xticks=splits,
        title="a bar hangs from the best score down to the item's own",
        ylim=(None, 14),
    )

    for place, (item, colour) in enumerate(((inside, BLUE), (outside, ORANGE)), start=1):
        floor = 0.0
        for split, deficit in enumerate(deficits[item]):
            right.bar(place, deficit, 0.62, floor, color=colour, alpha=0.85, edgecolor="white")
            if deficit > 0.05 * totals[outside]:
                right.text(
                    place, floor + deficit / 2, str(split), color="white", ha="center", va="center"
                )
            floor += deficit
    right.bar(0, bounds.slack, 0.62, color=PALE, edgecolor=GREY)
    right.text(0, bounds.slack / 2, "Σ max$_m$ − θ", ha="center", va="center", rotation=90)
    right.axhline(bounds.slack, color=INK, linewidth=1, linestyle="--")
    right.set(
        ylabel="deficit",
        xticks=(0, 1, 2),
        title="the same bars, stacked",
        xticklabels=("slack", "item\ninside", "item\noutside"),
    )
    return figure


def draw_filter(catalogue: Catalogue) -> Figure:
    """Show the sum of quantised deficits against the real deficit, for all items and close by."""
    bounds = Bounds.of(catalogue, 100)
    real = catalogue.real_deficits(bounds).sum(axis=1) * bounds.units
    sums = catalogue.split_deficits(bounds).sum(axis=1)
    limit, slack = bounds.limit, bounds.slack * bounds.units
    scored = sums <= limit
    in_top = np.isin(np.arange(NUM_ITEMS), bounds.top)
    groups = (
        (~scored, GREY, ".", f"rejected: {np.count_nonzero(~scored):,}"),
        (scored & ~in_top, ORANGE, "^", f"scored, below θ: {np.count_nonzero(scored & ~in_top)}"),
        (in_top, BLUE, "o", f"top K: {np.count_nonzero(in_top)}"),
    )

    figure, (left, right) = plt.subplots(1, 2, figsize=(8.2, 3.9), width_ratios=(1, 1.15))
    # No bin may straddle the limit, or a bar would mix what is rejected with what is not.
    edges = np.arange(limit + 1 - 25 * 10, sums.max() + 26, 25)
    for chosen, colour in ((~scored, GREY), (scored, INK)):
        left.hist(sums[chosen], edges, log=True, color=colour)
    left.annotate(
        f"scored:\n{np.count_nonzero(scored)}",
        (limit - 25, 30),
        (30, 2000),
        va="center",
        arrowprops={"arrowstyle": "-", "color": GREY},
    )
    left.axvline(limit + 1, color=INK, linewidth=1, linestyle="--")
    left.text(limit - 8, left.get_ylim()[1], "L", ha="right", va="top")
    left.set(
        xlim=(0, None),
        xlabel="sum of quantised deficits",
        ylabel="items",
        title=f"all {NUM_ITEMS:,} items",
    )

    low, high = limit - 14, limit + 14
    right.fill_between((low, high), (low, high), high, color=PALE, linewidth=0)
    for chosen, colour, marker, label in groups:
        near = chosen & (real > low) & (real < high) & (sums > low)
        size = 40 if marker == "." else 20
        right.scatter(real[near], sums[near], size, color=colour, marker=marker, label=label)
    right.axhline(limit + 0.5, color=INK, linewidth=1, linestyle="--")
    right.text(high, limit + 0.7, "L", ha="right", va="bottom")
    right.vlines(slack, low, limit + 0.5, color=INK, linewidth=1, linestyle=":")
    right.text(slack + 0.3, low + 0.5, "slack", va="bottom")
    right.legend(loc="upper left", handletextpad=0.2, borderaxespad=0)
    right.set(
        xlim=(low, high),
        ylim=(low, high),
        title="close to the limit",
        aspect=1,
        xlabel="real deficit, in units",
        ylabel="sum of quantised deficits",
    )
    return figure


def draw_cells(catalogue: Catalogue) -> Figure:
    """Show which cells of a pair are visited, and which lists single splits would need."""
    bounds = Bounds.of(catalogue, 10)
    pair = SHOWN_PAIR
    limits = np.array(pair_limits(bounds))
    depth = int(limits[pair])
    lists = np.array(cheapest_limits(count_deficits(bounds), bounds.limit))
    by_pairs = np.mean((catalogue.pair_deficits(bounds) <= limits).any(axis=1))
    by_splits = np.mean((catalogue.split_deficits(bounds) <= lists).any(axis=1))
    across, up = (np.sort(bounds.quantised[split]) for split in (2 * pair, 2 * pair + 1))
    cells = up[:, None] + across
    visited = np.ma.masked_greater(cells, depth)
    share = np.count_nonzero(cells <= depth) / cells.size
    width = np.count_nonzero(across <= lists[2 * pair])
    height = np.count_nonzero(up <= lists[2 * pair + 1])
    list_share = 1 - (1 - width / NUM_SUB_ITEMS) * (1 - height / NUM_SUB_ITEMS)
    # The staircase: how many cells of every row are visited.
    steps = np.count_nonzero(cells <= depth, axis=1)
    corner = (int(steps.max()) + 4, int(np.count_nonzero(steps)) + 4)

    figure, (left, right) = plt.subplots(1, 2, figsize=(8.2, 3.8))
    for axes, size in ((left, (NUM_SUB_ITEMS, NUM_SUB_ITEMS)), (right, corner)):
        for end in ((width, NUM_SUB_ITEMS), (NUM_SUB_ITEMS, height)):
            axes.add_patch(Rectangle((0, 0), *end, color=SHADE, linewidth=0))
        image = axes.imshow(
            visited,
            cmap="Blues_r",
            vmin=0,
            vmax=1.4 * depth,
            origin="lower",
            interpolation="none",
            extent=(0, NUM_SUB_ITEMS, 0, NUM_SUB_ITEMS),
            zorder=2,
            aspect="auto",
        )
        axes.stairs(
            steps,
            np.arange(NUM_SUB_ITEMS + 1),
            orientation="horizontal",
            color=INK,
            linewidth=1,
            zorder=3,
        )
        axes.set(
            xlim=(0, size[0]),
            ylim=(0, size[1]),
            box_aspect=1,
            xlabel=f"sub-items of split {2 * pair}, best first",
            ylabel=f"sub-items of split {2 * pair + 1}, best first",
        )
    left.add_patch(Rectangle((0, 0), *corner, fill=False, edgecolor=GREY, zorder=4))
    by_cells = (
        f"visited cells: {100 * share:.1f} %",
        f"all four pairs: {100 * by_pairs:.1f} % of items",
    )
    by_lists = (
        f"lists of two splits: {100 * list_share:.0f} %",
        f"all eight: {100 * by_splits:.0f} % of items",
    )
    left.text(80, 190, "\n".join(by_cells), color=BLUE, va="center", linespacing=1.4)
    left.text(80, 140, "\n".join(by_lists), color=BROWN, va="center", linespacing=1.4)
    left.set_title(f"all {NUM_SUB_ITEMS} × {NUM_SUB_ITEMS} cells of a pair")
    right.set_title(f"its corner: deficit ≤ t$_{pair}$ = {depth}")
    bar = figure.colorbar(image, ax=right, label="deficit of the cell, in units", shrink=0.8)
    bar.ax.set_ylim(0, depth)
    return figure


@dataclass(frozen=True)
class Ring:
    """The pairs of all items, and from which of them the chains keep within their limits."""

    limits: Int64Array  # t_p
    deficits: Int64Array  # x_p: [item, pair]
    within: tuple[NDArray[np.bool_], ...]  # chains of one, two and three pairs: [item, pair]

    @classmethod
    def of(cls, catalogue: Catalogue, bounds: Bounds) -> Ring:
        """Add up all chains."""
        limits = np.array(pair_limits(bounds))
        deficits = catalogue.pair_deficits(bounds)
        chain, chain_limits = np.zeros_like(deficits), np.full(NUM_PAIRS, -1)
        passing, within = np.ones(deficits.shape, np.bool_), []
        for step in range(NUM_PAIRS - 1):
            chain = chain + np.roll(deficits, -step, axis=1)
            chain_limits = chain_limits + np.roll(limits, -step) + 1
            passing = passing & (chain <= chain_limits)
            within.append(passing)
        return cls(limits, deficits, tuple(within))


def draw_ring(catalogue: Catalogue) -> Figure:
    """Show items whose pairs and chains do, and do not, keep within their limits."""
    bounds = Bounds.of(catalogue, 10)
    ring = Ring.of(catalogue, bounds)
    one, two, three = (np.any(passing, axis=1) for passing in ring.within)
    in_top = np.isin(np.arange(NUM_ITEMS), bounds.top)
    # Of an item that only one pair finds, one chain shows everything.
    once = np.count_nonzero(ring.within[0], axis=1) == 1
    only_chain = np.count_nonzero(ring.within[2], axis=1) == 1
    # Neither a bar that all but touches its limit nor one that dwarfs the others can be read.
    gaps = np.abs(ring.deficits - ring.limits).min(axis=1)
    clear = (gaps > 5) & (ring.deficits.max(axis=1) < 200)
    fates = {
        "found: in the top 10": in_top & only_chain,
        "rejected by a chain of 3": once & two & ~three,
        "rejected by a chain of 2": once & ~two,
        "never visited": ~one,
    }

    figure, rows = plt.subplots(
        2, len(fates), figsize=(8.2, 5.0), sharey="row", height_ratios=(1, 1.15)
    )
    for (upper, lower), (title, having) in zip(rows.T, fates.items(), strict=True):
        item = int(np.flatnonzero(having & clear)[0])
        draw_pairs(upper, ring, item)
        upper.set_title(title)
        if ring.within[0][item].any():
            draw_chain(lower, ring, item)
    for pair, limit in enumerate(ring.limits):
        rows[0, -1].text(pair, limit + 4, f"t$_{pair}$", ha="center", va="bottom")
    rows[0, 0].set_ylabel("deficit of a pair")
    rows[1, 0].set_ylabel("deficit of a chain of pairs")
    # An item that is never visited has no chain: room for the numbers of the whole search.
    counts = (
        (NUM_ITEMS, "items"),
        (np.count_nonzero(one), "visited"),
        (np.count_nonzero(two), "pass a chain of 2"),
        (np.count_nonzero(three), "pass a chain of 3"),
        (np.count_nonzero(ring.deficits.sum(axis=1) <= bounds.limit), "scored"),
    )
    rows[1, -1].set_axis_off()
    for line, (count, what) in enumerate(counts):
        place = {"y": 0.8 - 0.12 * line, "transform": rows[1, -1].transAxes}
        rows[1, -1].text(0.42, s=f"{count:,}", ha="right", **place)
        rows[1, -1].text(0.47, s=what, **place)
    return figure


def draw_pairs(axes: Axes, ring: Ring, item: int) -> None:
    """Draw an item's pairs: blue where the item is found."""
    colours = [BLUE if within else PALE for within in ring.within[0][item]]
    draw_bars(axes, ring.deficits[item], ring.limits, colours)
    axes.set_xticks(range(NUM_PAIRS), [f"x$_{pair}$" for pair in range(NUM_PAIRS)])


def draw_chain(axes: Axes, ring: Ring, item: int) -> None:
    """Draw the longest chain of an item, as it grows pair by pair."""
    length = sum(bool(passing[item].any()) for passing in ring.within)
    start = int(np.argmax(ring.within[length - 1][item]))
    pairs = (start + np.arange(NUM_PAIRS - 1)) % NUM_PAIRS
    # It is followed until it breaks its limit: what would come after is pale.
    colours = [*[BLUE] * length, ORANGE, PALE][: len(pairs)]
    chain_limits = np.cumsum(ring.limits[pairs] + 1) - 1
    draw_bars(axes, np.cumsum(ring.deficits[item, pairs]), chain_limits, colours)
    names = [f"x$_{start}$", *(f"+ x$_{pair}$" for pair in pairs[1:])]
    axes.set_xticks(range(len(pairs)), names)


def draw_bars(axes: Axes, heights: Int64Array, limits: Int64Array, colours: list[str]) -> None:
    """Draw bars, each with its limit as a line across it."""
    places = np.arange(len(heights))
    edges = [GREY if colour == PALE else colour for colour in colours]
    axes.bar(places, heights, 0.6, color=colours, edgecolor=edges)
    axes.hlines(limits, places - 0.42, places + 0.42, color=INK, linewidth=2)


def draw_segments(catalogue: Catalogue) -> Figure:
    """Draw a catalogue in segments, and what a search finds in each of them."""
    names = ["a segment", "a smaller one", "the tail"]
    cuts = [0, 1_500_000, 1_930_000, NUM_ITEMS]
    rng = np.random.default_rng(SEED)
    scores = reference.score_items(catalogue.scores, catalogue.codes, None)
    figure, (lay, found) = plt.subplots(
        1, 2, figsize=(9.5, 3.4), gridspec_kw={"width_ratios": [3, 2]}
    )
    best: Float32Array = np.empty(0, np.float32)
    for place, (first, stop) in enumerate(pairwise(cuts)):
        colour = BLUE if place < 2 else ORANGE
        lay.add_patch(
            Rectangle((first / 1e6, -place - 0.3), (stop - first) / 1e6, 0.6, color=colour)
        )
        gone = np.sort(
            rng.permutation(stop - first)[: (stop - first) // 60_000 if place < 2 else 0]
        )
        for at in gone:
            lay.add_patch(
                Rectangle(((first + at) / 1e6, -place - 0.3), 0.004, 0.6, color="white", lw=0)
            )
        lay.text(first / 1e6, -place + 0.36, f"{names[place]}, {stop - first:,} items", color=INK)
        own = np.sort(scores[first:stop])[::-1][:10]
        floor = best[9] if len(best) >= 10 else -np.inf
        for score in own:
            enters = score >= floor
            found.plot(
                place, score, "o", ms=5, mec=colour, mfc=colour if enters else "white", alpha=0.9
            )
        best = np.sort(np.concatenate([best, own]))[::-1][:10]
        found.plot([place + 0.12, place + 0.88], [best[9]] * 2, color=INK, lw=1.4)
        if place == 0:
            found.text(0.5, best[9], "floor\n", ha="center", va="bottom")
    lay.set_xlim(-0.02, 2.4)
    lay.set_ylim(-2.6, 0.8)
    lay.set_yticks([])
    lay.spines["left"].set_visible(False)
    lay.set_xlabel("number of an item, millions; white: has left")
    found.set_xticks(range(3), ["segment", "smaller", "tail"])
    found.set_xlim(-0.4, 3.0)
    found.set_ylabel("score")
    found.set_title("the best 10 of each (hollow: too low)")
    return figure


PICTURES: dict[str, Callable[[Catalogue], Figure]] = {
    "deficits": draw_deficits,
    "filter": draw_filter,
    "cells": draw_cells,
    "ring": draw_ring,
    "catalogue": draw_segments,
}


def main() -> None:
    """Draw all pictures."""
    FOLDER.mkdir(exist_ok=True)
    catalogue = Catalogue.draw()
    with plt.rc_context(STYLE):
        for name, draw in PICTURES.items():
            figure = draw(catalogue)
            figure.savefig(FOLDER / f"{name}.svg", metadata={"Creator": None, "Date": None})
            plt.close(figure)


if __name__ == "__main__":
    main()
