"""How many requests a key is good for: token buckets that all workers take from.

A bucket holds as many tokens as come back in a second, one at least, and is kept as the moment at
which it will be full again (the generic cell rate algorithm): one number, in a file that all
workers have mapped. Two that take at the very same time may take one token together.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path

from recprune.serve.keys import StoredKey
from recprune.serve.logs import log_problem

_MOMENT = struct.Struct("d")  # by time.monotonic(), which is the same in all processes
_ROUNDING_S = 1e-6


class Rates:
    """The buckets of the keys that have a rate."""

    def __init__(self, folder: Path | None) -> None:
        """Keep them in a folder that all workers have; without one, in this process alone."""
        self._folder = folder
        self._buckets: dict[str, mmap.mmap] = {}  # by the hash of the key

    def take(self, key: StoredKey) -> float:
        """Take a token; return 0, or how many seconds it takes until there will be one."""
        if key.rate is None:
            return 0.0
        bucket = self._buckets.get(key.sha256)
        if bucket is None:
            bucket = self._buckets[key.sha256] = self._open(key.sha256)
        now, interval = time.monotonic(), 1.0 / key.rate
        room = interval * (max(1.0, key.rate) - 1.0)
        full_at: float = max(now, _MOMENT.unpack_from(bucket)[0])
        missing = full_at - now - room
        if missing > _ROUNDING_S:
            return missing
        _MOMENT.pack_into(bucket, 0, full_at + interval)
        return 0.0

    def _open(self, name: str) -> mmap.mmap:
        if self._folder is None:
            return mmap.mmap(-1, _MOMENT.size)
        try:
            return _mapped(self._folder / f"rate-{name}")
        except OSError as error:  # no room: then each worker counts for itself
            log_problem("rate not shared", {"reason": error.strerror})
            return mmap.mmap(-1, _MOMENT.size)


def _mapped(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if os.fstat(descriptor).st_size < _MOMENT.size:
            # Zeros: long ago. Written, as a mapped page without room ends who writes to it.
            os.pwrite(descriptor, bytes(_MOMENT.size), 0)
        return mmap.mmap(descriptor, _MOMENT.size)
    finally:
        os.close(descriptor)
