"""The supervisor: it accepts connections, deals them out to its workers, and leads their reloads.

Dealing connections out one by one keeps workers equally busy, which no way did in which the kernel
divides them (`python -m benchmarks.dealing`). Workers are forked from a process that has imported
what they need and opened nothing, so they share its memory, and the pages of the memory-mapped
index through the system's cache; where a process must not fork, they are started from nothing
(`spawning`). One that ends, or gives no sign of life, is replaced. The supervisor has no threads
and waits in one place, for connections, signals and messages.
"""

from __future__ import annotations

import gc
import importlib
import math
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

from recprune.cluster import use_own_token
from recprune.serve.addresses import listen, url_of
from recprune.serve.configuration import ServeSettings, WorkerJob
from recprune.serve.engine.backend import sharded_folder
from recprune.serve.keys import read_keys
from recprune.serve.logs import configure_logs, log, log_problem
from recprune.serve.metric_files import SHARED_FOLDER, forget_gauges, reserve_metric_files
from recprune.serve.processes.crew import BEATS, Crew, Worker
from recprune.serve.processes.dealer import Dealer
from recprune.serve.processes.messages import Message
from recprune.serve.processes.reloads import Reloads
from recprune.serve.processes.spawning import spawn_worker
from recprune.system import allow_descriptors, can_fork
from recprune.types import InputError, StorageError

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
_END_S = 15.0  # until workers that do not end are killed
_MOST_PAUSE_S = 30.0  # between attempts to start a worker that cannot
_OWN_DESCRIPTORS = 128  # of a worker, for all that is not a connection


def serve(settings: ServeSettings) -> None:
    """Serve until SIGTERM or SIGINT."""
    if sharded_folder(settings) is not None:  # refuses options that do not go with the folder
        if settings.ray == "local":
            use_own_token()  # before Ray is imported
        from recprune.serve.deploying import serve_on_ray

        serve_on_ray(settings)
        return
    if settings.keys_file is not None:
        read_keys(settings.keys_file)  # before anything is started
    configure_logs()
    settings = _within_descriptors(settings)
    scratch = Path(tempfile.mkdtemp(prefix="recprune-serve-"))
    settings = settings.model_copy(update={"scratch": scratch})
    figures = scratch / "metrics"
    before = os.environ.get(SHARED_FOLDER)
    os.environ[SHARED_FOLDER] = str(figures)  # for workers, which inherit it
    try:
        _reserve(figures, settings.workers)
        with listen(settings.host, settings.port) as listening:
            if can_fork():
                importlib.import_module("recprune.serve.processes.worker")
            _Supervisor(settings, listening).run()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        # Else whatever this process starts next would count in a folder that is gone.
        if before is None:
            del os.environ[SHARED_FOLDER]
        else:
            os.environ[SHARED_FOLDER] = before


def _reserve(figures: Path, workers: int) -> None:
    """Have room for what the workers will count, or say that there is none."""
    try:
        reserve_metric_files(figures, workers)
    except OSError as error:
        raise StorageError(f"{figures}: cannot be written: {error.strerror}") from None


def _within_descriptors(settings: ServeSettings) -> ServeSettings:
    """Let this process and its workers open what the system allows, and promise no more."""
    most = allow_descriptors()
    limits = settings.limits
    if most is None or limits.connections <= most - _OWN_DESCRIPTORS:
        return settings
    room = most - _OWN_DESCRIPTORS
    if room < 1:
        raise InputError(
            f"a process may open {most} files here (ulimit -n), which is too few to serve: "
            f"allow {limits.connections + _OWN_DESCRIPTORS}"
        )
    log_problem("fewer connections", {"asked": limits.connections, "allowed": room, "files": most})
    fewer = limits.model_copy(update={"connections": room})
    return settings.model_copy(update={"limits": fewer})


