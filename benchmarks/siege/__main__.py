"""Besiege a real service, and write down what came of it.

    python -m benchmarks.siege --minutes 3 --histories sqlite --out out/siege-sqlite.json
    python -m benchmarks.siege --minutes 30 --histories redis --out out/siege-redis.json
    python -m benchmarks.siege.table      # the table and the pictures of docs/reliability.md

Needs Linux, wrk, redis-server and a C compiler. Ends with 1 where something failed that must not.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from benchmarks.measure import write_result
from benchmarks.proc import has_proc
from benchmarks.siege.places import check_tools, in_namespaces
from benchmarks.siege.run import Plan, besiege
from benchmarks.siege.table import faults_of, show
from recprune.commands.console import say


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=3.0, help="of the siege itself")
    parser.add_argument("--histories", choices=("sqlite", "redis"), default="sqlite")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--items", type=int, default=20_000, help="of the catalogue")
    parser.add_argument("--swaps", type=int, default=100, help="of the folder")
    parser.add_argument("--connections", type=int, default=128, help="of the load")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/siege.json"))
    parser.add_argument("--keep", type=Path, help="a new folder for logs, which else are removed")
    parsed = parser.parse_args()
    if not has_proc():
        raise SystemExit("this needs Linux: workers and their memory are watched in /proc")
    check_tools(parsed.histories)
    in_namespaces()
    # As the first process of its namespace it would not notice; everything else ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    plan = Plan(
        minutes=parsed.minutes,
        histories=parsed.histories,
        workers=parsed.workers,
        items=parsed.items,
        swaps=parsed.swaps,
        connections=parsed.connections,
        seed=parsed.seed,
    )
    with tempfile.TemporaryDirectory(prefix="recprune-siege-") as place:
        record = besiege(plan, Path(place), parsed.keep)
    write_result(parsed.out, record)
    show(record)
    faults = faults_of(record)
    for fault in faults:
        say(f"must not be: {fault}")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
