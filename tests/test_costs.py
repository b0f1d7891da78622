"""What the cost model counts with is what `benchmarks.costs` has fitted to the records."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.costs import Point, combined, fit
from recprune import _native
from recprune.types import Json

RECORDS = sorted((Path(__file__).parents[1] / "docs" / "measured").glob("costs-*.json"))


def records() -> list[Json]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in RECORDS]


def test_two_machines_were_measured() -> None:
    assert len({record["machine"]["cpu"] for record in records()}) >= 2


@pytest.mark.parametrize("name", _native.instruction_sets())
def test_the_constants_of_the_core_are_those_of_the_records(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = combined(records(), name)
    if not wanted:
        pytest.skip(f"{name} was not measured")
    monkeypatch.setenv("RECPRUNE_ISA", name)
    assert _native.costs() == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize("record", records(), ids=[path.stem for path in RECORDS])
def test_a_record_is_fitted_as_it_says(record: Json) -> None:
    for of_set in record["instruction_sets"].values():
        points = [Point(**point) for point in of_set["points"]]
        assert fit(points) == pytest.approx(of_set["fitted"], rel=1e-3)


def test_constants_that_times_were_made_from_are_found() -> None:
    known = {
        "scan": 30e3,
        "scanned_item": 0.2,
        "scan_growth": 0.15,
        "cells": 9e3,
        "line": 8.0,
        "found_item": 400.0,
        "filtered_code": 0.3,
        "allowed_item": 10.0,
    }
    points = []
    for size in (10_000, 100_000, 1_000_000):
        points.append(Point("pqtopk", size, 10, 0, 0.0, known["filtered_code"] * size))
        points += [
            Point("pqtopk", size, 10, count, 0.0, 1e3 + known["allowed_item"] * count)
            for count in (1_000, 3_000, 10_000)
        ]
        points.append(Point("planning", size, 10, 0, 0.0, known["cells"]))
        for k in (1, 10, 100):
            scan = known["scan"] + known["scanned_item"] * size * (k / 10) ** known["scan_growth"]
            points.append(Point("scan", size, k, 0, 0.0, scan))
            for lines in (100.0 * k, 300.0 * k):
                cells = known["cells"] + known["line"] * lines + known["found_item"] * k
                points.append(Point("cells", size, k, 0, lines, cells))
    fitted = fit(points)
    few = fitted.pop("few_items")
    assert fitted == pytest.approx(known, rel=1e-6)
    # pqtopk takes 3 µs and 30 µs for the first two sizes, cells 29 µs: between them, close to the
    # second.
    assert 90_000 < few < 100_000
    assert np.isfinite(few)
