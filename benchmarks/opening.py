"""What opening a saved index takes: checks of its arrays alone, and comparing checksums too.

    python -m benchmarks.opening --items 1000000,10000000 --folder /dev/shm/recprune

Files are read from the system's cache, as they were written just before.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

import numpy as np

from benchmarks.measure import write_result
from recprune import Index
from recprune.commands.console import print_table
from recprune.experiments.ours.scaling import random_model
from recprune.system import available_cores
from recprune.types import Json

_TIMES = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--items", default="1000000,10000000", help="sizes, of random codes")
    parser.add_argument(
        "--folder", type=Path, default=Path("out/opening"), help="removed in the end"
    )
    parser.add_argument("--out", type=Path, default=Path("out/bench-opening.json"))
    parsed = parser.parse_args()
    found: list[Json] = []
    for size in map(int, parsed.items.split(",")):
        codes, embeddings, _ = random_model(size, 8, 1, seed=0)
        for layout in ("full", "compact"):
            try:
                Index.build(codes, embeddings, layout=layout, threads=available_cores()).save(
                    parsed.folder
                )
                found.append({"items": size, "layout": layout, **_measure(parsed.folder)})
            finally:
                shutil.rmtree(parsed.folder, ignore_errors=True)
    print_table(
        f"milliseconds to open, median of {_TIMES}, {available_cores()} cores",
        ("items", "layout", "checks alone", "and checksums"),
        [
            (
                f"{entry['items']:,}",
                entry["layout"],
                f"{entry['checks_ms']:.1f}",
                f"{entry['verified_ms']:.1f}",
            )
            for entry in found
        ],
    )
    write_result(parsed.out, {"opened": found})


def _measure(folder: Path) -> Json:
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(_TIMES):
        for verify, seconds in times.items():
            begun = time.perf_counter()
            Index.load(folder, verify=verify)
            seconds.append(time.perf_counter() - begun)
    return {
        "checks_ms": float(np.median(times[False])) * 1e3,
        "verified_ms": float(np.median(times[True])) * 1e3,
    }


if __name__ == "__main__":
    main()
