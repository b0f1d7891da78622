"""The parts of a batch answered by processes of this machine, each with a recommender of its own.

A worker process that is killed costs the parts that it had begun, which others then make.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path

from recprune.batch.parts import PartReport, PartWriter
from recprune.batch.plan import BatchPlan
from recprune.search.methods import native_settings
from recprune.types import RecpruneError

_DEATHS = 5  # of worker processes without a finished part between, until it is no accident


def write_parts_in_processes(
    plan: BatchPlan, out: str | Path, parts: Sequence[int], workers: int
) -> Iterator[PartReport]:
    """Answer parts in worker processes; yield each report as soon as its part is in place."""
    left = set(parts)
    deaths = 0
    while deaths < _DEATHS:
        try:
            for report in _write_in_one_pool(plan, out, sorted(left), workers):
                left.discard(report.part)
                deaths = 0
                yield report
            return
        except BrokenProcessPool:
            deaths += 1  # on with new processes, and the parts that are still missing
    raise RecpruneError(
        f"worker processes were killed {_DEATHS} times in a row, with {len(left)} parts to go "
        "(is there enough memory for all workers?); the same command goes on"
    )


def _write_in_one_pool(
    plan: BatchPlan, out: str | Path, parts: Sequence[int], workers: int
) -> Iterator[PartReport]:
    context = multiprocessing.get_context("spawn")
    # Workers end themselves when our end closes: after an error, Ctrl-C, or our own death.
    leash, hold = context.Pipe(duplex=False)
    executor = ProcessPoolExecutor(workers, context, _start_worker, (plan, str(out), leash))
    waiting = iter(parts)
    try:
        running = _submitted(executor, islice(waiting, 2 * workers))
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            # What has succeeded first: it is not to be done again if another was killed.
            for future in sorted(done, key=lambda future: future.exception() is not None):
                yield future.result()
            running |= _submitted(executor, islice(waiting, len(done)))
    except BaseException:
        hold.close()
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
        hold.close()
        leash.close()


def _submitted(executor: ProcessPoolExecutor, parts: Iterator[int]) -> set[Future[PartReport]]:
    """Hand parts out. Processes that this starts never see Ctrl-C, which is for us to act on."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return {executor.submit(_work, part) for part in parts}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _WorkerState:
    """What a worker process has been told, and what it has loaded."""

    given: tuple[BatchPlan, str]
    writer: PartWriter | None = None

    @classmethod
    def release(cls) -> None:
        """Drop native objects while there is an interpreter: their module complains otherwise."""
        cls.writer = None
        native_settings.cache_clear()


def _start_worker(plan: BatchPlan, out: str, leash: Connection) -> None:
    _WorkerState.given = (plan, out)
    atexit.register(_WorkerState.release)
    threading.Thread(target=_end_with, args=(leash,), daemon=True).start()


def _end_with(leash: Connection) -> None:
    leash.poll(None)  # nothing is ever sent: this returns when the other end is closed
    os._exit(1)


def _work(part: int) -> PartReport:
    if _WorkerState.writer is None:  # here, where an error has a way back
        _WorkerState.writer = PartWriter(*_WorkerState.given)
    return _WorkerState.writer.write(part)
