"""Messages between the supervisor and its workers: JSON, a line each.

From the supervisor: `load`, make a new engine of the folder; `swap`, serve it; `drop`, forget it;
`outcome`, how a reload went that this worker asked for; `ping`, a sign of life is wanted. From a
worker: `ready`, `failed` (it cannot start), `loaded`, `not_loaded`, `swapped`, `reload`, a client
asked for one, and `pong`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Literal, TypeAlias

Word: TypeAlias = Literal[
    "load",
    "swap",
    "drop",
    "outcome",
    "ping",
    "ready",
    "failed",
    "loaded",
    "not_loaded",
    "swapped",
    "reload",
    "pong",
]


@dataclass(frozen=True)
class Message:
    """One line."""

    word: Word
    version: str = ""  # of what was loaded, or swapped in
    text: str = ""  # what is wrong; empty where all is well
    public_text: str = ""  # the same for a client: no path in it
    number: int = 0  # of the reload; of `ready`, the latest good one before the fork
    workers: int = 0  # that have swapped
    answered: int = 0  # how many of a worker's `reload` this is the outcome of, the oldest first
    reloads: dict[str, int] = field(default_factory=dict)  # so far, by outcome

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


def from_line(line: bytes) -> Message:
    return Message(**json.loads(line))
