"""What Linux counts for its processes and interfaces in /proc, which other systems do not have."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from recprune.system import loopback

_PROC = Path("/proc")
_ESTABLISHED = "01"  # as net/tcp writes it


def has_proc() -> bool:
    """Whether the functions below can be called."""
    return (_PROC / "self" / "smaps_rollup").exists()


def children(pid: int) -> list[int]:
    return list(map(int, (_PROC / f"{pid}/task/{pid}/children").read_text().split()))


def memory(pid: int, beginning: str) -> int:
    """Return the bytes of a process that the system counts under names that begin so."""
    lines = (_PROC / f"{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(beginning))


def status(pid: int, name: str) -> int:
    """Return the bytes that the system counts for a process under a name: "VmHWM", "RssAnon"."""
    lines = (_PROC / f"{pid}/status").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def loopback_bytes() -> int:
    """Return how many bytes this machine has sent to itself."""
    for line in (_PROC / "net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == loopback():
            return int(counters.split()[0])
    return 0


def connections(pids: list[int], port: int) -> dict[int, list[int]]:
    """Return for each process the ports from which clients are connected with it at a port."""
    clients = {}  # by the inode of the socket
    for line in (_PROC / "net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, *_, inode = line.split()[:10]
        if int(local.rpartition(":")[2], 16) == port and state == _ESTABLISHED:
            clients[f"socket:[{inode}]"] = int(remote.rpartition(":")[2], 16)
    held = {}
    for pid in pids:
        links = []
        for descriptor in (_PROC / f"{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                links.append(descriptor.readlink().name)
        held[pid] = [clients[link] for link in links if link in clients]
    return held


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process so far, all its threads together."""
    times = (_PROC / f"{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")
