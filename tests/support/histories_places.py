"""Places to keep histories in, for tests: how they are opened, and a real Redis server."""

from __future__ import annotations

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
