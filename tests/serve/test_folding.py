"""What users take and the model does not know is put into the catalogue while it is served."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from recprune import LiveIndex, Recommender
from recprune.cli import main
from recprune.recommender.swapping import Succession
from recprune.serve.configuration import ServeSettings
from recprune.serve.engine.engine import load_engine
from recprune.serve.folding.folding import Folding
from recprune.serve.folding.takers import NEVER, Takers
from recprune.serve.histories.histories import Event, open_histories
from recprune.serve.prometheus import Metrics
from recprune.types import StorageError
from tests.support.serving import (
    HISTORY,
    Service,
    items_of,
    save_recommender,
    serving,
    wait_for_workers,
    wait_until,
)

FIRST = 3  # users until an item is folded in


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("folding")


@pytest.fixture(scope="module")
def recommender(place: Path) -> Recommender:
    return save_recommender(place / "recommender")


@pytest.fixture
def live(recommender: Recommender, tmp_path: Path) -> Path:
    recommender.make_live(tmp_path / "live").close()
    return tmp_path / "live"


def options(live: Path, tmp_path: Path) -> list[str | Path]:
    return [
        *("--live", live, "--fold-in", str(FIRST)),
        *("--history", f"sqlite:///{tmp_path / 'histories.db'}"),
    ]


@pytest.fixture
def service(place: Path, live: Path, tmp_path: Path) -> Iterator[Service]:
    words = [*options(live, tmp_path), "--workers", "2"]
    with serving(place / "recommender", *words) as running:
        wait_for_workers(running, 2)
        yield running


def take(service: Service, item: str, users: range, history: list[str] = HISTORY) -> None:
    """Let users have a history, and then an item."""
    for user in users:
        events = [{"user": f"user {user}", "item": one} for one in [*history, item]]
        # Over a connection of its own: workers take turns.
        found = httpx.post(f"{service.url}/events", json={"events": events})
        assert found.status_code == 200, found.text


def code_of(service: Service, item: str) -> list[int] | None:
    found = service.client.get(f"/items/{item}")
    return found.json()["code"] if found.status_code == 200 else None


def folded(service: Service, outcome: str) -> float:
    return service.metric(f'recprune_folded_items_total{{outcome="{outcome}"}}')


def there(service: Service, item: str) -> None:
    wait_until(lambda: code_of(service, item) is not None, f"{item} is folded in")


def test_an_item_is_recommended_after_some_users_took_it(
    service: Service, recommender: Recommender
) -> None:
    take(service, "hat", range(FIRST - 1))
    take(service, "hat", range(FIRST - 1))  # the same users: they count once
    take(service, "scarf", range(FIRST))  # has its turn later than the hat would have
    there(service, "scarf")
    assert code_of(service, "hat") is None
    take(service, "hat", range(FIRST, FIRST + 1))
    there(service, "hat")
    found = items_of(service.recommend(history=HISTORY, k=10, exclude_seen=False))
    assert "hat" in found
    assert folded(service, "added") == 2
    # An item of the model is known, and stays as it is.
    take(service, "b", range(FIRST))
    number = recommender.item_ids.find("b")
    assert code_of(service, "b") == recommender.index.item_codes()[number].tolist()


def test_more_users_give_it_another_code(service: Service) -> None:
    take(service, "hat", range(FIRST))
    there(service, "hat")
    assert folded(service, "replaced") == 0
    other = ["tea é50", "tea é51", "tea é52"]
    take(service, "hat", range(FIRST, 2 * FIRST), other)
    wait_until(lambda: folded(service, "replaced") == 1, "at twice as many users")
    take(service, "hat", range(2 * FIRST, 4 * FIRST), other)
    wait_until(lambda: folded(service, "replaced") == 2, "and at four times as many")
    assert folded(service, "added") == 1


def test_what_others_did_stays(service: Service, recommender: Recommender) -> None:
    code = recommender.index.item_codes()[0].tolist()
    added = {"items": [{"id": "theirs", "code": code}]}
    assert service.post("/items", added).status_code == 200
    take(service, "theirs", range(FIRST))
    wait_until(lambda: folded(service, "left") == 1, "it is left alone")
    assert code_of(service, "theirs") == code

    for item in ("gone", "changed"):
        take(service, item, range(FIRST))
        there(service, item)
    assert service.client.delete("/items/gone").status_code == 200
    changed = {"items": [{"id": "changed", "code": code}], "replace": True}
    assert service.post("/items", changed).status_code == 200
    for item in ("gone", "changed"):
        take(service, item, range(FIRST, 2 * FIRST))
    wait_until(lambda: folded(service, "left") == 3, "both are left alone")
    assert code_of(service, "gone") is None
    assert code_of(service, "changed") == code


def test_killed_workers_do_no_harm(
    place: Path, live: Path, tmp_path: Path, service: Service
) -> None:
    """Counts go on where they were, and what was folded in is known again."""
    take(service, "hat", range(FIRST))
    there(service, "hat")
    take(service, "coat", range(FIRST - 1))
    with Takers(tmp_path / "live-takers.db", first=FIRST, most=100) as takers:
        wait_until(lambda: len(takers.users("coat")) == FIRST - 1, "they are noted")
    for worker in service.workers:
        os.kill(worker, signal.SIGKILL)
    service.kill_all()
    with serving(place / "recommender", *options(live, tmp_path)) as again:
        assert code_of(again, "hat") is not None
        take(again, "coat", range(FIRST, FIRST + 1))
        there(again, "coat")
        take(again, "hat", range(FIRST, 2 * FIRST))
        wait_until(lambda: folded(again, "replaced") == 1, "the hat goes on")
        assert folded(again, "left") == 0
    with LiveIndex.open(live) as opened:
        assert opened.find(["hat", "coat"]).min() >= 0


@pytest.mark.parametrize("was_put", [False, True])
def test_a_worker_that_was_killed_while_it_put_an_item(
    place: Path, live: Path, tmp_path: Path, was_put: bool
) -> None:
    """What it meant to put is written down: whether or not it came to it, others go on."""
    code = np.arange(8, dtype=np.uint8)
    with closing(open_histories(f"sqlite:///{tmp_path / 'histories.db'}", 100)) as histories:
        histories.append(
            [
                Event(f"user {user}", item, 1_500_000_000.0 + step)
                for user in range(FIRST)
                for step, item in enumerate([*HISTORY, "hat"])
            ]
        )
    with Takers(tmp_path / "live-takers.db", first=FIRST, most=100) as takers:
        takers.note([("hat", f"user {user}") for user in range(FIRST)])
        with LiveIndex.open(live) as opened:
            takers.begin(opened.identity, opened.origin)
            takers.intend("hat", None, code.tobytes())
            if was_put:
                opened.put(["hat"], code[None])
    with serving(place / "recommender", *options(live, tmp_path)) as service:
        outcome = "replaced" if was_put else "added"
        wait_until(lambda: folded(service, outcome) == 1, "it is folded in")
        assert code_of(service, "hat") is not None


def test_another_catalogue_gets_them_too(
    place: Path, recommender: Recommender, live: Path, tmp_path: Path
) -> None:
    with serving(place / "recommender", *options(live, tmp_path)) as service:
        for item in ("hat", "gone"):
            take(service, item, range(FIRST))
            there(service, item)
        assert service.client.delete("/items/gone").status_code == 200
        take(service, "gone", range(FIRST, 2 * FIRST))
        wait_until(lambda: folded(service, "left") == 1, "it is left alone")
    shutil.rmtree(live)
    recommender.make_live(live).close()
    with serving(place / "recommender", *options(live, tmp_path)) as service:
        there(service, "hat")
        assert code_of(service, "gone") is None


def test_nothing_is_folded_in_unless_it_is_asked_for(
    place: Path, live: Path, tmp_path: Path
) -> None:
    words = [*options(live, tmp_path)]
    place_of = words.index("--fold-in")
    del words[place_of : place_of + 2]
    with serving(place / "recommender", *words) as service:
        take(service, "hat", range(4 * FIRST))
        assert code_of(service, "hat") is None
    assert not (tmp_path / "live-takers.db").exists()


def test_it_needs_a_live_index(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(place / "recommender"), "--fold-in", "3"]) == 2
    assert "--fold-in" in (said := capsys.readouterr().err)
    assert "--live" in said
    assert main(["serve", str(place / "recommender"), "--live", "x", "--fold-in", "0"]) == 2
    assert "--fold-in" in capsys.readouterr().err
    words = ["--live", "x", "--fold-in", "3", "--ray", "local"]
    assert main(["serve", str(place / "recommender"), *words]) == 2
    assert "give --fold-in or --ray" in capsys.readouterr().err


# The thread by itself, when something happens beside it ------------------------------------------


class Worker:
    """What a worker folds in with, in this process."""

    def __init__(self, recommender: Path, live: Path, place: Path) -> None:
        self.settings = ServeSettings(folder=recommender, live=live)
        self.engine = load_engine(self.settings)
        self.histories = open_histories(f"sqlite:///{place / 'histories.db'}", 100)
        self.metrics = Metrics()
        self.folding = Folding(live, FIRST, lambda: self.engine, self.histories, self.metrics)

    @property
    def live(self) -> LiveIndex:
        assert self.engine.live is not None
        return self.engine.live

    def take(self, item: str, users: range, history: list[str] = HISTORY) -> None:
        for user in users:
            events = [
                Event(f"user {user}", one, 1_500_000_000.0 + step)
                for step, one in enumerate([*history, item])
            ]
            self.histories.append(events)
            self.folding.note(events)

    def wait(self, **outcomes: int) -> None:
        """Wait for counts of outcomes."""

        def are_there() -> bool:
            text = self.metrics.text().decode()
            return all(
                f'recprune_folded_items_total{{outcome="{name}"}} {count}.0\n' in text
                for name, count in outcomes.items()
            )

        wait_until(are_there, f"{outcomes} are counted")

    def refresh(self, new: Recommender | None = None) -> None:
        """Have another recommender take the place of the one that is served, and load that."""
        served = self.engine.recommender
        assert served is not None
        old = Recommender.load(self.settings.folder)
        Succession(self.settings.folder, self.live, None, False).swap(old, new or old)
        before, self.engine = self.live, load_engine(self.settings)
        assert before.identity != self.live.identity

    def close(self) -> None:
        self.folding.close()
        self.engine.close()
        self.histories.close()


@pytest.fixture
def worker(place: Path, live: Path, tmp_path: Path) -> Iterator[Worker]:
    folder = shutil.copytree(place / "recommender", tmp_path / "recommender")
    with closing(Worker(folder, live, tmp_path)) as worker:
        yield worker


def test_what_was_removed_does_not_come_back_with_a_refresh(worker: Worker) -> None:
    worker.take("hat", range(FIRST))
    worker.wait(added=1)
    worker.live.remove(worker.live.find(["hat"]))
    worker.refresh()
    worker.wait(left=1)
    assert worker.live.find(["hat"]).tolist() == [-1]


def test_what_a_refresh_carries_along_goes_on(worker: Worker) -> None:
    worker.take("hat", range(FIRST))
    worker.wait(added=1)
    worker.refresh()
    worker.wait(replaced=1)  # by the states of the new model
    worker.take("hat", range(FIRST, 2 * FIRST))
    worker.wait(added=1, replaced=2)
    worker.refresh()
    worker.refresh()
    worker.wait(added=1, replaced=3)


@pytest.mark.parametrize("what", ["added", "changed", "removed"])
def test_what_others_do_while_states_are_looked_up_stays(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    if what != "added":
        worker.take("hat", range(FIRST))
        worker.wait(added=1)
    code = np.zeros((1, 8), np.uint8)
    look_up = worker.histories.dated_history
    is_done: list[bool] = []

    def change(user: str) -> Any:
        if not is_done:
            is_done.append(True)
            with LiveIndex.open(worker.live.folder) as elsewhere:
                if what == "removed":
                    elsewhere.remove(elsewhere.find(["hat"]))
                else:
                    elsewhere.put(["hat"], code, replace=True)
        return look_up(user)

    monkeypatch.setattr(worker.histories, "dated_history", change)
    worker.take("hat", range(FIRST, 2 * FIRST))
    worker.wait(left=1)
    worker.live.refresh()
    there = worker.live.find(["hat"])
    assert (there[0] < 0) == (what == "removed")
    if what != "removed":
        assert worker.live.snapshot().item_codes(there).tolist() == code.tolist()


@pytest.mark.parametrize("reached_it", [False, True])
def test_a_put_that_fails_is_tried_again(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, reached_it: bool
) -> None:
    """Either code is ours: the one before, and the one that was about to be put."""
    monkeypatch.setattr("recprune.serve.folding.folding._REST_S", 0.01)
    worker.take("hat", range(FIRST))
    worker.wait(added=1)
    put = worker.live.put
    failures = [1, 2]

    def fail(*given: Any, **more: Any) -> Any:
        if not failures:
            return put(*given, **more)
        failures.pop()
        if reached_it:
            put(*given, **more)
        raise StorageError("no space left on device")

    monkeypatch.setattr(worker.live, "put", fail)
    worker.take("hat", range(FIRST, 2 * FIRST), ["tea é50", "tea é51"])
    worker.wait(failed=2, replaced=1)
    worker.take("hat", range(2 * FIRST, 4 * FIRST))
    worker.wait(added=1, failed=2, replaced=2)


def test_a_code_of_a_full_table_is_known_again_when_its_row_has_moved(tmp_path: Path) -> None:
    old = save_recommender(tmp_path / "recommender", embedding="full")
    new = save_recommender(tmp_path / "new", num_items=130, embedding="full")
    moved = new.item_ids.find_all(old.item_ids.take(range(len(old.item_ids))))
    old.make_live(tmp_path / "live").close()
    with closing(Worker(tmp_path / "recommender", tmp_path / "live", tmp_path)) as worker:
        for item in ("hat", "changed"):
            worker.take(item, range(FIRST), ["tea é50", "tea é51", "tea é52"])
        worker.wait(added=2)
        numbers = worker.live.find(["hat", "changed"])
        codes = worker.live.snapshot().item_codes(numbers)
        assert moved[codes[0, 0]] != codes[0, 0]
        worker.live.replace(numbers[1:], (codes[1:] + 1) % len(moved))
        worker.refresh(new)
        worker.wait(replaced=1, left=1)


# The store of its own -----------------------------------------------------------------------------


def test_users_are_counted_once_and_in_order(tmp_path: Path) -> None:
    with Takers(tmp_path / "takers.db", first=2, most=3) as takers:
        takers.note([("a", "x"), ("a", "x"), ("b", "y")])
        assert takers.due() is None
        takers.note([("a", "y")])
        due = takers.due()
        assert due is not None
        assert due == ("a", 2, 2, None, None)
        takers.note([("a", user) for user in "zuvw"])
        assert takers.users("a") == ["x", "y", "z"]  # of each item, so many
        takers.intend("a", None, b"\1\2")
        assert takers.due() == ("a", 3, 2, None, b"\1\2")
        takers.settle("a", 4, b"\1\2")
        assert takers.due() is None
        takers.settle("a", 3, b"\1\2")
        takers.intend("a", b"\1\2", b"\3\4")
        assert takers.due() == ("a", 3, 3, b"\1\2", b"\3\4")
        takers.settle("a", NEVER, None)
        assert takers.due() is None
        takers.forget("a")
        assert takers.users("a") == []


def test_items_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recprune.serve.folding.takers.MOST_ITEMS", 3)
    with Takers(tmp_path / "takers.db", first=2, most=3) as takers:
        for item in "abcd":
            takers.note([(item, "x")])
        takers.note([("b", "y"), ("e", "x")])
        assert {item for item in "abcde" if takers.users(item)} == {"b", "d", "e"}


def test_another_database_is_not_touched(place: Path, live: Path, tmp_path: Path) -> None:
    import sqlite3

    with sqlite3.connect(tmp_path / "live-takers.db") as other:
        other.execute("CREATE TABLE theirs (x)")
    words = [str(word) for word in options(live, tmp_path)]
    before = dict(os.environ)
    assert main(["serve", str(place / "recommender"), "--port", "0", *words]) == 2
    assert dict(os.environ) == before  # what is started next is none of this service
