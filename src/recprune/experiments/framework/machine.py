"""What a figure was measured on: a time without its machine means nothing."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from recprune.experiments.peers.families import libraries
from recprune.types import VERSION, Json

# Beside NumPy, whose versions figures may depend on.
_PACKAGES = tuple(dict.fromkeys(("torch", "onnxruntime", *libraries(), "polars")))


def machine() -> Json:
    """Name the machine, its system and the versions of what runs on it."""
    cpuinfo = Path("/proc/cpuinfo")
    models = [
        line.partition(":")[2].strip()
        for line in (cpuinfo.read_text().splitlines() if cpuinfo.exists() else [])
        if line.startswith("model name")
    ]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count() or 0,
        "memory_gigabytes": round(memory_bytes() / 1e9, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "recprune": VERSION,
        "commit": _commit(),
        "numpy": np.__version__,
        **{name: found for name in _PACKAGES if (found := _version(name))},
    }


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_bytes() -> int:
    """Return how much memory can be had now."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") + _cached_bytes()


_PACKAGE = Path(__file__).parents[2]  # recprune


def _cached_bytes() -> int:
    """Return what the system would give back: its cache of files."""
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Cached:"))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _commit() -> str:
    """Return the commit of the sources that run, where they are a checkout; else nothing."""
    commit = _git("rev-parse", "--short=12", "HEAD")
    return f"{commit} and changes" if commit and _git("status", "--porcelain", ".") else commit


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(_PACKAGE), *arguments]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    except OSError:
        return ""
    return found.stdout.strip()
