"""The beam over a graph of items that exact decoding is compared with, and the table of both."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.decoding import main
from benchmarks.decoding_table import FOLDER, records, table, with_table
from benchmarks.graph_decoding import GraphDecoder, item_graph, load_graph
from recprune import Index, InputError
from recprune.experiments.ours.scaling import random_model
from recprune.types import Json


def test_the_graph_links_items_to_those_that_are_most_like_them() -> None:
    codes, embeddings, _ = random_model(300, 4, 1, seed=1)
    graph = item_graph(codes, embeddings, 7)
    unit = embeddings / np.linalg.norm(embeddings, axis=2, keepdims=True)
    vectors = unit[np.arange(4), codes].reshape(300, -1)
    likeness = vectors @ vectors.T
    np.fill_diagonal(likeness, -np.inf)
    best = -np.sort(-likeness, axis=1)[:, :7]
    found = np.take_along_axis(likeness, graph.neighbours.astype(np.int64), 1)
    np.testing.assert_allclose(found, best, atol=1e-5)


def test_a_beam_as_wide_as_the_catalogue_is_exact() -> None:
    codes, embeddings, queries = random_model(300, 4, 5, seed=2)
    graph = item_graph(codes, embeddings, 5)
    index = Index.build(codes, embeddings)
    decoder = GraphDecoder(codes, embeddings, graph.neighbours, beam=300, rounds=1)
    for query in queries:
        ids, scores = decoder.search(query, 10)
        exact = index.search(query, 10)
        assert np.array_equal(ids, exact.ids)
        np.testing.assert_allclose(scores, exact.scores, rtol=1e-5)
        assert decoder.items_scored == 300


def test_a_walk_reaches_what_its_links_lead_to_and_nothing_else() -> None:
    """Items 0 → 1 → 2 in a chain, and 3 apart: from 0, two rounds end at 2."""
    codes = np.arange(4, dtype=np.uint8).reshape(4, 1)
    embeddings = np.array([[[1.0], [2.0], [3.0], [9.0]]], np.float32)
    neighbours = np.array([[1], [2], [1], [0]], np.int32)
    query = np.ones(1, np.float32)
    for rounds, reached in ((0, 0), (1, 1), (2, 2), (9, 2)):
        decoder = GraphDecoder(codes, embeddings, neighbours, beam=1, rounds=rounds)
        decoder._starts = np.array([0])
        ids, _ = decoder.search(query, 1)
        assert ids.tolist() == [reached]
        assert decoder.items_scored == min(rounds, 2) + 1


# Graphs on disk ----------------------------------------------------------------------------------


def test_a_graph_does_not_depend_on_threads_and_is_read_as_it_was_saved(tmp_path: Path) -> None:
    codes, embeddings, _ = random_model(300, 4, 1, seed=1)
    graph = item_graph(codes, embeddings, 7, threads=3)
    assert np.array_equal(graph.neighbours, item_graph(codes, embeddings, 7).neighbours)
    graph.save(tmp_path / "graph.npy")
    assert [path.name for path in tmp_path.iterdir()] == ["graph.npy"]
    for count in (7, 3):
        loaded = load_graph(tmp_path / "graph.npy", codes, embeddings, count)
        assert np.array_equal(loaded.neighbours, graph.neighbours)
        assert loaded.neighbours.dtype == np.int32
        assert loaded.seconds is None


def test_a_graph_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    codes, embeddings, _ = random_model(300, 4, 1, seed=1)
    path = tmp_path / "graph.npy"
    with pytest.raises(InputError, match="graph.npy: cannot be read as an array"):
        load_graph(path, codes, embeddings, 7)
    neighbours = item_graph(codes, embeddings, 7).neighbours
    outside = neighbours.copy()
    outside[200, 3] = 300
    wrong: list[tuple[Any, str]] = [
        (neighbours[:299], r"int32 \[299, 7\], expected the neighbours of 300 items as int32"),
        (neighbours.astype(np.int64), r"int64 \[300, 7\]"),
        (neighbours[:, :6], "6 neighbours, expected 7 or more"),
        (outside, "links to items that are not there"),
        (neighbours[::-1], "other neighbours of item"),
    ]
    for array, message in wrong:
        np.save(path, array)
        with pytest.raises(InputError, match=f"graph.npy: {message}"):
            load_graph(path, codes, embeddings, 7)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(InputError, match="graph.npy: cannot be read as an array"):
        load_graph(path, codes, embeddings, 7)


def test_items_cannot_have_more_neighbours_than_there_are_others() -> None:
    codes, embeddings, _ = random_model(5, 2, 1, seed=1)
    assert item_graph(codes, embeddings, 4).neighbours.min() == 0
    with pytest.raises(InputError, match="5 items cannot have 5 neighbours each"):
        item_graph(codes, embeddings, 5)


# The table ---------------------------------------------------------------------------------------


def test_a_workload_is_measured_with_numpy_and_the_compiled_module_alone(tmp_path: Path) -> None:
    arrays = random_model(400, 8, 6, seed=3)
    for name, array in zip(
        ("codes", "sub_item_embeddings", "sequence_embeddings"), arrays, strict=True
    ):
        np.save(tmp_path / f"{name}.npy", array)
    code = """
import sys
for name in ("torch", "onnx", "onnxruntime", "polars", "scipy", "rich", "pyarrow", "pydantic"):
    sys.modules[name] = None
