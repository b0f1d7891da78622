"""A lock between processes: an empty file that one of them has locked."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recprune.types import StorageError


class LockedError(StorageError):
    """A lock that another process holds."""


_PAUSE = 0.002  # seconds until it is tried again


@contextmanager
def locked(path: Path, seconds: float) -> Iterator[None]:
    """Hold the lock; wait for it no longer than that. The system lets go of what a process held."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise StorageError(f"{path}: cannot be locked: {error.strerror or error}") from None
    try:
        deadline = time.monotonic() + seconds
        while not _try_to_lock(descriptor, path):
            if time.monotonic() >= deadline:
                raise LockedError(f"{path}: held by another process for {seconds:g} s")
            time.sleep(_PAUSE)
        yield
    finally:
        os.close(descriptor)


def _try_to_lock(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise StorageError(f"{path}: cannot be locked: {error.strerror or error}") from None
    return True
