"""Processes that change a live index until they are killed, and what they must have done.

What change k does follows from k and the numbers that are there, so that a test can tell which
catalogue k changes make. Run as a program, this forks a process for every line of its input: that
is far quicker than starting Python as often.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recprune import LiveIndex
from recprune.live import merging

NUM_SPLITS, NUM_SUB_ITEMS = 4, 16


def first_codes() -> NDArray[np.uint8]:
    return drawn(np.random.default_rng(0), 400)


def drawn(rng: np.random.Generator, count: int) -> NDArray[np.uint8]:
    return rng.integers(0, NUM_SUB_ITEMS, (count, NUM_SPLITS)).astype(np.uint8)


def change(k: int, numbers: NDArray[np.int64]) -> tuple[str, Any, Any]:
    """Return what change k does to the items with these numbers: its name, numbers and codes."""
    rng = np.random.default_rng(k)
    name = ["add", "remove", "add", "replace"][k % 4]
    if name == "add" or len(numbers) < 100:
        return "add", None, drawn(rng, int(rng.integers(1, 60)))
    chosen = rng.permutation(numbers)[: int(rng.integers(1, 40))]
    return name, chosen, drawn(rng, len(chosen))


def said_by(k: int) -> str | None:
    """Return what change k says of the items that it adds: some say nothing."""
    return f"by {k}" if k % 8 == 0 else None


def catalogue_after(changes: int) -> dict[int, tuple[bytes, str | None]]:
    """Return code and note of every item that is there after so many changes, by number."""
    items: dict[int, tuple[bytes, str | None]]
    items = {number: (code.tobytes(), None) for number, code in enumerate(first_codes())}
    next_number = len(items)
    for k in range(1, changes + 1):
        name, chosen, codes = change(k, np.array(sorted(items), np.int64))
        if name == "add":
            chosen = np.arange(next_number, next_number + len(codes))
            next_number += len(codes)
        for place, number in enumerate(chosen.tolist()):
            if name == "remove":
                del items[number]
            else:
                said = said_by(k) if name == "add" else items[number][1]
                items[number] = codes[place].tobytes(), said
    return items


def write_forever(folder: Path, acknowledged: Path) -> None:
    """Make one change after the other, and note each that has returned."""
    merging.FULL_TAIL = 300
    notes = os.open(acknowledged, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    live = LiveIndex.open(folder)
    while True:
        k = live.snapshot().sequence + 1
        name, chosen, codes = change(k, live.snapshot().numbers())
        if name == "add":
            said = said_by(k)
            live.add(codes, notes=None if said is None else [{"said": said}] * len(codes))
        elif name == "remove":
            live.remove(chosen)
        else:
            live.replace(chosen, codes)
        os.write(notes, f"{k}\n".encode())
        if k % 25 == 0:
            live.compact()


def add_some(folder: Path, noted: Path, who: int) -> None:
    """Add a hundred items with a code of one's own; note their numbers."""
    with LiveIndex.open(folder) as live:
        for _ in range(20):
            numbers = live.add(np.full((5, NUM_SPLITS), who, np.uint8))
            with noted.open("a") as file:
                file.write("".join(f"{number} {who}\n" for number in numbers.tolist()))


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    for line in sys.stdin:
        what, folder, notes, *more = line.split()
        child = os.fork()
        if child:
            print(child, flush=True)  # noqa: T201
            continue
        try:
            if what == "forever":
                write_forever(Path(folder), Path(notes))
            else:
                add_some(Path(folder), Path(notes), int(more[0]))
        finally:
            os._exit(0)


if __name__ == "__main__":
    main()
