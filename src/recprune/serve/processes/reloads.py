"""Reloads, as the supervisor leads them, in two phases.

Every worker loads and checks the folder, and only if all of them found the same one good, all swap
it in. A worker that hangs is the supervisor's concern: its end counts as its answer. One that lives
and loads for too long makes the reload fail.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from recprune.serve.logs import log, log_problem
from recprune.serve.processes.crew import Crew, Worker
from recprune.serve.processes.messages import Message


@dataclass
class _RunningReload:
    """A reload that is under way."""

    number: int
    asked_by: dict[int, int]  # pid: how many of its requests it answers
    waiting_for: set[int]  # pids
    load_by: float  # by time.monotonic()
    is_swapping: bool = False
    versions: set[str] = field(default_factory=set)
    problem: Message | None = None


class Reloads:
    """At most one at a time; requests that come meanwhile are for the next one."""

    def __init__(self, crew: Crew, seconds: float, succeeded: Callable[[], None]) -> None:
        """`seconds` is what loading may take; `succeeded` is called after every good one."""
        self.version = ""  # of what is served
        self.number = 0  # of the latest that all workers had to swap in
        self.counts = {"ok": 0, "failed": 0}
        self._crew = crew
        self._seconds = seconds
        self._succeeded = succeeded
        self._asked: dict[int, int] = {}  # pid: how often; 0 is SIGHUP, or the supervisor itself
        self._begun = 0
        self._reload: _RunningReload | None = None

    def ask(self, pid: int) -> None:
        """Note a request for one."""
        self._asked[pid] = self._asked.get(pid, 0) + 1

    def turn(self) -> None:
        """Begin one that was asked for, or give up on one that takes too long."""
        reload = self._reload
        if reload is None:
            self._begin()
        elif not reload.is_swapping and time.monotonic() >= reload.load_by:
            text = f"a worker has not loaded the folder within {self._seconds:g} s"
            self._finish(reload, text, text)

    def check_new(self, message: Message) -> None:
        """Ask for a reload if what a new worker has loaded may not be what the others serve."""
        # The same folder is not enough: names may have changed since it was forked.
        if (message.version, message.number) != (self.version, self.number):
            self.ask(0)

    def handle(self, worker: Worker, message: Message) -> None:
        reload = self._reload
        if reload is None or message.number != reload.number:
            return
        if message.word == "not_loaded":
            reload.problem = message
        elif message.word == "loaded":
            reload.versions.add(message.version)
        elif message.version != self.version:  # it came too late to have anything to swap in
            self.ask(0)
        reload.waiting_for.discard(worker.pid)
        self._advance(reload)

    def forget(self, pid: int) -> None:
        """Do without a worker that has ended."""
        self._asked.pop(pid, None)
        if self._reload is not None:
            self._reload.asked_by.pop(pid, None)
            self._reload.waiting_for.discard(pid)
            self._advance(self._reload)

    def _ready(self) -> set[int]:
        return {pid for pid, worker in self._crew.items() if worker.is_ready}

    def _begin(self) -> None:
        ready = self._ready()
        if not self._asked or not ready:
            return
        self._begun += 1
        load_by = time.monotonic() + self._seconds
        self._reload = _RunningReload(self._begun, self._asked, ready, load_by)
        self._asked = {}
        self._send(ready, Message("load", number=self._begun))

    def _advance(self, reload: _RunningReload) -> None:
        """Go on once every worker has answered."""
        if reload.waiting_for:
            return
        if reload.is_swapping:
            self._finish(reload, "", "")
        elif reload.problem is not None:
            self._finish(reload, reload.problem.text, reload.problem.public_text)
        elif len(reload.versions) != 1:
            text = (
                "the folder was replaced while it was read: try again"
                if reload.versions
                else "every worker ended while it loaded the folder"
            )
            self._finish(reload, text, text)
        else:
            reload.is_swapping = True
            reload.waiting_for = self._ready()
            self.version, self.number = next(iter(reload.versions)), reload.number
            self.counts["ok"] += 1
            self._send(
                reload.waiting_for, Message("swap", number=reload.number, reloads=self.counts)
            )
            self._advance(reload)  # all may have ended meanwhile

    def _finish(self, reload: _RunningReload, text: str, public_text: str) -> None:
        self._reload = None
        if text:
            log_problem("reload failed", {"reason": text})
            self.counts["failed"] += 1
            self._send(set(self._crew), Message("drop", number=reload.number, reloads=self.counts))
        else:
            log("reloaded", {"version": self.version, "workers": len(self._crew)})
            self._succeeded()
        for pid, count in reload.asked_by.items():
            outcome = Message(
                "outcome",
                version=self.version,
                text=text,
                public_text=public_text,
                workers=len(self._crew),
                answered=count,
            )
            self._send({pid} & set(self._crew), outcome)

    def _send(self, pids: set[int], message: Message) -> None:
        for pid in pids:
            self._crew[pid].send(message)
