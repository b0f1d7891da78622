"""Where buckets of counts begin: two for every doubling."""

from __future__ import annotations

import math

import numpy as np

from recprune.types import Int64Array


def half_powers(num_buckets: int, unit: int = 1) -> Int64Array:
    """Return where all buckets but the first begin: √2, 2, 2 √2, … units, rounded up.

    Integers, so that what is trained and what is served cannot disagree, on any machine.
    """
    squares = (unit * unit << half for half in range(1, num_buckets))
    return np.array([math.isqrt(square - 1) + 1 for square in squares], np.int64)
