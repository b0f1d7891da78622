"""Users a second of `recprune batch`, with one worker process and with two, and where time goes.

The histories are those of a prepared log's test users, oldest first; more users are the same again.
The two take turns, so that what slows the machine down slows both. Users a second are those of the work
itself, from when as many parts as there are workers are finished to the last; beside them those of
the whole run, in which the workers are started too. Small parts keep what is under way at the first
moment, and counted, below two in a hundred.

    recprune export out/reproduce/gitlog/prepared out/reproduce/gitlog/models/gsasrecjpq --out out/rec
    python -m benchmarks.batch out/reproduce/gitlog/prepared out/rec
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measure import write_result
from recprune.batch.in_processes import write_parts_in_processes
from recprune.batch.output import run_batch
from recprune.batch.parts import PartReport
from recprune.batch.plan import BatchPlan, BatchSettings, make_plan
from recprune.commands.console import output, print_table
from recprune.experiments.framework.machine import machine
from recprune.preparation.prepared import Prepared

_WORKERS = (1, 2)


@dataclass(frozen=True)
class Run:
    """What one run of the whole batch gave."""

    workers: int
    users_per_second: float
    whole_users_per_second: float  # the start of the workers included
    seconds: dict[str, float]  # in each stage, summed over the workers
    load: float  # of the machine, before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("prepared", type=Path, help="made by recprune prepare")
    parser.add_argument("recommender", type=Path, help="made by recprune export from its model")
    parser.add_argument("--users", type=int, help="default: every test user once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows-per-part", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("out/bench-batch.json"))
    parsed = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory() as scratch:
        histories = Path(scratch) / "histories.parquet"
        _write_histories(Prepared.load(parsed.prepared), parsed.users, histories)
        settings = BatchSettings(exclude_seen=True, rows_per_part=parsed.rows_per_part)
        plan = make_plan(parsed.recommender, histories, settings)
        for turn in range(parsed.rounds):
            order = _WORKERS if turn % 2 == 0 else _WORKERS[::-1]
            for workers in order:
                out = Path(scratch) / f"out-{turn}-{workers}"
                rounds.append(_measure(plan, out, workers))
                _check_same(out, Path(scratch) / f"out-0-{_WORKERS[0]}")
    rows = []
    first_speed = 0.0
    for workers in _WORKERS:
        mine = [entry for entry in rounds if entry.workers == workers]
        speed = float(np.median([entry.users_per_second for entry in mine]))
        first_speed = first_speed or speed
        with_start = float(np.median([entry.whole_users_per_second for entry in mine]))
        whole = sum(sum(entry.seconds.values()) for entry in mine)
        shares = [
            f"{sum(entry.seconds[stage] for entry in mine) / whole:.0%}"
            for stage in mine[0].seconds
        ]
        ratio = f"{speed / first_speed:.2f}×"
        rows.append((str(workers), f"{speed:,.0f}", ratio, f"{with_start:,.0f}", *shares))
    print_table(
        f"{plan.num_rows:,} users, median of {parsed.rounds} rounds",
        ("workers", "users/s", "ratio", "with start", *rounds[0].seconds),
        rows,
    )
    each = ", ".join(f"{entry.workers}: {entry.users_per_second:,.0f}" for entry in rounds)
    load = ", ".join(f"{entry.load:.1f}" for entry in rounds)
    output.print(f"users/s of each run, by workers: {each}", soft_wrap=True)
    cpu = machine()["cpu"]
    output.print(f"{cpu}; load average before each run: {load}", soft_wrap=True)
    result = {"users": plan.num_rows, "rounds": [asdict(entry) for entry in rounds]}
    write_result(parsed.out, result)


def _write_histories(prepared: Prepared, users: int | None, path: Path) -> None:
    test = prepared.test
    chosen = np.resize(np.arange(len(test)), users or len(test))
    histories = [
        prepared.item_ids.take(prepared.items[test.starts[place] : test.ends[place]].tolist())
        for place in chosen
    ]
    columns = {"user_id": pa.array(np.arange(len(chosen))), "history": pa.array(histories)}
    pq.write_table(pa.table(columns), path)


def _measure(plan: BatchPlan, out: Path, workers: int) -> Run:
    load = os.getloadavg()[0]
    started = time.perf_counter()
    finished: list[tuple[float, PartReport]] = []
    run_batch(
        plan,
        out,
        lambda plan, out, parts: write_parts_in_processes(plan, out, parts, workers),
        lambda report, _: finished.append((time.perf_counter(), report)),
    )
    # The first part of every worker waits for it to load, so the count begins after those.
    begun, counted = finished[workers - 1][0], finished[workers:]
    users = sum(report.rows for _, report in counted)
    stages = counted[0][1].seconds
    return Run(
        workers,
        users / (finished[-1][0] - begun),
        plan.num_rows / (finished[-1][0] - started),
        {stage: sum(report.seconds[stage] for _, report in counted) for stage in stages},
        load,
    )


def _check_same(folder: Path, first: Path) -> None:
    for path in first.iterdir():
        if path.read_bytes() != (folder / path.name).read_bytes():
            raise SystemExit(f"{path.name} depends on the number of workers: this is a bug")


if __name__ == "__main__":
    main()
