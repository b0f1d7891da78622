"""The picture of a training: loss and validation NDCG against epochs."""

from __future__ import annotations

import json
from pathlib import Path

from recprune.storage import writing_file
from recprune.types import needs_extra


def draw_training(epochs: Path, picture: Path) -> None:
    """Draw the lines that training wrote, one for each epoch, as a PNG."""
    with needs_extra("demo"):
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot
        from matplotlib.ticker import MaxNLocator
    lines = [json.loads(line) for line in epochs.read_text(encoding="utf-8").splitlines()]
    numbers = [line["epoch"] for line in lines]
    best = max(lines, key=lambda line: line["ndcg"])
    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(7, 5), sharex=True)
    upper.plot(numbers, [line["loss"] for line in lines], color="#33658a")
    upper.set_ylabel("training loss")
    lower.plot(numbers, [line["ndcg"] for line in lines], color="#33658a")
    lower.plot([best["epoch"]], [best["ndcg"]], "o", color="#d1495b")
    lower.annotate(
        f"best: {best['ndcg']:.4f}",
        (best["epoch"], best["ndcg"]),
        xytext=(0, -16),
        textcoords="offset points",
        ha="center",
    )
    lower.set_ylabel("validation NDCG@10")
    lower.set_xlabel("epoch")
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    with writing_file(picture) as temporary:
        figure.savefig(temporary, dpi=130, format="png")
    pyplot.close(figure)
