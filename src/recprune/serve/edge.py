"""The service on a Ray cluster: an application of Ray Serve, with shards behind an edge.

The edge is the application that `recprune serve` runs in its workers, as Serve's HTTP ingress: it
encodes histories, asks the shards and merges what they answer. Serve listens, hands requests to
edges that have room, and replaces edges and shards that are lost. KubeRay deploys the same by
`application`. A reload has two phases here too: every edge loads and checks the folder, and only if
all of them found the same one good, all swap it in.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import socket
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from recprune.cluster import connected, local_cluster
from recprune.serve.configuration import ServeSettings, read_settings
from recprune.serve.engine.backend import sharded_folder
from recprune.serve.engine.engine import Engine
from recprune.serve.http.app import create_app
from recprune.serve.keys import read_keys
from recprune.serve.logs import configure_logs, log, log_problem
from recprune.serve.prometheus import merged_texts
from recprune.serve.service import ReloadError, ReloadOutcome, open_service
from recprune.shards.deployment import QUICK, shard_deployment
from recprune.shards.folder import read_folder
from recprune.shards.sharded_index import ShardedIndex
from recprune.types import InputError, Json, RecpruneError, StorageError, needs_extra

with needs_extra("ray"):
    from ray import serve

APPLICATION = "recprune"
EDGE = "edge"
_OTHERS = 64  # requests of an edge beside those for items: health, events, names, figures
_HEALTH_S = 2.0  # between checks of an edge's health
_GRACE_S = 10.0  # for requests that have begun, when an edge is to end
_FIGURES_S = 5.0  # for all edges to say theirs
_SWAP_S = 30.0
# Given by the operator of the cluster, or of no meaning there.
_NOT_THEIRS = {"settings_file", "host", "port", "scratch"}


@dataclass(frozen=True)
class _Loaded:
    """What an edge says of the folder that it was told to load."""

    version: str = ""
    problem: str = ""  # without paths


@serve.ingress()
class Edge:
    """One replica of the edge."""

    async def __init__(self, given: Json, *shards: Any) -> None:  # type: ignore[misc] # Serve's
        """`given` are settings; shards are the handles of their deployments, in their order."""
        configure_logs()
        # What is not given comes from the variables of this node, passwords above all.
        settings = read_settings(given)
        self._scratch = Path(tempfile.mkdtemp(prefix="recprune-serve-"))
        self._settings = settings.model_copy(update={"scratch": self._scratch})
        self._shards, self._loop = shards, asyncio.get_running_loop()
        self._candidate: tuple[str, Engine] | None = None  # of a reload, by its name
        self._reloads = {"ok": 0, "failed": 0}
        self._edges: Any = None
        self._service = await asyncio.to_thread(open_service, self._settings, self._opened)
        self._service.reload_everywhere = self._reload_everywhere
        self._service.figures = self._figures_of_all
        log("edge started", {"version": self._service.engine.version})

    def __serve_build_asgi_app__(self) -> Any:
        return create_app(self._settings, self._service)

    async def __del__(self) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)

    # What the other edges ask for -------------------------------------------------------------

    async def load(self, name: str) -> _Loaded:
        """Load the folder for a reload, beside what is served."""
        try:
            engine = await asyncio.to_thread(self._service.load)
        except RecpruneError as error:
            log_problem("reload failed", {"reason": str(error)})
            return _Loaded(problem=self._service.without_paths(error))
        except Exception as error:  # a damaged folder can fail in ways of its own
            log_problem("reload failed", {}, error)
            return _Loaded(problem=f"cannot be loaded: {type(error).__name__}")
        self._candidate = (name, engine)
        return _Loaded(engine.version)

    async def swap(self, name: str) -> bool:
        """Serve what was loaded for a reload; return whether there is such a thing."""
        if self._candidate is None or self._candidate[0] != name:
            return False
        self._service.swap(self._candidate[1])
        self._candidate = None
        self._count_reload("ok")
        return True

    async def drop(self, name: str) -> None:
        """Forget what was loaded for a reload that has failed."""
        if self._candidate is not None and self._candidate[0] == name:
            self._candidate = None
        self._count_reload("failed")

    async def reload(self) -> ReloadOutcome:
        """Reload all edges."""
        return await self._reload_everywhere()

    async def figures(self) -> tuple[str, bytes]:
        """Return the name of this edge, and its figures."""
        name = serve.get_replica_context().replica_tag
        return name, await asyncio.to_thread(self._service.metrics.text)

    # Inside -----------------------------------------------------------------------------------

    def _opened(self, folder: Path) -> ShardedIndex:
        """Open a version of the shards, in all of their replicas, through their deployments."""
        saved = read_folder(folder)
        filled = sum(shard.num_items > 0 for shard in saved.shards)
        if filled != len(self._shards):
            raise StorageError(
                f"{folder}: has {filled} shards with items, and this service was started with "
                f"{len(self._shards)}: start it anew"
            )
        settings = self._settings
        index = ShardedIndex(
            saved,
            list(self._shards),
            replicas=settings.replicas,
            allow_partial=settings.allow_partial,
            timeout=settings.limits.shard_seconds,
            loop=self._loop,
        )
        index.wait_until_ready(settings.replicas * filled)
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
            await self._all("drop", name, seconds=_SWAP_S)
            raise ReloadError(problem)
        swapped = await self._all("swap", name, seconds=_SWAP_S)
        version = versions.pop()
        log("reloaded", {"version": version, "workers": len(swapped)})
        return ReloadOutcome(version, sum(one is True for one in swapped))

    async def _figures_of_all(self) -> bytes:
        said = await self._all("figures", seconds=_FIGURES_S)
        texts: dict[str, bytes] = dict(one for one in said if isinstance(one, tuple))
        return await asyncio.to_thread(merged_texts, texts)

    async def _all(self, method: str, *arguments: Any, seconds: float) -> list[Any]:
        """Return what all edges answer; errors in their place, nothing where one hangs."""
        if self._edges is None:
            application = serve.get_replica_context().app_name
            self._edges = serve.get_deployment_handle(EDGE, application)
        try:
            answered: list[Any] = await self._edges.broadcast(method, *arguments).results_async(
                timeout_s=seconds, return_exceptions=True
            )
        except TimeoutError:
            return []
        return answered

    def _count_reload(self, outcome: str) -> None:
        self._reloads[outcome] += 1
        self._service.metrics.set_reloads(self._reloads)


def application(args: Json) -> serve.Application:
    """Return the application that serves a folder; the arguments are settings, by their names.

    KubeRay, and `serve deploy`, name it as `recprune.serve.edge:application`. Where Serve listens
    is said elsewhere, so that it is taken for a place that others reach.
    """
    given = {"ray": "auto", **args}
    return _application(read_settings({"host": "0.0.0.0", **given}), given)  # noqa: S104


def _application(settings: ServeSettings, given: Json) -> serve.Application:
    numbers = _shards(settings)
    if settings.history_url is None and settings.workers > 1 and settings.ray != "local":
        raise InputError(
            "several edges may be on several machines, which cannot share the file of SQLite that "
            "histories are kept in: give --history, with the URL of a Redis"
        )
    shards = [shard_deployment(number, settings.replicas, verify=True) for number in numbers]
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
        max_constructor_retry_count=1,
        ray_actor_options={"num_cpus": 1, "runtime_env": {"env_vars": QUICK}},
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
    )
    bound: serve.Application = edge.bind(given, *shards)
    return bound


def _shards(settings: ServeSettings) -> list[int]:
    """Return the numbers of the shards that have items."""
    folder = sharded_folder(settings)
    if folder is None:
        raise InputError(f"{settings.folder}: is not in shards: it is served without Ray")
    numbers = [shard.number for shard in read_folder(folder).shards if shard.num_items]
    if not numbers:
        raise StorageError(f"{folder}: has no items to serve")
    return numbers


# From the command line ---------------------------------------------------------------------------


def serve_on_ray(settings: ServeSettings) -> None:
    """Deploy the application, and serve until SIGTERM or SIGINT; then delete it."""
    configure_logs()
    if settings.keys_file is not None:
        read_keys(settings.keys_file)  # before anything is started
    settings = settings.model_copy(update={"port": settings.port or _free_port(settings.host)})
    given = _given(settings)
    deployed = _application(settings, given)
    signals = _Signals()
    with _cluster(settings) as address, connected(address):
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        _listen(settings)
        try:
            edges = _deployed(deployed)
            where = f"http://{_shown(settings.host)}:{settings.port}/"
            print(f"serving on {where}", flush=True)  # noqa: T201
            log("serving", {"workers": settings.workers})
            for number in signals:
                if number != signal.SIGHUP:
                    break
                _reload(edges)
            log("ending", {})
        finally:
            serve.delete(APPLICATION)


def _deployed(deployed: serve.Application) -> Any:
    """Deploy the application, wait until it serves, and return the handle of its edges."""
    try:
        return serve.run(deployed, name=APPLICATION, route_prefix="/")
    except RuntimeError as error:
        said = serve.status().applications[APPLICATION].deployments[EDGE].message.splitlines()
        # Among what Serve quotes of an edge that could not start is the name of the error.
        named = [line.strip() for line in said if line.strip().startswith("recprune.")]
        why = named[-1].partition(": ")[2] if named else "\n".join(said) or str(error)
        raise StorageError(why) from None


def _given(settings: ServeSettings) -> Json:
    """Return the settings as edges are given them, who may be on other machines."""
    given: Json = settings.model_dump(
        mode="json", exclude=_NOT_THEIRS | {"history_password", "history_password_file"}
    )
    for name in ("folder", "shards", "keys_file", "names_file"):
        if given[name] is not None:
            given[name] = str(Path(given[name]).absolute())
    given["item_sets"] = {
        name: str(Path(path).absolute()) for name, path in given["item_sets"].items()
    }
    password = settings.history_password
    if password is not None:
        given["history_password"] = password.get_secret_value()
    return given


@contextmanager
def _cluster(settings: ServeSettings) -> Iterator[str]:
    """Have the cluster that is asked for, and yield its address."""
    if settings.ray != "local":
        yield str(settings.ray)
        return
    with local_cluster(settings.replicas * len(_shards(settings)) + settings.workers) as address:
        yield address


def _listen(settings: ServeSettings) -> None:
    """Have Serve listen; refuse where it listens already, but elsewhere."""
    serve.start(
        proxy_location="EveryNode",
        http_options={
            "host": settings.host,
            "port": settings.port,
            "keep_alive_timeout_s": int(settings.limits.client_seconds),
        },
    )
    there = cast(Any, serve.context._get_global_client()).http_config
    if (there.host, there.port) != (settings.host, settings.port):
        raise InputError(
            f"Ray Serve is running on this cluster already and listens on {there.host}, port "
            f"{there.port}: give these, or end it with `serve shutdown`"
        )


def _reload(edges: Any) -> None:
    try:
        edges.reload.remote().result()
    except Exception as error:
        lines = str(error).strip().splitlines()
        log_problem("reload failed", {"reason": lines[-1] if lines else type(error).__name__})


class _Signals:
    """SIGTERM, SIGINT and SIGHUP, one after the other, as they come."""

    def __init__(self) -> None:
        self._came = threading.Event()
        self._numbers: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._note)

    def _note(self, number: int, _: Any) -> None:
        self._numbers.append(number)
        self._came.set()

    def __iter__(self) -> Iterator[int]:
        while True:
            while not self._came.wait(1.0):  # now and then: handlers run between waits alone
                pass
            self._came.clear()
            while self._numbers:
                yield self._numbers.pop(0)


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
