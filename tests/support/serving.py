"""A real service for tests: a small saved recommender, and the command that serves it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from recprune import Index, assign_random, prepare, temporal_holdout
from recprune.models.architectures import build_model
from recprune.models.onnx_export import EncoderPrecision
from recprune.models.settings import Settings
from recprune.recommender.making import from_model
from recprune.recommender.recommender import Recommender
from tests.support.small_models import walks

CLI = [sys.executable, "-m", "recprune.cli"]
PATIENCE_S = 30.0  # far more than anything here takes; a test that waits so long has failed
WIDTH = 32
HISTORY = ["a", "tea é7", "n"]
Json = dict[str, Any]


def save_two_recommenders(place: Path) -> list[Path]:
    """Save two recommenders of the same items that answer differently."""
    for seed in (0, 1):
        save_recommender(place / str(seed), seed)
    return [place / "0", place / "1"]


def save_recommender(
    folder: Path,
    seed: int = 0,
    ids: str = "strings",
    num_items: int = 90,
    encoder_precision: EncoderPrecision = "float32",
    **values: Any,
) -> Recommender:
    """Save the recommender of a model that was never trained: it answers like any other."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    holdout = temporal_holdout(walks(60, num_items, ids), validation_users=20)
    codebook = assign_random(holdout.train.num_items, num_splits=8, num_sub_items=16, seed=seed)
    prepared = prepare(holdout, codebook, {"holdout": "temporal", "seed": seed})
    settings = Settings().with_values(
        {"width": WIDTH, "length": 10, "num_blocks": 1, "num_heads": 1, **values}
    )
    model = build_model(settings.model, prepared.codes, codebook.num_sub_items)
    recommender = from_model(prepared, model, settings, encoder_precision)
    recommender.save(folder)
    return Recommender.load(folder)


def save_index(folder: Path, num_items: int, seed: int = 0, width: int = WIDTH) -> Index:
    """Save an index of random items."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (num_items, 8), np.uint8)
    index = Index.build(codes, rng.standard_normal((8, 256, width // 8)).astype(np.float32))
    index.save(folder)
    return index


class Service:
    """`recprune serve` in a process of its own, on a free loopback port."""

    def __init__(
        self, folder: Path, *options: str | Path, command: Sequence[str] | None = None
    ) -> None:
        self.log = folder.with_name(f"{folder.name}-{time.monotonic_ns()}.log")
        words = [str(folder), "--port", "0", *map(str, options)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*(command or [*CLI, "serve"]), *words],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"TMPDIR": str(folder.parent)},  # a killed one leaves files there
            )
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        if not said.startswith("serving on "):
            self.stop()
            raise AssertionError(f"does not serve: {self.log.read_text()}")
        self.url = said.split()[-1].rstrip("/")
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE_S)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def workers(self) -> list[int]:
        pid = self.process.pid
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))

    def post(self, path: str, body: Json, **headers: str) -> httpx.Response:
        return self.client.post(path, json=body, headers=headers)

    def recommend(self, **body: Any) -> Json:
        """Return the one answer to a question that must be answered."""
        response = self.post("/recommend", body)
        assert response.status_code == 200, response.text
        (answer,) = response.json()["answers"]
        return dict(answer)

    def metric(self, line: str) -> float:
        """Return a figure by its name and labels; 0 where it is not counted yet."""
        for text in self.client.get("/metrics").text.splitlines():
            name, _, value = text.rpartition(" ")
            if name == line:
                return float(value)
        return 0.0

    def logged(self) -> list[Json]:
        whole, _, _ = self.log.read_text().rpartition("\n")  # the last line may be half written
        return [json.loads(line) for line in whole.splitlines()]

    def kill_all(self) -> None:
        """End everything at once, as a power cut would."""
        for pid in [self.process.pid, *self.workers]:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        """End it as a service manager would, and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        if hasattr(self, "client"):
            self.client.close()
        return code


@contextmanager
def serving(
    folder: Path, *options: str | Path, command: Sequence[str] | None = None
) -> Iterator[Service]:
    service = Service(folder, *options, command=command)
    try:
        yield service
    finally:
        service.stop()


