"""Asking shards: around replicas that are lost, and with a batch through all shards.

All questions of a process go through one event loop, beside whoever asks. Ray Serve chooses the
replica; one that does not answer, or not in time, is followed by another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from recprune.live.snapshot import Moment
from recprune.search.question import Question
from recprune.search.top_k import RECORD_WORDS
from recprune.shards.answers import (
    Answer,
    is_the_same_for_all,
    kth_scores,
    message_for,
    read_answer,
)
from recprune.shards.deployment import Refusal, Version
from recprune.shards.folder import PastMomentError, ShardBusyError, ShardLostError
from recprune.shards.live_shards import AnyShard
from recprune.types import Json, RecpruneError

T = TypeVar("T")

_END_S = 2.0  # for questions under way to end when an index is closed
_PAUSE_S = 0.05  # before a shard is asked again where a replica failed
_KNOWN_S = 1.0  # that is waited for a shard which gave no answer the last time
# Beyond this, a message is put into Ray's object store, once for all shards, and fetched by each;
# Serve's own way refuses messages of 4 MB.
LARGE_BYTES = 100_000


@functools.cache
def own_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of this process, in a thread of its own, that shards are asked from."""
    try:
        import uvloop  # which Ray Serve brings where there is one

        loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    except ImportError:
        loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="shards", daemon=True).start()
    return loop


class Attempts:
    """A question to one shard, whichever of its replicas answers."""

    def __init__(self, send: Callable[[], Any], patience: float, replicas: int) -> None:
        """Ask a replica; `send` does so, and returns Serve's response, which can be awaited."""
        self.patience = patience  # seconds
        self.share = patience / replicas  # after which another replica is asked as well
        self.begun = self.called = time.monotonic()
        self.under_way: set[asyncio.Task[Any]] = set()
        self.failure = ""
        self.refusals: dict[str, str] = {}  # by replica
        self._send = send
        self._first: Any = send()

    async def first(self) -> Any:
        """Return what the first replica answers; awaited in place, which costs no task."""
        response, self._first = self._first, None
        return await _settled(response)

    def again(self) -> None:
        """Ask a replica, or another one; the first time, wait for the one that was asked."""
        check_connected()
        self.called = time.monotonic()
        response, self._first = self._first or self._send(), None
        self.under_way.add(asyncio.ensure_future(_settled(response)))

    def finished(self) -> list[Any]:
        """Return what has come since."""
        done = [attempt for attempt in self.under_way if attempt.done()]
        self.under_way.difference_update(done)
        return [attempt.result() for attempt in done]

    def end(self) -> None:
        """Wait for nothing any more."""
        if self._first is not None:
            self._first.cancel()
        for attempt in self.under_way:
            attempt.cancel()

    def reasons(self) -> str:
        said = [self.failure] if self.failure else []
        return "; ".join(dict.fromkeys([*said, *self.refusals.values()]))


