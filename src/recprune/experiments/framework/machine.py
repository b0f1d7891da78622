"""What a figure was measured on: a time without its machine means nothing."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from recprune.experiments.peers.families import libraries
from recprune.system import memory_bytes, processor
from recprune.types import VERSION, Json

# Beside NumPy, whose versions figures may depend on.
_PACKAGES = tuple(dict.fromkeys(("torch", "onnxruntime", *libraries(), "polars")))


def machine() -> Json:
    """Name the machine, its system and the versions of what runs on it."""
    return {
        "cpu": processor(),
        "cores": os.cpu_count() or 0,
        "memory_gigabytes": round(memory_bytes() / 1e9, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "recprune": VERSION,
        "commit": _commit(),
        "numpy": np.__version__,
        **{name: found for name in _PACKAGES if (found := _version(name))},
    }


_PACKAGE = Path(__file__).parents[2]  # recprune


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
