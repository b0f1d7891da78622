"""What the service takes of memory, sampled: shared pages are divided by those that share them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from benchmarks.proc import memory
from benchmarks.siege.places import Service

_EVERY_S = 2.0


@dataclass(frozen=True)
class Sample:
    """Bytes at a moment, by time.monotonic()."""

    moment: float
    all_bytes: int  # of all processes of the service, PSS
    spared_bytes: int  # private ones, of the worker that is not killed; 0 once it is
    workers: int


class Memory:
    """Samples every few seconds."""

    def __init__(self, service: Service, spared: int) -> None:
        self._service = service
        self._spared = spared
        self.samples: list[Sample] = []

    @contextmanager
    def sampling(self) -> Iterator[Memory]:
        end = threading.Event()

        def run() -> None:
            while not end.wait(_EVERY_S):
                self.sample()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield self
        finally:
            end.set()
            thread.join()

    def sample(self) -> None:
        workers = self._service.workers
        every = [_bytes(pid, "Pss:") for pid in (self._service.pid, *workers)]
        spared = _bytes(self._spared, "Private_") if self._spared in workers else 0
        self.samples.append(
            Sample(time.monotonic(), sum(every), spared, sum(size > 0 for size in every[1:]))
        )


def _bytes(pid: int, beginning: str) -> int:
    try:
        return memory(pid, beginning)
    except OSError:  # it has ended meanwhile
        return 0


def slope(moments: Sequence[float], values: Sequence[float]) -> float:
    """Return the growth in ten minutes by Theil and Sen: the median of the slopes of all pairs.

    Workers that are killed and started are far outliers, which a least-squares line would follow.
    """
    times, sizes = np.array(moments), np.array(values)
    first, second = np.triu_indices(len(times), 1)
    if not len(first):
        return 0.0
    return 600.0 * float(np.median((sizes[second] - sizes[first]) / (times[second] - times[first])))
