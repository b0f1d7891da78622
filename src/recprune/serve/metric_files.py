"""The files that workers count in, made before there is a worker, and used again by the next one.

prometheus_client has a file for each process and kind of figure, and maps it. A mapped page that
the disk has no room for ends the process that writes to it (SIGBUS): so room is taken beforehand.
Files belong to the places of workers, not to processes. A worker that takes the place of one that
has ended counts on from there, so that there are never more files than that.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from recprune.types import needs_extra

with needs_extra("serve"):
    from prometheus_client import values

SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # the variable by which the library is told where
# Bytes by the library's name of a file. Routes, statuses, stages and methods are known, so that it
# is known what they take: a quarter to a half of this.
_BYTES = {
    "counter": 64 << 10,
    "histogram": 256 << 10,
    "gauge_livemax": 16 << 10,
    "gauge_livemostrecent": 16 << 10,
    "gauge_livesum": 16 << 10,
}
_GAUGES = tuple(kind for kind in _BYTES if kind.startswith("gauge_"))
_NOTHING_USED = bytes(8)  # how a file begins that has no figures yet


def reserve_metric_files(folder: Path, workers: int) -> None:
    """Make the files of so many workers; OSError where there is no room for them."""
    folder.mkdir()
    for place in range(workers):
        for kind, size in _BYTES.items():
            # Written, not only made so long: else it would have no room of its own yet.
            _path(folder, kind, place).write_bytes(bytes(size))


def count_at(place: int) -> None:
    """Let this process count in the files of a place, from the first figure on."""
    values.ValueClass = values.MultiProcessValue(lambda: place)  # type: ignore[no-untyped-call]


def forget_gauges(folder: Path, place: int) -> None:
    """Forget what was the case in a worker that has ended; what it has counted stays."""
    for kind in _GAUGES:
        with suppress(OSError), _path(folder, kind, place).open("r+b") as file:
            file.write(_NOTHING_USED)


def _path(folder: Path, kind: str, place: int) -> Path:
    return folder / f"{kind}_{place}.db"
