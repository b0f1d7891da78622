"""`recprune serve` that adds up the processor time it spends in which part of a request.

    python benchmarks/end_to_end_stages.py SECONDS serve FOLDER ...

SECONDS is a file that gets one float64 for every stage, which workers share. Run by its path, so that
the Python of another checkout runs its own service. What a version does not have is not measured.
"""

from __future__ import annotations

import importlib
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Each with the calls that it consists of; a call inside another one counts for the inner stage alone.
STAGES = {
    "parse JSON": ["json:loads"],
    "check the request": ["fastapi._compat.v2:ModelField.validate"],
    "parse and check": ["recprune.serve.http.json_route:parsed"],
    "look ids up": ["recprune.data.identifiers:IntegerIds.find_all"],
    "encode": ["recprune.models.inference:OnnxEncoder.encode"],
    "search": ["recprune.search.index:Index.search"],
    "the recommender's rest": ["recprune.serve.engine.engine:Engine.recommend"],
    "names": [
        "recprune.serve.engine.catalogue:Catalogue.name",
        "recprune.serve.engine.catalogue:Catalogue.external_id",
    ],
    "write JSON": ["recprune.serve.http.routes:_answers"],
    "count for /metrics": [
        f"recprune.serve.prometheus:Metrics.{name}"
        for name in ("count_found", "count_request", "set_depth")
    ],
}


def main() -> None:
    path, *words = sys.argv[1:]
    spent = _shared(Path(path))
    inner = threading.local()  # seconds that calls inside the running one have taken
    for place, calls in enumerate(STAGES.values()):
        for call in calls:
            _time(call, place, spent, inner)
    from recprune.cli import main as run

    sys.exit(run(words))


def _shared(path: Path) -> memoryview[float]:
    size = 8 * len(STAGES)
    path.write_bytes(bytes(size))
    descriptor = os.open(path, os.O_RDWR)
    return memoryview(mmap.mmap(descriptor, size)).cast("d")


def _time(call: str, place: int, spent: memoryview[float], inner: threading.local) -> None:
    """Put a clock around a function or method, if there is such a one."""
    module, _, name = call.partition(":")
    try:
        owner: Any = importlib.import_module(module)
        *outer, last = name.split(".")
        for part in outer:
            owner = getattr(owner, part)
        function: Callable[..., Any] = getattr(owner, last)
    except (ImportError, AttributeError):
        return

    def timed(*arguments: Any, **named: Any) -> Any:
        before = getattr(inner, "seconds", 0.0)
        inner.seconds = 0.0
        begun = time.thread_time()
        try:
            return function(*arguments, **named)
        finally:
            whole = time.thread_time() - begun
            spent[place] += whole - inner.seconds
            inner.seconds = before + whole

    setattr(owner, last, timed)


if __name__ == "__main__":
    main()
