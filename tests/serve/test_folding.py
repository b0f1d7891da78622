"""What users take and the model does not know is put into the catalogue while it is served."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import numpy as np
import pytest

from recprune import LiveIndex, Recommender
from recprune.cli import main
from recprune.serve.folding.takers import NEVER, Takers
from recprune.serve.histories.histories import Event, open_histories
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
            takers.begin(opened.identity)
            takers.intend("hat", code.tobytes())
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


# The store of its own -----------------------------------------------------------------------------


def test_users_are_counted_once_and_in_order(tmp_path: Path) -> None:
    with Takers(tmp_path / "takers.db", first=2, most=3) as takers:
        takers.note([("a", "x"), ("a", "x"), ("b", "y")])
        assert takers.due() is None
        takers.note([("a", "y")])
        due = takers.due()
        assert due is not None
        assert due == ("a", 2, 2, None, False)
        takers.note([("a", user) for user in "zuvw"])
        assert takers.users("a") == ["x", "y", "z"]  # of each item, so many
        takers.intend("a", b"\1\2")
        takers.settle("a", 4, is_put=True)
        assert takers.due() is None
        takers.settle("a", 3, is_put=True)
        assert takers.due() == ("a", 3, 3, b"\1\2", True)
        takers.settle("a", NEVER, is_put=False)
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
