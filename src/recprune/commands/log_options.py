"""The options of every command that reads a log, and the reading."""

from __future__ import annotations

import argparse

from recprune.data.identifiers import too_large_for_integers
from recprune.data.interactions import DEFAULT_MIN_INTERACTIONS, Interactions, read_interactions
from recprune.types import Columns, InputError

_LOG = "CSV, TSV, Parquet, JSON lines, or a folder of parts"


def add_log_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the log itself and how to read it."""
    parser.add_argument("log", metavar="LOG", help=_LOG)
    add_reading_arguments(parser)


def add_optional_log_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a log that may be left out, and how to read it: no user of it is too short."""
    parser.add_argument("log", metavar="LOG", nargs="?", help=_LOG)
    add_reading_arguments(parser, min_interactions=1)


def add_reading_arguments(
    parser: argparse.ArgumentParser, *, min_interactions: int = DEFAULT_MIN_INTERACTIONS
) -> None:
    """Add how to read a log, `parsed.log`, which may be None."""
    added = [
        parser.add_argument(
            "--format",
            default="auto",
            metavar="NAME",
            help="auto (by the file's name and columns), gowalla, tmall or movielens",
        ),
        *(
            parser.add_argument(f"--{role}-column", metavar="NAME", help="default: detected")
            for role in ("user", "item", "time")
        ),
        parser.add_argument(
            "--time-format",
            default="auto",
            metavar="NAME",
            help="auto, seconds, milliseconds, microseconds, nanoseconds, iso8601 or yyyymmdd; "
            "order for a log without times, whose rows stand in their order",
        ),
        parser.add_argument(
            "--min-rating", type=float, metavar="R", help="leave out rows with a lower rating"
        ),
        parser.add_argument(
            "--rating-column", metavar="NAME", help="with --min-rating; default: detected"
        ),
        parser.add_argument(
            "--deduplicate",
            action="store_true",
            help="of rows with the same user, item and time keep one",
        ),
        parser.add_argument(
            "--delimiter", metavar="CHAR", help="of a text file; default: detected"
        ),
        parser.add_argument(
            "--no-header",
            action="store_true",
            help="the columns of a text file are called 0, 1, 2 ...",
        ),
        parser.add_argument(
            "--min-interactions",
            type=int,
            default=min_interactions,
            metavar="N",
            help="leave out users with fewer; default %(default)s",
        ),
        parser.add_argument(
            "--on-bad-rows",
            choices=("error", "skip"),
            default="error",
            help="stop at the first bad row, or leave bad rows out and count them; default "
            "%(default)s",
        ),
    ]
    parser.set_defaults(reading_defaults={option.dest: option.default for option in added})


def check_log_options(parsed: argparse.Namespace, log: str) -> None:
    """Refuse options that say how to read a log, where none is given, as `log` would be."""
    if parsed.log is not None:
        return
    for name, default in parsed.reading_defaults.items():
        if getattr(parsed, name) != default:
            raise InputError(f"--{name.replace('_', '-')} says how to read a log: give {log}")


def add_seed_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="of all chance; default %(default)s")


def read_log(parsed: argparse.Namespace) -> Interactions:
    """Read the log that a command was given, and say what was left out."""
    from recprune.commands.console import say, showing_progress  # a recommender does without

    columns = Columns(
        parsed.user_column, parsed.item_column, parsed.time_column, parsed.rating_column
    )
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
            min_rating=parsed.min_rating,
            deduplicate=parsed.deduplicate,
            progress=progress,
        )
        duplicates = 0 if parsed.deduplicate else log.count_duplicates()
    for bad in log.left_out.bad_rows:
        rows = "1 row" if bad.count == 1 else f"{bad.count:,} rows"
        say(f"left out {rows}: {bad.reason}; the first: {bad.first}")
    if log.left_out.low_ratings:
        say(f"left out {log.left_out.low_ratings:,} rows rated below {parsed.min_rating:g}")
    if log.left_out.duplicates:
        say(f"left out {log.left_out.duplicates:,} rows that say again what another one says")
    if log.left_out.short_users:
        say(
            f"left out {log.left_out.short_users:,} users with fewer than "
            f"{parsed.min_interactions:,} interactions, with {log.left_out.short_interactions:,} "
            "interactions: --min-interactions 1 keeps all"
        )
    for kind, ids in (("user", log.user_ids), ("item", log.item_ids)):
        if large := too_large_for_integers(ids):
            say(f"{kind} ids are strings, as {large} is beyond the integers of 64 bits")
    if duplicates:
        say(
            f"{duplicates:,} interactions say again what another one says (user, item and time): "
            "--deduplicate keeps one of each"
        )
    if log.times.min() == log.times.max():
        say(
            "all times are equal: histories are in the order of the rows, and a cut in time is not "
            "possible (--time-format order takes the rows' order as times)"
        )
    return log
