"""The names of all items, and the lines that are searched for words: files that workers share.

They are written once for all workers of a service, before any of them is ready, and mapped: a
million names in every worker would cost more than everything else that it has of its own. Only
where the disk is full, a worker has them for itself.
"""

from __future__ import annotations

import fcntl
import io
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from recprune.data.identifiers import ExternalId
from recprune.serve.logs import log_problem
from recprune.types import Int64Array

_LINES = 8192  # written, or searched, at a time: a megabyte or so, for which other threads wait


class _Ids(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, internal_id: int, /) -> ExternalId: ...


class TextFiles(Protocol):
    """A few files by name, written once and then read."""

    def create(self, name: str) -> BinaryIO:
        """Open a new one for writing."""

    def array(self, name: str) -> NDArray[Any]:
        """Return one that `np.save` has written."""

    def content(self, name: str) -> NDArray[np.uint8]:
        """Return all bytes of one."""

    def has(self, name: str) -> bool: ...


@dataclass(frozen=True)
class _Folder:
    """Files on disk, mapped: they may be removed, and what is mapped stays."""

    path: Path

    def create(self, name: str) -> BinaryIO:
        return (self.path / name).open("wb")

    def array(self, name: str) -> NDArray[Any]:
        mapped: NDArray[Any] = np.load(self.path / name, mmap_mode="r")
        return mapped

    def content(self, name: str) -> NDArray[np.uint8]:
        return np.memmap(self.path / name, np.uint8, "r")

    def has(self, name: str) -> bool:
        return (self.path / name).exists()


class _Memory:
    """The same in this process alone, for when there is no room on the disk."""

    def __init__(self) -> None:
        self._files: dict[str, io.BytesIO] = {}

    def create(self, name: str) -> BinaryIO:
        self._files[name] = _StaysOpen()
        return self._files[name]

    def array(self, name: str) -> NDArray[Any]:
        self._files[name].seek(0)
        loaded: NDArray[Any] = np.load(self._files[name])
        return loaded

    def content(self, name: str) -> NDArray[np.uint8]:
        return np.frombuffer(self._files[name].getbuffer(), np.uint8)

    def has(self, name: str) -> bool:
        return name in self._files


class _StaysOpen(io.BytesIO):
    def close(self) -> None:
        """Keep what was written."""


class CatalogueTexts:
    """Names by item, and a search over one line an item, the most popular first."""

    def __init__(self, files: TextFiles) -> None:
        """Take what `write_texts` has written."""
        self._order = files.array("order.npy")
        self._starts = files.array("line_starts.npy")
        self._lines = files.content("lines")
        self.has_names = files.has("names")
        if self.has_names:
            # Of a few names at a time: slices of an array would take longer than decoding them.
            self._name_starts = files.array("name_starts.npy").data
            self._names = files.content("names").data

    def name(self, item: int) -> str | None:
        """Return the name, or None where there is none."""
        if not self.has_names:
            return None
        start, end = self._name_starts[item], self._name_starts[item + 1]
        return str(self._names[start : end - 1], "utf-8") or None

    def find(self, words: str, most: int) -> list[int]:
        """Return the most popular items whose line contains the words."""
        wanted = folded(words).encode("utf-8", "replace")
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


def folded(words: str) -> str:
    """Return words as they are looked for."""
    return " ".join(words.split()).casefold()


def shared_texts(
    scratch: Path | None, key: str | None, write: Callable[[TextFiles], None]
) -> CatalogueTexts:
    """Return what `write` writes; of all workers, the first one does it.

    `key` says which texts they are. Without one, or without a folder that workers share, they are
    written anew. Those of an earlier key are removed: who still needs them has them mapped. Where
    there is no room for them, this worker has them in memory: a full disk must not keep it from
    starting.
    """
    try:
        if scratch is None or key is None:
            with tempfile.TemporaryDirectory(prefix="recprune-texts-") as name:
                return _written(_Folder(Path(name)), write)
        return _written_once(scratch, key, write)
    except OSError as error:
        log_problem("texts in memory", {"reason": str(error)})
        return _written(_Memory(), write)


def _written(files: TextFiles, write: Callable[[TextFiles], None]) -> CatalogueTexts:
    write(files)
    return CatalogueTexts(files)


def _written_once(scratch: Path, key: str, write: Callable[[TextFiles], None]) -> CatalogueTexts:
    with _locked(scratch / "texts.lock"):
        folder = scratch / f"texts-{key}"
        if not folder.exists():
            for old in scratch.glob("texts-*"):
                shutil.rmtree(old)
            fresh = scratch / "texts-fresh"
            fresh.mkdir()
            try:
                write(_Folder(fresh))
                fresh.rename(folder)
            finally:  # what is half written takes room that others need
                shutil.rmtree(fresh, ignore_errors=True)
        return CatalogueTexts(_Folder(folder))


def write_texts(
    files: TextFiles, ids: _Ids, popularity: Int64Array | None, names: Sequence[str] | None
) -> None:
    """Write the names of items, if there are any, and the lines to be searched."""
    count = len(ids)
    order = np.argsort(-popularity, kind="stable") if popularity is not None else np.arange(count)
    _save(files, "order.npy", order.astype(np.int32 if count < 2**31 else np.int64))

    def line(item: int) -> str:
        name = names[item] if names is not None else ""
        return f"{ids[item]} {name}".replace("\n", " ")

    with files.create("lines") as file:
        starts = _write_lines(file, (line(item) for item in order.tolist()), count, fold=True)
    _save(files, "line_starts.npy", starts)
    if names is not None:
        with files.create("names") as file:
            starts = _write_lines(file, iter(names), count, fold=False)
        _save(files, "name_starts.npy", starts)


def _save(files: TextFiles, name: str, array: NDArray[Any]) -> None:
    with files.create(name) as file:
        np.save(file, array)


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
