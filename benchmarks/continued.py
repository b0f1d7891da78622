"""A user acts and is answered: by continuing what was kept, and by encoding the whole window.

In process: one event after the other, φ and the exact search for the best ten, the ways in turns, in
processor time of the one thread, so that waiting for a core that others use does not count; before that,
continued alone, which finds the caches as a service that does nothing else. Over HTTP: POST /events, then
/recommend of that user, by turns at two services of the same folder, of which one keeps no states. The
preset `continued` with random weights, d = 512, histories of 200 items.

    OPENBLAS_NUM_THREADS=1 python -m benchmarks.continued   # a million items
    OPENBLAS_NUM_THREADS=1 python -m benchmarks.continued --workload WORKLOAD   # of a trained model
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np

from benchmarks.measure import write_result
from recprune import Recommender
from recprune.commands.console import output, print_table
from recprune.experiments.framework.machine import machine

_WAYS = ("continued", "whole window, NumPy", "whole window, ONNX Runtime")
_ALONE = "continued, alone"
_STATELESS = ("--max-state-bytes", "0", "--max-stored-states", "0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--workload", type=Path, help="codes, sub-item and sequence embeddings")
    parser.add_argument("--events", type=int, default=300, help="that are answered in each way")
    parser.add_argument("--http-events", type=int, default=300, help="0: in process alone")
    parser.add_argument("--out", type=Path, default=Path("out/bench-continued.json"))
    parsed = parser.parse_args()
    with TemporaryDirectory() as place:
        folder = Path(place) / "recommender"
        chosen = ["--items", str(parsed.items)]
        if parsed.workload is not None:
            chosen = ["--workload", str(parsed.workload)]
        model = Path(__file__).with_name("end_to_end_model.py")
        command = [sys.executable, model, folder, "--preset", "continued", *chosen]
        subprocess.run([*map(str, command)], check=True)
        figures: dict[str, Any] = {"items": parsed.items, **_in_process(folder, parsed.events)}
        if parsed.http_events:
            figures["http"] = _over_http(folder, parsed.http_events)
    write_result(parsed.out, figures)


def _in_process(folder: Path, events: int) -> dict[str, Any]:
    recommender = Recommender.load(folder)
    continuation, index = recommender.continuation, recommender.index
    assert continuation is not None
    rng = np.random.default_rng(0)
    history = rng.integers(0, index.num_items, continuation.length).astype(np.int32)
    state = continuation.anew(history)
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in (_ALONE, *_WAYS)}
    for item in rng.integers(0, index.num_items, 2 * events, np.int32):
        history = np.append(history, item)
        begun = time.thread_time()
        continued = continuation.continued(state, history)
        assert continued is not None
        encoded = time.thread_time()
        index.search(continued.embedding[None], 10)
        seconds[_ALONE].append((encoded - begun, time.thread_time() - encoded))
        state = continued
    differences = []
    for _ in range(events):
        history = np.append(history, rng.integers(0, index.num_items, 1).astype(np.int32))
        embeddings = {}
        for way in rng.permutation(_WAYS):
            # The other ways' weights and windows leave the caches, as they would not in a service.
            for measured in (False, True):
                begun = time.thread_time()
                if way == _WAYS[0]:
                    found = continuation.continued(state, history)
                    assert found is not None
                    embedding = found.embedding
                elif way == _WAYS[1]:
                    embedding = continuation.anew(history).embedding
                else:
                    embedding = recommender.encoder.encode([history])[0]
                encoded = time.thread_time()
                index.search(embedding[None], 10)
                if measured:
                    seconds[way].append((encoded - begun, time.thread_time() - encoded))
            embeddings[str(way)] = embedding
            if way == _WAYS[0] and found is not None:
                following = found
        state = following
        whole = embeddings[_WAYS[2]]
        differences.append(float(np.abs(embeddings[_WAYS[0]] - whole).max() / np.abs(whole).max()))
    figures, rows = {}, []
    for way, both in seconds.items():
        parts = 1000.0 * np.array(both)
        encode, search = np.median(parts, axis=0).tolist()
        total = parts.sum(axis=1)
        p50, p99 = float(np.median(total)), float(np.percentile(total, 99))
        figures[way] = {"encode_ms": encode, "search_ms": search, "p50_ms": p50, "p99_ms": p99}
        rows.append((way, *(f"{value:.3f}" for value in (encode, search, p50, p99))))
    size = state.rows.nbytes + state.items.nbytes + state.embedding.nbytes
    title = f"processor milliseconds from an event to the best ten of {index.num_items:,} items, one thread"
    print_table(title, ("", "encode", "search", "both, median", "p99"), rows)
    output.print(
        f"φ differs by at most {max(differences):.1e} of its largest number; "
        f"{size:,} bytes a user; {machine()['cpu']}"
    )
    return {"ways": figures, "largest_difference": max(differences), "state_bytes": size}


def _over_http(folder: Path, events: int) -> dict[str, Any]:
    services = {
        "continued": _Service(folder, "kept"),
        "whole window": _Service(folder, "none", *_STATELESS),
    }
    rng = np.random.default_rng(1)
    num_items = Recommender.load(folder, verify=False).index.num_items
    try:
        first = [{"user": "ann", "item": int(i)} for i in rng.integers(0, num_items, 200)]
        for service in services.values():
            service.post("/events", {"events": first})
            service.post("/recommend", {"user": "ann"})
        seconds: dict[str, list[tuple[float, ...]]] = {name: [] for name in services}
        for _ in range(events):
            event = {"user": "ann", "item": int(rng.integers(num_items))}
            for name in rng.permutation([*services]):
                begun = time.perf_counter()
                services[name].post("/events", {"events": [event]})
                kept = time.perf_counter()
                answer = services[name].post("/recommend", {"user": "ann"})["answers"][0]
                done = time.perf_counter()
                spent = answer["milliseconds"]
                inside = (spent["histories"], spent["encode"], spent["search"])
                seconds[name].append((*inside, 1e3 * (kept - begun), 1e3 * (done - kept)))
    finally:
        for service in services.values():
            service.stop()
    columns = ("histories", "encode", "search", "POST /events", "POST /recommend")
    rows, figures = [], {}
    for name, parts in seconds.items():
        medians = np.median(np.array(parts), axis=0).tolist()
        figures[name] = dict(zip(columns, medians, strict=True))
        rows.append((name, *(f"{value:.3f}" for value in medians)))
    print_table("milliseconds over HTTP, median", ("", *columns), rows)
    return figures


class _Service:
    """`recprune serve` with histories of its own."""

    def __init__(self, folder: Path, name: str, *options: str) -> None:
        where = f"sqlite:///{folder.with_name(name)}.db"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "recprune.cli", "serve", str(folder), "--port", "0",
             "--history", where, "--no-access-log", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ,
        )  # fmt: skip
        assert self._process.stdout is not None
        url = self._process.stdout.readline().split()[-1]
        self._client = httpx.Client(base_url=url, timeout=60.0)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        found = self._client.post(path, json=body)
        found.raise_for_status()
        return found.json()

    def stop(self) -> None:
        self._client.close()
        self._process.terminate()
        self._process.wait()


if __name__ == "__main__":
    main()