class ShardCalls:
    """One shard, as those see it who ask it. Belongs to one event loop."""

    def __init__(
        self, shard: AnyShard, handle: Any, version: Version, replicas: int, timeout: float
    ) -> None:
        """Use `connect`."""
        self.shard = shard
        self.problem = ""  # why the last question was given up; empty where it was not
        self.is_superseded = False  # whether a replica has only another version
        self._handle, self._version = handle, version
        self._replicas, self._timeout = replicas, timeout
        self._last_answer = 0.0
        # Serve makes a handle for every method, and every time anew.
        self._quick = {name: _quick(handle, name) for name in ("search", "score", "describe")}
        self._by_reference = {name: getattr(handle, name) for name in self._quick}

    def begin(
        self, method: str, *message: Any, is_large: bool = False, patience: float | None = None
    ) -> Attempts:
        """Ask one replica, and return what `answer` waits for.

        The shard is lost when it has been silent for `patience` seconds, its timeout if none are
        given; one that gave no answer the last time gets less.
        """
        call = (self._by_reference if is_large else self._quick)[method]
        if patience is None:
            patience = min(_KNOWN_S, self._timeout) if self.problem else self._timeout
        send = functools.partial(call.remote, self._version, *message)
        return Attempts(send, patience, self._replicas)

    def is_answer(self, answered: Any, asked: Attempts) -> bool:
        """Say whether this is an answer, or that the question is wrong; note it where it is not.

        Raises `ShardLostError` when every replica has refused.
        """
        if isinstance(answered, _Failure):
            asked.failure = answered.reason
            return False
        if isinstance(answered, Refusal) and not answered.is_input_error:
            asked.refusals[answered.by] = answered.reason
            self.is_superseded |= answered.is_superseded
            if len(asked.refusals) >= self._replicas:
                lost = self._lost(f"cannot answer: {asked.reasons()}")
                raise PastMomentError(str(lost)) if answered.is_past else lost
            return False
        self._last_answer, self.problem, self.is_superseded = time.monotonic(), "", False
        return True

    async def answer(self, asked: Attempts) -> Any:
        """Return the answer of a replica, or its refusal of a question that is wrong.

        Raises `ShardLostError` when every replica refuses, or none has said anything in time.
        """
        try:
            while True:
                for answered in asked.finished():
                    if self.is_answer(answered, asked):
                        return answered
                now = time.monotonic()
                silent = now - max(asked.begun, self._last_answer)
                if silent > asked.patience:
                    why = f": {asked.reasons()}" if asked.reasons() else ""
                    raise self._lost(f"has said nothing for {asked.patience:g} s{why}")
                if not asked.under_way:
                    if asked.reasons():
                        await asyncio.sleep(_PAUSE_S)
                    asked.again()
                # One that takes too long is not waited for alone: another may have the answer.
                elif len(asked.under_way) < self._replicas and now - asked.called > asked.share:
                    asked.again()
                await asyncio.wait(
                    asked.under_way,
                    timeout=min(asked.patience - silent, asked.share),
                    return_when=asyncio.FIRST_COMPLETED,
                )
        finally:
            asked.end()

    async def ask(self, method: str, *message: Any, **how: Any) -> Any:
        """Ask, and wait for the answer."""
        return await self.answer(self.begin(method, *message, **how))

    async def describe_all(self, seconds: float) -> list[Json]:
        """Return what all replicas say of themselves that answer in time."""
        said: list[Any] = []
        try:
            said = await self._handle.broadcast("describe", self._version).results_async(
                timeout_s=seconds, return_exceptions=True
            )
        except Exception:  # one that hangs keeps Serve from saying what the others answered
            with contextlib.suppress(RecpruneError):
                said = [await self.ask("describe", patience=seconds)]
        return [dict(one) for one in said if isinstance(one, dict)]

    def _lost(self, reason: str) -> ShardLostError:
        self.problem = reason
        return ShardLostError(f"{self.shard} {reason}")


class _Failure:
    """A question that was not answered, as the replica, its node or the way there was lost."""

    def __init__(self, error: BaseException) -> None:
        lines = str(error).strip().splitlines()
        name = type(error).__name__
        self.reason = f"{name}: {lines[0]}" if lines else name


async def _settled(response: Any) -> Any:
    """Return what a replica answers, with failures as data."""
    try:
        return await response
    except asyncio.CancelledError:
        if asyncio.current_task().cancelling():  # type: ignore[union-attr]
            raise
        return _Failure(ConnectionError("the question was cancelled"))  # by Serve
    except Exception as error:  # of Ray, of Serve, or of the network
        return _failed(error)


def _failed(error: Exception) -> _Failure | Refusal:
    from grpc import RpcError  # type: ignore[import-untyped]
    from ray.exceptions import RayError, RayTaskError
    from ray.serve.exceptions import BackPressureError, RayServeException

    if isinstance(error, BackPressureError):
        raise ShardBusyError("too many searches are waiting for a shard") from None
    on_the_way = isinstance(error, RayError | RayServeException | RpcError | OSError)
    if on_the_way and not isinstance(error, RayTaskError):
        return _Failure(error)
    # One of the replica itself: another try would end the same way.
    last = (str(error).strip().splitlines() or [""])[-1]
    return Refusal(f"{type(error).__name__}: {last}", "", is_input_error=False)


def _quick(handle: Any, method: str) -> Any:
    """Return the quickest way to call a method: without Ray's object store."""
    return getattr(handle.options(_by_reference=False), method)


async def connect(
    shards: Sequence[AnyShard], handles: list[Any], version: Version, replicas: int, timeout: float
) -> list[ShardCalls]:
    """Return shards that can be asked from the event loop which this runs in."""
    for handle in handles:
        if not handle.is_initialized:
            # Else each call would pass through the loop of yet another thread.
            handle._init(_run_router_in_separate_loop=False)
    return [
        ShardCalls(shard, handle, version, replicas, timeout)
        for shard, handle in zip(shards, handles, strict=True)
    ]


def check_connected() -> None:
    """Raise where there is no cluster any more: Ray would connect to whatever it finds."""
    import ray

    if not ray.is_initialized():
        raise ShardLostError("the connection to the cluster was closed")


