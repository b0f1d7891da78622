"""Soak a real service over a living catalogue, and write down what came of it.

    python -m benchmarks.soak --minutes 60 --out docs/measured/soak.json

Items come, change and go, as does what is said of them, users act, answers are filtered, while
workers and the whole service are killed with -9, catalogues compacted (by processes that are killed
too) and folders loaded anew.
Every answer is compared, ids and score bits, with exhaustive scoring of what was acknowledged. Needs
Linux and a C compiler. Ends with 1 where something was wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.measure import write_result
from benchmarks.proc import has_proc
from benchmarks.soak.run import Plan, Soak
from recprune.commands.console import say


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--items", type=int, default=5_000, help="of the catalogue, to begin with")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/soak.json"))
    parsed = parser.parse_args()
    if not has_proc():
        raise SystemExit("this needs Linux: workers are found in /proc")
    with tempfile.TemporaryDirectory(prefix="recprune-soak-") as place:
        soak = Soak(Plan(parsed.minutes, parsed.items, seed=parsed.seed), Path(place))
        try:
            record = soak.run()
        finally:
            soak.end.set()
            if soak.service.process is not None and soak.service.process.poll() is None:
                soak.service.kill_all()
    write_result(parsed.out, record)
    print(json.dumps({name: record[name] for name in ("counts", "late_s", "read_back")}, indent=2))
    for fault in (*record["wrong"], *record["failed"]):
        say(f"must not be: {fault}")
    back = record["read_back"]
    sys.exit(1 if record["wrong"] or record["failed"] or back["equal"] < back["rankings"] else 0)


if __name__ == "__main__":
    main()
