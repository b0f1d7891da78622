"""Tables that several commands print."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

from recprune.commands.console import output, print_table
from recprune.data.statistics import Statistics, iso_time
from recprune.evaluation.evaluation import Evaluation, group_rows, mean_rows
from recprune.preparation.codebook import Codebook
from recprune.preparation.holdout import Holdout

_Name = TypeVar("_Name")


def statistics_rows(statistics: Statistics) -> list[tuple[str, str]]:
    """Return the figures of a log in words, the paper's dataset table first."""
    return [
        ("users", f"{statistics.users:,}"),
        ("items", f"{statistics.items:,}"),
        ("interactions", f"{statistics.interactions:,}"),
        ("average length", f"{statistics.average_length:.2f}"),
        ("median length", f"{statistics.median_length:.0f}"),
        ("95th / 99th percentile", f"{statistics.p95_length:.0f} / {statistics.p99_length:.0f}"),
        ("longest", f"{statistics.longest:,}"),
        ("repeated consumption", f"{statistics.repeat_share:.1%}"),
        ("interactions on the top 1 % of items", f"{statistics.top_1_percent_share:.1%}"),
        ("items seen once", f"{statistics.single_items_share:.1%}"),
        ("Gini of item popularity", f"{statistics.gini:.3f}"),
        ("first", statistics.first_time),
        ("last", statistics.last_time),
        ("users left out as too short", f"{statistics.left_out_users:,}"),
        ("  and their interactions", f"{statistics.left_out_interactions:,}"),
        ("bad rows left out", f"{statistics.bad_rows:,}"),
        ("user ids / item ids", f"{statistics.user_ids} / {statistics.item_ids}"),
    ]


def print_holdout(holdout: Holdout) -> None:
    """Print how a log was divided."""
    if holdout.cut_time is not None:
        cut = f"cut after {iso_time(holdout.cut_time)}"
    elif holdout.train.num_interactions == holdout.log.num_interactions:
        cut = "none, all of the log trains"
    else:
        cut = "leave one out"
    trained = int((holdout.train.lengths > 0).sum())
    validated, tested = len(holdout.validation), len(holdout.test)
    print_table(
        f"Hold-out: {cut}",
        ("", "interactions", "users"),
        [
            ("training", f"{holdout.train.num_interactions:,}", f"{trained:,}"),
            ("validation targets", f"{validated:,}", f"{validated:,}"),
            ("test targets", f"{tested:,}", f"{tested:,}"),
            ("dropped, without a past", "", f"{len(holdout.dropped_users):,}"),
        ],
    )


_NAME_WIDTH = 28  # characters of a baseline's longest name; longer ones of models are folded
_BOUND = re.compile(r"(?<=[\[ ])(0(\.\d+)|(1\.0+)0)(?=[,\]])")  # of an interval, of 4 decimals


def print_runs(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print figures of runs, a row a run, so that no interval is broken where there is room.

    Where there is little, bounds have no 0 before the point (and a 1 has one less behind it), and
    what does not stand beside the first columns is another table.
    """
    if not _fits(_widths(header, rows)):
        rows = [[_BOUND.sub(r"\2\3", cell) for cell in row] for row in rows]
    widths = _widths(header, rows)
    end = 1
    while end < len(header):
        first, end = end, end + 1
        while end < len(header) and _fits([widths[0], *widths[first : end + 1]]):
            end += 1
        chosen = [0, *range(first, end)]
        print_table(
            title if first == 1 else "",
            [header[place] for place in chosen],
            [[row[place] for place in chosen] for row in rows],
        )


def _widths(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    columns = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return [min(columns[0], _NAME_WIDTH), *columns[1:]]


def _fits(widths: Sequence[int]) -> bool:
    return sum(widths) + 3 * len(widths) + 1 <= output.width  # blanks and lines between them


_COLUMNS_AT_ONCE = 5  # as many as stand in 80 characters beside the names of baselines


def print_metrics(
    evaluations: Sequence[Evaluation], metrics: Sequence[str], cutoffs: Sequence[int]
) -> None:
    """Print means alone: of one cutoff the metrics side by side, of several a table a metric."""
    if len(cutoffs) == 1:
        for names in _parts(metrics):
            rows = mean_rows(evaluations, [f"{metric}@{cutoffs[0]}" for metric in names])
            print_table(f"At {cutoffs[0]}, means of all users", ("", *names), rows)
        return
    for metric in metrics:
        for places in _parts(cutoffs):
            rows = mean_rows(evaluations, [f"{metric}@{cutoff}" for cutoff in places])
            print_table(f"{metric} at, means of all users", ("", *map(str, places)), rows)


def _parts(names: Sequence[_Name]) -> list[Sequence[_Name]]:
    return [names[n : n + _COLUMNS_AT_ONCE] for n in range(0, len(names), _COLUMNS_AT_ONCE)]


def print_repeats(evaluations: Sequence[Evaluation], metrics: Sequence[str]) -> None:
    """Print how good runs are where users repeat themselves, and where they do not."""
    repeats, users = evaluations[0].repeats, evaluations[0].num_users
    found = repeats.num_users if repeats is not None else 0
    if found in (0, users):  # the figures of all users say it already
        which = "All targets are" if found else "No target is"
        output.print(f"{which} in the user's own history")
        return
    header = ("", *metrics)
    share = f"{found:,} users, {found / users:.1%}"
    rows = group_rows(evaluations, "repeats", metrics)
    print_runs(f"Where the target repeats the user's own history: {share}", header, rows)
    rows = group_rows(evaluations, "others", metrics)
    print_runs(f"Where it is new to the user: {users - found:,} users", header, rows)


def print_cold(evaluations: Sequence[Evaluation], metrics: Sequence[str]) -> None:
    """Print how good runs are where the target was never trained on, and where it was."""
    cold, users = evaluations[0].cold, evaluations[0].num_users
    found = cold.num_users if cold is not None else 0
    if not found:
        return
    header = ("", *metrics)
    share = f"{found:,} users, {found / users:.1%}"
    rows = group_rows(evaluations, "cold", metrics)
    print_runs(f"Where the target is cold, without a training interaction: {share}", header, rows)
    if found < users:
        rows = group_rows(evaluations, "warm", metrics)
        print_runs(f"Where it is warm: {users - found:,} users", header, rows)


def print_codebook(codebook: Codebook) -> None:
    """Print what a codebook looks like, split by split."""
    singular_values = codebook.settings.get("singular_values")
    header = ["split", "fewest items", "most items", "unused ids"]
    rows = []
    for split, counts in enumerate(codebook.occupancy()):
        row = [str(split), f"{counts.min():,}", f"{counts.max():,}", f"{(counts == 0).sum():,}"]
        rows.append(row + ([f"{singular_values[split]:,.1f}"] if singular_values else []))
    if singular_values:
        header.append("singular value")
    title = (
        f"{codebook.num_items:,} items in {codebook.num_splits} splits "
        f"of {codebook.num_sub_items} sub-items"
    )
    print_table(title, header, rows)
    shared = codebook.items_sharing_full_code()
    output.print(f"{shared:,} items share their whole code with another item")
    if codebook.settings.get("unseen_items"):
        output.print(
            f"{codebook.settings['unseen_items']:,} items have no training interaction: "
            "their codes are chance"
        )
