"""Fits what the cost model counts with, from measurements on one machine or on several.

Every engine is measured alone, for catalogues and cut-offs on both sides of where another one takes
over, with each instruction set that the machine has; sub-item scores are left out, as all engines need
them. Each constant of `Costs` (native/kernels/kernels.hpp) is then the least-squares fit of the one term
that it belongs to, errors counted relative to the time:

    scan      scan + scanned_item · items · (K / 10)^scan_growth
    cells     cells + line · planned lines + found_item · K, where `cells` is what planning takes
    pqtopk    filtered_code · items;   allowed_item · allowed items where few are allowed
    few_items the size up to which pqtopk takes less than both others, for K = 10

    python -m benchmarks.costs --out costs-here.json          # ten minutes, on an idle machine
    python -m benchmarks.costs --combine a.json b.json        # constants for all of these machines

The second form prints the geometric mean over the machines, beside what the code has: what belongs into the
tables of native/kernels. Then `recprune reproduce --only shapes` says how often `auto` errs.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.measure import model_of, write_result
from recprune import Index, _native
from recprune.types import Float32Array, Float64Array, Json

SIZES = (10_000, 30_000, 100_000, 300_000, 1_000_000, 2_000_000)
CUTOFFS = (1, 10, 100, 1_000)
ALLOWED = (1_000, 3_000, 10_000)
_QUERIES = 60
_ROUNDS = 5
_USUAL_K = 10
_LARGE = 100_000  # items from which on codes are not filtered as they come
_HOPELESS = 3.0  # cells that take so many times as long as a scan are not counted


class Point(NamedTuple):
    """The median search of one engine for one shape."""

    method: str
    num_items: int
    k: int
    num_allowed: int  # 0: all are
    lines: float  # that cells plan to visit
    nanoseconds: float  # of the engine alone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--items", default=",".join(map(str, SIZES)))
    parser.add_argument("--rounds", type=int, default=_ROUNDS)
    parser.add_argument("--out", type=Path, default=Path("out/bench-costs.json"))
    parser.add_argument("--combine", type=Path, nargs="+", metavar="JSON")
    parsed = parser.parse_args()
    if parsed.combine:
        results = [json.loads(path.read_text(encoding="utf-8")) for path in parsed.combine]
    else:
        sizes = [int(size) for size in parsed.items.split(",")]
        result = measure(sizes, parsed.rounds)
        write_result(parsed.out, result)
        results = [result]
    show(results)


def measure(sizes: Sequence[int], rounds: int) -> Json:
    """Measure all instruction sets of this machine, and fit their constants."""
    names = _native.instruction_sets()
    points: dict[str, list[Point]] = {name: [] for name in names}
    for size in sizes:
        codes, embeddings, queries = model_of(None, size, _QUERIES)
        index = Index.build(codes, embeddings, threads=2)
        for name in names:
            os.environ["RECPRUNE_ISA"] = name
            points[name] += measure_size(index, queries, rounds)
            print(f"{size:,} items, {name}", flush=True)
    del os.environ["RECPRUNE_ISA"]
    return {
        "instruction_sets": {
            name: {"fitted": fit(own), "points": [point._asdict() for point in own]}
            for name, own in points.items()
        }
    }


def measure_size(index: Index, queries: Float32Array, rounds: int) -> list[Point]:
    """Return what each engine takes of a catalogue, for all cut-offs."""
    rng = np.random.default_rng(0)
    tables = index.sub_item_scores(queries)
    shapes = [(method, k, 0) for method in ("scan", "pqtopk") for k in CUTOFFS]
    shapes += [("pqtopk", _USUAL_K, count) for count in ALLOWED if 10 * count <= index.num_items]
    plans: dict[int, Float64Array] = {}
    if _native.has_cells(index.num_items, index.num_splits, index.num_sub_items):
        shapes += [("cells", k, 0) for k in CUTOFFS]
        for k in CUTOFFS:
            plans[k] = np.array([index._native.planned_lines(table, k) for table in tables])
    masks = {}
    for count in ALLOWED:
        mask = np.zeros(-(-index.num_items // 64) * 64, np.bool_)
        mask[rng.permutation(index.num_items)[:count]] = True
        masks[count] = np.packbits(mask, bitorder="little").view(np.uint64)
    times: dict[tuple[str, int, int], list[Float64Array]] = {shape: [] for shape in shapes}
    planning: list[list[int]] = []
    for _ in range(rounds):
        if plans:
            planning.append([_planning_time(index, table) for table in tables])
        for at in rng.permutation(len(shapes)):
            method, k, count = shapes[at]
            allow = masks[count] if count else None
            own = []
            for query in queries:  # one by one: a batch is another matter
                stats = index.search(query, k, method=method, allow=allow).stats
                own.append(stats.nanoseconds[0] - stats.sub_item_score_nanoseconds[0])
            times[shapes[at]].append(np.array(own, np.float64))
    points = []
    if planning:
        taken = float(np.median(np.min(planning, axis=0)))
        points.append(Point("planning", index.num_items, _USUAL_K, 0, 0.0, taken))
    for (method, k, count), of_rounds in times.items():
        # The fastest of each query: what other processes take away is no cost of an engine.
        fastest = np.min(of_rounds, axis=0)
        if method == "cells":
            # By quarters of the queries, from those with few lines to those with many.
            for part in np.array_split(np.argsort(plans[k]), 4):
                lines = float(plans[k][part].mean())
                points.append(
                    Point(method, index.num_items, k, 0, lines, float(fastest[part].mean()))
                )
        else:
            points.append(Point(method, index.num_items, k, count, 0.0, float(np.median(fastest))))
    return points


def _planning_time(index: Index, table: Float32Array) -> int:
    begun = time.perf_counter_ns()
    index._native.planned_lines(table, _USUAL_K)
    return time.perf_counter_ns() - begun


# Fitting -----------------------------------------------------------------------------------------


def fit(points: Sequence[Point]) -> Json:
    """Return the constants of one instruction set."""
    scans = [point for point in points if point.method == "scan" and point.num_items >= _LARGE]
    cells = [point for point in points if point.method == "cells" and point.num_items >= _LARGE]
    codes = [point for point in points if point.method == "pqtopk" and not point.num_allowed]
    masked = [point for point in points if point.num_allowed]
    fitted: Json = _fit_scan(scans)
    # What `auto` would leave at once says nothing of where it should.
    by_scan = {(point.num_items, point.k): point.nanoseconds for point in scans}
    cells = [
        point
        for point in cells
        if point.nanoseconds < _HOPELESS * by_scan[point.num_items, point.k]
    ]
    # Planning is measured by itself: a fit could not tell it from the first lines.
    plans = [p.nanoseconds for p in points if p.method == "planning" and p.num_items >= _LARGE]
    base = float(np.mean(plans))
    terms = [[point.lines, point.k] for point in cells]
    line, found = _least_squares(terms, [point.nanoseconds - base for point in cells])
    fitted |= {"cells": base, "line": line, "found_item": found}
    usual = [point for point in codes if point.k == _USUAL_K]
    largest = max(usual, key=lambda point: point.num_items)
    fitted["filtered_code"] = largest.nanoseconds / largest.num_items
    wide = [point for point in masked if point.num_items == largest.num_items]
    terms = [[1.0, point.num_allowed] for point in wide]
    fitted["allowed_item"] = _least_squares(terms, [point.nanoseconds for point in wide])[1]
    others = [point for point in points if point.method in ("scan", "cells")]
    fitted["few_items"] = _crossing(usual, others)
    return fitted


def _least_squares(terms: Sequence[Sequence[float]], times: Sequence[float]) -> Float64Array:
    """Return factors of the terms, none of them negative, by errors relative to the times."""
    matrix, wanted = np.array(terms, np.float64), np.array(times, np.float64)
    kept = list(range(matrix.shape[1]))
    factors = np.zeros(matrix.shape[1])
    while kept:
        found = np.linalg.lstsq(matrix[:, kept] / wanted[:, None], np.ones(len(wanted)))[0]
        if (found >= 0).all():
            factors[kept] = found
            break
        kept.pop(int(found.argmin()))
    return factors


def _fit_scan(points: Sequence[Point]) -> Json:
    def attempt(growth: float) -> tuple[float, Float64Array]:
        terms = [[1.0, p.num_items * (p.k / _USUAL_K) ** growth] for p in points]
        times = np.array([point.nanoseconds for point in points])
        factors = _least_squares(terms, list(times))
        return float(np.square(np.array(terms) @ factors / times - 1).sum()), factors

    growth = min(np.arange(0.0, 0.6, 0.005), key=lambda growth: attempt(float(growth))[0])
    base, item = attempt(float(growth))[1]
    return {"scan": base, "scanned_item": item, "scan_growth": float(growth)}


def _crossing(codes: Sequence[Point], others: Sequence[Point]) -> float:
    """Return the size from which on another engine is faster, between those that were measured."""
    before: tuple[float, float] | None = None  # the last size, and how much longer others took
    for point in sorted(codes, key=lambda point: point.num_items):
        rivals: dict[str, list[float]] = {}
        for other in others:
            if (other.num_items, other.k) == (point.num_items, point.k):
                rivals.setdefault(other.method, []).append(other.nanoseconds)
        ahead = float(np.log(min(map(np.mean, rivals.values())) / point.nanoseconds))
        size = float(np.log(point.num_items))
        if ahead < 0:
            if before is None:
                return float(point.num_items)
            share = before[1] / (before[1] - ahead)
            return float(np.exp(before[0] + share * (size - before[0])))
        before = (size, ahead)
    return float(np.exp(before[0])) if before else 0.0


def combined(results: Sequence[Json], name: str) -> dict[str, float]:
    """Return the constants of an instruction set: the geometric mean over the machines that have it."""
    sets = [result["instruction_sets"] for result in results]
    fitted = [own[name]["fitted"] for own in sets if name in own]
    return {
        constant: float(np.exp(np.mean([np.log(max(one[constant], 1e-9)) for one in fitted])))
        for constant in (fitted[0] if fitted else ())
    }


def show(results: Sequence[Json]) -> None:
    """Print the constants of all machines together, beside those of this build."""
    names = dict.fromkeys(name for result in results for name in result["instruction_sets"])
    for name in names:
        print(name)
        if name in _native.instruction_sets():  # of this machine
            os.environ["RECPRUNE_ISA"] = name
            present = _native.costs()
            del os.environ["RECPRUNE_ISA"]
        else:
            present = {}
        for constant, mean in combined(results, name).items():
            print(f"  .{constant} = {mean:,.3g}; in this build {present.get(constant)}")


if __name__ == "__main__":
    main()