def replace(folder: Path, source: Path) -> None:
    """Put a copy of another folder in the place of one, in one step for whoever opens it."""
    fresh, old = folder.with_name("fresh"), folder.with_name("old")
    shutil.copytree(source, fresh)
    folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old)


def expected(folder: Path) -> list[Any]:
    return Recommender.load(folder).recommend([HISTORY], 5).items[0]


def events_of(service: Service) -> list[str]:
    return [entry["event"] for entry in service.logged()]


def damaged(source: Path, place: Path, how: str) -> Path:
    """Return a copy of a folder that something has happened to."""
    copy = shutil.copytree(source, place / f"damaged {how}")
    codes = copy / "index_codes.npy"
    if how == "truncated":
        os.truncate(codes, codes.stat().st_size // 2)
    elif how == "a bit":
        content = bytearray(codes.read_bytes())
        content[-1] ^= 1
        codes.write_bytes(content)
    elif how == "no manifest":
        (copy / "manifest.json").unlink()
    return copy


class Load:
    """Clients in threads that ask all the time, each over a connection of its own."""

    def __init__(self, service: Service, *, keep_alive: bool, key: str | None = None) -> None:
        self.answers: list[tuple[float, str, list[Any]]] = []  # when asked, version, and items
        self.failures: list[str] = []
        self._url = service.url
        self._headers = {} if keep_alive else {"connection": "close"}
        if key is not None:
            self._headers["authorization"] = f"Bearer {key}"
        self._end = threading.Event()

    @contextmanager
    def running(self, threads: int = 4) -> Iterator[Load]:
        with ThreadPoolExecutor(threads) as pool:
            jobs = [pool.submit(self._ask) for _ in range(threads)]
            try:
                wait_until(lambda: len(self.answers) > 20, "answers under load")
                yield self
            finally:
                self._end.set()
            for job in jobs:
                job.result()

    def more(self, count: int = 20) -> None:
        """Wait for so many further answers."""
        reached = len(self.answers) + count
        wait_until(lambda: len(self.answers) >= reached, "further answers")

    def _ask(self) -> None:
        with httpx.Client(base_url=self._url, headers=self._headers, timeout=PATIENCE_S) as client:
            while not self._end.is_set():
                asked = time.monotonic()
                try:
                    found = client.post("/recommend", json={"history": HISTORY, "k": 5})
                except httpx.TransportError as error:
                    self.failures.append(type(error).__name__)
                    continue
                if found.status_code != 200:
                    self.failures.append(found.text)
                    continue
                body = found.json()
                self.answers.append((asked, body["version"], items_of(body["answers"][0])))


def received(connection: socket.socket) -> bytes:
    """Read until the other side ends it."""
    connection.settimeout(PATIENCE_S)
    parts = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def sockets(pid: int) -> int:
    """Count the connections of a process, those to nobody included."""
    count = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            count += descriptor.readlink().name.startswith("socket:")
    return count


def wait_for_workers(service: Service, count: int) -> None:
    """Wait until as many workers have answered."""

    def have_answered() -> bool:
        httpx.get(f"{service.url}/healthz")  # over a connection of its own
        answered = {entry["process"] for entry in service.logged() if entry["event"] == "request"}
        return len(answered & set(service.workers)) == count

    wait_until(have_answered, f"{count} workers at work")


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, f"{what}: not within {PATIENCE_S} s"
        time.sleep(0.02)


def scores_of(answer: Json) -> list[int]:
    """Return the bits of the scores."""
    scores = np.array([item["score"] for item in answer["items"]], np.float32)
    return [int(bits) for bits in scores.view(np.uint32)]


def items_of(answer: Json) -> list[Any]:
    return [item["item"] for item in answer["items"]]


def error_of(response: httpx.Response) -> tuple[int, str, str]:
    """Return status, code and message of an answer that is an error, and nothing but that."""
    (error,) = response.json().values()
    assert set(error) == {"code", "message"}
    no_paths = re.sub("/search|/events|application/json", "", error["message"])
    assert "/" not in no_paths
    assert "Traceback" not in error["message"]
    return response.status_code, error["code"], error["message"]
