"""What benchmarks share: models to search, work in a process of its own, results as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from recprune.experiments.framework.machine import machine
from recprune.types import CodeArray, Float32Array, Json


@dataclass(frozen=True)
class Measurement:
    """What one run took. `seconds` is the work alone, imports and start-up left out."""

    name: str
    seconds: float
    peak_gigabytes: float


def measure(name: str, setup: str, work: str, *arguments: str | Path) -> Measurement:
    """Run `work` in a fresh process after `setup`, and measure it; `sys.argv[1:]` is `arguments`."""
    program = (
        f"import sys, time\n{setup}\n_begun = time.perf_counter()\n{work}\n"
        "print(time.perf_counter() - _begun)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    shown = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{name}: failed with exit code {process.returncode}")
    return Measurement(name, float(shown.split()[-1]), usage.ru_maxrss * 1024 / 1e9)


def write_result(path: Path, result: Json) -> None:
    """Write figures as JSON, with the machine that they were measured on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": machine(), **result}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def model_of(
    workload: Path | None, num_items: int, queries: int
) -> tuple[CodeArray, Float32Array, Float32Array]:
    """Return codes, sub-item and sequence embeddings: a trained model's from a folder, or random."""
    if workload is None:
        from recprune.experiments.ours.scaling import random_model

        return random_model(num_items, 8, queries, seed=0)
    names = ("codes", "sub_item_embeddings", "sequence_embeddings")
    codes, embeddings, users = (np.load(workload / f"{name}.npy") for name in names)
    return codes, embeddings, users[:queries]
