"""Where the siege happens: a small disk, a Redis, and the service itself, all of which can be hurt.

Everything runs in namespaces of its own (`in_namespaces`): processes and the small disk end with the
driver, however that ends, and no other process of the machine is seen or hurt.
"""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.proc import children
from benchmarks.siege.client import Client

_INSIDE = "RECPRUNE_SIEGE_INSIDE"  # set where the namespaces are there
_PATIENCE_S = 60.0
# By program, the Debian package that has it.
_NEEDED = {"wrk": "wrk", "unshare": "util-linux", "mount": "mount", "cc": "gcc"}


def check_tools(histories: str) -> None:
    """Say at once, and all of it, what has to be installed."""
    needed = dict(_NEEDED)
    if histories == "redis":
        needed["redis-server"] = "redis-server"
    missing = {package for program, package in needed.items() if shutil.which(program) is None}
    if missing:
        words = " ".join(sorted(missing))
        raise SystemExit(f"not installed, but needed (Debian): apt install {words}")


def compiled_clock(place: Path) -> Path:
    """Compile the library that gives a process a wall clock that jumps."""
    library = place / "clock.so"
    source = Path(__file__).with_name("clock.c")
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True)
    return library


def in_namespaces() -> None:
    """Go on in a new process with processes, mounts and temporary files of its own."""
    if os.environ.get(_INSIDE):
        return
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if os.getuid() != 0:
        command.append("--map-root-user")
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        raise SystemExit(
            "this needs namespaces of its own (unshare): be root, or allow users to have them "
            "(sysctl kernel.unprivileged_userns_clone)"
        )
    environment = os.environ | {_INSIDE: "1"}
    words = [sys.executable, "-m", "benchmarks.siege", *sys.argv[1:]]
    os.execvpe(command[0], [*command, *words], environment)


class SmallDisk:
    """A file system of its own that can be filled up."""

    def __init__(self, place: Path, megabytes: int) -> None:
        self.place = place
        place.mkdir()
        options = f"size={megabytes}m,mode=0700"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "siege", str(place)], check=True)
        self._filler = place / "filler"

    def fill(self) -> None:
        """Take all room that is left, to the last byte."""
        with self._filler.open("ab", buffering=0) as filler:
            for size in (1 << 20, 4096):
                with suppress(OSError):
                    while filler.write(bytes(size)) == size:
                        pass

    def free(self) -> None:
        self._filler.unlink(missing_ok=True)

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.place)], check=False)


class Redis:
    """A redis-server that keeps what it has acknowledged, started again when it ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self.start()

    def start(self) -> None:
        """Start it and wait until it answers."""
        deadline = time.monotonic() + _PATIENCE_S
        while not self._try_to_start():
            if time.monotonic() > deadline:
                raise SystemExit(f"redis-server does not start: {self._log()}")
            time.sleep(0.2)

    def _try_to_start(self) -> bool:
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--dir", str(self.folder), "--appendonly", "yes", "--appendfsync", "always"]
        command += ["--save", "", "--maxmemory-policy", "noeviction"]
        with (self.folder / "redis.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        while self.process.poll() is None:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return True
            time.sleep(0.02)
        return False

    def _log(self) -> str:
        return (self.folder / "redis.log").read_text(errors="replace")[-2000:]

    def start_if_gone(self) -> None:
        """Do what a service manager does. Two hardships may ask for it at once."""
        with self._lock:
            if self.process is None or self.process.poll() is not None:
                self.start()

    def kill(self) -> None:
        with self._lock:
            if self.process is not None:
                self.process.kill()
                self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None:
            self.process.send_signal(number)


class Service:
    """`recprune serve`, with a clock that can be set, on a disk that can be full."""

    def __init__(
        self, folder: Path, disk: Path, histories: str, *, workers: int, options: Sequence[str] = ()
    ) -> None:
        self.folder = folder
        self.disk = disk
        self.histories = histories
        self.num_workers = workers
        self.port = free_port()
        self.client = Client(self.port)
        self._options = list(options)
        clock = disk.parent / f"{disk.name}-clock"
        clock.write_bytes(bytes(8))
        with clock.open("r+b") as file:
            self._clock = mmap.mmap(file.fileno(), 8)
        self._environment = os.environ | {
            "TMPDIR": str(disk / "tmp"),
            "LD_PRELOAD": str(compiled_clock(disk.parent)),
            "SIEGE_CLOCK": str(clock),
        }
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start it and wait until it serves."""
        command = [sys.executable, "-m", "recprune.cli", "serve", str(self.folder)]
        command += ["--port", str(self.port), "--workers", str(self.num_workers)]
        command += ["--history", self.histories, "--no-access-log", *self._options]
        (self.disk / "tmp").mkdir(exist_ok=True)
        with (self.disk / "service.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=self._environment
            )
        assert self.process.stdout is not None
        if not self.process.stdout.readline().startswith("serving on "):
            said = (self.disk / "service.log").read_text()[-4000:]
            raise SystemExit(f"the service does not start: {said}")
        self.wait_until_ready()

    def set_clock(self, seconds: int) -> None:
        """Let the service's wall clock be so far ahead of ours, from now on."""
        self._clock[:8] = seconds.to_bytes(8, sys.byteorder, signed=True)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def workers(self) -> list[int]:
        """Return the processes of the workers; of one that has just begun, too."""
        with suppress(OSError):
            return children(self.pid)
        return []

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while self.client.ask("GET", "/readyz").status != 200:
            if time.monotonic() > deadline:
                raise SystemExit(f"the service is not ready after {_PATIENCE_S:.0f} s")
            time.sleep(0.1)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill_all(self) -> None:
        """End all of it at once, as a power cut would."""
        for pid in [self.pid, *self.workers]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._let_go()

    def stop(self) -> int:
        """End it as a service manager would."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
        try:
            code = self.process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill_all()
            return -9
        self._let_go()
        return code

    def _let_go(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        self.process.wait()
        self.process.stdout.close()
        self.client.close()

    def log(self) -> str:
        return (self.disk / "service.log").read_text(errors="replace")


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])
