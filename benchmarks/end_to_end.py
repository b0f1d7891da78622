"""POST /recommend as a client sees it, for a model of real size, with all of the service on one core.

    python -m benchmarks.end_to_end                              # 930,528 items with random codes
    python -m benchmarks.end_to_end --workload FOLDER            # codes, sub-item and sequence embeddings
    python -m benchmarks.end_to_end --int8                                 # with weights of 8 bits, too
    python -m benchmarks.end_to_end --beside ../old/.venv/bin/python    # another version, in turns

The load has a core of its own. Where others use the service's core too, processor times of the worker
are the figures to compare. Where the time goes is measured in a service of its own, with clocks around
its parts and one connection, for histories of the median length; the rest is what remains.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from benchmarks.end_to_end_stages import STAGES
from benchmarks.measure import write_result
from benchmarks.proc import children, cpu_seconds, has_proc
from benchmarks.serve_peers import WAITING
from recprune.commands.console import output, print_table
from recprune.experiments.framework.machine import machine
from recprune.models.settings import PRESETS
from recprune.types import Json

_HERE = Path(__file__).parent
_SERVICE_CORE, _LOAD_CORE = 0, 1
_REQUESTS = 1000
_MEDIAN, _SPREAD = 44, 1.0  # of the lengths of histories, log-normal
_INT8 = "this version, int8"
_LENGTH = PRESETS["gsasrec"].model.length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workload", type=Path, help="codes, sub-item and sequence embeddings")
    parser.add_argument("--items", type=int, default=930_528, help="where no workload is given")
    parser.add_argument("--beside", type=Path, help="the Python of another version of recprune")
    parser.add_argument("--int8", action="store_true", help="also with an encoder of 8 bits")
    parser.add_argument("--connections", default="1,16")
    parser.add_argument("--rounds", type=int, default=8, help="of turns")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--out", type=Path, default=Path("out/bench-end-to-end.json"))
    parsed = parser.parse_args()
    if not has_proc():
        raise SystemExit("this takes a system on which processes can be tied to cores: Linux")
    pythons = {"this version": Path(sys.executable)}
    if parsed.beside:
        pythons = {"beside": parsed.beside, **pythons}
    if parsed.int8:
        pythons[_INT8] = Path(sys.executable)
    place = parsed.out.parent / "end-to-end"
    place.mkdir(parents=True, exist_ok=True)
    names, num_items = place / "names.csv", 0
    folders = {}
    for name, python in pythons.items():
        folders[name] = place / name.replace(" ", "-")
        precision = ["--encoder-precision", "int8"] if name == _INT8 else []
        num_items = _make_model(python, folders[name], parsed.workload, parsed.items, precision)
    _write_names(names, num_items)
    mixed, median = _write_requests(place, num_items)
    ladder = [int(count) for count in parsed.connections.split(",")]
    with ExitStack() as stack:
        services = {
            name: stack.enter_context(_service(python, folders[name], names))
            for name, python in pythons.items()
        }
        runs = _take_turns(services, mixed, ladder, parsed.rounds, parsed.seconds)
    result: Json = {"items": num_items, "runs": runs, "stages": {}}
    for name, python in pythons.items():
        result["stages"][name] = _stages(python, folders[name], names, median, 4 * parsed.seconds)
    _show(result)
    write_result(parsed.out, result)


def _make_model(
    python: Path, folder: Path, workload: Path | None, items: int, precision: list[str]
) -> int:
    """Save a recommender as a version does; return its number of items."""
    chosen = ["--items", str(items)] if workload is None else ["--workload", str(workload)]
    _run(python, "end_to_end_model.py", str(folder), *chosen, *precision)
    return len(np.load(folder / "popularity.npy", mmap_mode="r"))


def _write_names(path: Path, num_items: int) -> None:
    rows = [f"{item},module-{item % 1000:03}/source/file-{item:07}.c" for item in range(num_items)]
    path.write_text("\n".join(["item_id,name", *rows]))


def _write_requests(place: Path, num_items: int) -> tuple[Path, Path]:
    """Write requests with histories of all lengths, and with histories of the median length."""
    rng = np.random.default_rng(1)
    drawn = np.exp(rng.normal(np.log(_MEDIAN), _SPREAD, _REQUESTS)).astype(int)
    paths = place / "mixed.jsonl", place / "median.jsonl"
    for path, lengths in zip(paths, (np.clip(drawn, 1, _LENGTH), [_MEDIAN] * 100), strict=True):
        histories = [rng.integers(0, num_items, length).tolist() for length in lengths]
        path.write_text("\n".join(json.dumps({"history": history}) for history in histories))
    return paths


def _run(python: Path, script: str, *options: str) -> None:
    # Without the folder of the script, whose names are not for this checkout's packages alone.
    subprocess.run([str(python), "-P", str(_HERE / script), *options], check=True)


@contextmanager
def _service(python: Path, folder: Path, names: Path, *before: str) -> Iterator[tuple[str, int]]:
    """Run `recprune serve` on its core; yield its address and the id of its worker."""
    command = ["taskset", "--cpu-list", str(_SERVICE_CORE), str(python), "-P"]
    command += [*(before or ("-m", "recprune.cli")), "serve", str(folder), "--port", "0"]
    command += ["--names", str(names), "--no-access-log", "--max-waiting", str(WAITING)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit("the service does not start; see above")
        yield line.split()[-1].rstrip("/") + "/recommend", children(process.pid)[0]
    finally:
        process.terminate()
        process.wait()


def _load(url: str, requests: Path, connections: int, seconds: float) -> Json:
    """Send requests from the other core; return what serve_load prints."""
    options = ["--connections", str(connections), "--seconds", str(seconds)]
    command = ["taskset", "--cpu-list", str(_LOAD_CORE), sys.executable]
    command += ["-m", "benchmarks.serve_load", url, str(requests), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the load failed: {done.stderr}")
    figures: Json = json.loads(done.stdout)
    if set(figures["statuses"]) != {"200"}:
        raise SystemExit(f"{url}: answered with {figures['statuses']}")
    return figures


def _take_turns(
    services: dict[str, tuple[str, int]],
    requests: Path,
    ladder: list[int],
    rounds: int,
    seconds: float,
) -> list[Json]:
    """Measure all versions at all numbers of connections, again and again; return the medians."""
    for url, _ in services.values():
        _load(url, requests, 4, 1.0)  # what the first requests build
    found: dict[tuple[str, int], list[Json]] = {}
    for number in range(rounds):
        turns = [(name, count) for count in ladder for name in services]
        for name, count in turns if number % 2 else reversed(turns):
            url, worker = services[name]
            before = cpu_seconds(worker)
            run = _load(url, requests, count, seconds)
            # One more for every connection, which opens it.
            run["cpu_ms"] = 1e3 * (cpu_seconds(worker) - before) / (run["statuses"]["200"] + count)
            found.setdefault((name, count), []).append(run)
    return [
        {"version": name, "connections": count}
        | {
            figure: float(np.median([run[figure] for run in found[name, count]]))
            for figure in ("per_second", "p50_ms", "p99_ms", "cpu_ms")
        }
        for count in ladder
        for name in services
    ]


def _stages(
    python: Path, folder: Path, names: Path, requests: Path, seconds: float
) -> dict[str, float]:
    """Return microseconds of a request in each stage, and in all of the worker."""
    spent = folder.with_suffix(".seconds")
    script = str(_HERE / "end_to_end_stages.py")
    with _service(python, folder, names, script, str(spent)) as (url, worker):
        _load(url, requests, 1, 1.0)
        before, cpu = np.fromfile(spent), cpu_seconds(worker)
        run = _load(url, requests, 1, seconds)
        stages, whole = np.fromfile(spent) - before, cpu_seconds(worker) - cpu
    count = run["statuses"]["200"] + 1  # and one that opens the connection
    figures = dict(zip(STAGES, (stages / count * 1e6).tolist(), strict=True))
    figures["the rest: HTTP, event loop, threads"] = 1e6 * whole / count - sum(figures.values())
    return figures | {"processor time": 1e6 * whole / count}


def _show(result: Json) -> None:
    rows = [
        (
            run["version"],
            str(run["connections"]),
            f"{run['per_second']:,.0f}",
            f"{run['p50_ms']:.2f}",
            f"{run['p99_ms']:.2f}",
            f"{run['cpu_ms']:.2f}",
        )
        for run in result["runs"]
    ]
    title = f"POST /recommend on one core, {result['items']:,} items, histories of {_MEDIAN} in the median"
    print_table(
        title, ("service", "connections", "requests/s", "p50 ms", "p99", "processor ms"), rows
    )
    versions = result["stages"]
    stages = next(iter(versions.values()))
    table = [(stage, *(f"{found[stage]:.0f}" for found in versions.values())) for stage in stages]
    print_table(f"microseconds of a request, histories of {_MEDIAN}", ("", *versions), table)
    output.print(machine()["cpu"])


if __name__ == "__main__":
    main()
