"""The shards of an index as Ray actors: one that answers, and how a dead one is got around.

A shard has one or more replicas, each an actor in a process of its own. Ray restarts a process that
died, on another node if need be. Until then the next replica answers; where there is none, the call
waits. Whatever is wrong with a shard's folder is told as data: such an actor lives, and is well
again once its folder is.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from recprune.index import Index
from recprune.shards.answers import Answer, Question, answer, kth_scores, read_answer
from recprune.shards.folder import Shard, ShardLostError, load_shard, shard_folder
from recprune.types import Float32Array, InputError, Json, RecpruneError

_Said = TypeVar("_Said")

_TICK = 0.05  # seconds between looks at what is late
_PAUSE = 0.1  # seconds before a dead actor is asked again
_SHARED_BYTES = 100_000  # above this, Ray keeps an argument in its object store: once is enough
_PROBE = 1.0  # seconds between questions to a replica that failed, whether it is well again


@dataclass(frozen=True)
class Refusal:
    """Why a shard cannot answer: the question is wrong, or its own folder is."""

    reason: str
    is_input_error: bool


class ShardActor:
    """Answers for one shard, in a process of the cluster."""

    def __init__(self, folder: str, manifest_sha256: str) -> None:
        self._folder, self._manifest_sha256 = folder, manifest_sha256
        self._index: Index | None = None

    def search(self, message: bytes) -> bytes | Refusal:
        """Return the best items of this shard."""
        return self._told(lambda index: answer(index, message))

    def score(self, queries: Float32Array, items: Any) -> Float32Array | Refusal:
        """Return the scores of given items, counted from the first one of this shard."""
        return self._told(lambda index: index.score(queries, items))

    def describe(self) -> Json | Refusal:
        """Say what the shard holds, and where it is."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        return self._told(lambda index: {**index.describe(), "node": node, "pid": os.getpid()})

    def _told(self, ask: Callable[[Index], _Said]) -> _Said | Refusal:
        try:
            if self._index is None:  # not at the start: a folder may be mended while we live
                self._index = load_shard(self._folder, self._manifest_sha256)
            return ask(self._index)
        except RecpruneError as error:
            return Refusal(str(error), isinstance(error, InputError))


class Replicas:
    """The actors of one shard, as those see them who ask. Safe to share between threads."""

    def __init__(self, shard: Shard, actors: list[Any]) -> None:
        self.shard = shard
        self.actors = actors
        self.heard = time.monotonic()  # when it last answered anything
        self._turn = itertools.count()
        self._lock = threading.Lock()
        self._given_up = ""  # why, if the last call waited for it in vain
        # Those that failed, each with a question that it will answer when it is well again, and
        # when that was asked. New ones have not shown yet that they are.
        self._suspects = {number: self._probe(number) for number in range(len(actors))}

    def order(self) -> list[int]:
        """Return whom to ask first, second, …: in turn, and those that failed last."""
        if self._suspects:
            self._look_after_suspects(_PROBE)
        first, count = next(self._turn), len(self.actors)
        turns = [(first + place) % count for place in range(count)]
        return sorted(turns, key=self._suspects.__contains__)

    def still_lost(self) -> str:
        """Say why there is no sense in waiting again: it was in vain, and nobody has come back."""
        import ray

        if self._given_up and self._look_after_suspects(0.0):
            references = [reference for reference, _ in list(self._suspects.values())]
            ray.wait(references, timeout=_PROBE)  # those that were asked just now
            self._look_after_suspects(_PROBE)
        everybody = len(self._suspects) == len(self.actors)
        return self._given_up if everybody else ""

    def answered(self, number: int) -> None:
        """Take note of a replica that is well."""
        self.heard = time.monotonic()
        self._given_up = ""
        if number in self._suspects:
            with self._lock:
                self._suspects.pop(number, None)

    def failed(self, number: int) -> None:
        """Take note of a replica that did not answer."""
        with self._lock:
            if number not in self._suspects:
                self._suspects[number] = self._probe(number)

    def give_up(self, reason: str) -> None:
        """Take note that waiting for any of them was in vain."""
        for number in range(len(self.actors)):
            self.failed(number)
        self._given_up = reason

    def _probe(self, number: int) -> tuple[Any, float]:
        return self.actors[number].describe.remote(), time.monotonic()

    def _look_after_suspects(self, pause: float) -> bool:
        """Trust those again that are well; ask the others anew, unless it is too soon.

        Say whether any was asked. One that Ray is restarting keeps the question until it is back.
        """
        import ray

        asked_anew = False
        with self._lock:
            for number, (reference, asked) in list(self._suspects.items()):
                if not ray.wait([reference], timeout=0)[0]:
                    continue
                try:
                    is_well = not isinstance(ray.get(reference), Refusal)
                except ray.exceptions.RayError:
                    is_well = False
                if is_well:
                    del self._suspects[number]
                elif time.monotonic() - asked >= pause:
                    self._suspects[number] = self._probe(number)
                    asked_anew = True
        return asked_anew


