"""Being connected to a Ray cluster: one that is running, or one of this machine for the while.

Every node needs the same recprune, and whatever folders it is told of under the same paths.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from recprune.types import InputError, needs_extra

_CONNECT_SECONDS = 3.0


@contextmanager
def connected(address: str, num_cpus: int | None = None) -> Iterator[None]:
    """Be connected to a cluster. Within a connection that is there already, that one is used.

    The address "local" starts a cluster on this machine, with so many CPUs, and ends it afterwards;
    "auto" finds a running one; else it is host:port of the head node.
    """
    if address not in ("auto", "local"):
        check_reachable(address)
    # Nobody asked that anything be sent anywhere. Ray reads this when it is imported.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with needs_extra("ray"):
        import ray
    if ray.is_initialized():
        yield
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address == "local":
            ray.init("local", num_cpus=num_cpus, include_dashboard=False, **quiet)
        else:
            ray.init(address, **quiet)
    except (ray.exceptions.RayError, OSError, RuntimeError, ValueError) as error:
        raise InputError(f"no Ray cluster at {address}: {error}") from None
    try:
        yield
    finally:
        ray.shutdown()


def check_reachable(address: str) -> None:
    """Refuse a head node that does not answer; Ray itself would try for most of a minute."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        raise InputError(f"the address is {address!r}, expected host:port, auto or local")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise InputError(f"no Ray cluster at {address}: {error}") from None
