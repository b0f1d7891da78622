"""A file system of a few megabytes that can be filled up, for tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


class SmallDisk:
    """A tmpfs."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._filler = place / "filler"

    @contextmanager
    def full(self) -> Iterator[None]:
        """Leave no byte on it."""
        with self._filler.open("wb", buffering=0) as filler, suppress(OSError):
            os.posix_fallocate(filler.fileno(), 0, shutil.disk_usage(self.place).free)
            while True:
                filler.write(bytes(4096))
        try:
            yield
        finally:
            self._filler.unlink()


@contextmanager
def small_disk(place: Path, megabytes: int = 16) -> Iterator[SmallDisk]:
    """Mount one, or skip the test where that is not allowed."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tests", str(place)]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("needs mount")
    if done.returncode:
        pytest.skip("needs to be allowed to mount a file system")
    try:
        yield SmallDisk(place)
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)
