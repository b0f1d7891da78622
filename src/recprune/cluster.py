"""Being connected to a Ray cluster: one that is running, or one of this machine for the while.

Every node needs the same recprune, and the folders that are named to it under the same paths.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from recprune.types import InputError, Progress, RecpruneError, needs_extra

_CONNECT_SECONDS = 3.0
_END_SECONDS = 20.0  # for a cluster of this machine to end
_BUSY_SECONDS = 5.0  # without a free CPU, until that is reported
_POLL_SECONDS = 0.2  # between two looks at the CPUs


@dataclass
class _Connection:
    """Ray's one connection of this process, where it was made here."""

    driver: str | None
    is_local: bool  # whether the cluster was started with it
    users: int = 0


# Reentrant: garbage collection may end a user of the connection while the same thread connects.
_lock = threading.RLock()
_ours: _Connection | None = None


@contextmanager
def connected(address: str, num_cpus: int | None = None) -> Iterator[None]:
    """Be connected to a cluster. A connection that is there already is used, and closed by the last
    user, if it was made here.

    The address "local" starts a cluster on this machine, with so many CPUs, and ends it afterwards;
    "auto" finds a running one; else it is host:port of the head node.
    """
    if address not in ("auto", "local"):
        check_reachable(address)
    # No usage statistics, unless the environment asks for them. Ray reads this when imported.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with needs_extra("ray"):
        import ray
    connection = _use_connection(ray, address, num_cpus)
    try:
        yield
    finally:
        _leave_connection(ray, connection)


def _use_connection(ray: Any, address: str, num_cpus: int | None) -> _Connection | None:
    """Return the connection that was made here, with one user more; None: it is not ours."""
    global _ours
    with _lock:
        if not ray.is_initialized():
            _init(ray, address, num_cpus)
            _ours = _Connection(driver_id(), is_local=address == "local")
        if _ours is None or _ours.driver != driver_id():
            return None
        _ours.users += 1
        return _ours


def _leave_connection(ray: Any, connection: _Connection | None) -> None:
    """Close a connection after its last user."""
    global _ours
    with _lock:
        if connection is None:
            return
        connection.users -= 1
        if not connection.users and connection is _ours:
            _ours = None
            if connection.driver == driver_id():  # still the one that was made here
                ray.shutdown()


def is_own_cluster() -> bool:
    """Say whether the cluster was started here, for this process alone."""
    return _ours is not None and _ours.is_local and _ours.driver == driver_id()


def driver_id() -> str | None:
    """Return the id of this connection to a cluster; None without one.

    Asked anything else, Ray would connect by itself to whatever it finds.
    """
    import ray

    if not ray.is_initialized():
        return None
    return str(ray.get_runtime_context().get_worker_id())


def _init(ray: Any, address: str, num_cpus: int | None) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        with _keeping_sigterm():
            if address == "local":
                ray.init("local", num_cpus=num_cpus, include_dashboard=False, **quiet)
            else:
                ray.init(address, **quiet)
    except (ray.exceptions.RayError, OSError, RuntimeError, ValueError) as error:
        raise InputError(f"no Ray cluster at {address}: {error}") from None


@contextmanager
def _keeping_sigterm() -> Iterator[None]:
    """Keep the handler of SIGTERM, which Ray replaces by its own."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if callable(before) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


def largest_node() -> int:
    """Return the CPUs of the node that has most of them."""
    import ray

    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return max((int(node["Resources"].get("CPU", 0)) for node in nodes if node["Alive"]), default=0)


def say_if_busy(progress: Progress) -> None:
    """Look for a free CPU for a while, and say so if there is none: what is asked for will wait."""
    import ray

    begun = time.monotonic()
    while ray.available_resources().get("CPU", 0) < 1:  # type: ignore[no-untyped-call]
        if time.monotonic() > begun + _BUSY_SECONDS:
            progress("all CPUs of the cluster are taken: waiting until one is free")
            return
        time.sleep(_POLL_SECONDS)


def use_own_token() -> None:
    """Close a cluster that is to be started here to other programs; before Ray is imported.

    Ray has a token made for a cluster of its own process, and one that joins from another needs it.
    """
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


@contextmanager
def local_cluster(num_cpus: int) -> Iterator[str]:
    """Have a cluster on this machine, and yield its address, without being connected to it.

    It belongs to a process of its own, which ends it when this one has ended, however that happens.
    """
    with needs_extra("ray"):
        if find_spec("ray") is None:
            raise ModuleNotFoundError(name="ray")
    owner = subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", "recprune.cluster", str(num_cpus)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for the process that uses the cluster
    )
    try:
        address = owner.stdout.readline().strip() if owner.stdout is not None else ""
        if not address:
            raise InputError("no Ray cluster could be started on this machine")
        yield address
    finally:
        try:
            owner.communicate(timeout=_END_SECONDS)  # closes its input, which ends it
        except subprocess.TimeoutExpired:
            owner.kill()
            owner.wait()


def _run_local_cluster(num_cpus: int) -> None:
    """Start a cluster, say where it is, and end it when the input ends."""
    with connected("local", num_cpus):
        import ray

        sys.stdout.write(f"{ray.get_runtime_context().gcs_address}\n")
        sys.stdout.flush()
        sys.stdin.read()


def check_reachable(address: str) -> None:
    """Refuse a head node that does not answer; Ray itself would try for most of a minute."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        raise InputError(f"the address is {address!r}, expected host:port, auto or local")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise InputError(f"no Ray cluster at {address}: {error}") from None


if __name__ == "__main__":
    try:
        _run_local_cluster(int(sys.argv[1]))
    except RecpruneError as problem:
        sys.exit(str(problem))