class _Supervisor:
    """Starts workers, replaces those that die or hang, and leads them through reloads."""

    def __init__(self, settings: ServeSettings, listening: socket.socket) -> None:
        self._settings = settings
        self._address = listening.getsockname()[:2]
        self._crew: Crew = {}
        self._selector = selectors.DefaultSelector()
        self._dealer = Dealer(listening, self._selector, self._crew)
        self._reloads = Reloads(self._crew, settings.limits.reload_seconds, self._try_at_once)
        self._has_served = False
        self._failures = 0  # in a row, of workers that could not start
        self._start_at = 0.0  # not before this moment
        self._beat_at = 0.0
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
            for worker in self._crew.values():  # only where something went wrong
                os.kill(worker.pid, signal.SIGKILL)
                os.waitpid(worker.pid, 0)

    def _loop(self, signals: socket.socket) -> None:
        while not (self._is_ending and not self._crew):
            if not self._is_ending:
                self._start_missing()
                self._dealer.turn()
            for key, _ in self._selector.select(self._patience()):
                if key.fileobj is signals:
                    for number in signals.recv(4096):
                        self._handle_signal(number)
                elif key.data in self._crew:
                    self._receive(self._crew[key.data])
                elif key.data is None and not self._is_ending:
                    self._dealer.accept()
            if not self._is_ending:
                self._reloads.turn()
                self._beat()
            elif time.monotonic() >= self._kill_at:
                for pid in self._crew:
                    os.kill(pid, signal.SIGKILL)

    def _patience(self) -> float:
        """Return for how long there is nothing to do."""
        now = time.monotonic()
        if self._is_ending:
            return max(0.05, self._kill_at - now)
        moments = [self._beat_at]
        if self._dealer.again_at is not None:
            moments.append(self._dealer.again_at)
        if len(self._crew) < self._settings.workers:
            moments.append(self._start_at)
        return max(0.0, min(moments) - now)

    # Workers -------------------------------------------------------------------------------------

    def _start_missing(self) -> None:
        while len(self._crew) < self._settings.workers and time.monotonic() >= self._start_at:
            self._start_worker()

    def _start_worker(self) -> None:
        line, their_line = socket.socketpair()
        handover, their_handover = socket.socketpair()
        taken = {worker.place for worker in self._crew.values()}
        place = next(place for place in range(self._settings.workers) if place not in taken)
        # The first ones may take the time that they need: no client waits for an answer yet.
        patience = self._settings.limits.reload_seconds if self._has_served else math.inf
        if can_fork():
            gc.collect()
            gc.freeze()  # a collection in a worker would write to pages that all share
            pid = os.fork()
        else:
            pid = spawn_worker(self._job(place), line, their_line, their_handover)
        if pid == 0:
            line.close()
            handover.close()
            self._become_worker(place, their_line, their_handover)
        ready_by = time.monotonic() + patience
        self._crew[pid] = Worker(pid, line, handover, their_handover, ready_by, place)
        their_line.close()
        for ours in (line, handover, their_handover):
            ours.setblocking(False)
        self._selector.register(line, selectors.EVENT_READ, pid)

    def _become_worker(self, place: int, line: socket.socket, handover: socket.socket) -> NoReturn:
        """Go on as a worker: nothing of the supervisor's may stay open here."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            self._selector.close()
            self._dealer.close()
            for end in self._wakeup:
                end.close()
            for other in self._crew.values():  # else the supervisor's end would go unnoticed
                other.close()
            from recprune.serve.processes.worker import run_worker

            code = run_worker(self._job(place), line, handover)
        except BaseException as error:
            log_problem("worker failed", {}, error)
        finally:
            sys.stderr.flush()
            os._exit(code)  # what the supervisor would clean up is not ours to clean

    def _job(self, place: int) -> WorkerJob:
        return WorkerJob(self._settings, self._reloads.number, self._reloads.counts, place)

    def _receive(self, worker: Worker) -> None:
        messages = worker.receive()
        if messages is None:  # it is about to end, and SIGCHLD will say so
            self._selector.unregister(worker.line)
        for message in messages or []:
            self._handle(worker, message)

    def _handle(self, worker: Worker, message: Message) -> None:
        if message.word == "ready":
            self._handle_ready(worker, message)
        elif message.word == "failed":
            if not self._has_served:
                raise StorageError(message.text)
            log_problem("worker cannot start", {"reason": message.text})
        elif message.word == "pong":
            worker.missed_beats = 0
        elif message.word == "reload":
            self._reloads.ask(worker.pid)
        else:
            self._reloads.handle(worker, message)

    def _handle_ready(self, worker: Worker, message: Message) -> None:
        worker.is_ready = True
        self._failures = 0
        if self._has_served:
            self._reloads.check_new(message)
        else:
            self._has_served = True
            self._reloads.version = message.version
            self._announce()

    def _announce(self) -> None:
        print(f"serving on {url_of(*self._address)}", flush=True)  # noqa: T201
        log("serving", {"version": self._reloads.version, "workers": self._settings.workers})

    def _beat(self) -> None:
        """Ask for a sign of life now and then, and end those that have given none for too long.

        Beats are counted, not seconds: a machine that was suspended has no hung workers.
        """
        now = time.monotonic()
        if now < self._beat_at:
            return
        self._beat_at = now + self._settings.limits.silent_seconds / BEATS
        for worker in self._crew.values():
            if worker.missed_beats >= BEATS or (not worker.is_ready and now >= worker.ready_by):
                log_problem("worker hangs", {"worker": worker.pid})
                os.kill(worker.pid, signal.SIGKILL)
            elif worker.is_ready:
                worker.missed_beats += 1
                worker.send(Message("ping"))
                if not worker.takes_connections:
                    self._dealer.take_back(worker)

    def _reap(self, worker: Worker, status: int) -> None:
        """Forget a worker that has ended; another one will take its place."""
        del self._crew[worker.pid]  # first of all: its number may soon be another process's
        watched = self._selector.get_map()
        if worker.line.fileno() in watched:
            self._receive(worker)  # its last messages
        if worker.line.fileno() in watched:
            self._selector.unregister(worker.line)
        self._dealer.take_back(worker)
        worker.close()
        forget_gauges(Path(os.environ[SHARED_FOLDER]), worker.place)
        if self._is_ending:
            return
        self._reloads.forget(worker.pid)
        log_problem(
            "worker ended", {"worker": worker.pid, "code": os.waitstatus_to_exitcode(status)}
        )
        if not worker.is_ready:
            if not self._has_served:
                raise StorageError("a worker ended before it could serve; see the log above")
            self._failures += 1
            pause = min(_MOST_PAUSE_S, 0.5 * 2.0**self._failures)
            self._start_at = time.monotonic() + pause

    def _try_at_once(self) -> None:
        """Start what could not be started: the folder is good again."""
        self._failures = 0
        self._start_at = 0.0

    # Signals -------------------------------------------------------------------------------------

    def _handle_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            for worker in list(self._crew.values()):
                pid, status = os.waitpid(worker.pid, os.WNOHANG)
                if pid:
                    self._reap(worker, status)
        elif number == signal.SIGHUP:
            self._reloads.ask(0)
        elif number in (signal.SIGTERM, signal.SIGINT):
            if not self._is_ending:
                log("ending", {})
                self._is_ending = True
                self._dealer.end()
                self._kill_at = time.monotonic() + _END_S
                for pid in self._crew:
                    os.kill(pid, signal.SIGTERM)
            elif number == signal.SIGINT:
                self._kill_at = 0.0  # a second Ctrl-C
