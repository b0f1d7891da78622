"""Shapes of a question: what is measured of them, and what the section says of `auto`'s choice."""

from __future__ import annotations

import json

import numpy as np
import pytest

from recprune import Index
from recprune.experiments.framework.experiment import Setup
from recprune.experiments.framework.record import Record
from recprune.experiments.ours.scaling import random_model
from recprune.experiments.ours.shapes import BlockTiming, Shapes, questions, race
from recprune.experiments.report.document import Picture, Section, Table
from recprune.experiments.report.introduction import introduction
from recprune.search.index import instruction_set
from recprune.types import Json, RecpruneError
from tests.support.experiments import MACHINE, recorded, words_of

QUICK = Setup((), (), (), quick=True, memory_bytes=1 << 30)
FULL = Setup((), (), (), quick=False, memory_bytes=1 << 30)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    return recorded(Shapes(), QUICK, tmp_path_factory.mktemp("records"))


def test_every_question_is_measured_for_every_size_and_k(records: list[Record]) -> None:
    shapes = [
        (record.figures["items"], shape["k"], shape["question"])
        for record in records
        for shape in record.figures["shapes"]
    ]
    assert len(set(shapes)) == len(shapes) == 2 * 2 * 11
    for record in records:
        assert record.figures["instruction_set"] == instruction_set()
        assert record.part == f"{record.figures['items']}-{instruction_set()}"
        for shape in record.figures["shapes"]:
            times = shape["microseconds"]
            assert min(times.values()) > 0
            assert shape["best"] in times.keys() - {"auto"}
            assert shape["taken"] in ("cells", "scan", "pqtopk")
            assert shape["ratio"] > 0


def test_no_k_is_larger_than_the_catalogue() -> None:
    (smallest, *_) = Shapes().parts(FULL)
    assert smallest.settings["items"] < max(smallest.settings["cutoffs"])
    parts = {json.dumps(part.settings) for part in (*Shapes().parts(FULL), *Shapes().parts(QUICK))}
    assert len(parts) == 9 + 2


def test_questions_hide_and_allow_what_their_names_say() -> None:
    codes, embeddings, queries = random_model(5_000, 8, 3, 0)
    index = Index.build(codes, embeddings)
    asked = {question.name: question for question in questions(index, queries)}
    allowed = {
        name: int(np.bitwise_count(question.options["allow"]).sum())
        for name, question in asked.items()
        if name.startswith("allow")
    }
    assert allowed["allow 1 %"] == 50
    assert allowed["allow 0.01 %"] == 1
    assert allowed["allow 100 %"] == 5_000
    hidden = asked["exclude 100"].options["exclude"]
    assert np.array_equal(hidden, index.search(queries[0], 100).ids)
    assert not set(index.search(queries[0], 10, exclude=hidden).ids.tolist()) & set(hidden.tolist())
    assert np.array_equal(asked["boost 100"].options["boosts"][0], hidden)
    assert [name for name, question in asked.items() if question.biased] == ["bias"]


def test_methods_that_disagree_end_the_experiment() -> None:
    codes, embeddings, queries = random_model(300, 8, 5, 0)
    index = Index.build(codes, embeddings)
    asks = {
        "auto": lambda query: index.search(query, 3),
        "scan": lambda query: index.search(-query, 3),
    }
    with pytest.raises(RecpruneError, match="scan and auto differ in their answers: this is a bug"):
        race(asks, queries, BlockTiming(rounds=1))


def shape_of(question: str, ratio: float, auto: float = 12.0) -> Json:
    return {
        "k": 10,
        "question": question,
        "microseconds": {"auto": auto, "scan": auto / ratio, "cells": 99.0},
        "taken": "cells",
        "best": "scan",
        "ratio": ratio,
        "calls": 3,
    }


def record_of(items: int, isa: str, *shapes: Json) -> Record:
    figures: Json = {"items": items, "instruction_set": isa, "shapes": list(shapes)}
    return Record("shapes", f"{items}-{isa}", {}, MACHINE, figures)


def tables_of(section: Section) -> list[Table]:
    return [block for block in section.blocks if isinstance(block, Table)]


def test_the_section_names_the_worst_shapes_first() -> None:
    section = Shapes().section(
        [
            record_of(2_000, "avx2", shape_of("plain", 0.9), shape_of("bias", 1.2, 2400.0)),
            record_of(100, "avx2", shape_of("plain", 1.04), shape_of("bias", 1.5)),
        ]
    )
    words = words_of(section)
    assert "**avx2**, a CPU." in words
    # The geometric mean of 1, 1.2, 1.04 and 1.5: what is faster than the fastest is chance.
    assert "in 2 of 4 shapes of a question; it takes 17.0% longer" in words
    assert "and 50% at most." in words
    (table,) = tables_of(section)
    assert table.rows == (
        ("bias", "100", "10", "cells", "12", "scan", "8", "1.50 ×"),
        ("bias", "2,000", "10", "cells", "2,400", "scan", "2,000", "1.20 ×"),
    )
    (picture,) = [block for block in section.blocks if isinstance(block, Picture)]
    assert picture.name == "shapes-avx2"
    for word in ("plain", "bias", "100", "2,000", "12", "2.4m"):
        assert f">{word}</text>" in picture.svg


def test_a_long_list_is_cut_and_no_list_is_no_table() -> None:
    slow = [shape_of(f"allow {at} %", 1.1 + at / 100) for at in range(20)]
    (table,) = tables_of(Shapes().section([record_of(100, "avx2", *slow)]))
    assert len(table.rows) == 15
    assert table.rows[0][0] == "allow 19 %"
    assert "5 more are not shown" in table.note
    assert not tables_of(Shapes().section([record_of(100, "avx2", shape_of("plain", 1.0))]))


def test_instruction_sets_are_told_apart() -> None:
    both = [record_of(100, isa, shape_of("plain", 1.2)) for isa in ("avx2", "avx512")]
    section = Shapes().section(both)
    names = [block.name for block in section.blocks if isinstance(block, Picture)]
    assert names == ["shapes-avx2", "shapes-avx512"]
    short = words_of(introduction(both))
    for isa in ("avx2", "avx512"):
        assert (
            f"Choice of a method, {isa}: `auto` is the fastest, or within 5% of it, in 0 of 1"
            in short
        )


def test_the_same_figures_give_the_same_section(records: list[Record]) -> None:
    section = Shapes().section(records)
    assert section == Shapes().section(records)
    assert len([block for block in section.blocks if isinstance(block, Picture)]) == 1
