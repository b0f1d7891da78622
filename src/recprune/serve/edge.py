"""The service on a Ray cluster: an application of Ray Serve, with shards behind an edge.

The edge is the application that `recprune serve` runs in its workers, as Serve's HTTP ingress: it
encodes histories, asks the shards and merges what they answer. Serve listens, hands requests to
edges that have room, and replaces edges and shards that are lost. KubeRay deploys it by
`application`, the command line by `deploying`. A reload has two phases here too: every edge loads
and checks the folder, and only if all of them found the same one good, all swap it in.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recprune.live.generation import read_division
from recprune.live.live_index import LiveIndex
from recprune.serve.configuration import ServeSettings, read_settings
from recprune.serve.engine.backend import sharded_folder
from recprune.serve.engine.engine import Engine
from recprune.serve.http.app import create_app
from recprune.serve.logs import configure_logs, log, log_problem
from recprune.serve.prometheus import merged_texts
from recprune.serve.service import ReloadError, ReloadOutcome, open_service
from recprune.shards.deployment import QUICK, shard_deployment
from recprune.shards.folder import read_folder
from recprune.shards.sharded_index import ShardedIndex, asked_shards
from recprune.types import InputError, Json, RecpruneError, StorageError, needs_extra

with needs_extra("ray"):
    from ray import serve

APPLICATION = "recprune"
EDGE = "edge"
_OTHERS = 64  # requests of an edge beside those for items: health, events, names, figures
_HEALTH_S = 2.0  # between checks of an edge's health
_GRACE_S = 10.0  # for requests that have begun, when an edge is to end
_STARTS = 3  # of an edge that cannot, one after the other
_ANSWER_S = 10.0  # for all edges to answer what takes no time
_LOOK_S = 3.0  # between looks at what the other edges serve
# Settings that are the cluster's, or that would be seen by all who see its applications.
_NOT_THEIRS = ("host", "port", "ray", "scratch", "settings_file", "history_password")


@dataclass(frozen=True)
class _Loaded:
    """What an edge says of the folder that it was told to load."""

    version: str = ""
    problem: str = ""  # without paths


@serve.ingress()
class Edge:
    """One replica of the edge."""

    async def __init__(  # type: ignore[misc] # it is Serve that awaits it
        self, given: Json, numbers: list[int], *shards: Any
    ) -> None:
        """`given` are settings; shards are handles of deployments, of shards with these numbers."""
        configure_logs()
        # What is not given comes from the variables of this node, passwords above all.
        settings = read_settings(given)
        self._scratch = Path(tempfile.mkdtemp(prefix="recprune-edge-"))
        self._settings = settings.model_copy(update={"scratch": self._scratch})
        self._numbers, self._shards = numbers, shards
        self._loop = asyncio.get_running_loop()
        self._reload_name = ""  # of the one under way
        self._candidate: Engine | None = None  # for it
        self._reloads = {"ok": 0, "failed": 0}
        self._name = serve.get_replica_context().replica_tag
        application = serve.get_replica_context().app_name
        self._edges: Any = serve.get_deployment_handle(EDGE, application)
        self._service = await asyncio.to_thread(open_service, self._settings, self._opened)
        self._service.reload_everywhere = self._reload_everywhere
        self._service.figures = self._figures_of_all
        self._looking = asyncio.create_task(self._keep_looking())
        log("edge started", {"version": self._service.engine.version})

    def __serve_build_asgi_app__(self) -> Any:
        return create_app(self._settings, self._service)

    async def __del__(self) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)

    # What the other edges ask for ----------------------------------------------------------------

    async def load(self, name: str) -> _Loaded:
        """Load the folder for a reload, beside what is served."""
        if self._reload_name:
            return _Loaded(problem="another reload is under way: try again in a moment")
        self._reload_name = name
        try:
            engine = await asyncio.to_thread(self._service.load)
        except RecpruneError as error:
            log_problem("reload failed", {"reason": str(error)})
            return _Loaded(problem=self._service.without_paths(error))
        except Exception as error:  # a damaged folder can fail in ways of its own
            log_problem("reload failed", {}, error)
            return _Loaded(problem=f"cannot be loaded: {type(error).__name__}")
        if self._reload_name == name:  # else it took too long, and was given up
            self._candidate = engine
        return _Loaded(engine.version)

    async def swap(self, name: str) -> bool:
        """Serve what was loaded for a reload; return whether there is such a thing."""
        if self._reload_name != name or self._candidate is None:
            return False
        self._service.swap(self._candidate)
        self._end_reload("ok")
        return True

    async def drop(self, name: str) -> None:
        """Forget what was loaded for a reload that has failed."""
        if self._reload_name == name:
            self._end_reload("failed")

    async def reload(self) -> ReloadOutcome:
        """Reload all edges."""
        return await self._reload_everywhere()

    async def version(self) -> tuple[str, str, bool]:
        """Return the name of this edge, what it serves, and whether its shards have moved on."""
        index = self._service.engine.index
        moved_on = isinstance(index, ShardedIndex) and index.is_superseded
        return self._name, self._service.engine.version, moved_on

    async def figures(self) -> tuple[str, bytes]:
        """Return the name of this edge, and its figures."""
        return self._name, await asyncio.to_thread(self._service.metrics.text)

    # Inside --------------------------------------------------------------------------------------

    def _opened(self, folder: Path, live: LiveIndex | None) -> ShardedIndex:
        """Open a version of the shards, in all of their replicas, through their deployments."""
        whole = read_folder(folder) if live is None else live
        asked = [shard.number for shard in asked_shards(whole)]
        if asked != self._numbers:
            raise StorageError(
                f"{folder}: has items in the shards {asked}, and this service was started for "
                f"{self._numbers}: start it anew"
            )
        settings = self._settings
        index = ShardedIndex(
            whole,
            list(self._shards),
            replicas=settings.replicas,
            allow_partial=settings.allow_partial,
            timeout=settings.limits.shard_seconds,
            loop=self._loop,
        )
        index.wait_until_ready(settings.limits.reload_seconds)
        return index

    async def _reload_everywhere(self) -> ReloadOutcome:
        name = uuid.uuid4().hex
        seconds = self._settings.limits.reload_seconds
        loaded = await self._all("load", name, seconds=seconds)
        problems = [one.problem for one in loaded if isinstance(one, _Loaded) and one.problem]
        versions = {one.version for one in loaded if isinstance(one, _Loaded)}
        problem = ""
        if problems:
            problem = problems[0]
        elif not loaded or any(not isinstance(one, _Loaded) for one in loaded):
            problem = f"an edge has not loaded the folder, or not within {seconds:g} s"
        elif len(versions) != 1:
            problem = "the folder was replaced while it was read: try again"
        if problem:
            await self._all("drop", name, seconds=_ANSWER_S)
            raise ReloadError(problem)
        swapped = await self._all("swap", name, seconds=_ANSWER_S)
        if len(swapped) != len(loaded) or not all(one is True for one in swapped):
            raise ReloadError("not every edge has taken it over: those that have not will reload")
        version = versions.pop()
        log("reloaded", {"version": version, "workers": len(swapped)})
        return ReloadOutcome(version, len(swapped))

    async def _keep_looking(self) -> None:
        """Reload where edges serve different versions, or shards have only another one.

        So it is after one was replaced from a folder that had changed. Of all edges, one does so.
        """
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                said = [one for one in await self._all("version") if isinstance(one, tuple)]
                differ = len({version for _, version, _ in said}) > 1
                moved_on = any(superseded for _, _, superseded in said)
                if (differ or moved_on) and self._name == min(name for name, _, _ in said):
                    await self._reload_everywhere()
            except Exception as error:
                log_problem("reload failed", {"reason": str(error)})

    async def _figures_of_all(self) -> bytes:
        said = await self._all("figures")
        texts: dict[str, bytes] = dict(one for one in said if isinstance(one, tuple))
        if self._name not in texts:  # one that hangs keeps all others from being heard
            texts = dict([await self.figures()])
        return await asyncio.to_thread(merged_texts, texts)

    async def _all(self, method: str, *arguments: Any, seconds: float = _ANSWER_S) -> list[Any]:
        """Return what all edges answer; errors in their place, nothing where one hangs."""
        try:
            answered: list[Any] = await self._edges.broadcast(method, *arguments).results_async(
                timeout_s=seconds, return_exceptions=True
            )
        except TimeoutError:
            return []
        return answered

    def _end_reload(self, outcome: str) -> None:
        self._reload_name, self._candidate = "", None
        self._reloads[outcome] += 1
        self._service.metrics.set_reloads(self._reloads)


def application(args: Json) -> serve.Application:
    """Return the application that serves a folder; the arguments are settings, by their names.

    KubeRay, and `serve deploy`, name it as `recprune.serve.edge:application`. Where Serve listens
    is said elsewhere, so that it is taken for a place that others reach.
    """
    for name in _NOT_THEIRS:
        if name in args:
            raise InputError(f"{name} is no argument of this application: see docs/serving.md")
    given = {"ray": "auto", **args}
    return edge_application(read_settings({"host": "0.0.0.0", **given}), given)  # noqa: S104


def edge_application(settings: ServeSettings, given: Json, owner: Any = None) -> serve.Application:
    """Return the application; with an owner, it lives no longer than that actor."""
    numbers = filled_shards(settings)
    if settings.workers > 1 and settings.ray != "local" and settings.histories[:6] == "sqlite":
        raise InputError(
            "several edges may be on several machines, which cannot share the file of SQLite that "
            "histories are kept in: set histories (--history) to the URL of a Redis"
        )
    shards = [
        shard_deployment(number, settings.replicas, verify=True, owner=owner) for number in numbers
    ]
    limits = settings.limits
    edge: Any = serve.deployment(
        Edge,
        name=EDGE,
        num_replicas=settings.workers,
        max_ongoing_requests=limits.running + limits.waiting + _OTHERS,
        max_queued_requests=limits.connections,
        health_check_period_s=_HEALTH_S,
        health_check_timeout_s=limits.silent_seconds,
        graceful_shutdown_timeout_s=_GRACE_S,
        max_constructor_retry_count=_STARTS,
        ray_actor_options={"num_cpus": 1, "runtime_env": {"env_vars": QUICK}},
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
    )
    bound: serve.Application = edge.bind(given, numbers, *shards)
    return bound


def filled_shards(settings: ServeSettings) -> list[int]:
    """Return the numbers of the shards that have, or may get, items."""
    folder = sharded_folder(settings)
    if folder is None:
        raise InputError(f"{settings.folder}: is not in shards: it is served without Ray")
    if settings.live is not None:
        return list(range(read_division(folder)[1].num_shards))  # all, as any may get items
    numbers = [shard.number for shard in read_folder(folder).shards if shard.num_items]
    if not numbers:
        raise StorageError(f"{folder}: has no items to serve")
    return numbers
