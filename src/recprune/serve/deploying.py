"""`recprune serve --ray`: the application of `edge` on a cluster, while the command runs."""

from __future__ import annotations

import contextlib
import logging
import queue
import signal
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from recprune.cluster import connected, local_cluster
from recprune.serve.addresses import listen, url_of
from recprune.serve.configuration import ServeSettings
from recprune.serve.edge import APPLICATION, EDGE, edge_application, filled_shards
from recprune.serve.keys import read_keys
from recprune.serve.logs import configure_logs, log, log_problem
from recprune.shards.deployment import start_owner
from recprune.types import InputError, Json, RecpruneError, StorageError, needs_extra

with needs_extra("ray"):
    from ray import serve
    from ray.exceptions import RayError

_LOOK_S = 1.0  # between looks at how the application is
_WORD_S = 5.0  # between words about what is waited for
_ROOM_S = 15.0  # for the application of a command that was killed to end
_LISTEN_S = 20.0  # for Serve to listen once the application runs


def serve_on_ray(settings: ServeSettings) -> None:
    """Deploy the application, and serve until SIGTERM or SIGINT; then delete it."""
    configure_logs()
    if settings.keys_file is not None:
        read_keys(settings.keys_file)  # before anything is started
    filled_shards(settings)
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    with _cluster(settings) as address, connected(address):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, _: signals.put(number))
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        _wait_for_room()
        settings = _listening(settings)
        try:
            _run(settings, signals)
        except RayError as error:
            raise RecpruneError(f"the cluster fails: {str(error).splitlines()[0]}") from None
        finally:
            with contextlib.suppress(RayError):
                serve.delete(APPLICATION)


def _wait_for_room() -> None:
    """Wait for an application of this name to end, as that of a killed command does; or refuse."""
    refuse_at = time.monotonic() + _ROOM_S
    while APPLICATION in serve.status().applications:
        if time.monotonic() >= refuse_at:
            raise InputError(
                f"Ray Serve has an application {APPLICATION!r} on this cluster already: end that "
                "one first, or use another cluster"
            )
        time.sleep(_LOOK_S)


def _run(settings: ServeSettings, signals: queue.SimpleQueue[int]) -> None:
    owner = start_owner()
    deployed = edge_application(settings, _given(settings), owner)
    # Not waited for by Serve, which hears of no signal meanwhile.
    target = serve.RunTarget(deployed, name=APPLICATION, route_prefix="/")
    (edges,) = serve.run_many([target], wait_for_applications_running=False)
    has_served = False
    word_at = time.monotonic() + _WORD_S
    while True:
        number = _next(signals)
        if number in (signal.SIGTERM, signal.SIGINT):
            log("ending", {})
            return
        said = serve.status().applications.get(APPLICATION)
        if said is None:
            raise RecpruneError("somebody has ended the application: it is no longer served")
        if said.status == "DEPLOY_FAILED":
            raise StorageError(_why(said))
        if not has_served and said.status == "RUNNING":
            _announce(settings)
            has_served = True
        elif not has_served and time.monotonic() >= word_at:
            word_at = time.monotonic() + _WORD_S
            waiting = {name: one.message for name, one in said.deployments.items() if one.message}
            log("waiting for the cluster", waiting)
        if number == signal.SIGHUP and has_served:
            _reload(edges)


def _next(signals: queue.SimpleQueue[int]) -> int | None:
    try:
        return signals.get(timeout=_LOOK_S)
    except queue.Empty:
        return None


def _announce(settings: ServeSettings) -> None:
    """Say where it is served, once it really is."""
    where = url_of(settings.host, settings.port)
    deadline = time.monotonic() + _LISTEN_S
    while True:
        try:
            asked = HTTPConnection(settings.host, settings.port, timeout=_LOOK_S)
            with contextlib.closing(asked):
                asked.request("GET", "/healthz")
                asked.getresponse().read()
            break
        except (OSError, HTTPException):
            if time.monotonic() >= deadline:
                raise InputError(
                    f"Ray Serve runs on this cluster, and does not listen on {settings.host}, port "
                    f"{settings.port}: it was started otherwise; end it with `serve shutdown`"
                ) from None
            time.sleep(_LOOK_S / 4)
    print(f"serving on {where}", flush=True)  # noqa: T201
    log("serving", {"workers": settings.workers})


def _why(said: Any) -> str:
    """Return why an edge could not start."""
    lines = said.deployments[EDGE].message.splitlines() if EDGE in said.deployments else []
    # Among what Serve quotes of it is the name of the error.
    named = [line.strip() for line in lines if line.strip().startswith("recprune.")]
    return named[-1].partition(": ")[2] if named else "\n".join(lines) or str(said.message)


def _given(settings: ServeSettings) -> Json:
    """Return the settings as edges are given them, who may be on other machines.

    Passwords are not among them: each edge reads its own node's variable, or the file.
    """
    given: Json = settings.model_dump(
        mode="json", exclude={"settings_file", "host", "port", "scratch", "history_password"}
    )
    paths = ("folder", "shards", "live", "attributes", "keys_file", "names_file")
    for name in (*paths, "history_password_file"):
        if given[name] is not None:
            given[name] = str(Path(given[name]).absolute())
    given["item_sets"] = {
        name: str(Path(path).absolute()) for name, path in given["item_sets"].items()
    }
    return given


@contextlib.contextmanager
def _cluster(settings: ServeSettings) -> Iterator[str]:
    """Have the cluster that is asked for, and yield its address."""
    if settings.ray != "local":
        yield str(settings.ray)
        return
    needed = settings.replicas * len(filled_shards(settings)) + settings.workers
    with local_cluster(needed) as address:
        yield address


def _listening(settings: ServeSettings) -> ServeSettings:
    """Have Serve listen, unless it does already; return the settings with the port."""
    is_there = bool(serve.status().proxies)
    if not is_there:
        # Serve itself would share the port with whoever listens there.
        with listen(settings.host, settings.port) as probe:
            settings = settings.model_copy(update={"port": probe.getsockname()[1]})
    try:
        serve.start(
            proxy_location="EveryNode",
            http_options={
                "host": settings.host,
                "port": settings.port,
                "keep_alive_timeout_s": int(settings.limits.client_seconds),
            },
        )
    except (RayError, RuntimeError, TimeoutError) as error:
        raise InputError(f"Ray Serve does not start on this cluster: {error}") from None
    return settings


def _reload(edges: Any) -> None:
    try:
        outcome = edges.reload.remote().result()
    except Exception as error:
        lines = str(error).strip().splitlines()
        log_problem("reload failed", {"reason": lines[-1] if lines else type(error).__name__})
    else:
        log("reloaded", {"version": outcome.version, "workers": outcome.workers})
