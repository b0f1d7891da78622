"""What commands that answer have in common: what may be in an answer, and boosts."""

from __future__ import annotations

import argparse
import math

from recprune.types import InputError


def check_k(k: int) -> None:
    """Refuse to look for nothing."""
    if k < 1:
        raise InputError(f"-k is {k}, expected at least 1")


def add_seen_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `exclude_seen`: True, False, or None, which leaves it to the model."""
    default = (
        "default: leave it out, unless the model has learnt what is taken again; `recprune "
        "evaluate` leaves it in by default"
    )
    for option, value, meaning in (
        ("--include-seen", False, "items of the history may come again"),
        ("--exclude-seen", True, f"they may not; {default}"),
    ):
        parser.add_argument(
            option, dest="exclude_seen", action="store_const", const=value, help=meaning
        )


def add_filter_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `where`, a condition or None, and `at_most`, a column and a number or None."""
    add_where_argument(parser)
    parser.add_argument(
        "--at-most",
        type=parse_limit,
        metavar="COLUMN=N",
        help="of an answer's items, so many at most have the same value in this column",
    )


def add_where_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--where",
        metavar="CONDITION",
        help='on the attributes of items, such as "price < 50 and in_stock": only items of '
        "which it is true",
    )


def add_names_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--names",
        metavar="FILE",
        help="CSV or Parquet with item_id and name, which stand beside the ids",
    )


def add_live_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `live` and `attributes`, folders or None."""
    parser.add_argument(
        "--live",
        metavar="FOLDER",
        help="live index made by recprune index live: what is there now, all answers at one moment",
    )
    parser.add_argument(
        "--attributes",
        metavar="FOLDER",
        help="of the items, made by recprune attributes of the live index; default: the "
        "recommender's own",
    )


def check_live(parsed: argparse.Namespace) -> None:
    if parsed.attributes is not None and parsed.live is None:
        raise InputError("--attributes goes with --live: a recommender has its own")


def parse_limit(text: str) -> tuple[str, int]:
    """Return a column and a number from COLUMN=N; the last = counts."""
    column, _, number = text.rpartition("=")
    column = column.strip()
    if not column or not number.strip().isascii() or not number.strip().isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a column, = and a number")
    return column, int(number)


def parse_boosts(text: str) -> tuple[list[str], list[float]]:
    """Return ids and numbers from ID=NUMBER with commas between; the last = of a word counts."""
    items: list[str] = []
    values: list[float] = []
    for word in filter(None, map(str.strip, text.split(","))):
        item, equals, number = word.rpartition("=")
        item = item.strip()
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not equals or not item or not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{word!r} is not an id, = and a finite number")
        if item in items:
            raise argparse.ArgumentTypeError(f"{item!r} is boosted twice")
        items.append(item)
        values.append(value)
    return items, values
