"""The index over several nodes: its shards are Ray actors, and answers are those of one index."""

from __future__ import annotations

import itertools
import os
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recprune.cluster import connected, driver_id
from recprune.search.checks import (
    checked_count,
    checked_items,
    checked_queries,
    refuse_infinite,
)
from recprune.search.methods import METHODS, Method
from recprune.search.question import QueryName, Question, checked_question, largest_boosts
from recprune.search.top_k import RECORD, RECORD_WORDS, SearchStats
from recprune.shards.actors import (
    Refusal,
    Replicas,
    described,
    end_actors,
    got_description,
    start_actors,
)
from recprune.shards.answers import (
    ShardedTopK,
    best_possible_scores,
    highest_boosts,
    merge,
    merge_records,
    plan_rounds,
)
from recprune.shards.calls import Call, InFlight, QueryGroup, answers, calling
from recprune.shards.folder import Shard, ShardedFolder, ShardLostError, read_folder
from recprune.shards.lease import Heartbeat
from recprune.types import Float32Array, InputError, Json

_QUERIES_FOR_TWO_ROUNDS = 256  # for every shard
_START_SECONDS = 30.0  # or more: a process that starts takes longer than one that answers
_DESCRIBE_SECONDS = 5.0


class ShardedIndex:
    """Finds the exact top K of a catalogue in shards. Safe to share between threads.

    Use `ShardedIndex.open`, and close it, or use it in a `with` statement.
    """

    def __init__(
        self,
        folder: ShardedFolder,
        started: list[Replicas],
        allow_partial: bool,
        timeout: float,
        connection: ExitStack,
    ) -> None:
        """Use `ShardedIndex.open`."""
        self.num_items = folder.num_items
        self.num_splits = folder.vectors.num_splits
        self.num_sub_items = folder.vectors.num_sub_items
        self.width = folder.vectors.width  # d
        self._folder, self._vectors = folder, folder.vectors
        self._started = started  # of the shards that have items
        self._allow_partial, self._timeout = allow_partial, timeout
        self._connection = connection
        self._in_flight = InFlight()
        self._turn = itertools.count()

    @classmethod
    def open(
        cls,
        folder: str | Path,
        *,
        address: str | None = None,
        replicas: int = 1,
        allow_partial: bool = False,
        timeout: float = 30.0,
        shared: bool = False,
        lease: float = 60.0,
        verify: bool = True,
    ) -> ShardedIndex:
        """Start the actors of a saved sharded index; every node must find it under this path.

        The address is that of the cluster's head node, host:port; without one, the cluster that
        this process is connected to is used, or one is started on this machine. A shard that has
        been silent for `timeout` seconds is lost. Then a search fails; with `allow_partial`, it
        returns what the other shards have, marked as not exact.

        Actors that are `shared` are those of all processes which open the same folder this way.
        They end `lease` seconds after the last of these has closed it, or has died. Unless `verify`
        is false, every byte of a shard is compared with its checksum before it answers.
        """
        if not 1 <= checked_count(replicas, "replicas") <= 100:
            raise InputError(f"replicas is {replicas}, expected 1 to 100")
        _check_seconds(timeout, "timeout")
        _check_seconds(lease, "lease")
        saved = read_folder(folder)
        num_actors = replicas * sum(shard.num_items > 0 for shard in saved.shards)
        with ExitStack() as connection:
            num_cpus = max(num_actors, os.cpu_count() or 1)
            connection.enter_context(connected(address or "local", num_cpus))
            started = start_actors(saved, replicas, _nodes(), lease if shared else None, verify)
            if shared:
                connection.callback(Heartbeat(started, lease).end)
            else:
                connection.callback(end_actors, started, driver_id())
            index = cls(saved, started, allow_partial, timeout, connection)
            index._wait_until_ready(num_actors)
            index._connection = connection.pop_all()
        if shared:  # closed with its last reference, at the latest
            weakref.finalize(index, index._connection.close)
        return index

    def close(self) -> None:
        """End the actors, or let go of shared ones; and the cluster, if it was started for them."""
        self._in_flight.close()
        self._connection.close()

    def __enter__(self) -> ShardedIndex:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # Asking it -----------------------------------------------------------------------------------

    def search(
        self,
        sequence_embeddings: Float32Array,
        k: int = 10,
        *,
        method: str | Method = "auto",
        exclude: Any = None,
        allow: Any = None,
        floor: Any = None,
        boosts: Any = None,
        threads: int = 1,
        rounds: int | None = None,
        allow_partial: bool | None = None,
    ) -> ShardedTopK:
        """Return the exact top k for sequence embeddings (float32 [queries, d], or [d]).

        All arguments are those of `Index.search`; `threads` are those of each shard. In more than
        one of `rounds`, shards are given the scores that others found; by default, this is done
        where it pays. `allow_partial` can be another one than when the index was opened.
        """
        return self._answer(
            checked_question(
                self, sequence_embeddings, k, method, exclude, allow, floor, boosts, threads
            ),
            rounds,
            allow_partial,
        )

    def search_scores(
        self,
        sub_item_scores: Float32Array,
        k: int = 10,
        *,
        method: str | Method = "auto",
        exclude: Any = None,
        allow: Any = None,
        floor: Any = None,
        boosts: Any = None,
        threads: int = 1,
        rounds: int | None = None,
        allow_partial: bool | None = None,
    ) -> ShardedTopK:
        """Return the exact top k for sub-item scores S (float32 [queries, M, B], or [M, B])."""
        name: QueryName = "sub_item_scores"
        return self._answer(
            checked_question(
                self, sub_item_scores, k, method, exclude, allow, floor, boosts, threads, name=name
            ),
            rounds,
            allow_partial,
        )

    def score(self, sequence_embeddings: Float32Array, items: Any) -> Float32Array:
        """Return the scores of given items, [queries, items] or [items]; never a part of them."""
        name = "sequence_embeddings"
        queries, single = checked_queries(sequence_embeddings, name, (self.width,))
        wanted = checked_items(items, self.num_items)
        refuse_infinite(queries, name)
        scores = np.empty((len(queries), len(wanted)), np.float32)
        calls: deque[Call] = deque()
        for replicas in self._started:
            shard = replicas.shard
            places = np.flatnonzero((wanted >= shard.first) & (wanted < shard.stop))
            if len(places):
                local = wanted[places].astype(np.int64) - shard.first
                calls.append(Call(replicas, calling("score", queries, local), about=places))
        for call, answered in self._answers(calls):
            if isinstance(answered, ShardLostError):
                raise answered
            if isinstance(answered, Refusal):
                raise InputError(answered.reason)
            scores[:, call.about] = answered
        return scores[0] if single else scores

    def sub_item_scores(self, sequence_embeddings: Float32Array) -> Float32Array:
        """Return S, [queries, M, B] or [M, B]: what `search_scores` searches with."""
        return self._vectors.sub_item_scores(sequence_embeddings)

    def sub_item_embeddings(self) -> Float32Array:
        """Return the vectors of the sub-items, [M, B, d/M]."""
        return self._vectors.sub_item_embeddings()

    def describe(self) -> Json:
        """Say what the shards hold and cost, and on which nodes they are."""
        import ray

        self._in_flight.check()
        asked = [
            [actor.describe.remote() for actor in replicas.actors] for replicas in self._started
        ]
        flat = [reference for references in asked for reference in references]
        seconds = min(self._timeout, _DESCRIBE_SECONDS)
        answered = set(ray.wait(flat, num_returns=len(flat), timeout=seconds)[0]) if flat else set()
        shards = [
            described(
                replicas.shard, [got_description(ref) if ref in answered else None for ref in refs]
            )
            for replicas, refs in zip(self._started, asked, strict=True)
        ]
        size = sum(shard["bytes"] for shard in shards)
        return {
            "items": self.num_items,
            "splits": self.num_splits,
            "sub_items": self.num_sub_items,
            "width": self.width,
            "shards": shards,
            "replicas": len(self._started[0].actors) if self._started else 0,
            "nodes": sorted({place["node"] for shard in shards for place in shard["places"]}),
            "bytes": size,  # of one replica of every shard that answered
            "bytes_per_item": round(size / max(self.num_items, 1), 2),
        }

    def lost_shards(self) -> list[Shard]:
        """Return the shards without a healthy replica, as far as known; calls none."""
        return [replicas.shard for replicas in self._started if replicas.is_lost]

    def stored_bytes(self) -> int:
        """Return what the shards take on disk; calls none."""
        return self._folder.stored_bytes()

    @property
    def manifest_sha256(self) -> str:
        """The checksum of the folder that was opened."""
        return self._folder.manifest_sha256

    def __repr__(self) -> str:
        return f"ShardedIndex({self.num_items:,} items, {len(self._folder.shards)} shards)"

    # Inside --------------------------------------------------------------------------------------

    def _answer(
        self, question: Question, rounds: int | None, allow_partial: bool | None
    ) -> ShardedTopK:
        import ray

        begun = time.perf_counter_ns()
        if rounds is not None and checked_count(rounds, "rounds") < 1:
            raise InputError(f"rounds is {rounds}, expected 1 or more")
        if not self._started:  # no items, no shards: an index of nothing has the answer
            top = self._vectors.answer(question._replace(method=METHODS["pqtopk"]))
            return ShardedTopK(top.ids, top.scores, top.stats)
        if question.boosts is not None:
            # The largest bias and the largest boost may be in different shards, and each of these
            # could add up what one index refuses.
            question.refuse_infinite()
            self._refuse_overflow(question)
        if rounds is None:
            rounds = _rounds_that_pay(len(question.queries), len(self._started))
        try:
            groups = self._ask(question, rounds)
        except ray.exceptions.RayError as error:  # not a shard's fault, but that of the way there
            raise ShardLostError(f"the cluster failed: {str(error).strip()}") from None
        if allow_partial is None:
            allow_partial = self._allow_partial
        missing = {shard: error for group in groups for shard, error in group.missing.items()}
        if missing and not (allow_partial and all(group.answers for group in groups)):
            raise next(iter(missing.values()))
        ids, scores, records = self._together(question, groups)
        records["nanoseconds"] = time.perf_counter_ns() - begun
        return ShardedTopK(
            ids[0] if question.single else ids,
            scores[0] if question.single else scores,
            SearchStats(records.view(np.int64).reshape(len(records), RECORD_WORDS)),
            missing_share=sum(shard.num_items for shard in missing) / self.num_items,
            network_bytes=sum(group.network_bytes for group in groups),
        )

    def _ask(self, question: Question, rounds: int) -> list[QueryGroup]:
        """Lead all groups of a batch through the shards."""
        plan = plan_rounds(
            len(question.queries), len(self._started), rounds, start=next(self._turn)
        )
        groups = [QueryGroup(question, rows, steps, self._started) for rows, steps in plan]
        todo: deque[Call] = deque()
        for group in groups:
            todo.extend(group.next_round())
        for call, answered in self._answers(todo):
            if isinstance(answered, Refusal):
                question.refuse_infinite()
                if answered.is_overflow:
                    self._refuse_overflow(question)
                raise InputError(answered.reason)
            group = call.about
            group.take(call, answered)
            if not group.unanswered:
                todo.extend(group.next_round())
        return groups

    def _together(
        self, question: Question, groups: list[QueryGroup]
    ) -> tuple[NDArray[np.int64], Float32Array, NDArray[Any]]:
        """Return ids, scores and records of the whole batch."""
        k = question.k
        merged = []
        for group in groups:
            answered = sorted(group.answers.items(), key=lambda pair: pair[0].first)
            ids, scores = merge(answered, group.rows.stop - group.rows.start, k)
            floors = question.floors[group.rows] if question.floors is not None else None
            found = [answer for _, answer in answered]
            records = merge_records(found, scores, self.num_items, floors)
            if group.missing:
                records["exact"] = 0
                bound = self._bound_of_missing(question, group)
                records["upper_bound"] = np.maximum(records["upper_bound"], bound)
            merged.append((ids, scores, records))
        if len(merged) == 1:
            return merged[0]
        return (
            np.concatenate([np.empty((0, k), np.int64), *(ids for ids, _, _ in merged)]),
            np.concatenate([np.empty((0, k), np.float32), *(found for _, found, _ in merged)]),
            np.concatenate([np.empty(0, RECORD), *(records for _, _, records in merged)]),
        )

    def _refuse_overflow(self, question: Question) -> None:
        """Refuse what one index would: sums that float32 cannot hold."""
        largest_bias = max(shard.largest_bias for shard in self._folder.shards)
        tables = self._tables(question)
        self._vectors.refuse_overflow(tables, largest_bias, largest_boosts(question))

    def _bound_of_missing(self, question: Question, group: QueryGroup) -> Float32Array:
        highest_bias = max(shard.highest_bias for shard in group.missing)
        bound = best_possible_scores(self._tables(question, group.rows), highest_bias)
        return bound + highest_boosts(question, group.rows, list(group.missing))

    def _tables(self, question: Question, rows: slice = slice(None)) -> Float32Array:
        """Return the sub-item scores of some of the queries, [queries, M, B]."""
        queries = question.queries[rows]
        if question.are_scores:
            return queries.reshape(-1, self.num_splits, self.num_sub_items)
        return self._vectors.sub_item_scores(queries)

    def _answers(self, todo: deque[Call]) -> Iterator[tuple[Call, Any]]:
        return answers(todo, self._timeout, self._in_flight)

    def _wait_until_ready(self, num_actors: int) -> None:
        import ray

        calls = deque(Call(replicas, calling("describe")) for replicas in self._started)
        patience = max(self._timeout, _START_SECONDS)
        answered = [answer for _, answer in answers(calls, patience, self._in_flight)]
        lost = [answer for answer in answered if isinstance(answer, ShardLostError)]
        if lost and not (self._allow_partial and len(lost) < len(self._started)):
            free = ray.available_resources().get("CPU", 0)  # type: ignore[no-untyped-call]
            why = f"; {num_actors} actors need a CPU each, and none is free" if free < 1 else ""
            raise ShardLostError(f"{lost[0]}{why}")


def _rounds_that_pay(num_queries: int, num_shards: int) -> int:
    # Measured by benchmarks/shards.py, two million items in four shards that share two cores: a
    # second round has shards score a third of the items, but each call costs a millisecond or two.
    # A single query is 15 to 30 % slower in two rounds and 256 queries 40 %; from 1024 on two
    # rounds seem to win by a tenth, within the noise. More than two score hardly fewer items.
    return 2 if num_queries >= _QUERIES_FOR_TWO_ROUNDS * num_shards else 1


def _check_seconds(seconds: Any, name: str) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < 1e6:
        raise InputError(f"{name} is {seconds!r}, expected seconds, more than 0")


def _nodes() -> list[str]:
    """Return the nodes that actors can run on."""
    import ray

    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return [node["NodeID"] for node in nodes if node["Alive"] and node["Resources"].get("CPU")]