def start_actors(
    folder: Path, shards: list[Shard], replicas: int, nodes: list[str]
) -> list[Replicas]:
    """Start the actors of all shards: neighbours, and replicas of one shard, on different nodes."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    actor_class: Any = ray.remote(ShardActor)
    started = []
    for place, shard in enumerate(shards):
        actors = []
        for replica in range(replicas):
            # Soft: where that node is full or gone, any other will do.
            where = NodeAffinitySchedulingStrategy(nodes[(place + replica) % len(nodes)], soft=True)
            options = actor_class.options(num_cpus=1, max_restarts=-1, scheduling_strategy=where)
            actors.append(
                options.remote(str(shard_folder(folder, shard.number)), shard.manifest_sha256)
            )
        started.append(Replicas(shard, actors))
    return started


def end_actors(started: list[Replicas]) -> None:
    """End all actors for good."""
    import ray

    for replicas in started:
        for actor in replicas.actors:
            ray.kill(actor)


# Asking ------------------------------------------------------------------------------------------


def asking(method: str, *arguments: Any) -> Callable[[Any], Any]:
    """Return the function that asks an actor this."""
    return lambda actor: getattr(actor, method).remote(*arguments)


@dataclass(eq=False)
class Call:
    """A question to one shard, whoever of its replicas answers."""

    replicas: Replicas
    send: Callable[[Any], Any]  # asks the actor that it is given; returns Ray's reference
    about: Any = None  # whatever the caller wants to know when the answer comes
    untried: list[int] = field(default_factory=list)
    waiting: int = 0  # replicas that were asked and have said nothing yet
    refusals: dict[int, str] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    begun: float = 0.0
    asked: float = 0.0  # when somebody was last asked


def answers(todo: deque[Call], timeout: float) -> Iterator[tuple[Call, Any]]:
    """Ask, and yield every call with its answer, or with a `ShardLostError` in its place.

    `todo` may be added to meanwhile. A shard is lost when all its replicas refuse, or when it has
    been silent for `timeout` seconds.
    """
    import ray

    unanswered: list[Call] = []
    pending: dict[Any, tuple[Call, int]] = {}
    while todo or unanswered:
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
            elif (number := _whom_to_ask(call, timeout)) is not None:
                call.asked = time.monotonic()
                call.waiting += 1
                pending[call.send(call.replicas.actors[number])] = (call, number)
        if not pending or todo:
            time.sleep(0 if todo or not unanswered else _TICK)
            continue
        # Until the first one is there; then whoever else is.
        done, _ = ray.wait(list(pending), num_returns=1, timeout=_TICK)
        if done and len(pending) > 1:
            done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0)
        for reference in done:
            call, number = pending.pop(reference)
            call.waiting -= 1
            try:
                answered = ray.get(reference)
            except ray.exceptions.RayTaskError as error:  # asking again would end the same way
                answered = Refusal(_last_line(error), is_input_error=False)
            except ray.exceptions.RayError as error:  # the actor, its node or the way there
                call.failures[number] = _first_line(error)
                call.replicas.failed(number)
                continue
            if isinstance(answered, Refusal) and not answered.is_input_error:
                call.refusals[number] = answered.reason
                call.replicas.failed(number)
                continue
            call.replicas.answered(number)
            if call in unanswered:  # no other replica was faster
                unanswered.remove(call)
                yield call, answered


def _whom_to_ask(call: Call, timeout: float) -> int | None:
    """Return the replica to ask now: the next one if nobody answers, or takes too long."""
    waited = time.monotonic() - call.asked
    if call.waiting and waited < timeout / len(call.replicas.actors):
        return None
    if not call.waiting and not call.untried and waited > _PAUSE:
        call.untried = list(call.failures)  # Ray may have restarted them
    return call.untried.pop(0) if call.untried else None


def _why_lost(call: Call, timeout: float) -> str | None:
    """Say why a shard is lost, or nothing as long as there is hope."""
    reasons = "; ".join(dict.fromkeys([*call.failures.values(), *call.refusals.values()]))
    if time.monotonic() - max(call.begun, call.replicas.heard) > timeout:
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


class Part:
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
            if not message or not self._question.is_the_same_for_all:
                message = self._question.message(self.rows, replicas.shard, floors)
                shared = message if len(message) < _SHARED_BYTES else ray.put(message)
            self.network_bytes += len(message)
            calls.append(Call(replicas, asking("search", shared), about=self))
        self.unanswered = len(calls)
        return calls

    def take(self, call: Call, answered: bytes | ShardLostError) -> None:
        """Keep what a shard said, or that it said nothing."""
        self.unanswered -= 1
        if isinstance(answered, ShardLostError):
            self.missing[call.replicas.shard] = answered
        else:
            self.answers[call.replicas.shard] = read_answer(answered)
            self.network_bytes += len(answered)
