"""What changes cost: a live index beside a fresh one over the same items, in one interleaved run.

1 % of a catalogue is changed, half of it added and half removed at random. Then every query is
asked of the live index and of a fresh one, in an order that changes: times are those of whole calls
from Python on one thread, the ratio is the median of quotients, query by query. Next, all is
compacted in a process of its own, which has opened the folder: its seconds, and the most memory
that it had (Linux alone tells). Last, items are added by the batch, each batch acknowledged when
it is on disk, and one by one, while another process waits for them.

    python -m benchmarks.live                                # a million random items
    python -m benchmarks.live --items 100000000 --layout slim --folder FOLDER
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from benchmarks.measure import model_of, write_result
from benchmarks.proc import has_proc, status
from recprune import Index, LiveIndex
from recprune.commands.console import output, print_table
from recprune.experiments.framework.machine import machine
from recprune.types import CodeArray, Float32Array, Json

_BATCHES = 200  # that are added
_SEEN = 50  # changes that another process is to see
_COMPACTING = """
import sys, time
from recprune import LiveIndex
begun = time.perf_counter()
live = LiveIndex.open(sys.argv[1], verify=False)
print(time.perf_counter() - begun, flush=True)
input()
begun = time.perf_counter()
live.compact(threads=int(sys.argv[2])).result()
print(time.perf_counter() - begun, flush=True)
input()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--changed", type=float, default=0.01, help="share of the items")
    parser.add_argument("--batch", type=int, default=1000, help="items that are added at once")
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-k", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--layout", default="auto", choices=("auto", "full", "slim", "compact"))
    parser.add_argument("--threads", type=int, default=2, help="to build and to compact")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured; a temporary one")
    parser.add_argument("--out", type=Path, default=Path("out/bench-live.json"))
    parsed = parser.parse_args()
    more = int(parsed.items * parsed.changed / 2)
    codes, embeddings, queries = model_of(None, parsed.items + more, parsed.queries)
    with tempfile.TemporaryDirectory(dir=parsed.folder) as place:
        folder = Path(place) / "live"
        live = LiveIndex.create(
            folder,
            codes[: parsed.items],
            embeddings,
            layout=parsed.layout,
            threads=parsed.threads,
        )
        live.add(codes[parsed.items :])
        leaving = np.random.default_rng(0).permutation(parsed.items)[:more]
        begun = time.perf_counter()
        live.remove(leaving)
        removing = time.perf_counter() - begun
        live.maintain()
        fresh, numbers = _fresh(live, embeddings, parsed.layout, parsed.threads)
        searches = {
            f"K = {k}": _compared(live, fresh, numbers, queries, k, parsed.rounds) for k in parsed.k
        }
        shape = live.describe()
        live.close()
        del live, fresh
        compacting = _compacting(folder, parsed.threads)
        with LiveIndex.open(folder, verify=False) as live:
            adding = _adding(live, codes, parsed.batch)
        with LiveIndex.open(folder, verify=False) as live:
            seeing = _seeing(live, folder, codes)
    print_table(
        f"{shape['items']:,} items, {parsed.changed:.1%} changed, {shape['layout']} layout, "
        f"segments of {shape['segments']} items and a tail of {shape['tail']:,}, "
        f"{shape['instruction_set']}",
        ("search", "fresh µs", "live µs", "ratio"),
        [
            (name, f"{at['fresh_us']:,.1f}", f"{at['live_us']:,.1f}", f"{at['ratio']:.3f}")
            for name, at in searches.items()
        ],
    )
    output.print(
        f"added {adding['items_a_second']:,.0f} items a second, {parsed.batch:,} at once "
        f"({adding['p50_ms']:.2f} ms, slowest {adding['slowest_ms']:.1f}); "
        f"removed {more:,} in {1e3 * removing:.1f} ms; another process sees a change after "
        f"{seeing['p50_ms']:.0f} ms, at the latest after {seeing['slowest_ms']:.0f}"
    )
    output.print(
        f"opened in {compacting['opening_seconds']:.2f} s without comparing checksums, with "
        f"{compacting['opening_gigabytes']:.2f} GB; compacted in {compacting['seconds']:.2f} s, "
        f"with {compacting['gigabytes']:.2f} GB at most, of which "
        f"{compacting['own_gigabytes']:.2f} are no mapped files"
    )
    output.print(machine()["cpu"])
    result: Json = {
        "index": shape,
        "searches": searches,
        "adding": adding,
        "seeing": seeing,
        "removing_seconds": removing,
        "compacting": compacting,
    }
    write_result(parsed.out, result)


