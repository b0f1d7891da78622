"""Worker processes on this machine: started, watched and ended together, as torchrun would.

Every worker has a line to its supervisor. It says there how it ended, if not well; and when the
supervisor is gone, however that came, the line is closed and the worker stops too.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from recprune.training.distributed import LostWorkerError
from recprune.training.signals import requests_to_stop
from recprune.types import InterruptedWorkError, Json, RecpruneError, needs_extra

with needs_extra("train"):
    import torch.distributed as dist

FAILED, INTERRUPTED = 2, 130  # exit codes, as the command line has them
_HOST = "127.0.0.1"
_GRACE = 15.0  # seconds for the others to end by themselves after one has failed
_GLANCE = 0.05  # seconds between two looks at the workers


@dataclass
class _Process:
    rank: int
    process: subprocess.Popen[bytes]
    line: socket.socket
    was_killed: bool = False  # by us

    def has_failed(self) -> bool:
        """Whether it has ended otherwise than well or as it was asked to."""
        return self.process.poll() not in (None, 0, INTERRUPTED)

    def last_words(self) -> Json | None:
        """Return what it said at its end, if anything."""
        self.line.setblocking(False)
        try:
            said = self.line.recv(1 << 20)
        except (BlockingIOError, ConnectionError):
            return None
        return json.loads(said) if said else None


def launch(module: str, job: Json, count: int) -> None:
    """Run `python -m module` as so many workers with a job, and return when all have done it.

    The module hands what it was called with to `as_worker`. What went wrong in a worker is raised
    here. The first request to stop is passed on, the second ends all at once.
    """
    # Its port is free because it has it already; and it outlives a first worker that dies.
    meeting_place = dist.TCPStore(  # type: ignore[attr-defined]
        _HOST, 0, is_master=True, wait_for_workers=False
    )
    with _requests_to_stop() as requests, ExitStack() as at_end:
        processes: list[_Process] = []
        for rank in range(count):
            started = _start(module, job, rank, count, meeting_place.port)
            at_end.callback(_end, started)
            processes.append(started)
        _watch(processes, requests)
        _raise_what_went_wrong(processes, was_asked=requests() > 0)


def _start(module: str, job: Json, rank: int, count: int, port: int) -> _Process:
    ours, theirs = socket.socketpair()
    environment = os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # nobody but us opens that port
    }
    threads = max(1, len(os.sched_getaffinity(0)) // count)
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with theirs:
        process = subprocess.Popen(  # noqa: S603
            # Without the current folder in its path, which is none of its business.
            [sys.executable, "-P", "-m", module, str(theirs.fileno()), json.dumps(job)],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the supervisor, who passes it on
        )
    return _Process(rank, process, ours)


def _watch(processes: list[_Process], requests: Callable[[], int]) -> None:
    """Wait until all have ended, and see to it that they do once one has failed."""
    passed_on = 0
    failed_at: float | None = None
    while any(process.process.poll() is None for process in processes):
        if requests() > passed_on:
            passed_on = requests()
            for process in processes:
                process.process.terminate()
        if failed_at is None and any(process.has_failed() for process in processes):
            failed_at = time.monotonic()
        if passed_on > 1 or (failed_at and time.monotonic() > failed_at + _GRACE):
            for process in processes:
                if process.process.poll() is None:
                    process.was_killed = True
                    process.process.kill()
        time.sleep(_GLANCE)


def _end(process: _Process) -> None:
    process.process.kill()
    process.process.wait()
    process.line.close()


def _raise_what_went_wrong(processes: list[_Process], was_asked: bool) -> None:
    """Say it once: what the first of them says that knows a cause, or who died without a word."""
    if all(process.process.returncode == 0 for process in processes):
        return
    said = [(process.rank, process.last_words()) for process in processes]
    words = [(rank, word["kind"], word["message"]) for rank, word in said if word is not None]
    for _, kind, message in words:
        if kind == "interrupted":
            raise InterruptedWorkError(message)
    if was_asked:
        raise InterruptedWorkError("interrupted")
    for rank, kind, message in words:
        if kind == "failed":
            raise RecpruneError(message if rank == 0 else f"worker {rank}: {message}")
    for process, (rank, word) in zip(processes, said, strict=True):
        code = process.process.returncode
        if word is None and code and not process.was_killed:
            how = (
                f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            )
            raise LostWorkerError(f"worker {rank} of {len(processes)} {how}")
    raise LostWorkerError(words[0][2] if words else "the workers had to be killed")


@contextmanager
def _requests_to_stop() -> Iterator[Callable[[], int]]:
    """Count the requests to stop instead of following them."""
    requests = 0

    def count() -> None:
        nonlocal requests
        requests += 1

    with requests_to_stop(count):
        yield lambda: requests


def as_worker(line_number: int, work: Callable[[], None]) -> int:
    """Do the work of one worker; tell the supervisor what went wrong, and return the exit code."""
    line = socket.socket(fileno=line_number)
    threading.Thread(target=_stop_with_supervisor, args=(line,), daemon=True).start()
    try:
        work()
    except (InterruptedWorkError, KeyboardInterrupt) as error:
        return _say(line, "interrupted", str(error) or "interrupted", INTERRUPTED)
    except LostWorkerError as error:
        return _say(line, "lost", str(error), FAILED)
    except (RecpruneError, OSError) as error:
        return _say(line, "failed", str(error), FAILED)
    except MemoryError as error:
        return _say(line, "failed", f"not enough memory: {error}", FAILED)
    return 0


def _say(line: socket.socket, kind: str, message: str, exit_code: int) -> int:
    with suppress(OSError):  # the supervisor may be gone
        line.sendall(json.dumps({"kind": kind, "message": message}).encode())
    return exit_code


def _stop_with_supervisor(line: socket.socket) -> None:
    with suppress(ConnectionError):
        line.recv(1)  # nothing is ever said; it returns when the other end is closed
    os.kill(os.getpid(), signal.SIGTERM)
