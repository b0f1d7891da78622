"""The siege keeps its books: it sees what is wrong where something is, and nothing where not."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.siege import table
from benchmarks.siege.client import Client
from benchmarks.siege.diary import Diary
from benchmarks.siege.folders import Oracle, make_questions, save_two
from benchmarks.siege.load import Load, LoadReport
from benchmarks.siege.memory import slope
from benchmarks.siege.witness import OPEN, Witness, lost_events
from recprune.serve.histories.histories import open_histories
from tests.support.serving import serving, wait_until

ROOT = Path(__file__).parents[1]


def test_the_document_has_what_was_measured() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    records = table.records()
    assert table.with_table(text, records) == text
    for store, record in records.items():
        assert table.faults_of(record) == []
        drawn = (ROOT / "docs" / "pictures" / f"siege-{store}.svg").read_text(encoding="utf-8")
        assert drawn.count("<path") > 20
        assert f"pictures/siege-{store}.svg" in text


def test_faults_are_named() -> None:
    record = table.records()["sqlite"]
    record["load"]["outcomes"] |= {"wrong": 1, "status-500": 2, "cut": 500, "cut-again": 30}
    record["events"]["lost"] = 4
    record["witness"] |= {"failed": 5, "said": ["/events: unanswered", "/events: 500"]}
    assert table.faults_of(record) == [
        "failed among the admitted, not by two kills: 6",
        "cut twice, more often than kills explain: 31",
        "wrong answers: 1",
        "acknowledged events lost: 4",
    ]


def test_what_wrk_says_is_read() -> None:
    report = LoadReport()
    report.read(["s 7 history right 3 400:2 500:1", "a ann e1", "a ann e2", "e read 4"])
    report.read(["s 7 history right 1 400:1", "s 8 events turned-away 5 10:5", "s 8 user cut 2"])
    report.read(["  64 threads and 64 connections", "x user wrong {} -> {}"])
    assert report.outcomes() == {"right": 4, "turned-away": 5, "cut": 2}
    assert report.acknowledged == {"ann": ["e1", "e2"]}
    assert report.errors == {"read": 4}
    assert report.strange == ["user wrong {} -> {}"]
    assert report.seconds() == range(7, 9)
    right = report.total(["right"])
    assert right.count == 4
    assert right.milliseconds(0.5) == pytest.approx(1.02**401 / 1000)
    assert right.milliseconds(0.99) == pytest.approx(1.02**501 / 1000)
    assert report.total(kinds=["events"], seconds=range(8, 9)).count == 5


def test_a_line_through_outliers_is_that_of_the_others() -> None:
    moments = [float(second) for second in range(100)]
    sizes = [100.0 + second / 600 if second % 10 else 5.0 for second in range(100)]
    assert slope(moments, sizes) == pytest.approx(1.0, rel=0.05)


def test_a_store_is_away_for_a_while() -> None:
    diary = Diary()
    with diary.noting("full disk", "no room", store_is_away=True) as entry:
        pass
    assert diary.store_was_away(entry.ended + 2.0, grace=3.0)
    assert not diary.store_was_away(entry.ended + 4.0, grace=3.0)
    assert not diary.store_was_away(entry.begun - 2.0, grace=3.0)


@pytest.mark.skipif(shutil.which("wrk") is None, reason="needs wrk (Debian: apt install wrk)")
def test_load_and_witness_see_what_is_planted(tmp_path: Path) -> None:
    """A real service under wrk, one of whose workers is killed meanwhile."""
    folders = save_two(tmp_path, 2000)
    oracles = [Oracle(folder) for folder in folders]
    questions = make_questions(oracles[0], 5)
    by_version = {oracle.version: oracle for oracle in oracles}
    database = tmp_path / "histories.db"
    options = ("--workers", "2", "--history", f"sqlite:///{database}", "--max-waiting", "64")
    with serving(folders[0], *options) as service:
        users = {"ann": oracles[0].items[:5], "bob": oracles[0].items[5:8]}
        for user, items in users.items():
            events = [{"user": user, "item": item} for item in items]
            assert service.post("/events", {"events": events}).status_code == 200
        load = Load(tmp_path, service.port, connections=6)
        load.plan(questions, users, oracles[0].items[:5], oracles)
        witness = Witness(service.port, by_version, questions)
        running = load.start(3, 100.0)
        with witness.watching():
            wait_until(lambda: witness.counts["compared"] > 10, "answers")
            os.kill(service.workers[0], signal.SIGKILL)
            wait_until(lambda: witness.counts["acknowledged"] > 10, "events")
            running.process.wait()
        report = running.report()
        with closing(Client(service.port)) as client:
            witness.read_back(client)
        outcomes = report.outcomes()
        assert 100 < outcomes["right"] <= 310
        assert set(outcomes) <= {"right", "cut", "turned-away"}
        assert report.strange == []
        assert (witness.wrong, witness.failed) == ([], [])

        # The other folder's answers, taken for those of this one: nothing that is compared is right.
        first, second = (oracle.version for oracle in oracles)
        oracles[1].version = first
        swapped = Witness(service.port, {first: oracles[1], second: oracles[0]}, questions)
        with swapped.watching(askers=1, users=0):
            wait_until(lambda: swapped.counts["compared"] > 5, "answers")
        assert len(swapped.wrong) == swapped.counts["compared"]
        load.plan(questions, users, oracles[0].items[:5], [oracles[1]])
        planted = load.run(1, 50.0)
        assert planted.outcomes()["wrong"] > 10
        assert len(planted.strange) == planted.outcomes()["wrong"]

    url = f"sqlite:///{database}"
    acknowledged = {user: items for user, items in witness.acknowledged.items() if items}
    with closing(open_histories(url, 1000)) as histories:
        assert lost_events(histories, acknowledged, ordered=True) == (0, 0)
        assert lost_events(histories, report.acknowledged, ordered=False) == (0, 0)
        user = next(name for name, items in acknowledged.items() if len(items) > 3)
        moved = [acknowledged[user][1], acknowledged[user][0], *acknowledged[user][2:]]
        assert lost_events(histories, {user: moved}, ordered=True) == (0, 2)
        assert lost_events(histories, {user: [OPEN]}, ordered=True) == (0, 0)
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("DELETE FROM events WHERE user = ? AND item = ?", (user, str(moved[0])))
    with closing(open_histories(url, 1000)) as histories:
        assert lost_events(histories, acknowledged, ordered=True)[0] == 1


def test_a_client_knows_how_far_an_answer_had_come() -> None:
    answers = [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab"]
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for answer in answers:
                connection, _ = listening.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(answer)

        server = threading.Thread(target=serve)
        server.start()
        client = Client(listening.getsockname()[1])
        assert [client.ask("GET", "/").cut for _ in answers] == ["unanswered", "halfway"]
        server.join()
    assert client.ask("GET", "/").cut == "refused"
