"""What learnt codes do to pruning: the counts by hand, and the section made of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from recprune import instruction_set
from recprune.experiments.framework.experiment import Setup
from recprune.experiments.framework.workload import Workload
from recprune.experiments.ours.other_codes import OtherCodes, balance, pigeonhole_shares
from recprune.experiments.report.document import Table
from recprune.preparation.codebook import Codebook
from tests.support.experiments import recorded, words_of

SPLITS = {"svd-codes": 8, "learnt-m-8": 8, "learnt-m-16": 16}


def toy(model: str, log: str = "toy") -> Workload:
    """A random model of 6,000 items with codes of that name."""
    rng, splits = np.random.default_rng(len(model)), SPLITS[model]
    return Workload(
        log,
        model,
        rng.integers(0, 64, (6000, splits), dtype=np.uint8),
        rng.standard_normal((splits, 64, 32 // splits), np.float32),
        rng.standard_normal((20, 32), np.float32),
        np.zeros(20, np.int32),
        {"model": {"codes": model.partition("-")[0]}},
    )


def test_balance_by_hand() -> None:
    codes = np.array([[0, 0], [0, 1], [1, 0], [0, 0]], np.uint8)
    assert balance(Codebook(codes, 2)) == {
        "least": 1,
        "most": 3,
        "even": pytest.approx(1 / (9 / 16 + 1 / 16)),
        "items_sharing_a_code": 2,
    }


def test_items_that_must_be_looked_at_by_hand() -> None:
    """The best conceivable score is 20 and θ is 15: of four items, two are within the slack of 5."""
    scores = np.array([[10, 5, 0], [10, 5, 0]], np.float32)
    codes = np.array([[0, 0], [0, 1], [1, 1], [2, 2]])
    # By single splits: all that have the best in the second (one item), and since an item may lose
    # all of the slack there, all that have the best in the first as well (two).
    assert pigeonhole_shares(scores, codes, 15.0, (1, 2)) == [3 / 4, 2 / 4]


def test_codes_of_any_length_are_compared(tmp_path: Path) -> None:
    workloads = tuple(toy(model) for model in sorted(SPLITS))
    setup = Setup((), (), (), quick=True, memory_bytes=1 << 30, codes=workloads)
    (record,) = recorded(OtherCodes(), setup, tmp_path)
    assert record.part == f"toy-{instruction_set()}"
    models = record.figures["models"]
    assert [entry["model"] for entry in models] == list(SPLITS), "SVD codes come first"
    for entry, workload in zip(models, (toy(model) for model in SPLITS), strict=True):
        stats = workload.index.search(
            workload.sequence_embeddings[:10], 10, method="recjpqprune"
        ).stats
        assert entry["methods"]["recjpqprune"]["items_scored"] == np.median(stats.items_scored)
        assert ("cells" in entry["methods"]) == (4 <= entry["splits"] <= 16)
        assert [row["k"] for row in entry["cutoffs"]] == [1, 10, 100, 1000]
        assert [row["items"] for row in entry["sizes"]] == [375, 1500, 6000]
    section = OtherCodes().section([record])
    words = words_of(section)
    for name in ("learnt, M = 8", "learnt, M = 16"):
        assert f"{name}: Algorithm 1 scores" in words
    assert "groups of four" in words, "said of longer codes"
    assert "The machine was shared" not in words
    busy = replace(record, machine=record.machine | {"load": 5.5})
    assert "**The machine was shared** (load 5.5)" in words_of(OtherCodes().section([busy]))
    tables = [block for block in section.blocks if isinstance(block, Table)]
    assert {row[0] for row in tables[0].rows} == {"SVD, M = 8", "learnt, M = 8", "learnt, M = 16"}


def test_every_log_has_a_part_that_says_what_it_depends_on() -> None:
    def parts(*workloads: Workload) -> list[dict[str, object]]:
        setup = Setup((), (), (), quick=True, memory_bytes=1 << 30, codes=workloads)
        return [part.settings for part in OtherCodes().parts(setup)]

    assert parts() == []
    base, other = toy("svd-codes"), toy("learnt-m-8")
    assert len(parts(base, toy("learnt-m-8", "another"))) == 2
    assert parts(base) != parts(other) != parts(base, other)
