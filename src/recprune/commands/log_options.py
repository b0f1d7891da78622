"""The options of every command that reads a log, and the reading."""

from __future__ import annotations

import argparse

from recprune.commands.console import say, showing_progress
from recprune.data.interactions import DEFAULT_MIN_INTERACTIONS, Interactions, read_interactions
from recprune.types import Columns


def add_log_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the log itself and how to read it."""
    parser.add_argument(
        "log", metavar="LOG", help="CSV, TSV, Parquet, JSON lines, or a folder of parts"
    )
    parser.add_argument(
        "--format",
        default="auto",
        metavar="NAME",
        help="auto (by the file's name and columns), gowalla, tmall or movielens",
    )
    for role in ("user", "item", "time"):
        parser.add_argument(f"--{role}-column", metavar="NAME", help="default: detected")
    parser.add_argument(
        "--time-format",
        default="auto",
        metavar="NAME",
        help="auto, seconds, milliseconds, microseconds, nanoseconds, iso8601 or yyyymmdd",
    )
    parser.add_argument("--delimiter", metavar="CHAR", help="of a text file; default: detected")
    parser.add_argument(
        "--no-header", action="store_true", help="the columns of a text file are called 0, 1, 2 ..."
    )
    parser.add_argument(
        "--min-interactions",
        type=int,
        default=DEFAULT_MIN_INTERACTIONS,
        metavar="N",
        help="leave out users with fewer; default %(default)s",
    )
    parser.add_argument(
        "--on-bad-rows",
        choices=("error", "skip"),
        default="error",
        help="stop at the first bad row, or leave bad rows out and count them; default %(default)s",
    )


def add_seed_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="of all chance; default %(default)s")


def read_log(parsed: argparse.Namespace) -> Interactions:
    """Read the log that a command was given, and say what was left out."""
    columns = Columns(parsed.user_column, parsed.item_column, parsed.time_column)
    with showing_progress("log") as progress:
        log = read_interactions(
            parsed.log,
            log_format=parsed.format,
            columns=columns,
            time_format=parsed.time_format,
            delimiter=parsed.delimiter,
            header=not parsed.no_header,
            min_interactions=parsed.min_interactions,
            on_bad_rows=parsed.on_bad_rows,
            progress=progress,
        )
    for bad in log.left_out.bad_rows:
        rows = "1 row" if bad.count == 1 else f"{bad.count:,} rows"
        say(f"left out {rows}: {bad.reason}; the first: {bad.first}")
    return log
