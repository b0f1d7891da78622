"""The shards of an index as Ray actors, and which of them are healthy.

A shard has one or more replicas, each an actor in a process of its own. Ray restarts a process that
died, on another node if need be. Until then the next replica answers; where there is none, the call
waits. What is wrong with a shard's folder is returned as data: such an actor lives on, and is
healthy again once its folder is.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from recprune.cluster import driver_id
from recprune.search.index import Index
from recprune.search.question import ScoreOverflowError
from recprune.shards.answers import answer
from recprune.shards.folder import (
    Shard,
    ShardedFolder,
    load_shard,
    shard_folder,
)
from recprune.shards.lease import Lease
from recprune.types import VERSION, Float32Array, InputError, Json, RecpruneError

_Answered = TypeVar("_Answered")

_NAMESPACE = "recprune"  # of actors that processes share
_LATE = 5.0  # seconds after which a heartbeat counts as unanswered
_PROBE = 1.0  # seconds between probes of a replica that failed


@dataclass(frozen=True)
class Refusal:
    """Why a shard cannot answer: the question is wrong, or its own folder is."""

    reason: str
    is_input_error: bool
    is_overflow: bool = False  # of the scores of a query, which the shard numbers in its own way


class ShardActor:
    """Answers for one shard, in a process of the cluster."""

    def __init__(
        self,
        folder: str,
        shard: Shard,
        lease: float | None = None,
        verify: bool = True,
    ) -> None:
        """With a lease, it ends itself after so many seconds without a call."""
        self._folder, self._shard, self._verify = folder, shard, verify
        self._index: Index | None = None
        self._lease = Lease(lease) if lease is not None else None

    def search(self, message: bytes) -> bytes | Refusal:
        return self._try(lambda index: answer(index, message))

    def score(self, queries: Float32Array, items: Any) -> Float32Array | Refusal:
        """Return the scores of given items, counted from the first one of this shard."""
        return self._try(lambda index: index.score(queries, items))

    def describe(self) -> Json | Refusal:
        """Say what the shard holds, and where it is."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        return self._try(lambda index: {**index.describe(), "node": node, "pid": os.getpid()})

    def _try(self, work: Callable[[Index], _Answered]) -> _Answered | Refusal:
        with self._lease or nullcontext():
            try:
                return work(self._loaded())
            except RecpruneError as error:
                return Refusal(
                    str(error),
                    isinstance(error, InputError),
                    isinstance(error, ScoreOverflowError),
                )

    def _loaded(self) -> Index:
        """Return the shard; loaded on the first call, so that a folder can still be mended."""
        if self._index is None:
            self._index = load_shard(self._folder, self._shard, verify=self._verify)
        return self._index


class Replicas:
    """The actors of one shard, as its callers see them. Safe to share between threads."""

    def __init__(
        self, shard: Shard, actors: list[Any], make_again: Callable[[int], Any] | None = None
    ) -> None:
        """`make_again` is for actors that may be gone for good, and returns another one."""
        self.shard = shard
        self.actors = actors
        self.failure = threading.Event()  # set when one has failed
        self._make_again = make_again
        self._gone: set[int] = set()
        # Unanswered heartbeats, and when they were sent.
        self._beats: dict[int, tuple[Any, float]] = {}
        self.last_answer = time.monotonic()
        self._turn = itertools.count()
        self._lock = threading.Lock()
        self._given_up = ""  # why, if the last call for it timed out
        # Replicas that failed, each with a probe that it answers when it is healthy again, and when
        # that was sent. New ones have not answered anything yet.
        self._suspects = {number: self._probe(number) for number in range(len(actors))}

    @property
    def is_lost(self) -> bool:
        """Whether none of them is known to be healthy."""
        return len(self._suspects) == len(self.actors)

    def order(self) -> list[int]:
        """Return the order in which to call them: in turn, and those that failed last."""
        if self._suspects:
            self._probe_suspects(_PROBE)
        first, count = next(self._turn), len(self.actors)
        turns = [(first + place) % count for place in range(count)]
        return sorted(turns, key=self._suspects.__contains__)

    def still_lost(self) -> str:
        """Return why waiting again is futile: the last call timed out, and no replica recovered."""
        import ray

        if self._given_up and self._probe_suspects(0.0):
            references = [reference for reference, _ in list(self._suspects.values())]
            ray.wait(references, timeout=_PROBE)  # the probes that were sent just now
            self._probe_suspects(_PROBE)
        return self._given_up if self.is_lost else ""

    def answered(self, number: int) -> None:
        """Note a replica that is healthy."""
        self.last_answer = time.monotonic()
        self._given_up = ""
        if number in self._suspects:
            with self._lock:
                self._suspects.pop(number, None)

    def failed(self, number: int, actor: Any = None, *, is_gone: bool = False) -> None:
        """Note a replica that did not answer, and whether Ray has given it up."""
        with self._lock:
            if actor is not None and self.actors[number] is not actor:
                return  # it has been replaced, which has not failed
            if is_gone:
                self._gone.add(number)
            if number not in self._suspects:
                self._suspects[number] = self._probe(number)
        self.failure.set()

    def give_up(self, reason: str) -> None:
        """Note that none of them answered in time."""
        for number in range(len(self.actors)):
            self.failed(number)
        self._given_up = reason

    def beat(self) -> None:
        """Send a heartbeat to all of them, and note which did not answer the last one."""
        import ray

        for number, (reference, asked) in list(self._beats.items()):
            if not ray.wait([reference], timeout=0)[0]:
                if time.monotonic() - asked > _LATE:
                    self.failed(number)
                continue
            del self._beats[number]
            try:
                answered = ray.get(reference)
            except ray.exceptions.RayError as error:
                self.failed(number, is_gone=isinstance(error, ray.exceptions.ActorDiedError))
            else:
                if isinstance(answered, Refusal):
                    self.failed(number)
        for number in range(len(self.actors)):
            if number not in self._suspects and number not in self._beats:
                self._beats[number] = self._probe(number)

    def replace_lost(self) -> bool:
        """Replace actors that are gone, trust healthy ones again; return whether any is left."""
        for number in list(self._gone):
            if self._make_again is None:
                break
            actor = self._make_again(number)
            with self._lock:
                self.actors[number] = actor
                self._gone.discard(number)
                self._beats.pop(number, None)  # of the old one
                self._suspects[number] = self._probe(number)
        if self._suspects:
            self._probe_suspects(_PROBE)
        return bool(self._suspects)

    def _probe(self, number: int) -> tuple[Any, float]:
        return self.actors[number].describe.remote(), time.monotonic()

    def _probe_suspects(self, pause: float) -> bool:
        """Trust replicas again that answered; probe the others anew, unless it is too soon.

        Return whether any was probed. One that Ray is restarting gets the probe when it is back.
        """
        import ray

        probed = False
        with self._lock:
            for number, (reference, asked) in list(self._suspects.items()):
                if not ray.wait([reference], timeout=0)[0]:
                    continue
                try:
                    is_healthy = not isinstance(ray.get(reference), Refusal)
                except ray.exceptions.RayError as error:
                    is_healthy = False
                    error.__traceback__ = None  # a cycle that would keep the index of the caller
                    if isinstance(error, ray.exceptions.ActorDiedError):
                        self._gone.add(number)
                if is_healthy:
                    del self._suspects[number]
                elif time.monotonic() - asked >= pause:
                    self._suspects[number] = self._probe(number)
                    probed = True
        return probed


