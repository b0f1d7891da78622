"""The supervisor: it accepts connections, deals them out to its workers, and leads their reloads.

Dealing connections out one by one keeps workers equally busy; from a socket that all accept from,
an idle one may take everything and keep it. Workers are forked from a process that has imported
what they need and opened nothing, so they share its memory, and the pages of the memory-mapped
index through the system's cache. A reload has two phases: every worker loads and checks the
folder, and only if all of them found the same one good, all swap it in. The supervisor has no
threads and waits in one place, for connections, signals and messages.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import NoReturn

from recprune.serve.keys import read_keys
from recprune.serve.logs import configure_logs, log, log_problem
from recprune.serve.messages import Message, from_line
from recprune.serve.settings import ServeSettings
from recprune.types import InputError, StorageError

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
_BACKLOG = 2048
_AT_ONCE = 64  # connections, before messages and signals have their turn
_END_S = 15.0  # until workers that do not end are killed
_MOST_PAUSE_S = 30.0  # between attempts to start a worker that cannot


@dataclass
class _Worker:
    """One process, and the line to it."""

    pid: int
    line: socket.socket  # for messages
    handover: socket.socket  # for connections
    is_ready: bool = False
    received: bytes = b""


@dataclass
class _Reload:
    """A reload that is under way."""

    number: int
    asked_by: dict[int, int]  # pid: how many of its requests it answers
    waiting_for: set[int]  # pids
    is_swapping: bool = False
    versions: set[str] = field(default_factory=set)
    problem: Message | None = None


def serve(settings: ServeSettings) -> None:
    """Serve until SIGTERM or SIGINT."""
    if settings.keys_file is not None:
        read_keys(settings.keys_file)  # before anything is started
    configure_logs()
    figures = tempfile.mkdtemp(prefix="recprune-metrics-")
    # prometheus_client reads it when it is imported, by the workers' modules below.
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = figures
    try:
        with _listen(settings) as listening:
            importlib.import_module("recprune.serve.worker")
            _Supervisor(settings, listening).run()
    finally:
        shutil.rmtree(figures, ignore_errors=True)


def _listen(settings: ServeSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((settings.host, settings.port))
        listening.listen(_BACKLOG)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        where = f"{settings.host}, port {settings.port}"
        raise InputError(f"cannot listen on {where}: {error.strerror or error}") from None
    return listening


class _Supervisor:
    """Starts workers, replaces those that die, and leads them through reloads."""

    def __init__(self, settings: ServeSettings, listening: socket.socket) -> None:
        self._settings = settings
        self._listening = listening
        self._workers: dict[int, _Worker] = {}
        self._selector = selectors.DefaultSelector()
        self._version = ""  # of what is served
        self._has_served = False
        self._asked: dict[int, int] = {}  # pid: requests for a reload; 0 is SIGHUP, or ourselves
        self._reload: _Reload | None = None
        self._reload_number = 0
        self._reloads = {"ok": 0, "failed": 0}
        self._failures = 0  # in a row, of workers that could not start
        self._start_at = 0.0  # not before this moment
        self._is_ending = False
        self._kill_at = 0.0

    def run(self) -> None:
        signals, wakeup = socket.socketpair()
        signals.setblocking(False)
        wakeup.setblocking(False)
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)  # it is enough that they wake us
        signal.set_wakeup_fd(wakeup.fileno())
        self._selector.register(signals, selectors.EVENT_READ)
        self._wakeup = (signals, wakeup)
        try:
            self._loop(signals)
        finally:
            signal.set_wakeup_fd(-1)
            for worker in self._workers.values():  # only where something went wrong
                os.kill(worker.pid, signal.SIGKILL)
                os.waitpid(worker.pid, 0)

    def _loop(self, signals: socket.socket) -> None:
        while not (self._is_ending and not self._workers):
            self._start_missing()
            for key, _ in self._selector.select(self._patience()):
                if key.fileobj is self._listening:
                    self._accept()
                elif key.fileobj is signals:
                    for number in signals.recv(4096):
                        self._handle_signal(number)
                elif key.data in self._workers:
                    self._receive(self._workers[key.data])
            self._begin_reload()
            if self._is_ending and time.monotonic() >= self._kill_at:
                for pid in self._workers:
                    os.kill(pid, signal.SIGKILL)

    def _patience(self) -> float | None:
        """Return for how long there is nothing to do."""
        now = time.monotonic()
        if self._is_ending:
            return max(0.05, self._kill_at - now)
        if len(self._workers) < self._settings.workers:
            return max(0.0, self._start_at - now)
        return None

    # Workers -------------------------------------------------------------------------------------

    def _start_missing(self) -> None:
        while (
            not self._is_ending
            and len(self._workers) < self._settings.workers
            and time.monotonic() >= self._start_at
        ):
            self._start_worker()

    def _start_worker(self) -> None:
        line, their_line = socket.socketpair()
        handover, their_handover = socket.socketpair()
        gc.collect()
        gc.freeze()  # a collection in a worker would write to pages that all share
        pid = os.fork()
        if pid == 0:
            self._workers[0] = _Worker(0, line, handover)
            self._become_worker(their_line, their_handover)
        their_line.close()
        their_handover.close()
        for ours in (line, handover):
            ours.setblocking(False)
        self._workers[pid] = _Worker(pid, line, handover)
        self._selector.register(line, selectors.EVENT_READ, pid)

    def _become_worker(self, line: socket.socket, handover: socket.socket) -> NoReturn:
        """Go on as a worker: nothing of the supervisor's may stay open here."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            self._selector.close()
            for opened in (self._listening, *self._wakeup):
                opened.close()
            for other in self._workers.values():  # else nobody would notice the supervisor's end
                other.line.close()
                other.handover.close()
            from recprune.serve.worker import run_worker

            code = run_worker(self._settings, line, handover)
        except BaseException as error:
            log_problem("worker failed", {}, error)
        finally:
            sys.stderr.flush()
            os._exit(code)  # what the supervisor would clean up is not ours to clean

    def _receive(self, worker: _Worker) -> None:
        try:
            received = worker.line.recv(1 << 16)
        except (BlockingIOError, ConnectionError):
            return
        if not received:  # it is about to end, and SIGCHLD will say so
            self._selector.unregister(worker.line)
            return
        *lines, worker.received = (worker.received + received).split(b"\n")
        for line in lines:
            self._handle(worker, from_line(line))

    def _handle(self, worker: _Worker, message: Message) -> None:
        if message.word == "ready":
            self._handle_ready(worker, message)
        elif message.word == "failed":
            if not self._has_served:
                raise StorageError(message.text)
            log_problem("worker cannot start", {"reason": message.text})
        elif message.word == "reload":
            self._asked[worker.pid] = self._asked.get(worker.pid, 0) + 1
        elif self._reload is not None and message.number == self._reload.number:
            self._continue_reload(self._reload, worker, message)

    def _handle_ready(self, worker: _Worker, message: Message) -> None:
        worker.is_ready = True
        self._failures = 0
        self._watch_for_connections()
        if not self._has_served:
            self._has_served = True
            self._version = message.version
            self._announce()
        elif message.version != self._version:
            self._asked[0] = 1  # the folder has been replaced: all shall serve the same

    def _announce(self) -> None:
        host, port = self._listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(f"serving on http://{shown}:{port}/", flush=True)  # noqa: T201
        log("serving", {"version": self._version, "workers": self._settings.workers})

    def _bury(self, worker: _Worker, status: int) -> None:
        """Forget a worker that has ended; another one will take its place."""
        from prometheus_client.multiprocess import mark_process_dead

        del self._workers[worker.pid]  # first of all: its number may soon be somebody else's
        watched = self._selector.get_map()
        if worker.line.fileno() in watched:
            self._receive(worker)  # what it said last
        if worker.line.fileno() in watched:
            self._selector.unregister(worker.line)
        worker.line.close()
        worker.handover.close()
        self._watch_for_connections()
        self._asked.pop(worker.pid, None)
        mark_process_dead(worker.pid)  # type: ignore[no-untyped-call]
        if self._reload is not None:
            self._reload.asked_by.pop(worker.pid, None)
            self._reload.waiting_for.discard(worker.pid)
            self._advance_reload(self._reload)
        if self._is_ending:
            return
        log_problem(
            "worker ended", {"worker": worker.pid, "code": os.waitstatus_to_exitcode(status)}
        )
        if not worker.is_ready:
            if not self._has_served:
                raise StorageError("a worker ended before it could serve; see the log above")
            self._failures += 1
            pause = min(_MOST_PAUSE_S, 0.5 * 2.0**self._failures)
            self._start_at = time.monotonic() + pause

    # Connections ---------------------------------------------------------------------------------

    def _watch_for_connections(self) -> None:
        """Accept while there is a worker to deal to; until then, clients wait in the backlog."""
        wanted = not self._is_ending and any(worker.is_ready for worker in self._workers.values())
        watched = self._listening.fileno() in self._selector.get_map()
        if wanted and not watched:
            self._selector.register(self._listening, selectors.EVENT_READ)
        elif watched and not wanted:
            self._selector.unregister(self._listening)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:  # no descriptors left, say: it passes
                log_problem("cannot accept", {"reason": error.strerror})
                return
            with connection:
                self._deal(connection)

    def _deal(self, connection: socket.socket) -> None:
        """Give a connection to the worker whose turn it is, or to the next that takes it."""
        for worker in list(self._workers.values()):
            if worker.is_ready:
                # Last in line from now on, whether it takes it or not.
                self._workers[worker.pid] = self._workers.pop(worker.pid)
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    socket.send_fds(worker.handover, [b"."], [connection.fileno()])
                    return

    # Signals -------------------------------------------------------------------------------------

    def _handle_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            for worker in list(self._workers.values()):
                pid, status = os.waitpid(worker.pid, os.WNOHANG)
                if pid:
                    self._bury(worker, status)
        elif number == signal.SIGHUP:
            self._asked[0] = 1
        elif number in (signal.SIGTERM, signal.SIGINT):
            if not self._is_ending:
                log("ending", {})
                self._is_ending = True
                self._watch_for_connections()
                self._kill_at = time.monotonic() + _END_S
                for pid in self._workers:
                    os.kill(pid, signal.SIGTERM)
            elif number == signal.SIGINT:
                self._kill_at = 0.0  # somebody insists

    # Reloads -------------------------------------------------------------------------------------

    def _begin_reload(self) -> None:
        ready = {pid for pid, worker in self._workers.items() if worker.is_ready}
        if self._reload is not None or not self._asked or not ready or self._is_ending:
            return
        self._reload_number += 1
        self._reload = _Reload(self._reload_number, self._asked, ready)
        self._asked = {}
        for pid in ready:
            self._send(pid, Message("load", number=self._reload_number))

    def _continue_reload(self, reload: _Reload, worker: _Worker, message: Message) -> None:
        if message.word == "not_loaded":
            reload.problem = message
        elif message.word == "loaded":
            reload.versions.add(message.version)
        reload.waiting_for.discard(worker.pid)
        self._advance_reload(reload)

    def _advance_reload(self, reload: _Reload) -> None:
        """Go on once every worker has answered."""
        if reload.waiting_for:
            return
        ready = {pid for pid, worker in self._workers.items() if worker.is_ready}
        if reload.is_swapping:
            self._finish_reload(reload, "", "")
        elif reload.problem is not None:
            self._finish_reload(reload, reload.problem.text, reload.problem.public_text)
        elif len(reload.versions) != 1:
            text = "the folder was replaced while it was read: try again"
            self._finish_reload(reload, text, text)
        else:
            reload.is_swapping = True
            reload.waiting_for = ready
            self._version = next(iter(reload.versions))
            self._reloads["ok"] += 1
            for pid in list(ready):
                self._send(pid, Message("swap", number=reload.number, reloads=self._reloads))

    def _finish_reload(self, reload: _Reload, text: str, public_text: str) -> None:
        self._reload = None
        if text:
            log_problem("reload failed", {"reason": text})
            self._reloads["failed"] += 1
            for pid in self._workers:
                self._send(pid, Message("drop", number=reload.number, reloads=self._reloads))
        else:
            log("reloaded", {"version": self._version, "workers": len(self._workers)})
        for pid, count in reload.asked_by.items():
            if pid in self._workers:
                outcome = Message(
                    "outcome",
                    version=self._version,
                    text=text,
                    public_text=public_text,
                    workers=len(self._workers),
                    answered=count,
                )
                self._send(pid, outcome)

    def _send(self, pid: int, message: Message) -> None:
        # One that ends, or hangs, hears nothing; nothing but its end will help.
        with contextlib.suppress(BlockingIOError, ConnectionError):
            self._workers[pid].line.sendall(message.to_line())
