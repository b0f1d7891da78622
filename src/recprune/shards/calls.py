"""Calling the actors of shards: around dead ones, and with a batch through all shards."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from recprune.search.question import Question
from recprune.shards.actors import Refusal, Replicas
from recprune.shards.answers import (
    Answer,
    is_the_same_for_all,
    kth_scores,
    message_for,
    read_answer,
)
from recprune.shards.folder import Shard, ShardLostError
from recprune.types import RecpruneError

_TICK = 0.05  # seconds between checks for late answers
_PAUSE = 0.1  # seconds before a dead actor is called again
_LEAVE_SECONDS = 2.0  # for calls in flight to notice that the index is closed
_SHARED_BYTES = 100_000  # above this, Ray keeps an argument in its object store: once is enough


def calling(method: str, *arguments: Any) -> Callable[[Any], Any]:
    """Return the function that calls a method of the actor that it is given."""
    return lambda actor: getattr(actor, method).remote(*arguments)


@dataclass(eq=False)
class Call:
    """A call to one shard, whichever of its replicas answers."""

    replicas: Replicas
    send: Callable[[Any], Any]  # calls the actor that it is given; returns Ray's reference
    about: Any = None  # what the caller wants back with the answer
    untried: list[int] = field(default_factory=list)
    waiting: int = 0  # replicas that were called and have not answered yet
    refusals: dict[int, str] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    begun: float = 0.0
    called: float = 0.0  # when a replica was last called


class InFlight:
    """How many calls are in flight, and whether the index is still open for more.

    Apart from the index: a call must not keep an index alive that has no other reference.
    """

    def __init__(self) -> None:
        self.count = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def check(self) -> None:
        """Raise if there is nothing to be called any more."""
        import ray

        if self._is_closed:
            raise RecpruneError("the sharded index is closed")
        if not ray.is_initialized():
            raise ShardLostError("the connection to the cluster was closed")

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a call for the length of a `with` block."""
        with self._changed:
            self.check()
            self.count += 1
        try:
            yield
        finally:
            with self._changed:
                self.count -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Refuse further calls, and let those in flight end: a late one would connect Ray again."""
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: not self.count, _LEAVE_SECONDS)


def answers(todo: deque[Call], timeout: float, in_flight: InFlight) -> Iterator[tuple[Call, Any]]:
    """Make calls, and yield each with its answer, or with a `ShardLostError` in its place.

    `todo` may be added to meanwhile. A shard is lost when all its replicas refuse, or when it has
    been silent for `timeout` seconds.
    """
    with in_flight.counted():
        yield from _answers_counted(todo, timeout, in_flight)


def _answers_counted(
    todo: deque[Call], timeout: float, in_flight: InFlight
) -> Iterator[tuple[Call, Any]]:
    import ray

    unanswered: list[Call] = []
    pending: dict[Any, tuple[Call, int, Any]] = {}
    while todo or unanswered:
        in_flight.check()
        while todo:
            call = todo.popleft()
            still_lost = call.replicas.still_lost()
            if still_lost:
                yield call, ShardLostError(f"{call.replicas.shard} {still_lost}")
                continue
            call.untried, call.begun = call.replicas.order(), time.monotonic()
            unanswered.append(call)
        for call in list(unanswered):
            lost = _why_lost(call, timeout)
            if lost is not None:
                unanswered.remove(call)
                if len(call.refusals) < len(call.replicas.actors):
                    call.replicas.give_up(lost)
                yield call, ShardLostError(f"{call.replicas.shard} {lost}")
            elif (number := _next_replica(call, timeout)) is not None:
                call.called = time.monotonic()
                call.waiting += 1
                actor = call.replicas.actors[number]
                pending[call.send(actor)] = (call, number, actor)
        if not pending or todo:
            time.sleep(0 if todo or not unanswered else _TICK)
            continue
        # Wait for the first one, then take all that have come.
        done, _ = ray.wait(list(pending), num_returns=1, timeout=_TICK)
        if done and len(pending) > 1:
            done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0)
        for reference in done:
            call, number, actor = pending.pop(reference)
            call.waiting -= 1
            try:
                answered = ray.get(reference)
            except ray.exceptions.RayTaskError as error:  # another try would end the same way
                answered = Refusal(_last_line(error), is_input_error=False)
            except ray.exceptions.RayError as error:  # the actor, its node or the way there
                error.__traceback__ = None  # a cycle that would keep the index, see InFlight
                call.failures[number] = _first_line(error)
                is_gone = isinstance(error, ray.exceptions.ActorDiedError)
                call.replicas.failed(number, actor, is_gone=is_gone)
                continue
            if isinstance(answered, Refusal) and not answered.is_input_error:
                call.refusals[number] = answered.reason
                call.replicas.failed(number, actor)
                continue
            call.replicas.answered(number)
            if call in unanswered:  # no other replica was faster
                unanswered.remove(call)
                yield call, answered


def _next_replica(call: Call, timeout: float) -> int | None:
    """Return the replica to call now: the next one if those called fail or take too long."""
    waited = time.monotonic() - call.called
    if call.waiting and waited < timeout / len(call.replicas.actors):
        return None
    if not call.waiting and not call.untried and waited > _PAUSE:
        call.untried = list(call.failures)  # Ray may have restarted them
    return call.untried.pop(0) if call.untried else None


def _why_lost(call: Call, timeout: float) -> str | None:
    """Return why a shard is lost, None while a replica may still answer."""
    reasons = "; ".join(dict.fromkeys([*call.failures.values(), *call.refusals.values()]))
    if time.monotonic() - max(call.begun, call.replicas.last_answer) > timeout:
        return f"has said nothing for {timeout:g} s{': ' if reasons else ''}{reasons}"
    if call.waiting or call.untried:
        return None
    if len(call.refusals) == len(call.replicas.actors):
        return f"cannot answer: {reasons}"
    return None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


# A batch on its way ------------------------------------------------------------------------------


class QueryGroup:
    """Some queries of a batch, on their way from shard to shard."""

    def __init__(
        self, question: Question, rows: slice, steps: list[list[int]], started: list[Replicas]
    ) -> None:
        self.rows = rows
        self.answers: dict[Shard, Answer] = {}
        self.missing: dict[Shard, ShardLostError] = {}
        self.unanswered = 0  # calls of this round
        self.network_bytes = 0
        self._question, self._steps, self._started = question, steps, started

    def next_round(self) -> list[Call]:
        """Return the calls of the next round; none after the last."""
        import ray

        calls: list[Call] = []
        floors = kth_scores(list(self.answers.values()), self._question.k)
        message, shared = b"", None
        for place in self._steps.pop(0) if self._steps else []:
            replicas = self._started[place]
            if not message or not is_the_same_for_all(self._question):
                message = message_for(self._question, self.rows, replicas.shard, floors)
                shared = message if len(message) < _SHARED_BYTES else ray.put(message)
            self.network_bytes += len(message)
            calls.append(Call(replicas, calling("search", shared), about=self))
        self.unanswered = len(calls)
        return calls

    def take(self, call: Call, answered: bytes | ShardLostError) -> None:
        """Keep the answer of a shard, or that it gave none."""
        self.unanswered -= 1
        if isinstance(answered, ShardLostError):
            self.missing[call.replicas.shard] = answered
        else:
            self.answers[call.replicas.shard] = read_answer(answered)
            self.network_bytes += len(answered)
