"""Two builds of the native core against each other: the same bits, and the ratio of their times.

Each has a process of its own and builds the same index. They take turns in blocks of queries, and
which one is first changes from block to block. A query is asked several times, by processes that are
started anew for every round, and its fastest time counts: what other processes take away is no
property of a core, nor is whether the system grants large pages. Times are those of whole calls from
Python on one thread, sub-item scores included.

    pip install --no-deps --target OLD CHECKOUT              # the other build
    python -m benchmarks.cores OLD                           # random codes, one million items
    python -m benchmarks.cores OLD --workload FOLDER         # and codes.npy,
                                                             # sub_item_embeddings.npy,
                                                             # sequence_embeddings.npy
    RECPRUNE_ISA=portable python -m benchmarks.cores OLD
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.core_worker import ARRAYS
from recprune.commands.console import output, print_table
from recprune.experiments.framework.machine import machine
from recprune.experiments.ours.scaling import random_model
from recprune.types import Float64Array, Json

_CHECKOUT = Path(__file__).parent.parent


class Worker:
    """A process that searches with one build of the core."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.instruction_set = self._read()["instruction_set"]

    def search(self, method: str, k: int, first: int, last: int) -> Json:
        """Return the times of these queries, and a digest of what they found."""
        assert self._process.stdin is not None
        asked = {"method": method, "k": k, "first": first, "last": last}
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> Json:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a worker ended; see above")
        answer: Json = json.loads(line)
        return answer


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("old", type=Path, help="a folder that holds another build of the package")
    parser.add_argument("--workload", type=Path, help="a folder with a trained model's arrays")
    parser.add_argument("--items", type=int, default=1_000_000, help="of random codes")
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--block", type=int, default=20, help="queries of one core in a row")
    parser.add_argument("-k", default="10,100")
    parser.add_argument("--methods", default="auto,cells,scan,recjpqprune,pqtopk")
    parser.add_argument("--out", type=Path, default=Path("out/bench-cores.json"))
    parsed = parser.parse_args()
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        arrays = random_model(parsed.items, 8, parsed.queries, seed=0)
        for name, array in zip(ARRAYS, arrays, strict=True):
            np.save(Path(folder) / f"{name}.npy", array)
        figures += _compare("random codes", Path(folder), parsed)
    if parsed.workload:
        figures += _compare(parsed.workload.name, parsed.workload, parsed)
    output.print(machine()["cpu"])
    parsed.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"machine": machine(), "figures": figures}
    parsed.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _compare(name: str, folder: Path, parsed: argparse.Namespace) -> list[Json]:
    """Measure one workload with both cores, and print its table."""
    cases = [(method, int(k)) for k in parsed.k.split(",") for method in parsed.methods.split(",")]
    fastest = {case: np.full((2, parsed.queries), np.inf) for case in cases}  # old, new
    for _ in range(parsed.rounds):
        with _worker(folder, parsed.old) as old, _worker(folder, None) as new:
            instruction_set = new.instruction_set
            for (method, k), times in fastest.items():
                np.minimum(times, _times(old, new, method, k, parsed), out=times)
    rows, figures = [], []
    for (method, k), times in fastest.items():
        before, now = np.median(times, axis=1).tolist()
        ratio = f"{now / before:.3f}"
        rows.append((f"{method}, K = {k}", f"{before:,.1f}", f"{now:,.1f}", ratio))
        entry = {"workload": name, "method": method, "k": k}
        figures.append(entry | {"old_p50_us": before, "new_p50_us": now, "ratio": now / before})
    title = f"{name}, {parsed.queries} queries, {instruction_set}"
    print_table(title, ("method", "old p50 µs", "new p50 µs", "new ÷ old"), rows)
    return figures


def _times(
    old: Worker, new: Worker, method: str, k: int, parsed: argparse.Namespace
) -> Float64Array:
    """Return the microseconds [core, query]; stop if the cores do not find the same."""
    times = np.empty((2, parsed.queries))
    turns = [old, new]
    for first in range(0, parsed.queries, parsed.block):
        last = min(first + parsed.block, parsed.queries)
        answers = {worker: worker.search(method, k, first, last) for worker in turns}
        if answers[old]["digest"] != answers[new]["digest"]:
            raise SystemExit(f"{method}, K = {k}: the cores disagree: this is a bug")
        times[:, first:last] = [answers[worker]["microseconds"] for worker in (old, new)]
        turns.reverse()
    return times


@contextmanager
def _worker(folder: Path, package: Path | None) -> Iterator[Worker]:
    command = [sys.executable, "-m", "benchmarks.core_worker", str(folder.absolute())]
    if package:
        command.append(str(package.absolute()))
    with subprocess.Popen(
        command, cwd=_CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Worker(process)


if __name__ == "__main__":
    main()
