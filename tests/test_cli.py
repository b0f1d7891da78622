"""The command as a stranger types it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from recprune import Codebook, Index, LiveIndex, read_interactions
from recprune.cli import main

COMMAND = Path(sys.executable).with_name("recprune")


@pytest.fixture(scope="module")
def log_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "log.parquet"
    sizes = ["--users", "60", "--items", "300", "--interactions", "4000"]
    assert main(["synth", "--preset", "gowalla-like", "--out", str(path), *sizes]) == 0
    return path


def test_stats_as_json(log_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", str(log_file), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert list(figures)[:4] == ["users", "items", "interactions", "average_length"]
    assert (figures["users"], figures["items"], figures["interactions"]) == (60, 300, 4000)
    assert figures["average_length"] == pytest.approx(4000 / 60)


def test_the_module_is_the_command() -> None:
    for words, code in ((["--version"], 0), (["stats", "nowhere.csv"], 2)):
        both = [
            subprocess.run([*command, *words], capture_output=True, text=True, check=False)
            for command in ([COMMAND], [sys.executable, "-m", "recprune"])
        ]
        assert both[0].returncode == both[1].returncode == code
        assert (both[0].stdout, both[0].stderr) == (both[1].stdout, both[1].stderr)


def test_stats_as_a_table(log_file: Path) -> None:
    shown = subprocess.run([COMMAND, "stats", log_file], capture_output=True, text=True, check=True)
    assert "4,000" in shown.stdout
    assert "average length" in shown.stdout
    assert shown.stderr == ""


def test_codebook(log_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "codebook"
    arguments = ["codebook", str(log_file), "--out", str(out), "--splits", "4", "--sub-items", "16"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "300 items in 4 splits of 16 sub-items" in shown
    assert "singular value" in shown
    assert "test targets" in shown
    training = Codebook.load(out).settings["training"]
    assert training["holdout"] == "temporal"
    assert training["cut_time"].startswith("2010-")
    codebook = Codebook.load(out)
    assert codebook.item_ids is not None
    assert codebook.item_ids[0] == read_interactions(log_file).item_ids[0]
    assert main([*arguments, "--method", "random", "--holdout", "none"]) == 0  # replaces it
    settings = Codebook.load(out).settings
    assert settings["method"] == "random"
    assert settings["training"]["log"] == "log.parquet"
    assert settings["training"]["holdout"] == "none"
    assert main([*arguments, "--holdout", "leave-one-out"]) == 0


def test_bad_rows_stop_the_command_or_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    good = "".join(f"{user},{item},12875{item}\n" for user in range(3) for item in range(10, 15))
    path.write_text("user,item,time\n" + good + "1,2\n")
    refused = subprocess.run([COMMAND, "stats", path], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert (
        refused.stderr
        == f"recprune stats: {path}: line 17: too few fields (2, expected 3): '1,2'\n"
    )
    assert refused.stdout == ""
    skipped = subprocess.run(
        [COMMAND, "stats", path, "--on-bad-rows", "skip", "--json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "left out 1 row: wrong number of fields" in skipped.stderr
    assert json.loads(skipped.stdout)["bad_rows"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stats", "nowhere.csv"], "nowhere.csv: no such file or folder"),
        (["stats", "LOG", "--format", "gowala"], "expected one of auto, gowalla"),
        (["stats", "LOG", "--user-column", "who"], "no column 'who'"),
        (["stats", "LOG", "--min-interactions", "1000000"], "no user has 1000000 interactions"),
        (["codebook", "LOG", "--out", "LOG"], "already exists and is something else"),
        (["codebook", "LOG", "--out", "x", "--splits", "0"], "num_splits is 0"),
        (["codebook", "LOG", "--out", "x", "--train-fraction", "2"], "train_fraction is 2.0"),
        (["codebook", "LOG", "--out", "x", "--seed", "-1"], "seed is -1"),
        (["synth", "--preset", "gowalla-like", "--out", "x/y.parquet"], "x does not exist"),
        (
            ["synth", "--preset", "gowalla-like", "--out", "y.parquet", "--users", "0"],
            "num_users is 0",
        ),
    ],
)
def test_mistakes_end_with_a_message_and_leave_nothing(
    log_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([str(log_file) if word == "LOG" else word for word in arguments]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == "" or "--seed" in arguments
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_ends_quietly_and_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "log.parquet"
    running = subprocess.Popen(
        [COMMAND, "synth", "--preset", "tmall-like", "--out", out],
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 240
    while not list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.01)  # until it writes: 35 million rows take seconds from here
    os.kill(running.pid, signal.SIGINT)
    _, complaint = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "interrupted" in complaint
    assert "Traceback" not in complaint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_closed_pipe_is_no_error(log_file: Path, options: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    shown = subprocess.run(
        [COMMAND, "stats", log_file, *options],
        stdout=writing, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    os.close(writing)
    assert (shown.returncode, shown.stderr) == (0, "")


def test_version_and_help_on_any_terminal() -> None:
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    for words in ([], ["--version"], ["--help"], ["stats", "--help"], ["codebook", "--help"]):
        subprocess.run([COMMAND, *words], check=True, capture_output=True, env=ascii_only)


def test_a_misspelt_option_shows_the_usage_of_its_command() -> None:
    shown = subprocess.run(
        [COMMAND, "stats", "log.csv", "--formt", "csv"], capture_output=True, text=True, check=False
    )
    assert shown.returncode == 2
    assert "usage: recprune stats" in shown.stderr
    assert "--formt" in shown.stderr


def test_file_names_are_printed_as_they_are(log_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "log[red].parquet"
    path.write_bytes(log_file.read_bytes())
    shown = subprocess.run([COMMAND, "stats", path], capture_output=True, text=True, check=True)
    assert "log[red].parquet" in shown.stdout.replace("\n", "")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_files_without_permission_are_refused(log_file: Path, tmp_path: Path) -> None:
    secret = tmp_path / "log.parquet"
    secret.write_bytes(log_file.read_bytes())
    secret.chmod(0)
    assert main(["stats", str(secret)]) == 2
    tmp_path.chmod(0o500)
    assert main(["codebook", str(log_file), "--out", str(tmp_path / "out")]) == 2


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    np.save(tmp_path / "codes.npy", rng.integers(0, 16, (500, 4)).astype(np.uint8))
    np.save(tmp_path / "embeddings.npy", rng.standard_normal((4, 16, 3)).astype(np.float32))
    np.save(tmp_path / "queries.npy", rng.standard_normal((3, 12)).astype(np.float32))
    return tmp_path


def test_an_index_is_built_described_and_searched(
    arrays: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = str(arrays / "index")
    files = [str(arrays / "codes.npy"), str(arrays / "embeddings.npy")]
    assert main(["index", "build", *files, "--out", out]) == 0
    assert main(["index", "info", out, "--verify"]) == 0
    shown = capsys.readouterr().out
    assert "bytes per item" in shown
    assert "instruction set" in shown
    answers = {}
    for method in ("auto", "pqtopk"):
        queries = str(arrays / "queries.npy")
        assert main(["search", out, queries, "-k", "5", "--method", method, "--json"]) == 0
        lines = capsys.readouterr().out.splitlines()
        answers[method] = [json.loads(line)["ids"] for line in lines]
    assert answers["auto"] == answers["pqtopk"]
    assert len(answers["auto"]) == 3
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["search", out, str(arrays / "queries.npy")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("\t")[0] for line in lines] == ["0", "1", "2"]  # for other programs
    with monkeypatch.context() as terminal:
        terminal.setattr(sys.stdout, "isatty", lambda: True)
        assert main(["search", out, str(arrays / "queries.npy")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[0] for line in lines if line[0] != " "] == ["0", "1", "2"]
    assert sum(line.count(":") for line in lines) == 30
    assert max(map(len, lines)) <= 80
    assert main(["index", "info", out]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "parts            " in "".join(lines)
    arguments = ["search", out, queries, "-k", "5", "--json"]
    assert main([*arguments, "--boosts", "7=1e6,3=2e6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["ids"][:2] for line in lines] == [[3, 7]] * 3
    assert main([*arguments, "--boosts", "a=1"]) == 2
    assert "--boosts: 'a' is not an item number" in capsys.readouterr().err


def test_a_live_index_is_built_changed_compacted_and_searched(
    arrays: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, queries = str(arrays / "live"), str(arrays / "queries.npy")
    files = [str(arrays / "codes.npy"), str(arrays / "embeddings.npy")]
    names = arrays / "names.txt"
    names.write_text("".join(f"item {number}\n" for number in range(500)))
    assert main(["index", "build", *files, "--out", out, "--live", "--item-ids", str(names)]) == 0
    more = arrays / "more.npy"
    np.save(more, np.load(arrays / "codes.npy")[:2])
    assert main(["index", "add", out, str(more), "--item-ids", str(names)]) == 2
    assert "item_ids has 500 ids for 2 items" in capsys.readouterr().err
    names.write_text("a\nb\n")
    assert main(["index", "add", out, str(more), "--item-ids", str(names)]) == 0
    assert "first number     500" in capsys.readouterr().out
    assert main(["index", "remove", out, "3", "500"]) == 0
    assert "removed          2 (item 3, a)" in capsys.readouterr().out
    assert main(["index", "remove", out, "--external", "item 7", "--from", str(names)]) == 2
    assert "'a': no such item is there" in capsys.readouterr().err
    assert main(["index", "remove", out, "--external", "item 7", "b"]) == 0
    assert main(["index", "remove", out, "--external"]) == 2
    assert "nothing to remove" in capsys.readouterr().err
    assert main(["index", "remove", out, "9223372036854775808"]) == 2
    assert "ID: 9223372036854775808 is beyond 9223372036854775807" in capsys.readouterr().err
    names.write_text("one\u2028two\r\nthree\n")  # two ids: a line ends with \n alone
    assert main(["index", "add", out, str(more), "--item-ids", str(names)]) == 0
    assert main(["index", "remove", out, "--external", "one\u2028two", "three"]) == 0
    notes = arrays / "notes.jsonl"
    note = {"name": "é\u2028", "attributes": {"price": 5}}
    add = ["index", "add", out, str(more), "--item-ids", str(names), "--notes", str(notes)]
    for lines, message in (
        ("{}\n{", "notes.jsonl, line 2: not JSON: '{'"),
        ("[]\n{}\n", "notes.jsonl, line 1: '[]' is no object, and not null"),
        ("{}\n", "notes has 1 objects for 2 items"),
    ):
        notes.write_text(lines)
        assert main(add) == 2
        assert message in capsys.readouterr().err
    notes.write_text(f"null\n{json.dumps(note, ensure_ascii=False)}\n")
    assert main(add) == 0
    with LiveIndex.open(out) as live:
        assert dict(live.snapshot().notes) == {505: note}
    assert main(["index", "remove", out, "504", "505"]) == 0
    np.save(arrays / "large.npy", np.array([1, 2**63], np.uint64))
    assert main(["index", "remove", out, "--from", str(arrays / "large.npy")]) == 2
    assert "holds 9223372036854775808, expected ids of at most" in capsys.readouterr().err
    assert main(["index", "remove", out, "x"]) == 2
    assert "x: expected numbers; external ids go to --external" in capsys.readouterr().err
    assert main(["search", out, queries, "-k", "500", "--json"]) == 0
    before = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert main(["index", "compact", out]) == 0
    assert main(["index", "info", out, "--verify"]) == 0
    assert "numbers          506" in capsys.readouterr().out
    assert main(["search", out, queries, "-k", "500", "--json"]) == 0
    after = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for one, other in zip(before, after, strict=True):
        assert (one["ids"], one["scores"]) == (other["ids"], other["scores"])
        assert set(one["ids"]) == set(range(500)) - {3, 7} | {-1}
        named = zip(one["ids"], one["external_ids"], strict=True)
        assert all(name == (f"item {number}" if number >= 0 else None) for number, name in named)
    capsys.readouterr()
    assert main(["index", "compact", out, "--shards", "3"]) == 0
    assert (
        "shards           3\nsegments         3, holding 166, 169, 163 items\n"
        in capsys.readouterr().out
    )
    assert main(["search", out, queries, "-k", "500", "--json"]) == 0
    divided = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for one, other in zip(before, divided, strict=True):
        assert (one["ids"], one["scores"]) == (other["ids"], other["scores"])
    assert main(["index", "shard", out, "--shards", "3", "--out", str(arrays / "x")]) == 2
    said = capsys.readouterr().err
    assert f"divided where it lies: recprune index compact {out} --shards 3" in said
    assert main(["index", "build", *files, "--out", str(arrays / "x"), "--item-ids", "y"]) == 2
    assert "--item-ids goes with --live" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl", "log.parquet"])
def test_integers_beyond_64_bits_are_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    frame = pl.DataFrame(
        {"user": [1] * 6, "item": pl.Series(range(2**63 - 3, 2**63 + 3), dtype=pl.UInt64)}
    ).with_columns(time=pl.int_range(6))
    file = tmp_path / name
    if name == "log.csv":
        frame.write_csv(file)
    elif name == "log.jsonl":
        frame.write_ndjson(file)
    else:
        frame.write_parquet(file)
    assert main(["stats", str(file)]) == 0
    shown = capsys.readouterr()
    assert "integers / strings" in shown.out
    said = f"item ids are strings, as {2**63} is beyond the integers of 64 bits\n"
    assert shown.err == said
    frame.with_columns(pl.col("item") - 6).write_csv(tmp_path / "small.csv")
    assert main(["stats", str(tmp_path / "small.csv")]) == 0
    assert capsys.readouterr().err == ""


def test_an_index_takes_the_codes_of_a_saved_codebook(log_file: Path, arrays: Path) -> None:
    sizes = ["--splits", "4", "--sub-items", "16"]
    assert main(["codebook", str(log_file), "--out", str(arrays / "codebook"), *sizes]) == 0
    files = [str(arrays / "codebook"), str(arrays / "embeddings.npy")]
    for layout in ("compact", "slim"):
        to = ["--out", str(arrays / layout), "--layout", layout]
        assert main(["index", "build", *files, *to]) == 0
        assert Index.load(arrays / layout).describe()["layout"] == layout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["index", "build", "codes.npy", "nowhere.npy", "--out", "x"], "nowhere.npy: no such file"),
        (
            ["index", "build", "text.npy", "embeddings.npy", "--out", "x"],
            "text.npy: not a readable .npy file: it does not begin like one",
        ),
        (["index", "build", "queries.npy", "embeddings.npy", "--out", "x"], "codes is float32"),
        (["index", "info", "codes.npy"], "not a saved index"),
        (["search", "nowhere", "queries.npy"], "nowhere: not a saved index"),
        (["index", "add", "nowhere", "codes.npy"], "nowhere: not a live index"),
        (["index", "compact", "nowhere"], "nowhere: not a live index"),
    ],
)
def test_mistakes_with_indexes_are_named(
    arrays: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(arrays)
    (arrays / "text.npy").write_text("not an array")
    assert main(words) == 2
    assert message in capsys.readouterr().err
    assert not (arrays / "x").exists()
