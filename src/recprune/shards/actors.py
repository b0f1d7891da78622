"""The shards of an index as Ray actors, and who of them is well.

A shard has one or more replicas, each an actor in a process of its own. Ray restarts a process that
died, on another node if need be. Until then the next replica answers; where there is none, the call
waits. Whatever is wrong with a shard's folder is told as data: such an actor lives, and is well
again once its folder is.
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
from recprune.shards.answers import answer
from recprune.shards.folder import (
    Shard,
    ShardedFolder,
    load_shard,
    shard_folder,
)
from recprune.shards.lease import Lease
from recprune.types import VERSION, Float32Array, InputError, Json, RecpruneError

_Said = TypeVar("_Said")

_NAMESPACE = "recprune"  # of actors that processes share
_SILENT = 5.0  # seconds that a sign of life may take
_PROBE = 1.0  # seconds between questions to a replica that failed, whether it is well again


@dataclass(frozen=True)
class Refusal:
    """Why a shard cannot answer: the question is wrong, or its own folder is."""

    reason: str
    is_input_error: bool


class ShardActor:
    """Answers for one shard, in a process of the cluster."""

    def __init__(
        self,
        folder: str,
        manifest_sha256: str,
        lease: float | None = None,
        verify: bool = False,
    ) -> None:
        """With a lease, it ends itself when nobody has asked anything for so many seconds."""
        self._folder, self._manifest_sha256, self._verify = folder, manifest_sha256, verify
        self._index: Index | None = None
        self._lease = Lease(lease) if lease is not None else None

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
        with self._lease or nullcontext():
            return self._told_or_refused(ask)

    def _told_or_refused(self, ask: Callable[[Index], _Said]) -> _Said | Refusal:
        try:
            if self._index is None:  # not at the start: a folder may be mended while we live
                self._index = load_shard(self._folder, self._manifest_sha256, verify=self._verify)
            return ask(self._index)
        except RecpruneError as error:
            return Refusal(str(error), isinstance(error, InputError))


class Replicas:
    """The actors of one shard, as those see them who ask. Safe to share between threads."""

    def __init__(
        self, shard: Shard, actors: list[Any], make_again: Callable[[int], Any] | None = None
    ) -> None:
        """`make_again` is for actors that may be gone for good, and returns another one."""
        self.shard = shard
        self.actors = actors
        self.alarm = threading.Event()  # set when one has failed
        self._make_again = make_again
        self._gone: set[int] = set()
        self._beats: dict[int, tuple[Any, float]] = {}  # of `beat`, under way: since when
        self.heard = time.monotonic()  # when it last answered anything
        self._turn = itertools.count()
        self._lock = threading.Lock()
        self._given_up = ""  # why, if the last call waited for it in vain
        # Those that failed, each with a question that it will answer when it is well again, and
        # when that was asked. New ones have not shown yet that they are.
        self._suspects = {number: self._probe(number) for number in range(len(actors))}

    @property
    def is_lost(self) -> bool:
        """Whether none of them is known to be well."""
        return len(self._suspects) == len(self.actors)

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
        return self._given_up if self.is_lost else ""

    def answered(self, number: int) -> None:
        """Take note of a replica that is well."""
        self.heard = time.monotonic()
        self._given_up = ""
        if number in self._suspects:
            with self._lock:
                self._suspects.pop(number, None)

    def failed(self, number: int, actor: Any = None, *, is_gone: bool = False) -> None:
        """Take note of a replica that did not answer, and of whether Ray has given it up."""
        with self._lock:
            if actor is not None and self.actors[number] is not actor:
                return  # it has been replaced, and its failure says nothing of the new one
            if is_gone:
                self._gone.add(number)
            if number not in self._suspects:
                self._suspects[number] = self._probe(number)
        self.alarm.set()

    def give_up(self, reason: str) -> None:
        """Take note that waiting for any of them was in vain."""
        for number in range(len(self.actors)):
            self.failed(number)
        self._given_up = reason

    def beat(self) -> None:
        """Ask all of them for a sign of life, note who gave none, and replace who is gone."""
        import ray

        for number, (reference, asked) in list(self._beats.items()):
            if not ray.wait([reference], timeout=0)[0]:
                if time.monotonic() - asked > _SILENT:
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

    def mend(self) -> bool:
        """Replace those that are gone, trust those again that are well; say if any is not."""
        for number in list(self._gone):
            if self._make_again is None:
                break
            actor = self._make_again(number)
            with self._lock:
                self.actors[number] = actor
                self._gone.discard(number)
                self._beats.pop(number, None)  # whatever the old one says
                self._suspects[number] = self._probe(number)
        if self._suspects:
            self._look_after_suspects(_PROBE)
        return bool(self._suspects)

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
                except ray.exceptions.RayError as error:
                    is_well = False
                    error.__traceback__ = None  # a cycle that would keep the index of the caller
                    if isinstance(error, ray.exceptions.ActorDiedError):
                        self._gone.add(number)
                if is_well:
                    del self._suspects[number]
                elif time.monotonic() - asked >= pause:
                    self._suspects[number] = self._probe(number)
                    asked_anew = True
        return asked_anew


def start_actors(
    folder: ShardedFolder, replicas: int, nodes: list[str], lease: float | None, verify: bool
) -> list[Replicas]:
    """Start the actors of all shards: neighbours, and replicas of one shard, on different nodes.

    With a lease, they are shared: those that another process has started are used, and they live
    for as long as anybody asks them anything.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    actor_class: Any = ray.remote(ShardActor)

    def start(shard: Shard, place: int, replica: int) -> Any:
        # Soft: where that node is full or gone, any other will do.
        where = NodeAffinitySchedulingStrategy(nodes[(place + replica) % len(nodes)], soft=True)
        options: dict[str, Any] = {
            "num_cpus": 1, "max_restarts": -1, "scheduling_strategy": where,
        }  # fmt: skip
        if lease is not None:
            options |= {
                "name": _actor_name(folder, shard, replica, lease, verify),
                "namespace": _NAMESPACE,
                "lifetime": "detached",
                "get_if_exists": True,
            }
        path = str(shard_folder(folder.path, shard.number))
        return actor_class.options(**options).remote(path, shard.manifest_sha256, lease, verify)

    started = []
    for place, shard in enumerate(shard for shard in folder.shards if shard.num_items):
        again = partial(start, shard, place)
        actors = [again(replica) for replica in range(replicas)]
        started.append(Replicas(shard, actors, again if lease is not None else None))
    return started


def _actor_name(
    folder: ShardedFolder, shard: Shard, replica: int, lease: float, verify: bool
) -> str:
    """Return the name of an actor that does the very same for everybody who asks for it."""
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
    """Return what an actor said of itself, or nothing if it said nothing."""
    import ray

    try:
        said = ray.get(reference)
    except ray.exceptions.RayError:
        return None
    return None if isinstance(said, Refusal) else dict(said)


def described(shard: Shard, said: list[Json | None]) -> Json:
    """Put together what the replicas of a shard said."""
    present = [description for description in said if description is not None]
    return {
        "shard": shard.number,
        "first": shard.first,
        "items": shard.num_items,
        "bytes": present[0]["bytes"] if present else 0,
        "layout": present[0]["layout"] if present else None,
        "places": [{"node": entry["node"], "pid": entry["pid"]} for entry in present],
    }
