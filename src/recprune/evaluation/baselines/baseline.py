"""What every baseline is.

All of them learn from a training log by counting, take histories oldest first, and break ties by
item id unless they say otherwise. Items without training interactions are never recommended, unless
from the user's own past.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from recprune.types import InputError, Int32Array, Int64Array


class Baseline(Protocol):
    """Anything that recommends items for histories."""

    name: str

    def recommend(
        self, histories: Sequence[Int32Array], k: int, *, exclude_seen: bool
    ) -> Int64Array:
        """Return the k best items of every user, [users, k], −1 where there are fewer.

        With `exclude_seen` no item of the user's own history is among them.
        """
        ...


def check_question(histories: Sequence[Int32Array], k: int, num_items: int) -> None:
    if k < 1:
        raise InputError(f"k is {k}, expected at least 1")
    for row, history in enumerate(histories):
        if history.ndim != 1 or history.dtype.kind not in "iu":
            raise InputError(
                f"histories[{row}] is {history.dtype}{list(history.shape)}, expected integers [n]"
            )
        if len(history) and not 0 <= history.min() <= history.max() < num_items:
            raise InputError(f"histories[{row}] holds items outside 0 to {num_items - 1}")
