"""The soak can tell right from wrong, and a short one finds nothing wrong."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.soak.ledger import CONDITIONS, NOTHING_KNOWN, Attributes, Filters, Ledger
from benchmarks.soak.run import Plan, Soak
from benchmarks.soak.table import FOLDER, recorded, with_table
from recprune.types import Float32Array

# Two splits of two sub-items: codes (0, 0) score 3, (0, 1) and (1, 1) less.
SCORES: Float32Array = np.array([[1.0, 0.5], [2.0, -1.0]], np.float32)


@pytest.fixture
def ledger() -> Ledger:
    codes = np.array([[0, 1], [1, 0], [0, 1]], np.uint8)
    known = [Attributes(10.0, "a"), Attributes(60.0, "c"), NOTHING_KNOWN]
    return Ledger(codes, ["x", "y", "z"], known)


def test_every_version_has_its_answer(ledger: Ledger) -> None:
    change = ledger.begin()
    codes = np.array([[0, 0], [0, 0]], np.uint8)
    assert ledger.put(["new", "x"], codes, [{}, {}]) == [3, 0]
    change.acknowledge()
    ledger.begin()
    ledger.remove("y")
    first = (("y", 2.5), ("x", 0.0), ("z", 0.0))  # ties by number
    second = (("x", 3.0), ("new", 3.0), ("y", 2.5), ("z", 0.0))
    for version, right in enumerate((first, second, (second[0], second[1], second[3]))):
        assert ledger.answer(version, SCORES, 9, Filters()) == right
    assert ledger.answer(1, SCORES, 2, Filters(["x"])) == (("new", 3.0), ("y", 2.5))
    cheap, _, _, _, unbranded = CONDITIONS
    # One that is replaced keeps what is known of it, of a new one nothing is.
    assert ledger.answer(2, SCORES, 9, Filters((), cheap)) == (("x", 3.0),)
    assert ledger.answer(2, SCORES, 9, Filters((), unbranded)) == (("new", 3.0), ("z", 0.0))
    begin_again = ledger.begin()
    assert ledger.put(["y"], codes[:1], [{}]) == [4]  # a number is not used twice
    begin_again.acknowledge()


def test_what_is_said_of_an_item_counts_from_its_version_on(ledger: Ledger) -> None:
    cheap, _, _, _, unbranded = CONDITIONS
    for said in ({"price": None, "brand": "b"}, {"price": 7.0}):
        ledger.begin().acknowledge()
        ledger.put(["x"], np.array([[0, 1]], np.uint8), [said])
    x, z = ("x", 0.0), ("z", 0.0)
    assert [ledger.answer(version, SCORES, 9, Filters((), cheap)) for version in range(3)] == [
        (x,),
        (),
        (x,),
    ]
    assert ledger.answer(2, SCORES, 9, Filters((), unbranded)) == (z,)  # the brand is as it was


def test_another_live_index_has_other_numbers(ledger: Ledger) -> None:
    ledger.begin().acknowledge()
    ledger.put(["new"], np.array([[0, 1]], np.uint8), [{}])
    ledger.begin().acknowledge()
    ledger.renumber({"new": 1, "x": 2, "y": 0, "z": 3}, 7)
    before = (("y", 2.5), ("x", 0.0), ("z", 0.0), ("new", 0.0))  # ties by number
    after = (("y", 2.5), ("new", 0.0), ("x", 0.0), ("z", 0.0))
    assert ledger.answer(1, SCORES, 9, Filters()) == before
    assert ledger.answer(2, SCORES, 9, Filters()) == after
    assert ledger.answer(2, SCORES, 9, Filters(["new", "y"])) == after[2:]
    unbranded = CONDITIONS[-1]
    assert ledger.answer(1, SCORES, 9, Filters((), unbranded)) == before[2:]  # x and y have one
    assert ledger.answer(2, SCORES, 9, Filters((), unbranded)) == (after[1], after[3])
    assert sorted(ledger.present()) == ["new", "x", "y", "z"]
    ledger.begin().acknowledge()
    assert ledger.put(["one more"], np.array([[1, 1]], np.uint8), [{}]) == [7]


def test_an_answer_may_be_of_what_was_sent_and_not_of_what_is_long_gone(ledger: Ledger) -> None:
    now = time.monotonic()
    for sent, acknowledged in ((-9.0, -8.0), (-0.2, -0.1), (0.5, 0.6), (2.0, np.inf)):
        change = ledger.begin()
        change.sent, change.acknowledged = now + sent, now + acknowledged
    found = [(version, round(late, 6)) for version, late in ledger.versions(now, now + 1.0)]
    assert found == [(2, 0.0), (3, 0.0), (1, 0.1)]  # without the first: 8 s late


def test_the_table_is_that_of_the_recorded_soak() -> None:
    text = (FOLDER / "catalogue.md").read_text(encoding="utf-8")
    assert with_table(text, recorded()) == text


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers are found in /proc")
def test_a_short_soak(tmp_path: Path) -> None:
    soak = Soak(Plan(minutes=0.1, items=300), tmp_path)
    try:
        record = soak.run()
    finally:
        soak.end.set()
        if soak.service.process is not None and soak.service.process.poll() is None:
            soak.service.kill_all()
    assert (record["wrong"], record["failed"]) == ([], [])
    assert record["counts"]["compared"] > 10
    assert record["read_back"]["equal"] == record["read_back"]["rankings"] == 20
