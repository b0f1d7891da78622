"""What commands that answer have in common: whether what was seen may come again, and boosts."""

from __future__ import annotations

import argparse
import math


def add_seen_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `exclude_seen`: True, False, or None, which leaves it to the model."""
    default = "default: leave it out, unless the model has learnt what is taken again"
    for option, value, meaning in (
        ("--include-seen", False, "items of the history may come again"),
        ("--exclude-seen", True, f"they may not; {default}"),
    ):
        parser.add_argument(
            option, dest="exclude_seen", action="store_const", const=value, help=meaning
        )


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
