"""The shards of an index as deployments of Ray Serve, one for each shard, with its replicas.

Serve starts replicas, spreads them over the nodes, watches their health, replaces those that are
lost, and hands a question to one that has room. A replica is asked for one version of its shard by
folder and checksum, and keeps the last few: so old and new callers are each answered by what they
have opened, while one follows the other. What is wrong with a shard's folder is returned as data:
such a replica lives on, and answers again once its folder is mended.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

from recprune.cluster import driver_id
from recprune.live.generation import is_live, read_division
from recprune.live.live_index import LiveIndex, MomentLostError
from recprune.live.snapshot import LiveSnapshot, Moment
from recprune.search.index import Index
from recprune.search.question import ScoreOverflowError
from recprune.shards.answers import answer
from recprune.shards.folder import ShardedFolder, load_shard, read_folder, shard_folder
from recprune.shards.live_shards import live_checksum
from recprune.shards.wire import unpack
from recprune.types import InputError, Json, RecpruneError, StorageError

_Answered = TypeVar("_Answered")

MOST_REPLICAS = 100
# Of its shard that a replica keeps, those that were asked for last: the one that is served, the one
# before it, and some that were loaded for reloads which failed. They are mapped files, and cost
# little.
_VERSIONS = 4
_ONGOING = 16  # questions that a replica takes; it answers them one after the other
_QUEUED = 1024  # questions of a caller that may wait for a replica; further ones are refused
_COMING_S = 5.0  # that a change may take to be read here which has been read where one asks
_HEALTH_S = 1.0  # between checks of a replica's health
_OWNER_CHECKS = 5  # of which one looks for the owner
_SILENT_S = 10.0  # that one may take to answer a check
_END_S = 2.0  # for questions under way when a replica is to end
# What the questions of a search cost is mostly Serve's own work for each: these spare a thread that
# each would pass through, and a line of a log for each.
QUICK = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1000",
    "RAY_SERVE_LOG_TO_STDERR": "0",
}


# Which shards are meant: a folder, and the checksum of its manifest, or of what a live index is and
# how it is divided. It goes along with every
# question, so that it is a plain tuple.
Version: TypeAlias = tuple[str, str]


def version_of(whole: ShardedFolder | LiveIndex) -> Version:
    if isinstance(whole, LiveIndex):
        return str(whole.folder), live_checksum(whole.identity, whole.snapshot().division)
    return str(whole.path), whole.manifest_sha256


@dataclass(frozen=True)
class Refusal:
    """Why a shard cannot answer: the question is wrong, or its own folder is."""

    reason: str
    by: str  # the replica
    is_input_error: bool
    is_superseded: bool = False  # as the folder has another version by now
    is_past: bool = False  # what was asked for is a moment that is not known any more
    is_overflow: bool = False  # of the scores of a query, which the shard numbers in its own way


class _SupersededError(StorageError):
    """The folder has another version than the one that is asked for."""


class ShardServer:
    """Answers for one shard, in a process of the cluster."""

    def __init__(self, number: int, verify: bool, owner: Any = None) -> None:
        """With an owner, an actor, it lives no longer than that."""
        import ray

        self._number, self._verify, self._owner = number, verify, owner
        self._checks = 0  # of its health, so far
        self._versions: dict[
            Version, asyncio.Task[Index | LiveIndex]
        ] = {}  # loaded, or loading; the latest last
        self._threads = ThreadPoolExecutor(1)
        self._node = ray.get_runtime_context().get_node_id()
        self._name = f"{self._node} {os.getpid()}"

    async def search(
        self, version: Version, message: bytes, moment: tuple[int, int] | None
    ) -> bytes | Refusal:
        return await self._try(version, lambda index: answer(index, message), message, moment)

    async def score(self, version: Version, message: bytes) -> bytes | Refusal:
        """Return the scores of given items, counted from the first one of this shard."""

        def score(index: Index) -> bytes:
            queries, items = unpack(message)[1]
            return bytes(index.score(queries, items).tobytes())

        return await self._try(version, score, message)

    async def describe(self, version: Version) -> Json | Refusal:
        """Say what the shard holds, and where it is."""
        where = {"node": self._node, "pid": os.getpid()}
        return await self._try(version, lambda index: {**index.describe(), **where})

    async def check_health(self) -> None:
        """Be called by Serve; what matters is that there is an answer."""
        import ray

        self._checks += 1
        if self._owner is not None and self._checks % _OWNER_CHECKS == 0:
            try:
                await self._owner.is_there.remote()
            except ray.exceptions.ActorDiedError:
                await asyncio.to_thread(_end_this_application)
            except ray.exceptions.RayError:
                pass  # its node may be lost, and Ray starts it anew

    async def _try(
        self,
        version: Version,
        work: Callable[[Any], _Answered],  # of an index, a snapshot, or a live index
        message: bytes = b"",
        moment: tuple[int, int] | None = None,
    ) -> _Answered | Refusal:
        try:
            index: Index | LiveIndex | LiveSnapshot = await self._index(version)
            if moment is not None and isinstance(index, LiveIndex):
                index = await _at(index, Moment(*moment))
            if len(message) < 1 << 16:
                return work(index)
            # A batch, which takes its time: beside the loop, which Serve's questions come through.
            return await asyncio.get_running_loop().run_in_executor(self._threads, work, index)
        except Exception as error:
            said = str(error) if isinstance(error, RecpruneError) else f"{type(error).__name__}"
            return Refusal(
                said,
                self._name,
                is_input_error=isinstance(error, InputError),
                is_overflow=isinstance(error, ScoreOverflowError),
                is_superseded=isinstance(error, _SupersededError),
                is_past=isinstance(error, MomentLostError),
            )

    async def _index(self, version: Version) -> Index | LiveIndex:
        """Return a version; loaded on the first question for it, so that a folder can be mended."""
        loading = self._versions.pop(version, None)
        if loading is None:
            loading = asyncio.create_task(asyncio.to_thread(self._opened, version))
            loading.add_done_callback(functools.partial(self._loaded, version))
        self._versions[version] = loading  # asked for last
        for old in list(self._versions)[:-_VERSIONS]:
            del self._versions[old]
        # Who asks may not wait so long; what is loaded is there for the next one.
        return loading.result() if loading.done() else await asyncio.shield(loading)

    def _loaded(self, version: Version, loading: asyncio.Task[Index | LiveIndex]) -> None:
        """Keep nothing of what could not be loaded: the next question tries again."""
        if loading.cancelled() or loading.exception() is not None:
            self._versions.pop(version, None)

    def _opened(self, version: Version) -> Index | LiveIndex:
        folder, checksum = version
        if is_live(folder):
            if live_checksum(*read_division(Path(folder))) == checksum:
                live = LiveIndex.open(folder, shard=self._number, verify=self._verify)
                if live_checksum(live.identity, live.snapshot().division) == checksum:
                    return live
                live.close()  # it was divided anew in between
            raise _SupersededError(f"{folder}: holds other shards by now")
        saved = read_folder(folder)
        if saved.manifest_sha256 != checksum:
            raise _SupersededError(f"{folder}: holds another sharded index by now")
        place = shard_folder(saved.path, self._number)
        return load_shard(place, saved.shards[self._number], verify=self._verify)


async def _at(live: LiveIndex, moment: Moment) -> LiveSnapshot:
    """Return the shard as it is, or was, at a moment; one that comes is waited for."""
    snapshot = live.snapshot()
    if snapshot.moment == moment:
        return snapshot
    return await asyncio.to_thread(live.at, moment, _COMING_S)


class Owner:
    """An actor of the program that has opened shards, which ends with it, however that ends."""

    def is_there(self) -> bool:
        return True


def _end_this_application() -> None:
    from ray import serve

    serve.delete(serve.get_replica_context().app_name, _blocking=False)


def start_owner() -> Any:
    """Start the actor that says that this program is there."""
    import ray

    owner_class: Any = ray.remote(Owner)
    return owner_class.options(num_cpus=0, max_restarts=-1).remote()


def shard_deployment(
    number: int, replicas: int, verify: bool, owner: Any = None, num_cpus: int = 1
) -> Any:
    """Return the deployment of one shard, as a part of an application."""
    from ray import serve

    deployment: Any = serve.deployment(
        ShardServer,
        name=f"shard-{number}",
        num_replicas=replicas,
        max_ongoing_requests=_ONGOING,
        max_queued_requests=_QUEUED,
        health_check_period_s=_HEALTH_S,
        health_check_timeout_s=_SILENT_S,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=_END_S,
        ray_actor_options={"num_cpus": num_cpus, "runtime_env": {"env_vars": QUICK}},
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
    )
    return deployment.bind(number, verify, owner)


class Deployed(NamedTuple):
    """Shards that were deployed by this process."""

    names: list[str]  # of their applications
    handles: list[Any]
    owner: Any  # as long as this is referred to, they live


def deploy(numbers: list[int], replicas: int, verify: bool, num_cpus: int) -> Deployed:
    """Have the shards with these numbers served, each as an application of its own.

    They are not waited for: where there is room for some only, these answer.
    """
    from ray import serve

    owner = start_owner()
    name = f"recprune-{uuid.uuid4().hex[:12]}"
    names = [f"{name}-{number}" for number in numbers]
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # importing it has set another one
    serve.start(proxy_location="Disabled")  # unless Serve is there already: then as it is
    targets = [
        serve.RunTarget(
            shard_deployment(number, replicas, verify, owner, num_cpus), name, route_prefix=None
        )
        for number, name in zip(numbers, names, strict=True)
    ]
    handles = serve.run_many(targets, wait_for_applications_running=False)
    return Deployed(names, handles, owner)


def delete(deployed: Deployed, driver: str | None) -> None:
    """End what was deployed through a connection; without that, it has ended already."""
    import ray
    from ray import serve

    if driver is None or driver_id() != driver:
        return
    with contextlib.suppress(ray.exceptions.RayError, serve.exceptions.RayServeException):
        for name in deployed.names:
            serve.delete(name, _blocking=False)
