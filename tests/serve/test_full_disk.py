"""A disk without room: workers neither end by it nor are kept from starting."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from recprune.serve.engine.texts import CatalogueTexts, shared_texts, write_texts
from recprune.serve.metric_files import reserve_metric_files
from tests.support.serving import (
    HISTORY,
    error_of,
    events_of,
    expected,
    items_of,
    replace,
    save_two_recommenders,
    serving,
    wait_until,
)
from tests.support.small_disk import SmallDisk, small_disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "small") as disk:
        yield disk


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return save_two_recommenders(tmp_path_factory.mktemp("saved"))


def test_a_worker_that_is_replaced_on_a_full_disk_serves(
    disk: SmallDisk, saved: list[Path]
) -> None:
    # Log, histories and temporary files are beside the folder.
    folder = shutil.copytree(saved[0], disk.place / "served")
    with serving(folder) as service:
        requests = 'recprune_requests_total{route="/recommend",status="200"}'
        service.recommend(history=HISTORY, k=5)
        counted = service.metric(requests)
        assert counted == 1
        with disk.full():
            for _ in range(3):
                (worker,) = service.workers
                os.kill(worker, signal.SIGKILL)
                wait_until(lambda: worker not in service.workers, "its end")  # noqa: B023
                assert items_of(service.recommend(history=HISTORY, k=5)) == expected(saved[0])
                counted += 1
                assert service.metric(requests) == counted, "and counts on"
            event = {"events": [{"user": "ann", "item": "i" * 200} for _ in range(1000)]}
            assert error_of(service.post("/events", event))[:2] == (503, "histories_unavailable")
        assert service.post("/events", event).status_code == 200
    codes = [entry.get("code") for entry in service.logged() if entry["event"] == "worker ended"]
    assert set(codes) <= {-signal.SIGKILL, None}


def test_a_new_folder_is_swapped_in_on_a_full_disk(disk: SmallDisk, saved: list[Path]) -> None:
    folder = shutil.copytree(saved[0], disk.place / "served")
    shutil.copytree(saved[1], disk.place / "other")
    with serving(folder, "--workers", "2") as service:
        replace(folder, disk.place / "other")
        with disk.full():
            assert service.client.post("/admin/reload").status_code == 200
            assert items_of(service.recommend(history=HISTORY, k=5)) == expected(saved[1])
            assert service.client.get("/items", params={"query": "tea"}).json()["items"]
        wait_until(lambda: "texts in memory" in events_of(service), "a word of it")


def test_texts_are_the_same_in_memory(disk: SmallDisk, tmp_path: Path) -> None:
    ids = [f"tea {number}" for number in range(20_000)]
    names = [f"Name of {number}" for number in range(20_000)]

    def texts(scratch: Path) -> CatalogueTexts:
        return shared_texts(scratch, "key", lambda files: write_texts(files, ids, None, names))

    on_disk = texts(tmp_path)
    with disk.full():
        in_memory = texts(disk.place)
        assert not list(disk.place.glob("texts-*")), "nothing is left half written"
    for one in (on_disk, in_memory):
        assert one.name(19_999) == "Name of 19999"
        assert one.find("name of 1999", 5) == [1999, *range(19_990, 19_994)]


def test_files_for_figures_are_refused_without_room(disk: SmallDisk) -> None:
    with disk.full(), pytest.raises(OSError, match="No space left"):
        reserve_metric_files(disk.place / "metrics", 2)


RATES = """
import sys
from pathlib import Path
from recprune.serve.keys import StoredKey
from recprune.serve.rates import Rates
key = StoredKey(name="a", scopes=("ask",), sha256="0" * 64, rate=2.0)
rates = Rates(Path(sys.argv[1]))
print([rates.take(key) > 0 for _ in range(3)])
"""


def test_rates_are_kept_without_room_for_them(disk: SmallDisk) -> None:
    with disk.full():  # in a process of its own, which a mapped page without room would end
        done = subprocess.run(
            [sys.executable, "-c", RATES, str(disk.place)],
            capture_output=True,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stdout) == (0, "[False, False, True]\n"), done.stderr


def test_workers_that_are_replaced_leave_no_files_behind(saved: list[Path], tmp_path: Path) -> None:
    folder = shutil.copytree(saved[0], tmp_path / "served")
    reserve_metric_files(tmp_path / "expected", 2)
    names = {path.name: path.stat().st_size for path in (tmp_path / "expected").iterdir()}
    with serving(folder, "--workers", "2") as service:
        (figures,) = tmp_path.glob("recprune-serve-*/metrics")
        depth = 'recprune_queue_depth{state="running",work="search"}'
        for _ in range(3):
            killed = service.workers[0]
            os.kill(killed, signal.SIGKILL)
            wait_until(lambda: killed not in service.workers, "its end")  # noqa: B023
            service.recommend(history=HISTORY)
            assert service.metric(depth) == 0
        wait_until(lambda: len(service.workers) == 2, "two workers")
        found = {path.name: path.stat().st_size for path in figures.iterdir()}
        assert found == names, "as many, and none has grown"
