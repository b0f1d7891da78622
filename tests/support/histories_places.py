"""Places to keep histories in, for tests: how they are opened, and a real Redis server."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from recprune.serve.histories.histories import Event, Histories, open_histories

MOST = 5


@contextmanager
def opened(url: str, most: int = MOST) -> Iterator[Histories]:
    with closing(open_histories(url, most)) as histories:
        yield histories


def bought(user: str, items: str, start: float = 0.0) -> list[Event]:
    """One event for each letter, one second after the other."""
    return [Event(user, item, start + at) for at, item in enumerate(items)]


class RedisServer:
    """A redis-server of our own, with a durable log in a folder of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        binary = shutil.which("redis-server")
        if binary is None:
            pytest.skip("needs redis-server (Debian: apt install redis-server)")
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        self.folder = folder
        self._command = [
            binary, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder),
            "--appendonly", "yes", "--appendfsync", "always", "--save", "", *options,
        ]  # fmt: skip
        self.start()

    def start(self) -> None:
        with (self.folder / "redis.log").open("a") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)
        deadline = time.monotonic() + 20
        while not answers(self.port):
            assert self.process.poll() is None, (self.folder / "redis.log").read_text()
            assert time.monotonic() < deadline, "redis-server does not listen"
            time.sleep(0.01)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class RedisCluster:
    """Three masters of our own, which share the slots."""

    def __init__(self, folder: Path, password: str = "") -> None:
        self._password = password
        options = ("--requirepass", password, "--masterauth", password) if password else ()
        self.servers: list[RedisServer] = []
        try:
            for number in range(3):
                (folder / str(number)).mkdir()
                bus = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
                self.servers.append(RedisServer(folder / str(number), *bus, *options))
            places = [f"127.0.0.1:{server.port}" for server in self.servers]
            self._tell("--cluster", "create", *places, "--cluster-yes")
            self.wait()
        except BaseException:
            self.kill()
            raise
        self.url = f"redis+cluster://{places[0]}"

    def start(self) -> None:
        for server in self.servers:
            server.start()
        self.wait()

    def wait(self) -> None:
        """Return when all of them find that all slots are there."""
        deadline = time.monotonic() + 30
        while not all("cluster_state:ok" in self._info(server) for server in self.servers):
            assert time.monotonic() < deadline, "the cluster does not come together"
            time.sleep(0.05)

    def move_slots(self, count: int) -> None:
        """Let the second server have slots of the first, with what is in them."""
        names = [self._tell("-p", str(one.port), "cluster", "myid").strip() for one in self.servers]
        first = f"127.0.0.1:{self.servers[0].port}"
        words = (
            "--cluster-from",
            names[0],
            "--cluster-to",
            names[1],
            "--cluster-slots",
            str(count),
        )
        self._tell("--cluster", "reshard", first, *words, "--cluster-yes")

    def _tell(self, *words: str) -> str:
        done = subprocess.run(
            ["redis-cli", *words],
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | ({"REDISCLI_AUTH": self._password} if self._password else {}),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def _info(self, server: RedisServer) -> str:
        return self._tell("-p", str(server.port), "cluster", "info")

    def kill(self) -> None:
        for server in self.servers:
            server.kill()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