class InFlight:
    """What is being asked, and whether the index is still open for more.

    Apart from the index: a question must not keep an index alive that has no other reference.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.count = 0
        self._loop, self._process = loop, os.getpid()
        self._futures: set[Future[Any]] = set()
        self._changed = threading.Condition()
        self._is_closed = False

    def run(self, asking: Coroutine[Any, Any, T]) -> T:
        """Have something asked, and wait for it; raises where the index is closed meanwhile."""
        try:
            self._check()
        except BaseException:
            asking.close()
            raise
        future = asyncio.run_coroutine_threadsafe(self._counted(asking), self._loop)
        self._futures.add(future)
        try:
            return future.result()
        except CancelledError:
            raise RecpruneError("the sharded index is closed") from None
        except KeyboardInterrupt:
            future.cancel()
            raise
        finally:
            self._futures.discard(future)

    def close(self) -> None:
        """Refuse further questions, end those under way, and wait until they have ended."""
        self._is_closed = True
        for future in list(self._futures):
            future.cancel()
        if self._process == os.getpid():
            with self._changed:
                self._changed.wait_for(lambda: not self.count, _END_S)

    def _check(self) -> None:
        if self._is_closed:
            raise RecpruneError("the sharded index is closed")
        if self._process != os.getpid():
            raise RecpruneError("the sharded index was opened before this process was forked")
        check_connected()

    async def _counted(self, asking: Coroutine[Any, Any, T]) -> T:
        with self._changed:
            self.count += 1
        try:
            return await asking
        finally:
            with self._changed:
                self.count -= 1
                self._changed.notify_all()


async def together(asking: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results; where one fails, that is raised and the others are ended."""
    tasks = [asyncio.ensure_future(one) for one in asking]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


# A batch on its way ------------------------------------------------------------------------------


class QueryGroup:
    """Some queries of a batch, on their way from shard to shard."""

    def __init__(
        self,
        question: Question,
        moment: Moment | None,
        rows: slice,
        steps: list[list[int]],
        asked: list[ShardCalls],
    ) -> None:
        """Without a moment, the shards are such as do not change."""
        self.rows = rows
        self.answers: dict[AnyShard, Answer] = {}
        self.missing: dict[AnyShard, ShardLostError] = {}
        self.network_bytes = 0
        self._question, self._steps, self._asked = question, steps, asked
        self._moment = None if moment is None else tuple(moment)

    async def ask(self) -> Refusal | None:
        """Ask all shards, one round after the other; return why the question is wrong, if it is."""
        for step in self._steps:
            floors = kth_scores(list(self.answers.values()), self._question.k)
            messages = _Messages(self._question, self.rows, floors)
            asked = []
            for place in step:
                calls = self._asked[place]
                message, is_large = messages.for_shard(calls.shard)
                self.network_bytes += messages.size
                begun = calls.begin("search", message, self._moment, is_large=is_large)
                asked.append((calls, begun))
            refused = await self._round(asked)
            if refused is not None:
                return refused
        return None

    async def _round(self, asked: list[tuple[ShardCalls, Attempts]]) -> Refusal | None:
        """Keep what the shards of a round answer; return a refusal of the question."""
        waited_for = list(asked)
        is_well = not any(calls.problem for calls, _ in asked)
        try:
            # Mostly all is well. Then they are awaited one after the other, while all of them work.
            with contextlib.suppress(TimeoutError, ShardLostError):
                async with asyncio.timeout(asked[0][1].share):  # the same for all that are well
                    while waited_for and is_well:
                        calls, one = waited_for[0]
                        answered = await one.first()
                        if not calls.is_answer(answered, one):
                            break
                        waited_for.pop(0)
                        if isinstance(answered, Refusal):
                            return answered
                        self._keep(calls, answered)
            refused = await together(self._take(calls, one) for calls, one in waited_for)
            return next(filter(None, refused), None)
        finally:
            for _, one in waited_for:
                one.end()

    async def _take(self, calls: ShardCalls, asked: Attempts) -> Refusal | None:
        """Keep the answer of a shard, or that it gave none; return its refusal."""
        try:
            answered = await calls.answer(asked)
        except ShardLostError as error:
            self.missing[calls.shard] = error
            return None
        if isinstance(answered, Refusal):
            return answered
        self._keep(calls, answered)
        return None

    def _keep(self, calls: ShardCalls, answered: bytes) -> None:
        self.answers[calls.shard] = read_answer(answered)
        self.network_bytes += len(answered)


class _Messages:
    """What shards are asked in one round; the same message is made once."""

    def __init__(self, question: Question, rows: slice, floors: Any) -> None:
        self.size = 0  # of the latest message
        self._question, self._rows, self._floors = question, rows, floors
        self._message: Any = None
        self._is_large = False

    def for_shard(self, shard: AnyShard) -> tuple[Any, bool]:
        """Return the message, or a reference to it, and whether it, or its answer, is large."""
        import ray

        if self._message is None or not is_the_same_for_all(self._question):
            message = message_for(self._question, self._rows, shard, self._floors)
            self.size = len(message)
            num_queries = self._rows.stop - self._rows.start
            answers = 8 * num_queries * (self._question.k + RECORD_WORDS)
            self._is_large = max(self.size, answers) >= LARGE_BYTES
            check_connected()
            self._message = ray.put(message) if self._is_large else message
        return self._message, self._is_large
