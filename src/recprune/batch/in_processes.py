"""The parts of a batch answered by processes of this machine, each with a recommender of its own.

A worker process that is killed costs the parts that it had begun, which others then make.
"""

from __future__ import annotations

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

from recprune.batch.parts import PartReport, PartWriter, finished_part, noted_sha256
from recprune.batch.plan import BatchPlan
from recprune.types import RecpruneError

_MAX_CRASHES = 5  # of worker processes in a row, without a finished part between


def write_parts_in_processes(
    plan: BatchPlan, out: str | Path, parts: Sequence[int], workers: int
) -> Iterator[PartReport]:
    """Answer parts in worker processes; yield each report as soon as its part is in place."""
    left = set(parts)
    crashes = 0
    while crashes < _MAX_CRASHES:
        try:
            for report in _write_in_one_pool(plan, out, sorted(left), workers):
                left.discard(report.part)
                crashes = 0
                yield report
            return
        except BrokenProcessPool:
            crashes += 1  # on with new processes, and the parts that are still missing
            # A part may be in place although the word of it was lost with the pool.
            for part in sorted(left):
                found = finished_part(plan, Path(out), part, noted_sha256(Path(out), part))
                if found is not None:
                    left.discard(part)
                    crashes = 0
                    yield found
            if not left:
                return
    raise RecpruneError(
        f"worker processes were killed {_MAX_CRASHES} times in a row, with {len(left)} parts to go "
        "(is there enough memory for all workers?); the same command goes on"
    )


def _write_in_one_pool(
    plan: BatchPlan, out: str | Path, parts: Sequence[int], workers: int
) -> Iterator[PartReport]:
    context = multiprocessing.get_context("spawn")
    # Workers exit when our end closes: after an error, Ctrl-C, or when this process is killed.
    workers_end, our_end = context.Pipe(duplex=False)
    executor = ProcessPoolExecutor(workers, context, _start_worker, (plan, str(out), workers_end))
    waiting = iter(parts)
    try:
        running = _submitted(executor, islice(waiting, 2 * workers))
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            # Successes first: they must not be made again because another worker was killed.
            for future in sorted(done, key=lambda future: future.exception() is not None):
                yield future.result()
            running |= _submitted(executor, islice(waiting, len(done)))
    except BaseException:
        our_end.close()
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
        our_end.close()
        workers_end.close()


def _submitted(executor: ProcessPoolExecutor, parts: Iterator[int]) -> set[Future[PartReport]]:
    """Submit parts. Processes that this starts never see Ctrl-C, which this process acts on."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return {executor.submit(_work, part) for part in parts}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _WorkerState:
    """What a worker process was given, and what it has loaded."""

    given: tuple[BatchPlan, str]
    writer: PartWriter | None = None


def _start_worker(plan: BatchPlan, out: str, pipe: Connection) -> None:
    _WorkerState.given = (plan, out)
    threading.Thread(target=_exit_when_closed, args=(pipe,), daemon=True).start()


def _exit_when_closed(pipe: Connection) -> None:
    pipe.poll(None)  # nothing is ever sent: this returns when the other end is closed
    os._exit(1)


def _work(part: int) -> PartReport:
    if _WorkerState.writer is None:  # here, where an error reaches the caller
        _WorkerState.writer = PartWriter(*_WorkerState.given)
    return _WorkerState.writer.write(part)
