"""What commands that search have in common: boosts, as ID=NUMBER with commas between them."""

from __future__ import annotations

import argparse
import math


def parse_boosts(text: str) -> tuple[list[str], list[float]]:
    """Return the ids and the numbers; a number stands after the last = of its word."""
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
