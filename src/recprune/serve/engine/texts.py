"""The names of all items, and the lines that are searched for words: files that workers share.

They are written once for all workers of a service, before any of them is ready, and mapped: a
million names in every worker would cost more than everything else that it has of its own.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from recprune.data.identifiers import ExternalId
from recprune.types import Int64Array

_LINES = 8192  # written, or searched, at a time: a megabyte or so, for which other threads wait


class _Ids(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, internal_id: int, /) -> ExternalId: ...


class CatalogueTexts:
    """Names by item, and a search over one line an item, the most popular first."""

    def __init__(self, folder: Path) -> None:
        """Map what `write_texts` has written. The files may be removed: what is mapped stays."""
        self._order = np.load(folder / "order.npy", mmap_mode="r")
        self._starts = np.load(folder / "line_starts.npy", mmap_mode="r")
        self._lines = np.memmap(folder / "lines", np.uint8, "r")
        self.has_names = (folder / "names").exists()
        if self.has_names:
            self._name_starts = np.load(folder / "name_starts.npy", mmap_mode="r")
            self._names = np.memmap(folder / "names", np.uint8, "r")

    def name(self, item: int) -> str | None:
        """Return the name, or None where there is none."""
        if not self.has_names:
            return None
        start, end = self._name_starts[item : item + 2]
        return self._names[start : end - 1].tobytes().decode() or None

    def find(self, words: str, most: int) -> list[int]:
        """Return the most popular items whose line contains the words."""
        wanted = " ".join(words.split()).casefold().encode("utf-8", "replace")
        found: list[int] = []
        for first in range(0, len(self._order) if wanted else 0, _LINES):
            starts = self._starts[first : first + _LINES + 1]
            begin = int(starts[0])
            lines = self._lines[begin : int(starts[-1])].tobytes()
            place = lines.find(wanted)
            while place >= 0 and len(found) < most:
                line = int(np.searchsorted(starts, begin + place, side="right")) - 1
                found.append(int(self._order[first + line]))
                place = lines.find(wanted, int(starts[line + 1]) - begin)
            if len(found) == most:
                break
        return found


def shared_texts(
    scratch: Path | None, key: str | None, write: Callable[[Path], None]
) -> CatalogueTexts:
    """Return what `write` writes into a folder; of all workers, the first one does it.

    `key` says which texts they are. Without one, or without a folder that workers share, they are
    written anew. Those of an earlier key are removed: who still needs them has them mapped.
    """
    if scratch is None or key is None:
        with tempfile.TemporaryDirectory(prefix="recprune-texts-") as name:
            write(Path(name))
            return CatalogueTexts(Path(name))
    with _locked(scratch / "texts.lock"):
        folder = scratch / f"texts-{key}"
        if not folder.exists():
            for old in scratch.glob("texts-*"):
                shutil.rmtree(old)
            fresh = scratch / "texts-fresh"
            fresh.mkdir()
            write(fresh)
            fresh.rename(folder)
        return CatalogueTexts(folder)


def write_texts(
    folder: Path, ids: _Ids, popularity: Int64Array | None, names: Sequence[str] | None
) -> None:
    """Write the names of items, if there are any, and the lines to be searched."""
    count = len(ids)
    order = np.argsort(-popularity, kind="stable") if popularity is not None else np.arange(count)
    np.save(folder / "order.npy", order.astype(np.int32 if count < 2**31 else np.int64))

    def line(item: int) -> str:
        name = names[item] if names is not None else ""
        return f"{ids[item]} {name}".replace("\n", " ")

    with (folder / "lines").open("wb") as file:
        starts = _write_lines(file, (line(item) for item in order.tolist()), count, fold=True)
    np.save(folder / "line_starts.npy", starts)
    if names is not None:
        with (folder / "names").open("wb") as file:
            starts = _write_lines(file, iter(names), count, fold=False)
        np.save(folder / "name_starts.npy", starts)


def _write_lines(file: BinaryIO, lines: Iterator[str], count: int, *, fold: bool) -> Int64Array:
    """Write a line for each; return where it begins, and where the last one ends."""
    starts = np.zeros(count + 1, np.int64)
    for first in range(0, count, _LINES):
        part = [next(lines) for _ in range(min(_LINES, count - first))]
        # Folded as one text: a million small ones would take seconds.
        text = "\n".join([*part, ""])
        encoded = (text.casefold() if fold else text).encode("utf-8", "replace")
        ends = np.flatnonzero(np.frombuffer(encoded, np.uint8) == ord("\n")) + 1
        starts[first + 1 : first + 1 + len(part)] = starts[first] + ends
        file.write(encoded)
    if not count:
        file.write(b"\n")  # an empty file cannot be mapped
    return starts


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one worker at a time go on; one that dies lets go of it."""
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
