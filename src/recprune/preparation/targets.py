"""What is to be predicted, and from which history."""

from __future__ import annotations

from dataclasses import dataclass

from recprune.types import Int32Array, Int64Array, frozen


@dataclass(frozen=True, eq=False)
class Targets:
    """Items to be predicted: for each of some users one item, and the history before it.

    The history of target t is `log.items[starts[t]:ends[t]]`, in the log that was held out from.
    """

    users: Int32Array
    items: Int32Array
    starts: Int64Array
    ends: Int64Array

    def __post_init__(self) -> None:
        for name in ("users", "items", "starts", "ends"):
            frozen(getattr(self, name))

    def __len__(self) -> int:
        return len(self.users)
