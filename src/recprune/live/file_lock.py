"""A lock between processes: an empty file that one of them has locked."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from recprune.types import StorageError


class LockedError(StorageError):
    """A lock that another process holds."""


_PAUSE = 0.002  # seconds until it is tried again


@contextmanager
def locked(path: Path, seconds: float, stop: threading.Event | None = None) -> Iterator[None]:
    """Hold the lock; wait for it no longer than that, nor after `stop` is set.

    The system lets go of what a process held when that ends.
    """
    deadline = time.monotonic() + seconds
    while (descriptor := _try_to_lock(path)) is None:
        if time.monotonic() >= deadline:
            raise LockedError(f"{path}: held by another process for {seconds:g} s")
        if stop is not None and stop.is_set():
            raise LockedError(f"{path}: held by another process, and no longer waited for")
        time.sleep(_PAUSE)
    try:
        yield
    finally:
        # By hand: a process that was forked meanwhile has the descriptor too.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


@contextmanager
def held_alone(path: Path, refusal: str) -> Iterator[None]:
    """Hold a lock that is not waited for, a StorageError with `refusal` if another has it.

    Its file goes with it.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(path, 0.0))
        except LockedError:
            raise StorageError(refusal) from None
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _try_to_lock(path: Path) -> int | None:
    """Return the descriptor of a file that is locked now, None if another process has it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A file that was removed since is no lock: others make a new one.
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        raise StorageError(f"{path}: cannot be locked: {error.strerror or error}") from None
    os.close(descriptor)
    return None
