"""Measure what is recommended: item tables, codes and encoders on several logs, beside counting.

Four steps, of which the second and the third need torch, safetensors and NumPy alone, so that they
can run on another machine, with a GPU:

    python -m benchmarks.quality prepare WORK gitlog=gitlog.parquet yelp=yelp.parquet …
    python -m benchmarks.quality train WORK --minutes 8 [--only gitlog]
    python -m benchmarks.quality judge WORK
    python -m benchmarks.quality report WORK

`judge` looks at the test users once and keeps the rank of every target; `report` adds the baselines
and intervals, writes a record for each log to docs/records/quality, and the tables into
docs/models.md. Plan and settings stand in `quality_plan.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.quality_plan import LOGS, Log
from recprune.evaluation.metrics import RelevantRanks, ndcg, recall

_RECORDS = Path("docs/records/quality")
_DOCUMENT = Path("docs/models.md")
_SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("step", choices=("prepare", "train", "judge", "report"))
    parser.add_argument("work", type=Path, help="folder for prepared logs, models and ranks")
    parser.add_argument("logs", nargs="*", metavar="LOG=FILE", help="for prepare")
    parser.add_argument("--only", nargs="*", choices=[*LOGS], default=[*LOGS])
    parser.add_argument("--minutes", type=float, default=8.0, help="of each training")
    parser.add_argument("--at-once", type=int, default=64, help="trainings side by side")
    parsed = parser.parse_args()
    steps = {"prepare": prepare, "train": train, "judge": judge, "report": report}
    steps[parsed.step](parsed)


def prepare(parsed: argparse.Namespace) -> None:
    """Prepare each log that is given as the plan says."""
    for entry in parsed.logs:
        name, _, file = entry.partition("=")
        log = LOGS[name]
        content = ["--content", file.replace(".parquet", "_items.parquet")] if log.content else []
        out = parsed.work / name / "prepared"
        _recprune("prepare", file, *log.prepare, *content, "--out", str(out))


def train(parsed: argparse.Namespace) -> None:
    """Train all models of the plan, so many at once."""
    waiting = [
        (name, model, *chosen)
        for name in parsed.only
        for model, chosen in LOGS[name].models().items()
    ]
    running: list[tuple[str, subprocess.Popen[bytes]]] = []
    failed = 0
    while waiting or running:
        while waiting and len(running) < parsed.at_once:
            name, model, preset, settings = waiting.pop(0)
            running.append((f"{name}, {model}", _begin(parsed, name, model, preset, settings)))
        time.sleep(1.0)
        for title, process in [entry for entry in running if entry[1].poll() is not None]:
            print(f"{title}: ended with {process.returncode}", flush=True)
            running.remove((title, process))
            failed += process.returncode != 0
    if failed:
        raise SystemExit(f"{failed} trainings failed: see their .log files")


def _begin(
    parsed: argparse.Namespace, name: str, model: str, preset: str, settings: dict[str, Any]
) -> subprocess.Popen[bytes]:
    folder = _folder(parsed.work, name, model)
    folder.parent.mkdir(parents=True, exist_ok=True)
    options = [f"--set={key}={json.dumps(value).strip(chr(34))}" for key, value in settings.items()]
    command = [
        *(sys.executable, "-m", "recprune.cli", "train", str(parsed.work / name / "prepared")),
        *("--out", str(folder), "--preset", preset, "--max-minutes", str(parsed.minutes)),
        *options,
    ]
    with folder.with_suffix(".log").open("wb") as log:
        # One thread for what is not on a GPU: many trainings run side by side.
        own = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=own)


def judge(parsed: argparse.Namespace) -> None:
    """Find the rank of every test target in every model that was trained."""
    folders = [
        (parsed.work, name, model)
        for name in parsed.only
        for model in LOGS[name].models()
        if (_folder(parsed.work, name, model) / "model.safetensors").exists()
    ]
    with ProcessPoolExecutor(min(parsed.at_once, 8), mp_context=get_context("spawn")) as pool:
        for line in pool.map(_judge, folders):
            print(line, flush=True)


def _judge(where: tuple[Path, str, str]) -> str:
    from recprune.models.ranking import encode_histories, model_boosts, target_ranks
    from recprune.preparation.prepared import Prepared
    from recprune.training.checkpoint import load_model
    from recprune.training.loop import find_device

    work, name, model = where
    folder, log = _folder(work, name, model), LOGS[name]
    prepared = Prepared.load(work / name / "prepared", verify=False)
    loaded, settings = load_model(folder, prepared)
    trained = loaded.to(find_device("auto"))
    chosen = _test_users(log, len(prepared.test))
    histories = [prepared.history(prepared.test, int(target)) for target in chosen]
    timelines = [prepared.timeline(prepared.test, int(target)) for target in chosen]
    states = encode_histories(trained, settings.model.length, histories, timelines=timelines)
    boosts = model_boosts(trained, settings.model, states, histories, timelines)
    exclude = histories if log.exclude_seen else None
    ranks = target_ranks(
        trained, states, prepared.test.items[chosen], exclude, 1 << 28, boosts=boosts
    )
    np.save(folder / "ranks.npy", ranks)
    (folder / "figures.json").write_text(json.dumps(_training_figures(folder)), encoding="utf-8")
    return f"{name}, {model}: NDCG@10 {_ndcg(ranks).mean():.4f} of {len(ranks):,} users"


def report(parsed: argparse.Namespace) -> None:
    """Write records of what was judged, and the tables of all records into the document."""
    for name in parsed.only:
        folders = [_folder(parsed.work, name, model) for model in LOGS[name].models()]
        if any((folder / "ranks.npy").exists() for folder in folders):
            _write_record(parsed.work, name)
    text = _DOCUMENT.read_text(encoding="utf-8")
    for mark, lines in _tables().items():
        before, begin, rest = text.partition(f"<!-- {mark} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not begin or not end:
            raise SystemExit(f"{_DOCUMENT}: has no place for {mark}")
        text = before + begin + "\n".join(lines) + "\n" + end + after
    _DOCUMENT.write_text(text, encoding="utf-8")


def _write_record(work: Path, name: str) -> None:
    from recprune.evaluation.baselines.every_baseline import every_baseline
    from recprune.experiments.framework.machine import machine
    from recprune.experiments.framework.record import Record, save_record
    from recprune.preparation.prepared import Prepared

    log = LOGS[name]
    prepared = Prepared.load(work / name / "prepared")
    chosen = _test_users(log, len(prepared.test))
    targets = prepared.test.items[chosen].astype(np.int64)
    histories = [prepared.history(prepared.test, int(target)) for target in chosen]
    ranks: dict[str, NDArray[np.int64]] = {}
    models: dict[str, dict[str, Any]] = {}
    for model in log.models():
        folder = _folder(work, name, model)
        if (folder / "ranks.npy").exists():
            ranks[model] = np.load(folder / "ranks.npy")
            models[model] = json.loads((folder / "figures.json").read_text(encoding="utf-8"))
    baselines = {}
    for one in every_baseline(
        prepared.train_log(),
        temporal=prepared.is_temporal(),
        exclude_seen=log.exclude_seen,
        slow=True,
    ):
        ids = one.recommend(histories, 100, exclude_seen=log.exclude_seen)
        baselines[one.name] = _ranks_in(ids, targets)
    groups = {
        "all": np.ones(len(targets), np.bool_),
        "repeats": np.array(
            [item in history for item, history in zip(targets, histories, strict=True)]
        ),
        "cold": prepared.training_counts()[targets] == 0,
    }
    groups["new"] = ~groups["repeats"]
    groups["warm"] = ~groups["cold"]
    best = max(baselines, key=lambda one: float(_ndcg(baselines[one]).mean()))
    everything = ranks | baselines
    figures = {
        "log": name,
        "items": prepared.num_items,
        "users": len(targets),
        "shares": {group: float(mask.mean()) for group, mask in groups.items()},
        "best_baseline": best,
        "models": models,
        "baselines": [*baselines],
        "quality": {
            one: {group: _figures(found[mask]) for group, mask in groups.items() if mask.any()}
            for one, found in everything.items()
        },
        "against_best_baseline": {
            one: _difference(found, baselines[best]) for one, found in ranks.items()
        },
        "against_full_table": {
            one: _difference(found, ranks["full table"])
            for one, found in ranks.items()
            if "full table" in ranks and one != "full table"
        },
    }
    settings = {
        "prepared": prepared.checksum()[:16],
        "plan": {m: s for m, (_, s) in log.models().items()},
    }
    save_record(_RECORDS, Record("quality", name, settings, machine(), figures))


def _training_figures(folder: Path) -> dict[str, Any]:
    """Return how a training went: epochs, the best of them, and how well codes tell items apart."""
    from recprune.training.checkpoint import load_code_report

    lines = [json.loads(line) for line in (folder / "epochs.jsonl").read_text().splitlines()]
    best = [line for line in lines if line["best"]][-1]
    codes = load_code_report(folder)
    return {
        "epochs": len(lines),
        "best_epoch": best["epoch"],
        "validation_ndcg": best["ndcg"],
        "seconds": lines[-1]["seconds"],
        "codes": None if codes is None else vars(codes),
    }


# Figures -----------------------------------------------------------------------------------------


def _ndcg(ranks: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return NDCG@10 of every user, from how many items stand above each target."""
    return ndcg(RelevantRanks.of_targets(ranks + 1), 10)


