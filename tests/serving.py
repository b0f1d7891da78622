"""A real service for tests: a small saved recommender, and the command that serves it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from recprune import Index, assign_random, prepare, temporal_holdout
from recprune.recommender import Recommender
from recprune.sequence_model import build_model
from recprune.settings import Settings
from tests.test_recommender import walks

CLI = [sys.executable, "-m", "recprune.cli"]
PATIENCE_S = 30.0  # far more than anything here takes; a test that waits so long has failed
WIDTH = 32
Json = dict[str, Any]


def save_recommender(folder: Path, seed: int = 0, ids: str = "strings") -> Recommender:
    """Save the recommender of a model that was never trained: it answers like any other."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    holdout = temporal_holdout(walks(60, 90, ids), validation_users=20)
    codebook = assign_random(holdout.train.num_items, num_splits=8, num_sub_items=16, seed=seed)
    prepared = prepare(holdout, codebook, {"holdout": "temporal", "seed": seed})
    settings = Settings().with_values(
        {"width": WIDTH, "length": 10, "num_blocks": 1, "num_heads": 1}
    )
    model = build_model(settings.model, prepared.codes, codebook.num_sub_items)
    recommender = Recommender.from_model(prepared, model, settings)
    recommender.save(folder)
    return Recommender.load(folder)


def save_index(folder: Path, num_items: int, seed: int = 0) -> Index:
    """Save an index of random items."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (num_items, 8), np.uint8)
    index = Index.build(codes, rng.standard_normal((8, 256, WIDTH // 8)).astype(np.float32))
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
    assert "/" not in error["message"].replace("/search", "").replace("/events", ""), "no path"
    assert "Traceback" not in error["message"]
    return response.status_code, error["code"], error["message"]