def _compacting(folder: Path, threads: int) -> Json:
    """Compact in a process of its own, and return what that took."""
    words = [sys.executable, "-c", _COMPACTING, str(folder), str(threads)]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        opening = float(process.stdout.readline())
        opened = _gigabytes(process.pid, "VmHWM")
        own = [_gigabytes(process.pid, "RssAnon")]
        done = threading.Event()
        watch = threading.Thread(target=_watch, args=(process.pid, own, done))
        watch.start()
        process.stdin.write("\n")
        process.stdin.flush()
        seconds = float(process.stdout.readline())
        done.set()
        watch.join()
        most = _gigabytes(process.pid, "VmHWM")
        process.communicate("\n")
    return {
        "opening_seconds": opening,
        "opening_gigabytes": opened,
        "seconds": seconds,
        "gigabytes": most,
        "own_gigabytes": max(own),
    }


def _watch(pid: int, own: list[float], done: threading.Event) -> None:
    while not done.wait(0.005):
        own.append(_gigabytes(pid, "RssAnon"))


def _gigabytes(pid: int, name: str) -> float:
    return status(pid, name) / 1e9 if has_proc() else float("nan")


def _adding(live: LiveIndex, codes: CodeArray, batch: int) -> Json:
    """Add items that are there already by the batch, so many times that tails fill up."""
    seconds = []
    before = live.num_items
    for begin in range(0, min(len(codes), _BATCHES * batch), batch):
        begun = time.perf_counter()
        live.add(codes[begin : begin + batch])
        seconds.append(time.perf_counter() - begun)
    return {
        "items_a_second": (live.num_items - before) / sum(seconds),
        "p50_ms": 1e3 * float(np.median(seconds)),
        "slowest_ms": 1e3 * max(seconds),
        "batches": len(seconds),
    }


def _seeing(live: LiveIndex, folder: Path, codes: CodeArray) -> Json:
    """Measure how long after a change has returned another process has it."""
    program = (
        "import sys, time\nfrom recprune import LiveIndex\n"
        "live = LiveIndex.open(sys.argv[1], verify=False)\n"
        "known = live.num_items\nprint('ready', flush=True)\n"
        "while True:\n"
        "    if live.num_items != known:\n"
        "        known = live.num_items\n        print(time.monotonic(), flush=True)\n"
        "    time.sleep(0.001)\n"
    )
    reader = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert reader.stdout is not None
    reader.stdout.readline()
    seconds = []
    for _ in range(_SEEN):
        live.add(codes[:1])
        done = time.monotonic()
        seconds.append(float(reader.stdout.readline()) - done)
        time.sleep(0.01 * len(seconds) % 0.05)  # at any moment between two looks
    reader.kill()
    reader.wait()
    return {"p50_ms": 1e3 * float(np.median(seconds)), "slowest_ms": 1e3 * max(seconds)}


def _fresh(
    live: LiveIndex, embeddings: Float32Array, layout: str, threads: int
) -> tuple[Index, np.ndarray]:
    snapshot = live.snapshot()
    numbers = snapshot.numbers()
    codes = snapshot.item_codes(numbers)
    return Index.build(codes, embeddings, layout=layout, threads=threads), numbers  # type: ignore[arg-type]


def _compared(
    live: LiveIndex,
    fresh: Index,
    numbers: np.ndarray,
    queries: Float32Array,
    k: int,
    rounds: int,
) -> Json:
    """Ask both the same, compare the answers, and return what each took."""
    seconds = {name: np.empty((rounds, len(queries))) for name in ("live", "fresh")}
    asks = {"live": live.search, "fresh": fresh.search}
    rng = np.random.default_rng(0)
    for turn in range(rounds):
        for place, query in enumerate(queries):
            answers = {}
            for name in rng.permutation(list(asks)):
                begun = time.perf_counter()
                answers[name] = asks[name](query, k)
                seconds[name][turn, place] = time.perf_counter() - begun
            ours, theirs = answers["live"], answers["fresh"]
            if not (
                np.array_equal(ours.ids, numbers[theirs.ids])
                and np.array_equal(ours.scores, theirs.scores)
            ):
                raise SystemExit("the live index disagrees with a fresh one: this is a bug")
    return {
        "fresh_us": 1e6 * float(np.median(seconds["fresh"])),
        "live_us": 1e6 * float(np.median(seconds["live"])),
        "ratio": float(np.median(seconds["live"] / seconds["fresh"])),
    }


if __name__ == "__main__":
    main()
