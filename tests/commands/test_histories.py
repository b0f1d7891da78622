"""A log's histories reach `recprune batch` and the store of a service."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from recprune.cli import main
from recprune.recommender.recommender import Recommender
from recprune.serve.histories.histories import Event, open_histories
from tests.support.shops import Shop

LOG = "user,item,time\nanna,tea6,20\nbob,tea1,15.5\nanna,tea5,10\nanna,tea6,20\n"


@pytest.fixture
def log(tmp_path: Path) -> str:
    path = tmp_path / "log.csv"
    path.write_text(LOG)
    return str(path)


def test_histories_of_a_log_are_answered_by_batch(shop: Shop, log: str, tmp_path: Path) -> None:
    out = tmp_path / "histories.parquet"
    assert main(["histories", log, "--min-interactions", "1", "--out", str(out)]) == 0
    rows = pl.read_parquet(out)
    assert rows.rows() == [
        ("anna", ["tea5", "tea6", "tea6"], [10.0, 20.0, 20.0]),
        ("bob", ["tea1"], [15.5]),
    ]
    answers = tmp_path / "answers"
    words = ["--histories", str(out), "--out", str(answers), "-k", "3", "--workers", "1"]
    assert main(["batch", shop.recommender, *words]) == 0
    found = pl.read_parquet(answers / "part-00000.parquet")
    expected = Recommender.load(shop.recommender).recommend(rows["history"].to_list(), 3)
    assert found["items"].to_list() == expected.items


def test_who_and_what_is_left_out_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, out = tmp_path / "log.csv", str(tmp_path / "histories.parquet")
    counts = {"anna": 7, "bob": 5, "carl": 4, "dora": 1, "eve": 6}
    rows = [f"{user},tea{n},{n}\n" for user, count in counts.items() for n in range(count)]
    log.write_text("user,item,time\n" + "".join(rows) + "fritz,tea1,never\n")
    words = ["histories", str(log), "--out", out, "--on-bad-rows", "skip"]
    assert main([*words, "--most", "5"]) == 0
    bad, *said = capsys.readouterr().err.splitlines()
    assert bad.startswith("left out 1 row: ")
    assert said == [
        "left out 2 users with fewer than 5 interactions, with 5 interactions: --min-interactions "
        "1 keeps all",
        "left out 3 events of 2 users who have more than the newest 5: --most",
        f"wrote the histories of 3 users to {out}",
    ]
    assert pl.read_parquet(out)["user_id"].to_list() == ["anna", "bob", "eve"]
    assert main([*words, "--min-interactions", "1"]) == 0
    _, *said = capsys.readouterr().err.splitlines()
    assert said == [f"wrote the histories of 5 users to {out}"]


def test_a_log_is_imported_into_a_service_once(
    log: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path / 'histories.db'}"
    words = ["histories", log, "--min-interactions", "1", "--into", url]
    for new in (4, 0):
        assert main(words) == 0
        assert f"{new} events of 2 users are new in the histories" in capsys.readouterr().err
    histories = open_histories(url, 10)
    try:
        assert histories.dated_history("anna") == [("tea5", 10.0), ("tea6", 20.0), ("tea6", 20.0)]
        assert histories.dated_history("bob") == [("tea1", 15.5)]
    finally:
        histories.close()
    assert main([*words, "--most", "0"]) == 2
    assert "--most is 0" in capsys.readouterr().err
    assert main(["histories", log, "--into", "ftp://x"]) == 2


def test_an_import_leaves_what_a_service_has_stored(log: str, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'histories.db'}"
    stored = [Event("anna", f"item{n}", 100.0 + n, key=f"key{n}") for n in range(1500)]
    histories = open_histories(url, 2000)
    histories.append(stored)
    histories.close()
    assert main(["histories", log, "--min-interactions", "1", "--into", url, "--most", "2"]) == 0
    histories = open_histories(url, 2000)
    try:
        found = [(event.item, event.timestamp) for event in stored]
        assert histories.dated_history("anna") == [("tea6", 20.0), ("tea6", 20.0), *found]
        assert histories.append(stored) == 0  # their keys are remembered
    finally:
        histories.close()


def test_only_the_newest_are_taken(log: str, tmp_path: Path) -> None:
    out = str(tmp_path / "histories.parquet")
    assert main(["histories", log, "--min-interactions", "1", "--most", "2", "--out", out]) == 0
    assert pl.read_parquet(out)["history"].to_list() == [["tea6", "tea6"], ["tea1"]]
    missing = str(tmp_path / "nowhere" / "histories.parquet")
    assert main(["histories", log, "--min-interactions", "1", "--out", missing]) == 2
