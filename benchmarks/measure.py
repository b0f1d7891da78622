"""Time and peak memory of a piece of work, each run in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from recprune.experiments.framework.machine import machine


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


def write_json(path: Path, measurements: list[Measurement]) -> None:
    """Write measurements with the machine they were made on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": machine(), "measurements": [asdict(entry) for entry in measurements]}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