from benchmarks.decoding import main
main()
"""
    graph = tmp_path / "graph.npy"
    shown = []
    for _ in range(2):  # the second reads the graph of the first
        done = subprocess.run(
            [
                sys.executable, "-c", code, "--workload", str(tmp_path), "--title", "random",
                "--beams", "10", "400", "--neighbours", "5", "20", "--graph", str(graph),
                "--out", str(tmp_path / "record.json"),
            ],
            capture_output=True, text=True, check=False, cwd=FOLDER.parent,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        shown.append(done.stdout)
        assert np.load(graph).shape == (400, 20)
        exact, *beams = [line.split(" | ") for line in done.stdout.splitlines()[2:7]]
        assert exact[0] == "| random, 400 items, M = 8"
        assert exact[-1] == "100.0 % |"
        assert [line[1:3] for line in beams] == [
            ["10", "5"], ["10", "20"], ["400", "5"], ["400", "20"]
        ]  # fmt: skip
        for line in beams[2:]:
            assert line[3] == "400"
            assert line[-1] == "100.0 % |"
    first, second = (text.splitlines()[-1].split(" | ") for text in shown)
    assert first[:2] == second[:2] == ["| 400", "20"]
    assert first[2].endswith(" s")
    assert second[2] == ""


def decoding(ratio: float, found: float, **beam: int) -> Json:
    figures = {"items_scored": 1234.0, "items_touched": 5678.0, "p50_us": 100 * ratio}
    return figures | {"ratio": ratio, "recall": found} | beam


def test_a_beam_that_is_slower_and_finds_no_more_is_left_out() -> None:
    record: Json = {
        "title": "gitlog",
        "index": {"items": 100_000, "splits": 8, "instruction_set": "avx2"},
        "machine": {"cpu": "a CPU"},
        "codes_megabytes": 0.8,
        "graph": {"neighbours": 100, "megabytes": 40.0, "seconds": 83.4, "threads": 2},
        "decodings": {
            "exact": decoding(1, 1),
            "10 50": decoding(2, 0.5, beam=10, neighbours=50),
            "10 100": decoding(3, 0.5, beam=10, neighbours=100),
            "50 50": decoding(5, 0.9, beam=50, neighbours=50),
            "50 100": decoding(4, 0.95, beam=50, neighbours=100),
            "50 200": decoding(6, 0.9504, beam=50, neighbours=200),  # no more in one decimal
        },
    }
    lines = table([record])
    assert lines[2:5] == [
        "| gitlog, 100,000 items, M = 8 | exact |  | 1,234 | 5,678 | 100 µs | 1.0 | 100.0 % |",
        "|  | 10 | 50 | 1,234 |  | 200 µs | 2.0 | 50.0 % |",
        "|  | 50 | 100 | 1,234 |  | 400 µs | 4.0 | 95.0 % |",
    ]
    assert lines[5:] == [
        "",
        "| items | neighbours | graph made in | threads | graph | codes | measured on |",
        "|---|---|---|---|---|---|---|",
        "| 100,000 | 100 | 83 s | 2 | 40 MB | 0.8 MB | a CPU, avx2 |",
    ]
    assert len(table([record], every=True)) == len(lines) + 3


def test_the_document_has_the_table_of_what_was_measured() -> None:
    text = (FOLDER / "models.md").read_text(encoding="utf-8")
    assert len(records()) > 1
    assert with_table(text, records()) == text


# The benchmark -----------------------------------------------------------------------------------


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    names = ("codes", "sub_item_embeddings", "sequence_embeddings")
    for name, array in zip(names, random_model(60, 4, 3, seed=3), strict=True):
        np.save(tmp_path / f"{name}.npy", array)
    return tmp_path


def test_the_benchmark_measures_what_it_is_given(workload: Path) -> None:
    options = ["--beams", "5", "60", "--neighbours", "4", "-k", "5", "--out", str(workload / "out")]
    main(["--workload", str(workload), *options])
    figures = json.loads((workload / "out").read_text())["decodings"]
    assert list(figures) == ["exact", "5 4", "60 4"]
    assert figures["60 4"]["recall"] == 1.0  # all items begin


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "m"], "--prepared and --model belong together"),
        (["--prepared", "p"], "--prepared and --model belong together"),
        (["--prepared", "p", "--model", "m"], "--workload has a model already"),
        (["-k", "0"], "-k 0: expected 1, or more"),
        (["--queries", "0"], "--queries 0: expected 1, or more"),
        (["--items", "-5"], "--items -5: expected 0, or more"),
        (["--rounds", "-1"], "--rounds -1: expected 0, or more"),
        (["--threads", "0"], "--threads 0: expected 1, or more"),
        (["--neighbours", "5", "0"], "--neighbours 0: expected 1, or more"),
        (["--beams", "50", "9"], "--beams 9: expected K, which is 10, or more"),
        (["--neighbours", "59", "60"], "-k and --neighbours are up to 60: there are 60 items"),
        (["--items", "10", "--neighbours", "5"], "are up to 10: there are 10 items"),
        (["--workload", "nowhere"], "nowhere/codes.npy"),
        (["-k", "ten"], "argument -k: invalid int value"),
    ],
)
def test_the_benchmark_says_what_it_cannot_do(
    workload: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--workload", str(workload), *options])
    assert message in capsys.readouterr().err