def _figures(ranks: NDArray[np.int64]) -> dict[str, Any]:
    relevant = RelevantRanks.of_targets(ranks + 1)
    return {
        "NDCG@10": _interval(ndcg(relevant, 10)),
        "Recall@10": _interval(recall(relevant, 10)),
        "Recall@100": _interval(recall(relevant, 100)),
    }


def _difference(first: NDArray[np.int64], second: NDArray[np.int64]) -> list[float]:
    return _interval(_ndcg(first) - _ndcg(second))


def _interval(values: NDArray[np.float64]) -> list[float]:
    """Return a mean over users and its 95 % bootstrap interval."""
    from recprune.evaluation.resampling import bootstrap_mean

    estimate = bootstrap_mean(values, resamples=2000, seed=_SEED)
    return [estimate.mean, estimate.low, estimate.high]


def _ranks_in(ids: NDArray[np.int64], targets: NDArray[np.int64]) -> NDArray[np.int64]:
    found = ids == targets[:, None]
    ranks: NDArray[np.int64] = np.where(found.any(1), found.argmax(1), 1 << 40)
    return ranks


def _test_users(log: Log, count: int) -> NDArray[np.int64]:
    order = np.random.default_rng(_SEED).permutation(count)
    return np.sort(order[: log.test_users])


# Tables ------------------------------------------------------------------------------------------


def _tables() -> dict[str, list[str]]:
    from benchmarks.quality_tables import tables
    from recprune.experiments.framework.record import load_records

    return tables({record.part: record.figures for record in load_records(_RECORDS)})


def _folder(work: Path, name: str, model: str) -> Path:
    return work / name / re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")


def _recprune(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "recprune.cli", *arguments], check=True)


if __name__ == "__main__":
    main()
