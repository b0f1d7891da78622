"""Worker processes on this machine: started, watched and ended together, as torchrun would.

A socket connects every worker with its supervisor. The worker reports there what went wrong; and
when the supervisor is gone, for whatever reason, its end is closed and the worker stops too.
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
from typing import Any, NoReturn

from recprune.system import available_cores, loopback
from recprune.training.distributed import LostWorkerError
from recprune.training.signals import requests_to_stop
from recprune.types import InterruptedWorkError, Json, RecpruneError, needs_extra

with needs_extra("train"):
    import torch.distributed as dist

FAILED, INTERRUPTED = 2, 130  # exit codes, as the command line has them
_HOST = "127.0.0.1"
_GRACE = 15.0  # seconds for the others to end by themselves after one has failed
_POLL_EVERY = 0.05  # seconds


@dataclass
class _WorkerProcess:
    """A worker, as its supervisor has it."""

    rank: int
    process: subprocess.Popen[bytes]
    connection: socket.socket
    was_killed: bool = False  # by the supervisor

    def has_failed(self) -> bool:
        """Whether it has ended otherwise than well or as it was asked to."""
        return self.process.poll() not in (None, 0, INTERRUPTED)

    def report(self) -> Json | None:
        """Return what it reported at its end, if anything."""
        self.connection.setblocking(False)
        try:
            received = self.connection.recv(1 << 20)
        except (BlockingIOError, ConnectionError):
            return None
        return json.loads(received) if received else None


def launch(module: str, job: Json, count: int) -> None:
    """Run `python -m module` as so many workers with a job, and return when all have done it.

    The module hands what it was called with to `as_worker`. What went wrong in a worker is raised
    here. The first request to stop is passed on, the second ends all at once.
    """
    # Opened here, so that no other program gets the port, and that it outlives a first worker.
    store = _open_store()
    with _requests_to_stop() as requests, ExitStack() as at_end:
        processes: list[_WorkerProcess] = []
        for rank in range(count):
            started = _start(module, job, rank, count, store.port)
            at_end.callback(_reap, started)
            processes.append(started)
        _watch(processes, requests)
        _raise_what_went_wrong(processes, was_asked=requests() > 0)


def _open_store() -> Any:
    """Open the place where workers find each other: of this machine, for this machine.

    Given a host alone, torch would listen on every address, and anybody could write to it.
    """
    listening = socket.create_server((_HOST, 0))
    port = listening.getsockname()[1]
    return dist.TCPStore(  # type: ignore[attr-defined]
        _HOST,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),  # torch closes it
    )


def _start(module: str, job: Json, rank: int, count: int, port: int) -> _WorkerProcess:
    ours, theirs = socket.socketpair()
    environment = os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the port is open already
    }
    threads = max(1, available_cores() // count)
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    environment.setdefault("GLOO_SOCKET_IFNAME", loopback())
    with theirs:
        process = subprocess.Popen(  # noqa: S603
            # Without the current folder in its path: nothing there is to be imported.
            [sys.executable, "-P", "-m", module, str(theirs.fileno()), json.dumps(job)],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the supervisor, which passes it on
        )
    return _WorkerProcess(rank, process, ours)


def _watch(processes: list[_WorkerProcess], requests: Callable[[], int]) -> None:
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
        time.sleep(_POLL_EVERY)


def _reap(process: _WorkerProcess) -> None:
    process.process.kill()
    process.process.wait()
    process.connection.close()


def _raise_what_went_wrong(processes: list[_WorkerProcess], was_asked: bool) -> None:
    """Raise one error: the first report with a cause, or which worker died without any."""
    if all(process.process.returncode == 0 for process in processes):
        return
    reports = [process.report() for process in processes]
    causes = [
        (process.rank, report["kind"], report["message"])
        for process, report in zip(processes, reports, strict=True)
        if report is not None
    ]
    for _, kind, message in causes:
        if kind == "interrupted":
            raise InterruptedWorkError(message)
    if was_asked:
        raise InterruptedWorkError("interrupted")
    for rank, kind, message in causes:
        if kind == "failed":
            raise RecpruneError(message if rank == 0 else f"worker {rank}: {message}")
    for process, report in zip(processes, reports, strict=True):
        code = process.process.returncode
        if report is None and code and not process.was_killed:
            how = (
                f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            )
            raise LostWorkerError(f"worker {process.rank} of {len(processes)} {how}")
    raise LostWorkerError(causes[0][2] if causes else "the workers had to be killed")


@contextmanager
def _requests_to_stop() -> Iterator[Callable[[], int]]:
    """Count the requests to stop instead of following them."""
    requests = 0

    def count() -> None:
        nonlocal requests
        requests += 1

    with requests_to_stop(count):
        yield lambda: requests


def as_worker(descriptor: int, work: Callable[[], None]) -> int:
    """Do the work of one worker; report what went wrong, and return the exit code."""
    connection = socket.socket(fileno=descriptor)
    threading.Thread(target=_stop_with_supervisor, args=(connection,), daemon=True).start()
    try:
        work()
    except (InterruptedWorkError, KeyboardInterrupt) as error:
        return _report(connection, "interrupted", str(error) or "interrupted", INTERRUPTED)
    except LostWorkerError as error:
        return _report(connection, "lost", str(error), FAILED)
    except (RecpruneError, OSError) as error:
        return _report(connection, "failed", str(error), FAILED)
    except MemoryError as error:
        return _report(connection, "failed", f"not enough memory: {error}", FAILED)
    return 0


def leave(exit_code: int) -> NoReturn:
    """End a worker's process at once, without destructors.

    Threads of torch's may still be under way when the interpreter takes everything down, and end
    the process with SIGABRT although all work is done.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _report(connection: socket.socket, kind: str, message: str, exit_code: int) -> int:
    with suppress(OSError):  # the supervisor may be gone
        connection.sendall(json.dumps({"kind": kind, "message": message}).encode())
    return exit_code


def _stop_with_supervisor(connection: socket.socket) -> None:
    with suppress(ConnectionError):
        connection.recv(1)  # the supervisor sends nothing: this returns when its end is closed
    os.kill(os.getpid(), signal.SIGTERM)
