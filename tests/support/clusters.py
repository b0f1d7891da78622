"""A real Ray cluster for tests: nodes of this machine, in processes that end with the tests."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.serving import wait_until

# Made for this run of the tests alone: Ray would put one into the home folder. Set for good, as Ray
# reads them once in a process, when it is imported.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


class Cluster:
    """Two nodes, and a way to tell their keeper what shall happen to them."""

    def __init__(self, keeper: subprocess.Popen[str], address: str) -> None:
        self.keeper = keeper
        self.address = address  # of the head node

    def tell(self, order: str) -> None:
        """Have one of the keeper's orders obeyed."""
        assert self.keeper.stdin is not None
        assert self.keeper.stdout is not None
        self.keeper.stdin.write(order + "\n")
        self.keeper.stdin.flush()
        assert self.keeper.stdout.readline() == "done\n", order

    def workers(self, name: str) -> list[int]:
        """Return the processes of actors of a class."""
        return [
            pid
            for pid, line in descendants(self.keeper.pid).items()
            if line.startswith("ray::") and name in line
        ]


@contextmanager
def ray_environment() -> Iterator[Path]:
    """Let Ray keep its files together, on a short path for its sockets, and to itself."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_TMPDIR", folder)
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # No processes in stock: starting them costs more than the tests themselves.
        environment.setenv("RAY_prestart_worker_first_driver", "0")
        environment.setenv("RAY_enable_worker_prestart", "0")
        try:
            yield Path(folder)
        finally:
            end(processes_of(Path(folder)))
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def running_cluster(folder: Path, num_cpus: int = 1) -> Iterator[Cluster]:
    """Start two nodes of so many CPUs in a `ray_environment`; afterwards nothing of it is left."""
    log = folder / "keeper.log"
    with log.open("wb") as file:
        keeper = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("cluster_keeper.py")), str(num_cpus)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True,
        )  # fmt: skip
    assert keeper.stdout is not None
    address = keeper.stdout.readline().strip()
    try:
        if not address:
            raise AssertionError(log.read_text())
        yield Cluster(keeper, address)
    finally:
        keeper.communicate(timeout=30)  # closes its input, which ends it
    left = processes_of(folder).values()
    assert not [line for line in left if "raylet/raylet" in line], "a node is left"


def end(processes: Iterable[int]) -> None:
    """End what is left of a cluster: Ray's agents outlive a killed node by a minute."""
    left = list(processes)
    for pid in filter(is_running, left):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_running, left)), "the cluster is gone")


def processes_of(folder: Path) -> dict[int, str]:
    """Return the running processes of a `ray_environment`, whoever their parents are by now."""
    name = str(folder).encode()
    found = {}
    for pid in _running():
        with suppress(OSError):  # it has ended meanwhile, or is none of ours
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            if name in line or name in Path(f"/proc/{pid}/environ").read_bytes():
                found[pid] = line.replace(b"\0", b" ").decode()
    return found


def descendants(pid: int) -> dict[int, str]:
    """Return the running processes below one, with their command lines."""
    parents = _running()
    found: dict[int, str] = {}
    level = {pid}
    while level:
        level = {child for child, parent in parents.items() if parent in level}
        for child in level:
            with suppress(OSError):
                line = Path(f"/proc/{child}/cmdline").read_bytes()
                found[child] = line.replace(b"\0", b" ").decode()
    return found


def is_running(pid: int) -> bool:
    return pid in _running()


def _running() -> dict[int, int]:
    """Return all processes but those that are only waiting to be buried, with their parents."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                found[int(folder.name)] = int(parent)
    return found
