"""Reloads of a running service: all or nothing, and nobody notices."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from recprune import Recommender
from tests.support.serving import (
    CLI,
    HISTORY,
    PATIENCE_S,
    Load,
    damaged,
    error_of,
    events_of,
    expected,
    items_of,
    replace,
    save_two_recommenders,
    serving,
    wait_for_workers,
    wait_until,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return save_two_recommenders(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def folder(saved: list[Path], tmp_path: Path) -> Path:
    """The first of them, at a place where it may be replaced."""
    return shutil.copytree(saved[0], tmp_path / "served")


def test_reloads_under_load_fail_no_request(folder: Path, saved: list[Path]) -> None:
    right = [expected(source) for source in saved]
    assert right[0] != right[1]
    with serving(folder, "--workers", "2", "--max-waiting", "50") as service:
        wait_for_workers(service, 2)
        versions = [service.client.get("/readyz").json()["version"]]
        with Load(service, keep_alive=True).running() as load:
            for turn in (1, 0, 1):
                replace(folder, saved[turn])
                if turn:
                    answer = service.client.post("/admin/reload")
                    assert answer.status_code == 200, answer.text
                    assert answer.json()["workers"] == 2
                    versions.append(answer.json()["version"])
                else:
                    service.process.send_signal(signal.SIGHUP)
                    wait_until(lambda: events_of(service).count("reloaded") == 2, "a reload of all")
                done = time.monotonic()
                load.more(40)
                # Whoever asks after a reload gets the new one, from every worker.
                late = {version for asked, version, _ in load.answers if asked > done}
                assert late == {versions[turn]}
        assert not load.failures
        assert versions[0] != versions[1] == versions[2]
        by_version = {versions[0]: right[0], versions[1]: right[1]}
        assert all(items == by_version[version] for _, version, items in load.answers)
        assert service.metric('recprune_reloads{outcome="ok"}') == 3


@pytest.mark.parametrize("how", ["truncated", "a bit", "no manifest"])
def test_a_bad_folder_leaves_the_old_one_serving(
    folder: Path, saved: list[Path], tmp_path: Path, how: str
) -> None:
    right = expected(saved[0])
    bad = damaged(saved[1], tmp_path, how)
    # A worker that starts late, or again after a silence, would find the bad folder and end.
    with serving(folder, "--workers", "2", "--max-silent-seconds", "60") as service:
        wait_for_workers(service, 2)
        version = service.client.get("/readyz").json()["version"]
        replace(folder, bad)
        status, code, message = error_of(service.client.post("/admin/reload"))
        assert (status, code) == (409, "reload_failed")
        assert message.startswith("served" if how == "no manifest" else "index_codes.npy")
        for _ in range(6):  # whichever worker answers
            assert items_of(service.recommend(history=HISTORY, k=5)) == right
            assert service.client.get("/readyz").json()["version"] == version
        assert service.metric('recprune_reloads{outcome="failed"}') == 1
        replace(folder, saved[1])
        assert service.client.post("/admin/reload").json()["workers"] == 2
        assert items_of(service.recommend(history=HISTORY, k=5)) == expected(saved[1])


def test_a_bad_folder_is_not_served_in_the_first_place(saved: list[Path], tmp_path: Path) -> None:
    live = tmp_path / "live"
    Recommender.load(saved[0]).make_live(live).close()
    for folder, message in (
        (damaged(saved[0], tmp_path, "truncated"), "index_codes.npy"),
        (tmp_path / "missing", "not a saved recommender or index: no such folder"),
        (tmp_path, "has no manifest.json: expected a folder made by `recprune export`"),
        (live, "; it looks like a live index, which is named with --live"),
    ):
        done = subprocess.run(
            [*CLI, "serve", str(folder), "--port", "0"], capture_output=True, text=True
        )
        assert done.returncode == 2
        assert message in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr


# Slow ones, and those that come too late ---------------------------------------------------------


class Blocked:
    """A file of names that keeps whoever reads it waiting until it is let go."""

    def __init__(self, place: Path) -> None:
        self.path = place / "names.csv"
        self._text = "item_id,name\na,Apple\n"
        self._pipe = place / "pipe"
        self.path.write_text(self._text)

    def block(self) -> None:
        os.mkfifo(self._pipe)
        self.path.unlink()
        self.path.hardlink_to(self._pipe)

    def unblock_others(self) -> None:
        """Whoever comes from now on reads; who waits still waits."""
        fresh = self.path.with_name("fresh.csv")
        fresh.write_text(self._text)
        fresh.rename(self.path)

    def is_waited_for(self) -> bool:
        """Tell whether somebody has begun to read, who now waits for what there is to read."""
        try:
            self._writing = os.open(self._pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # nobody has
            return False
        return True

    def let_go(self) -> None:
        os.write(self._writing, self._text.encode())
        os.close(self._writing)


def test_a_reload_that_takes_too_long_fails_and_the_next_one_works(
    folder: Path, saved: list[Path], tmp_path: Path
) -> None:
    names = Blocked(tmp_path)
    options = ("--workers", "2", "--names", names.path, "--max-reload-seconds", "1")
    with serving(folder, *options) as service:
        wait_for_workers(service, 2)
        replace(folder, saved[1])
        names.block()
        status, code, message = error_of(service.client.post("/admin/reload"))
        assert (status, code) == (409, "reload_failed")
        assert message == "a worker has not loaded the folder within 1 s"
        assert items_of(service.recommend(history=HISTORY, k=5)) == expected(saved[0])
        names.unblock_others()
        assert "earlier reload" in error_of(service.client.post("/admin/reload"))[2]
        assert names.is_waited_for()
        names.let_go()
        wait_until(lambda: service.client.post("/admin/reload").status_code == 200, "a reload")
        assert items_of(service.recommend(history=HISTORY, k=5)) == expected(saved[1])


def test_a_worker_that_was_late_for_a_reload_follows(folder: Path, tmp_path: Path) -> None:
    names = Blocked(tmp_path)
    with serving(folder, "--workers", "2", "--names", names.path) as service:
        wait_for_workers(service, 2)
        names.block()
        os.kill(service.workers[1], signal.SIGKILL)
        wait_until(names.is_waited_for, "the next one")
        names.unblock_others()
        reloaded = httpx.post(f"{service.url}/admin/reload", timeout=PATIENCE_S)
        assert reloaded.status_code == 200
        assert events_of(service).count("worker started") == 2
        names.let_go()  # what it has read may be older than what the other one serves
        wait_until(lambda: events_of(service).count("reloaded") == 2, "a reload for the late one")


def test_a_new_worker_knows_of_earlier_reloads(folder: Path) -> None:
    with serving(folder) as service:
        assert service.client.post("/admin/reload").status_code == 200
        (worker,) = service.workers
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: events_of(service).count("worker started") == 2, "another one")
        service.client.close()  # its connection is gone
        service.client = httpx.Client(base_url=service.url, timeout=PATIENCE_S)
        assert service.metric('recprune_reloads{outcome="ok"}') == 1


def test_a_good_reload_starts_a_missing_worker_at_once(
    folder: Path, saved: list[Path], tmp_path: Path
) -> None:
    with serving(folder, "--workers", "2") as service:
        wait_for_workers(service, 2)
        replace(folder, damaged(saved[1], tmp_path, "truncated"))
        os.kill(service.workers[0], signal.SIGKILL)
        wait_until(lambda: events_of(service).count("worker ended") == 4, "three attempts")
        replace(folder, saved[1])  # the next attempt is 4 s away
        begun = time.monotonic()
        reloaded = httpx.post(f"{service.url}/admin/reload", timeout=PATIENCE_S)
        assert reloaded.status_code == 200
        wait_until(lambda: events_of(service).count("worker started") == 3, "the missing one")
        assert time.monotonic() - begun < 3
