"""The index over several nodes: its shards are on Ray Serve, and answers are those of one index."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from recprune.cluster import connected, driver_id, is_own_cluster
from recprune.live.generation import is_live
from recprune.live.live_index import LiveIndex
from recprune.live.snapshot import LiveSnapshot, Moment
from recprune.search.checks import (
    checked_count,
    checked_items,
    checked_queries,
    refuse_infinite,
)
from recprune.search.index import Index
from recprune.search.methods import METHODS, Method
from recprune.search.question import (
    IndexShape,
    QueryName,
    Question,
    checked_question,
    largest_boosts,
)
from recprune.search.top_k import RECORD, RECORD_WORDS, SearchStats
from recprune.shards.answers import (
    ShardedTopK,
    best_possible_scores,
    highest_boosts,
    merge,
    merge_records,
    plan_rounds,
)
from recprune.shards.calls import (
    LARGE_BYTES,
    InFlight,
    QueryGroup,
    ShardCalls,
    connect,
    own_loop,
    together,
)
from recprune.shards.deployment import (
    MOST_REPLICAS,
    Refusal,
    delete,
    deploy,
    version_of,
)
from recprune.shards.folder import (
    PastMomentError,
    Shard,
    ShardedFolder,
    ShardLostError,
    read_folder,
)
from recprune.shards.live_shards import AnyShard, LiveShard, LiveShards, ShardedSnapshot
from recprune.shards.wire import pack
from recprune.types import Float32Array, InputError, Json

T = TypeVar("T")

_QUERIES_FOR_TWO_ROUNDS = 256  # for every shard
_GROUPS_AT_ONCE = 8  # of a batch on their way, for every shard
_START_SECONDS = 30.0  # or more: a process that starts takes longer than one that answers
_DESCRIBE_SECONDS = 5.0
_MOMENTS = 3  # that a question is asked of while shards know newer ones alone


class ShardedIndex:
    """Finds the exact top K of a catalogue in shards. Safe to share between threads.

    Use `ShardedIndex.open`, and close it, or use it in a `with` statement.
    """

    def __init__(
        self,
        whole: ShardedFolder | LiveIndex,
        handles: list[Any],
        *,
        replicas: int = 1,
        allow_partial: bool = False,
        timeout: float = 30.0,
        loop: asyncio.AbstractEventLoop | None = None,
        connection: ExitStack | None = None,
    ) -> None:
        """Ask shards that Ray Serve has, each through its handle; `open` has Serve start some.

        The loop is the one that they are asked from; without one, it is that of a thread beside.
        """
        # The catalogue that is asked, and changed through this; None: it does not change.
        self.live = whole if isinstance(whole, LiveIndex) else None
        self._whole, self._vectors = whole, _parts_of(whole).vectors
        self._version = version_of(whole)
        self._num_shards = (  # of which some may have no items
            whole.snapshot().division.num_shards
            if isinstance(whole, LiveIndex)
            else len(whole.shards)
        )
        self._latest: tuple[LiveSnapshot, ShardedSnapshot] | None = None
        self._allow_partial, self._timeout, self._replicas = allow_partial, timeout, replicas
        self._connection = connection or ExitStack()
        self._in_flight = InFlight(loop or own_loop())
        self._turn = itertools.count()
        self._shards = self._in_flight.run(
            connect(asked_shards(whole), handles, self._version, replicas, timeout)
        )

    @classmethod
    def open(
        cls,
        folder: str | Path,
        *,
        address: str | None = None,
        replicas: int = 1,
        allow_partial: bool = False,
        timeout: float = 30.0,
        verify: bool = True,
    ) -> ShardedIndex:
        """Serve the shards of a saved sharded index, or of a live one that was divided into some.

        Every node must find it under this path.

        The address is that of the cluster's head node, host:port; without one, the cluster that
        this process is connected to is used, or one is started on this machine. A shard that has
        been silent for `timeout` seconds is lost. Then a search fails; with `allow_partial`, it
        returns what the other shards have, marked as not exact. Unless `verify` is false, every
        byte of a shard is compared with its checksum before it answers.

        The shards are applications of Ray Serve, and end when the index is closed, or with this
        process.
        """
        if not 1 <= checked_count(replicas, "replicas") <= MOST_REPLICAS:
            raise InputError(f"replicas is {replicas}, expected 1 to {MOST_REPLICAS}")
        if (
            isinstance(timeout, bool)
            or not isinstance(timeout, int | float)
            or not 0 < timeout < 1e6
        ):
            raise InputError(f"timeout is {timeout!r}, expected seconds, more than 0")
        with ExitStack() as connection:
            whole: ShardedFolder | LiveIndex
            if is_live(folder):
                whole = connection.enter_context(LiveIndex.open(folder, verify=verify))
            else:
                whole = read_folder(folder)
            numbers = [shard.number for shard in asked_shards(whole)]
            needed = replicas * len(numbers)
            connection.enter_context(
                connected(address or "local", max(needed, os.cpu_count() or 1))
            )
            handles: list[Any] = []
            if needed:
                # A cluster that is started for it is its own: how busy that is, is no concern.
                num_cpus = 0 if is_own_cluster() else 1
                deployed = deploy(numbers, replicas, verify, num_cpus)
                handles = deployed.handles
                connection.callback(delete, deployed, driver_id())
            index = cls(
                whole,
                handles,
                replicas=replicas,
                allow_partial=allow_partial,
                timeout=timeout,
                connection=connection,
            )
            index.wait_until_ready(max(timeout, _START_SECONDS))
            index._connection = connection.pop_all()
        return index

    def close(self) -> None:
        """End the shards that were opened here, and the cluster, if it was started for them."""
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
        return self._answer_now(
            lambda index: checked_question(
                index, sequence_embeddings, k, method, exclude, allow, floor, boosts, threads
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
        return self._answer_now(
            lambda index: checked_question(
                index, sub_item_scores, k, method, exclude, allow, floor, boosts, threads, name=name
            ),
            rounds,
            allow_partial,
        )

    def score(self, sequence_embeddings: Float32Array, items: Any) -> Float32Array:
        """Return the scores of given items, [queries, items] or [items]; never a part of them."""
        if self.live is not None:
            return self.live.score(sequence_embeddings, items)  # their codes are mapped here too
        name = "sequence_embeddings"
        queries, single = checked_queries(sequence_embeddings, name, (self.width,))
        wanted = checked_items(items, self.num_items)
        refuse_infinite(queries, name)
        scores = np.empty((len(queries), len(wanted)), np.float32)

        async def score(shard: ShardCalls, places: NDArray[Any]) -> None:
            local = wanted[places].astype(np.int64) - shard.shard.first
            message = pack([], [queries, local])
            is_large = max(len(message), 4 * len(queries) * len(places)) >= LARGE_BYTES
            answered = await shard.ask("score", message, is_large=is_large)
            if isinstance(answered, Refusal):
                raise InputError(answered.reason)
            found = np.frombuffer(answered, np.float32)
            scores[:, places] = found.reshape(len(queries), len(places))

        async def ask() -> None:
            asked = []
            for shard in self._shards:
                first, stop = shard.shard.first, shard.shard.stop
                places = np.flatnonzero((wanted >= first) & (wanted < stop))
                if len(places):
                    asked.append(score(shard, places))
            await together(asked)

        self._in_flight.run(ask())
        return scores[0] if single else scores

    def sub_item_scores(self, sequence_embeddings: Float32Array) -> Float32Array:
        """Return S, [queries, M, B] or [M, B]: what `search_scores` searches with."""
        return self._vectors.sub_item_scores(sequence_embeddings)

    def sub_item_embeddings(self) -> Float32Array:
        """Return the vectors of the sub-items, [M, B, d/M]."""
        return self._vectors.sub_item_embeddings()

    def describe(self) -> Json:
        """Say what the shards hold and cost, and on which nodes they are."""
        seconds = min(self._timeout, _DESCRIBE_SECONDS)

        async def ask() -> list[list[Json]]:
            return await asyncio.gather(*(one.describe_all(seconds) for one in self._shards))

        said = self._in_flight.run(ask())
        shards = [
            _described(one.shard, entries) for one, entries in zip(self._shards, said, strict=True)
        ]
        size = sum(shard["bytes"] for shard in shards)
        num_items = self.num_items if self.live is None else self.live.num_present
        return {
            "items": num_items,
            "splits": self.num_splits,
            "sub_items": self.num_sub_items,
            "width": self.width,
            "shards": shards,
            "replicas": self._replicas,
            "nodes": sorted({place["node"] for shard in shards for place in shard["places"]}),
            "bytes": size,  # of one replica of every shard that answered
            "bytes_per_item": round(size / max(num_items, 1), 2),
        }

    def snapshot(self) -> ShardedSnapshot:
        """Return a live index as it is now, which never changes; the shards answer for it.

        They know a moment for half a minute after the next change.
        """
        if self.live is None:
            raise InputError("this sharded index is not of a catalogue that changes")
        return self.at(self.live.snapshot())

    def at(self, snapshot: LiveSnapshot) -> ShardedSnapshot:
        """Return what the shards answer of a moment of the live index."""
        latest = self._latest
        if latest is None or latest[0] is not snapshot:
            parts = LiveShards(snapshot)
            sharded = ShardedSnapshot.of(
                snapshot, lambda question: self._answer(question, parts, None, None)
            )
            latest = self._latest = snapshot, sharded
        return latest[1]

    @property
    def num_items(self) -> int:
        """How many items there are; of a live index, how many numbers were ever used."""
        return self._whole.num_items

    @property
    def num_splits(self) -> int:
        return self._vectors.num_splits

    @property
    def num_sub_items(self) -> int:
        return self._vectors.num_sub_items

    @property
    def width(self) -> int:
        """How many numbers a sequence embedding has."""
        return self._vectors.width

    def lost_shards(self) -> list[AnyShard]:
        """Return the shards that gave no answer when they were last asked; asks none."""
        return [one.shard for one in self._shards if one.problem]

    @property
    def is_superseded(self) -> bool:
        """Whether a shard has only another version by now, as its folder was replaced."""
        return any(one.is_superseded for one in self._shards)

    async def ask_lost_shards(self) -> None:
        """Ask those again, so that it is known when they are back."""
        lost = [one for one in self._shards if one.problem]
        await asyncio.gather(*(one.ask("describe") for one in lost), return_exceptions=True)

    def stored_bytes(self) -> int:
        """Return what the shards take on disk; calls none."""
        whole = self._whole
        return (
            int(whole.describe()["bytes"]) if isinstance(whole, LiveIndex) else whole.stored_bytes()
        )

    @property
    def manifest_sha256(self) -> str:
        """The checksum of the folder that was opened, or what tells shards of a live index."""
        return self._version[1]

    def __repr__(self) -> str:
        count, more = self.num_items, ""
        if self.live is not None:
            count, more = self.live.num_present, ", live"
        return f"ShardedIndex({count:,} items, {self._num_shards} shards{more})"

    # Inside --------------------------------------------------------------------------------------

    def _answer_now(
        self,
        make: Callable[[IndexShape], Question],
        rounds: int | None,
        allow_partial: bool | None,
    ) -> ShardedTopK:
        """Answer a question of this moment, or of the next if shards do not know this one."""

        def answer() -> ShardedTopK:
            parts = _parts_of(self._whole)
            question = make(parts.snapshot if isinstance(parts, LiveShards) else self)
            return self._answer(question, parts, rounds, allow_partial)

        return at_a_known_moment(self.live, answer)

    def _answer(
        self,
        question: Question,
        parts: _Parts,
        rounds: int | None,
        allow_partial: bool | None,
    ) -> ShardedTopK:
        begun = time.perf_counter_ns()
        if rounds is not None and checked_count(rounds, "rounds") < 1:
            raise InputError(f"rounds is {rounds}, expected 1 or more")
        if not self._shards:  # no items, no shards: an index of nothing has the answer
            top = self._vectors.answer(question._replace(method=METHODS["pqtopk"]))
            return ShardedTopK(top.ids, top.scores, top.stats)
        if question.boosts is not None:
            # The largest bias and the largest boost may be in different shards, and each of these
            # could add up what one index refuses.
            question.refuse_infinite()
            self._refuse_overflow(question, parts)
        if rounds is None:
            rounds = _rounds_that_pay(len(question.queries), len(self._shards))
        groups = self._in_flight.run(self._ask(question, parts, rounds))
        if allow_partial is None:
            allow_partial = self._allow_partial
        missing = {shard: error for group in groups for shard, error in group.missing.items()}
        for error in missing.values():
            if isinstance(error, PastMomentError):  # it is not lost, and knows the next moment
                raise error
        if missing and not (allow_partial and all(group.answers for group in groups)):
            raise next(iter(missing.values()))
        ids, scores, records = self._together(question, parts, groups)
        records["nanoseconds"] = time.perf_counter_ns() - begun
        return ShardedTopK(
            ids[0] if question.single else ids,
            scores[0] if question.single else scores,
            SearchStats(records.view(np.int64).reshape(len(records), RECORD_WORDS)),
            missing_share=parts.share_of(missing) if missing else 0.0,
            network_bytes=sum(group.network_bytes for group in groups),
        )

    async def _ask(self, question: Question, parts: _Parts, rounds: int) -> list[QueryGroup]:
        """Lead all groups of a batch through the shards."""
        plan = plan_rounds(len(question.queries), len(self._shards), rounds, start=next(self._turn))
        groups = [
            QueryGroup(question, parts.moment, rows, steps, self._shards) for rows, steps in plan
        ]
        at_once = asyncio.Semaphore(_GROUPS_AT_ONCE * len(self._shards))

        async def ask(group: QueryGroup) -> None:
            async with at_once:
                refused = await group.ask()
            if refused is not None:
                question.refuse_infinite()
                if refused.is_overflow:
                    self._refuse_overflow(question, parts)
                raise InputError(refused.reason)

        await together(map(ask, groups))
        return groups

    def _together(
        self, question: Question, parts: _Parts, groups: list[QueryGroup]
    ) -> tuple[NDArray[np.int64], Float32Array, NDArray[Any]]:
        """Return ids, scores and records of the whole batch."""
        k = question.k
        merged = []
        for group in groups:
            ids, scores = merge(group.answers.items(), group.rows.stop - group.rows.start, k)
            floors = question.floors[group.rows] if question.floors is not None else None
            records = merge_records(list(group.answers.values()), scores, floors)
            if group.missing:
                records["exact"] = 0
                bound = self._bound_of_missing(question, parts, group)
                records["upper_bound"] = np.maximum(records["upper_bound"], bound)
            merged.append((ids, scores, records))
        if len(merged) == 1:
            return merged[0]
        return (
            np.concatenate([np.empty((0, k), np.int64), *(ids for ids, _, _ in merged)]),
            np.concatenate([np.empty((0, k), np.float32), *(found for _, found, _ in merged)]),
            np.concatenate([np.empty(0, RECORD), *(records for _, _, records in merged)]),
        )

    def _refuse_overflow(self, question: Question, parts: _Parts) -> None:
        """Refuse what one index would: sums that float32 cannot hold."""
        tables = self._tables(question)
        self._vectors.refuse_overflow(tables, parts.largest_bias(), largest_boosts(question))

    def _bound_of_missing(
        self, question: Question, parts: _Parts, group: QueryGroup
    ) -> Float32Array:
        highest_bias = parts.highest_bias(group.missing)
        bound = best_possible_scores(self._tables(question, group.rows), highest_bias)
        return bound + highest_boosts(question, group.rows, list(group.missing))

    def _tables(self, question: Question, rows: slice = slice(None)) -> Float32Array:
        """Return the sub-item scores of some of the queries, [queries, M, B]."""
        queries = question.queries[rows]
        if question.are_scores:
            return queries.reshape(-1, self.num_splits, self.num_sub_items)
        return self._vectors.sub_item_scores(queries)

    def wait_until_ready(self, patience: float) -> None:
        """Return once all shards answer; raises where one does not, unless a part is enough."""
        import ray

        async def ask() -> list[Any]:
            return await asyncio.gather(
                *(one.ask("describe", patience=patience) for one in self._shards),
                return_exceptions=True,
            )

        answered = self._in_flight.run(ask())
        lost = [one for one in answered if isinstance(one, BaseException)]
        if lost and not (self._allow_partial and len(lost) < len(self._shards)):
            if not isinstance(lost[0], ShardLostError):
                raise lost[0]
            free = ray.available_resources().get("CPU", 0)  # type: ignore[no-untyped-call]
            needed = self._replicas * len(self._shards)
            why = f"; {needed} replicas need a CPU each, and none is free" if free < 1 else ""
            raise ShardLostError(f"{lost[0]}{why if str(lost[0]).endswith(' s') else ''}")


def at_a_known_moment(live: LiveIndex | None, ask: Callable[[], T]) -> T:
    """Ask of this moment, and of the next if shards do not know this one any more.

    So it is where one has just been started, over a generation that is newer than the moment.
    """
    for _ in range(_MOMENTS - 1):
        try:
            return ask()
        except PastMomentError:
            if live is None:
                raise
            live.refresh()
    return ask()


class _Parts(Protocol):
    """What shards have together: those of a folder, or of a moment of a live index."""

    @property
    def moment(self) -> Moment | None: ...
    @property
    def vectors(self) -> Index: ...
    def share_of(self, shards: Iterable[Any]) -> float: ...
    def highest_bias(self, shards: Iterable[Any]) -> float: ...
    def largest_bias(self) -> float: ...


def _parts_of(whole: ShardedFolder | LiveIndex) -> ShardedFolder | LiveShards:
    return LiveShards(whole.snapshot()) if isinstance(whole, LiveIndex) else whole


def asked_shards(whole: ShardedFolder | LiveIndex) -> Sequence[AnyShard]:
    """Return the shards that are asked: those with items, or all, which may get some."""
    if isinstance(whole, LiveIndex):
        count = whole.snapshot().division.num_shards
        return [LiveShard(number, count) for number in range(count)]
    return [shard for shard in whole.shards if shard.num_items]


def _described(shard: AnyShard, replicas: list[Json]) -> Json:
    """Put together what the replicas of a shard say of themselves."""
    said = replicas[0]["items"] if replicas else 0
    return {
        "shard": shard.number,
        "first": shard.first,
        "items": shard.num_items if isinstance(shard, Shard) else said,
        "bytes": replicas[0]["bytes"] if replicas else 0,
        "layout": replicas[0]["layout"] if replicas else None,
        "places": [{"node": entry["node"], "pid": entry["pid"]} for entry in replicas],
    }


def _rounds_that_pay(num_queries: int, num_shards: int) -> int:
    # Measured by benchmarks/shards.py, 20 million items in four shards that share two cores: a
    # second round has shards score half of the items, but each call costs a millisecond or two. A
    # single query is a quarter slower in two rounds and 256 queries a third; 1024 queries are about
    # as fast, and 4096 a tenth faster, within the noise. More than two score hardly fewer items.
    return 2 if num_queries >= _QUERIES_FOR_TWO_ROUNDS * num_shards else 1
