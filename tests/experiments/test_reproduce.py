"""The whole evaluation in small, from a log to the report, and what happens to bad records."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from recprune import InputError, StorageError
from recprune.cli import main
from recprune.experiments.framework.record import Record, load_record, load_records, save_record
from recprune.experiments.registry import EXPERIMENTS
from recprune.experiments.report.headline import headline
from recprune.experiments.report.summary import put_summary, summary
from recprune.experiments.run import find_experiments, write_report

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("reproduce")
    assert main(["reproduce", "--quick", "--out", str(out)]) == 0
    return out


def test_every_table_and_figure_appears(quick: Path) -> None:
    markdown = (quick / "results.md").read_text(encoding="utf-8")
    html = (quick / "results.html").read_text(encoding="utf-8")
    recorded = {record.experiment for record in load_records(quick / "quick-records")}
    for experiment in EXPERIMENTS:
        assert experiment.name in recorded
        assert f"## {experiment.title}" in markdown
        assert f'id="{experiment.name}"' in html
    pictures = re.findall(r"\]\((pictures/[^)]+\.svg)\)", markdown)
    assert len(pictures) >= 10
    assert all((quick / picture).stat().st_size > 1000 for picture in pictures)
    assert html.count("<figure") == len(pictures)
    # Readers may follow links, to papers; the page itself needs nothing from elsewhere.
    without_links = re.sub(r"<a [^>]*>", "", html)
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", without_links)


def test_safe_methods_agree_on_ndcg(quick: Path) -> None:
    for path in (quick / "quick-records").glob("rq1.*.json"):
        methods = load_record(path).figures["methods"]
        found = {entry["ndcg"] for entry in methods.values() if "ndcg" in entry}
        assert len(found) == 1
        assert {"auto", "scan", "pqtopk", "recjpqprune"} <= set(methods)


def test_records_say_where_they_come_from(quick: Path) -> None:
    for record in load_records(quick / "quick-records"):
        assert {"cpu", "cores", "commit", "python", "recprune", "numpy"} <= set(record.machine)
        assert record.settings


def test_what_is_recorded_is_kept(quick: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in (quick / "quick-records").glob("*.json")}
    assert main(["reproduce", "--quick", "--out", str(quick)]) == 0
    assert f"0 parts run, {len(before)} kept" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in before} == before


def test_a_part_is_run_again_when_its_settings_change(
    quick: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(quick, tmp_path / "out")
    command = ["reproduce", "--quick", "--out", str(tmp_path / "out"), "--only", "splits"]
    assert main([*command, "--seed", "1"]) == 0
    said = capsys.readouterr().err
    assert "4 parts run, 0 kept" in said
    # Not on a terminal: one line for each part.
    assert re.search(r"^splits 4: \d+ s, 1 of 4, about \d+ min to go$", said, re.MULTILINE)
    assert len(re.findall(r"^splits \d+:", said, re.MULTILINE)) == 4


def test_what_other_sources_measured_is_said_to_be_kept(
    quick: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = tmp_path / "records"
    shutil.copytree(quick / "quick-records", records)
    record = load_record(records / "splits.4.json")
    save_record(records, replace(record, machine=record.machine | {"commit": "another"}))
    command = ["reproduce", "--quick", "--out", str(tmp_path), "--only", "splits"]
    assert main([*command, "--records", str(records)]) == 0
    said = capsys.readouterr().err
    assert "0 parts run, 4 kept from before, of them 1 from other commits" in said


def test_a_report_says_what_is_missing(
    quick: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(quick / "quick-records", tmp_path / "records")
    command = ["reproduce", "--report-only", "--out", str(tmp_path)]
    assert main(command) == 0
    assert "never finished" not in capsys.readouterr().err
    (tmp_path / "records" / "splits.16.json").unlink()
    (tmp_path / "records" / "heat-map.synthetic.json").unlink()
    assert main(command) == 0
    said = capsys.readouterr().err
    assert "as they were never finished: heat-map.synthetic.json, splits.16.json" in said


def test_only_what_is_needed_is_made(quick: Path, tmp_path: Path) -> None:
    assert main(["reproduce", "--quick", "--out", str(tmp_path / "a"), "--only", "splits"]) == 0
    assert not (tmp_path / "a" / "quick").exists(), "random codes need no log"
    datasets = ["reproduce", "--quick", "--no-train", "--only", "datasets"]
    assert main([*datasets, "--out", str(tmp_path / "b")]) == 0
    made = {path.name for path in (tmp_path / "b" / "quick" / "synthetic").iterdir()}
    assert made == {"prepared", "source.json"}
    assert {path.name for path in (quick / "quick" / "synthetic").iterdir()} == {
        "prepared",
        "source.json",
        "codes",
        "models",
        "variants",
        "workloads",
    }


def test_figures_of_several_machines_are_told_apart(quick: Path, tmp_path: Path) -> None:
    records = load_records(quick / "quick-records")

    def report(records: list[Record]) -> str:
        write_report(records, tmp_path / "a.md", tmp_path / "a.html", tmp_path / "pictures")
        return (tmp_path / "a.md").read_text(encoding="utf-8")

    assert "Measured on more than one machine" not in report(records)
    chosen = next(at for at, record in enumerate(records) if record.experiment == "rq3")
    records[chosen] = replace(
        records[chosen], machine=records[chosen].machine | {"cpu": "Another", "cores": 64}
    )
    rq3 = report(records).split("## RQ3")[1].split("\n## ")[0]
    assert "**Measured on more than one machine**" in rq3
    assert re.search(r"Another \(64 cores, [\d.]+ GB\): " + records[chosen].part, rq3)
    assert report(records).count("Measured on more than one machine") == 1


def test_the_report_introduces_itself(quick: Path) -> None:
    records = load_records(quick / "quick-records")
    text = (quick / "results.md").read_text(encoding="utf-8")
    short = text.split("## In short")[1].split("\n## ")[0]
    for sentence in (
        "**A quick run**",
        "**synthetic**, ",
        "Exactness: ",
        "Size: over 100,000 items",
        "In torch, on synthetic, ",
        "Beside other",
        "Stopping early: ",
        "Models trained to be pruned",
    ):
        assert sentence in short
    for word in ("auto", "cells", "scan", "recjpqprune", "pqtopk", "default", "φ", "S", "steps"):
        assert f"**{word}**: " in short
    agreed = sum(
        sum(record.figures["agreed"].values()) - record.figures["agreed"]["pqtopk"]
        for record in records
        if record.experiment == "rq1"
    )
    assert f"{agreed:,} timed answers" in short
    assert text.index("## In short") < text.index("## Data sets")


def test_an_interrupted_run_goes_on(quick: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(quick / "quick", out / "quick")
    command = [sys.executable, "-m", "recprune.cli", "reproduce", "--quick", "--out", str(out)]
    command += ["--only", "rq1", "--only", "splits"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(out.glob("quick-records/rq1*.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    if process.returncode != 0:  # a very quick machine may have finished
        assert process.returncode == 130, said
        assert "the same command goes on there" in said
    done = len(list(out.glob("quick-records/*.json")))
    again = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, again.stderr
    assert f"{7 - done} parts run, {done} kept" in again.stderr


def test_the_same_records_give_the_same_report(quick: Path, tmp_path: Path) -> None:
    records = load_records(quick / "quick-records")
    for name in ("first", "second"):
        folder = tmp_path / name
        write_report(
            records,
            folder / "results.md",
            folder / "results.html",
            folder / "pictures",
            quick=True,
        )
    first = {p.name: p.read_bytes() for p in (tmp_path / "first").rglob("*.*")}
    second = {p.name: p.read_bytes() for p in (tmp_path / "second").rglob("*.*")}
    assert first == second
    assert first["results.html"] == (quick / "results.html").read_bytes()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text.replace('"p50_us": ', '"p50_us": 1'), "changed after it was measured"),
        (lambda text: text[: len(text) // 2], "not a whole record"),
        (lambda _: "[]", "not a record of format 1"),
        (lambda text: text.replace('"format": 1', '"format": 2'), "not a record of format 1"),
    ],
)
def test_bad_records_are_refused(quick: Path, tmp_path: Path, damage: object, message: str) -> None:
    assert callable(damage)
    shutil.copytree(quick / "quick-records", tmp_path / "records")
    path = min((tmp_path / "records").glob("rq1.*.json"))
    path.write_text(damage(path.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(StorageError, match=message):
        load_records(tmp_path / "records")
    arguments = ["--records", str(tmp_path / "records"), "--out", str(tmp_path)]
    assert main(["reproduce", "--report-only", *arguments]) == 2


def test_a_record_under_another_name_is_refused(quick: Path, tmp_path: Path) -> None:
    path = min((quick / "quick-records").glob("rq1.*.json"))
    shutil.copy(path, tmp_path / "rq1.other.json")
    with pytest.raises(StorageError, match="holds the record"):
        load_record(tmp_path / "rq1.other.json")


def test_numbers_that_json_cannot_hold_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        save_record(tmp_path, Record("rq1", "a", {}, {}, {"ndcg": float("nan")}))
    assert not list(tmp_path.iterdir())


def test_bad_arguments_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--only", "rq9"], "there is no experiment 'rq9' (did you mean rq3?)"),
        (["--only", "nothing"], "there is no experiment 'nothing': there are datasets,"),
        (["--log", "a=/nowhere"], "/nowhere: no such file"),
        (["--log", "a b=x"], "expected NAME or NAME=PATH"),
        (["--gowalla", "/nowhere.txt"], "/nowhere.txt: no such file"),
        (["--seed", "-1", "--quick"], "--seed -1: expected 0 or more"),
        (["--readme", "/nope.md", "--quick"], "/nope.md: cannot be read: No such file"),
        (["--log", "absent"], "not there, and no log to make it from"),
        ([], "there is nothing to run this on"),
        (["--report-only"], "no records"),
    ):
        assert main(["reproduce", "--out", str(tmp_path), *arguments]) == 2, arguments
        assert message in capsys.readouterr().err, arguments


@pytest.mark.parametrize("name", ["gowalla", "tmall"])
def test_the_papers_own_files_can_be_given(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    rows = [(user, step, int(rng.integers(40))) for user in range(60) for step in range(12)]
    if name == "gowalla":
        text = "".join(
            f"{user}\t2010-10-{1 + step:02}T{user % 24:02}:00:00Z\t30.2\t-97.7\t{item}\n"
            for user, step, item in rows
        )
    else:
        text = "use_ID,sel_ID,ite_ID,cat_ID,act_ID,time_stamp\n" + "".join(
            f"{user},1,{item},2,0,201507{1 + step:02}\n" for user, step, item in rows
        )
    (tmp_path / "log.txt").write_text(text, encoding="utf-8")
    given = [f"--{name}", str(tmp_path / "log.txt"), "--only", "datasets"]
    assert main(["reproduce", "--quick", "--out", str(tmp_path / "out"), *given]) == 0
    figures = load_record(tmp_path / "out" / "quick-records" / f"datasets.{name}.json").figures
    assert figures["statistics"]["interactions"] == 720
    # Another log is not taken for the one that was prepared, were it called the same.
    (tmp_path / "log.txt").write_text(text.replace("1", "2", 1), encoding="utf-8")
    assert main(["reproduce", "--quick", "--out", str(tmp_path / "out"), *given]) == 2
    assert "was made from another log.txt than" in capsys.readouterr().err
    (tmp_path / "log.txt").rename(tmp_path / "other.txt")
    given[1] = str(tmp_path / "other.txt")
    assert main(["reproduce", "--quick", "--out", str(tmp_path / "out"), *given]) == 2
    assert "was made from log.txt, not from other.txt" in capsys.readouterr().err


def test_records_of_another_shape_are_refused(quick: Path, tmp_path: Path) -> None:
    for experiment, message in (("rq1", "not as this version"), ("rq9", "is not known")):
        record = Record(experiment, "part", {}, {"cpu": "x"}, {"log": "a"})
        with pytest.raises(StorageError, match=message):
            write_report([record], tmp_path / "a.md", tmp_path / "a.html", tmp_path / "pictures")
    assert load_records(quick / "quick-records")


def test_without_training_models_must_be_there(
    quick: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(quick / "quick", tmp_path / "quick")
    shutil.rmtree(tmp_path / "quick" / "synthetic" / "models" / "gsasrecjpq")
    command = ["reproduce", "--quick", "--no-train", "--out", str(tmp_path), "--only", "rq1"]
    assert main(command) == 2
    assert "there is no trained model" in capsys.readouterr().err


def test_experiments_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--list"]) == 0
    listed = capsys.readouterr().out
    assert all(experiment.name in listed for experiment in EXPERIMENTS)
    with pytest.raises(InputError, match="there is no experiment"):
        find_experiments(["nothing"])


# The committed results -----------------------------------------------------------------------------


def test_the_readme_shows_what_was_recorded(tmp_path: Path) -> None:
    records = load_records(ROOT / "docs" / "records")
    records += load_records(ROOT / "docs" / "records" / "quality")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert summary(records) in readme
    assert headline(records) in readme
    assert headline(records).count("\n| **") == 3
    copy = tmp_path / "README.md"
    copy.write_text(readme, encoding="utf-8")
    put_summary(copy, records)
    assert copy.read_text(encoding="utf-8") == readme


def test_times_of_several_versions_stand_apart(quick: Path) -> None:
    records = load_records(quick / "quick-records")
    [table, *others] = re.findall(r"Measured on: .*; sources of (.+)\.", summary(records))
    assert not others
    faster = next(record for record in records if record.experiment == "rq1")
    figures = json.loads(json.dumps(faster.figures))
    figures["methods"]["auto"]["p50_us"] = 0.25  # in microseconds: whatever else was measured
    at = records.index(faster)
    newer = replace(faster, figures=figures, machine=faster.machine | {"commit": "newer"})
    records[at] = newer
    text = summary(records)
    assert re.findall(r"sources of (.+)\.", text) == ["newer", table]
    assert text.index("0.000 |") < text.index("sources of newer") < text.index(f"of {table}")


def test_the_results_page_is_made_from_the_records(tmp_path: Path) -> None:
    records = load_records(ROOT / "docs" / "records")
    write_report(records, tmp_path / "results.md", tmp_path / "results.html", tmp_path / "pictures")
    committed = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert (tmp_path / "results.md").read_text(encoding="utf-8") == committed
    for picture in (tmp_path / "pictures").glob("*.svg"):
        assert picture.name in committed
        assert (ROOT / "docs" / "pictures" / picture.name).exists()


def test_the_readme_has_a_place_for_results(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("nothing", encoding="utf-8")
    records = load_records(ROOT / "docs" / "records")
    with pytest.raises(InputError, match="no place for the headline"):
        put_summary(tmp_path / "README.md", records)
    with pytest.raises(InputError, match="no record of rq1"):
        summary([])
