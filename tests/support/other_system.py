"""A system that has nothing of Linux's own: copied as sitecustomize.py, it comes before all else.

What is only on Linux is taken away from Python, so that a call that is not guarded fails. Compiled
libraries keep it, and other packages may read in /proc: they have builds for other systems.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import select
import signal
import socket
import sys
from types import FrameType, ModuleType
from typing import Any

TAKEN: dict[ModuleType, tuple[str, ...]] = {
    os: (
        *("sched_getaffinity", "sched_setaffinity", "sched_setscheduler", "sched_getparam"),
        # Both are on macOS too: the one is not safe there, the other is on few systems else.
        *("fork", "O_DIRECTORY"),
        *("O_PATH", "O_TMPFILE", "O_DIRECT", "O_NOATIME", "O_LARGEFILE", "O_RSYNC"),
        *("memfd_create", "eventfd", "pidfd_open", "copy_file_range", "splice", "getrandom"),
        *("posix_fadvise", "posix_fallocate", "fdatasync", "pipe2", "setns", "unshare"),
        *("getxattr", "setxattr", "listxattr", "getresuid", "setresuid", "accept4"),
    ),
    select: ("epoll",),
    socket: (
        *("SOCK_NONBLOCK", "SOCK_CLOEXEC", "AF_NETLINK", "AF_PACKET", "AF_VSOCK", "SO_PEERCRED"),
        *("SO_BINDTODEVICE", "SO_INCOMING_CPU", "TCP_QUICKACK", "TCP_USER_TIMEOUT", "TCP_CORK"),
        *("TCP_DEFER_ACCEPT", "MSG_CMSG_CLOEXEC", "MSG_NOSIGNAL", "MSG_ERRQUEUE"),
    ),
    signal: ("SIGPWR", "SIGSTKFLT", "SIGPOLL", "SIGRTMIN", "SIGRTMAX", "sigtimedwait"),
    mmap: ("MAP_POPULATE", "MADV_HUGEPAGE", "MADV_DONTFORK", "MADV_REMOVE", "MADV_HWPOISON"),
    resource: ("prlimit", "RLIMIT_SIGPENDING", "RLIMIT_NICE", "RUSAGE_THREAD"),
}
TAKEN_FROM_LIBC = ("renameat2", "prctl", "memfd_create", "sched_getaffinity", "epoll_create1")
_PYTHON = os.path.dirname(os.__file__)  # noqa: PTH120 # without importing more than it has to
TAKEN_FOLDERS = ("/proc", "/sys", "/dev/shm")


def take_away() -> None:
    """Change this process; its children read sitecustomize.py themselves."""
    for module, names in TAKEN.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    if hasattr(os, "process_cpu_count"):
        os.process_cpu_count = os.cpu_count  # it would ask for the affinity
    _take_from_libc()
    _take_from_sysconf()
    sys.addaudithook(_hide_folders)


def _take_from_libc() -> None:
    found = ctypes.CDLL.__getattr__

    def find(library: ctypes.CDLL, name: str) -> Any:
        if name in TAKEN_FROM_LIBC:
            raise AttributeError(name)
        return found(library, name)

    ctypes.CDLL.__getattr__ = find  # type: ignore[method-assign]


def _take_from_sysconf() -> None:
    found = os.sysconf

    def sysconf(name: str | int) -> int:
        if name == "SC_AVPHYS_PAGES":
            raise ValueError("unrecognized configuration name")
        return found(name)

    os.sysconf_names.pop("SC_AVPHYS_PAGES", None)
    os.sysconf = sysconf


def _hide_folders(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in ("open", "os.listdir", "os.scandir", "os.chdir") or not arguments:
        return
    path = arguments[0]
    is_hidden = isinstance(path, str | os.PathLike) and str(path).startswith(TAKEN_FOLDERS)
    if is_hidden and not _is_of_another_package():
        raise FileNotFoundError(2, "No such file or directory", str(path))


def _is_of_another_package() -> bool:
    """Whether the code that opens something, by Python's own library or itself, is not ours."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith((_PYTHON, "<frozen")):
        if "site-packages" in frame.f_code.co_filename:
            break
        frame = frame.f_back
    file = "" if frame is None else frame.f_code.co_filename
    return "site-packages" in file and "/recprune/" not in file


if __name__ == "sitecustomize":
    take_away()