def start_actors(
    folder: ShardedFolder, replicas: int, nodes: list[str], lease: float | None, verify: bool
) -> list[Replicas]:
    """Start the actors of all shards: neighbours, and replicas of one shard, on different nodes.

    With a lease, they are shared: those that another process has started are used, and they live
    as long as any process calls them.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    actor_class: Any = ray.remote(ShardActor)

    def start(shard: Shard, place: int, replica: int) -> Any:
        # Soft: where that node is full or gone, any other will do.
        where = NodeAffinitySchedulingStrategy(nodes[(place + replica) % len(nodes)], soft=True)
        options: dict[str, Any] = {
            "num_cpus": 1,
            "max_restarts": -1,
            "scheduling_strategy": where,
        }
        if lease is not None:
            options |= {
                "name": _actor_name(folder, shard, replica, lease, verify),
                "namespace": _NAMESPACE,
                "lifetime": "detached",
                "get_if_exists": True,
            }
        path = str(shard_folder(folder.path, shard.number))
        return actor_class.options(**options).remote(path, shard, lease, verify)

    started = []
    for place, shard in enumerate(shard for shard in folder.shards if shard.num_items):
        again = partial(start, shard, place)
        actors = [again(replica) for replica in range(replicas)]
        started.append(Replicas(shard, actors, again if lease is not None else None))
    return started


def _actor_name(
    folder: ShardedFolder, shard: Shard, replica: int, lease: float, verify: bool
) -> str:
    """Return a name that is the same wherever the same actor is wanted."""
    same = f"{VERSION} {folder.path} {folder.manifest_sha256} {lease} {verify}"
    return f"{hashlib.sha256(same.encode()).hexdigest()[:32]}-{shard.number}-{replica}"


def end_actors(started: list[Replicas], driver: str | None) -> None:
    """End all actors for good; those of a connection that was closed have ended with it."""
    import ray

    if driver is None or driver_id() != driver:
        return
    for replicas in started:
        for actor in replicas.actors:
            ray.kill(actor)


def got_description(reference: Any) -> Json | None:
    """Return an actor's description of itself, None if it gave none."""
    import ray

    try:
        answered = ray.get(reference)
    except ray.exceptions.RayError:
        return None
    return None if isinstance(answered, Refusal) else dict(answered)


def described(shard: Shard, descriptions: list[Json | None]) -> Json:
    """Put together the descriptions of a shard's replicas, None for those that gave none."""
    present = [description for description in descriptions if description is not None]
    return {
        "shard": shard.number,
        "first": shard.first,
        "items": shard.num_items,
        "bytes": present[0]["bytes"] if present else 0,
        "layout": present[0]["layout"] if present else None,
        "places": [{"node": entry["node"], "pid": entry["pid"]} for entry in present],
    }
