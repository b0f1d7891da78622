"""What Linux has and other systems lack: each such call once, with what is done without it."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import socket
import stat
import sys
from contextlib import suppress
from pathlib import Path

# macOS refuses a limit above this, whatever its hard one says: OPEN_MAX of sys/syslimits.h.
_MOST_DESCRIPTORS = 10_240


def available_cores() -> int:
    """Return on how many cores this process may run; where that is not told, how many there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def can_fork() -> bool:
    """Whether a process may go on in a child that it forks.

    The frameworks of macOS, with which NumPy and ONNX Runtime are linked there, do not survive it.
    """
    return sys.platform == "linux" and hasattr(os, "fork")


def open_folder(path: Path) -> int:
    """Return a descriptor of a folder; anything else is a NotADirectoryError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_DIRECTORY", 0))
    if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    return descriptor


def exchange(first: Path, second: Path) -> None:
    """Swap two folders atomically where the system can, in three renames where it cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is not None:
        at_cwd, swap = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of linux/fcntl.h and linux/fs.h
        if renameat2(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), swap) == 0:
            return
        if ctypes.get_errno() not in (errno.ENOSYS, errno.EINVAL):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(second))
    aside = first.with_name(first.name + ".old")
    second.rename(aside)
    first.rename(second)
    aside.rename(first)


def allow_descriptors() -> int | None:
    """Let this process open as many files as the system allows; return how many, None for any."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (most, _MOST_DESCRIPTORS):
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
            break
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if allowed == resource.RLIM_INFINITY else allowed


def loopback() -> str:
    """Return the name of the network interface on which a machine talks to itself: lo, or lo0."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def peak_bytes() -> int:
    """Return the most memory that this process has had; Linux counts it in kilobytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * 1024 if sys.platform == "linux" else peak


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_bytes() -> int:
    """Return how much memory can be had now; where that is not told, half of all."""
    if "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return memory_bytes() // 2
    cached = sum(  # what the system would give back: its cache of files
        1024 * int(line.split()[1]) for line in _proc("meminfo") if line.startswith("Cached:")
    )
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") + cached


def processor() -> str:
    """Return what the processor calls itself, or at least its family."""
    models = [line for line in _proc("cpuinfo") if line.startswith("model name")]
    return models[0].partition(":")[2].strip() if models else platform.processor()


def _proc(name: str) -> list[str]:
    """Return the lines of a file in /proc; none where there is no such folder."""
    try:
        return Path("/proc", name).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
