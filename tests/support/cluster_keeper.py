"""Keeps a Ray cluster of two small nodes; a program that `tests.support.clusters` runs."""

from __future__ import annotations

import sys
from typing import Any

import ray
from ray.cluster_utils import Cluster


def keep() -> None:
    """Start the nodes, say where the head is, and obey until the input ends."""
    small: dict[str, Any] = {"num_cpus": int(sys.argv[1]), "object_store_memory": 80 << 20}
    head = {
        "include_dashboard": False,
        # A node that does not answer is lost after a second and a half, not after fifteen.
        "_system_config": {"health_check_period_ms": 500, "health_check_failure_threshold": 3},
    }
    nodes = Cluster(initialize_head=True, head_node_args=small | head)
    second = nodes.add_node(**small)
    nodes.wait_for_nodes()
    _say(nodes.address)
    held = []
    for order in map(str.strip, sys.stdin):
        if order == "lose the second node":
            nodes.remove_node(second, allow_graceful=False)
        elif order == "add a second node":
            second = nodes.add_node(**small)
            nodes.wait_for_nodes()
        elif order == "fill the object store":
            ray.init(nodes.address, log_to_driver=False)
            held.append(ray.put(bytes(72 << 20)))
        elif order == "empty the object store":
            held.clear()
            ray.shutdown()
        else:
            raise ValueError(order)
        _say("done")
    nodes.shutdown()  # type: ignore[no-untyped-call]


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    keep()
