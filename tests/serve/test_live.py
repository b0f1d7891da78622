"""Items come and go while they are served: at once, everywhere, and for good."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import polars as pl
import pytest

from recprune import Attributes, LiveIndex, Recommender
from recprune.serve.configuration import ServeSettings
from recprune.serve.engine.engine import Engine, load_engine
from recprune.serve.keys import add_key
from recprune.shards.folder import PastMomentError
from tests.support.serving import (
    CLI,
    HISTORY,
    Json,
    Load,
    Service,
    error_of,
    items_of,
    replace,
    save_index,
    save_recommender,
    save_two_recommenders,
    scores_of,
    serving,
    wait_for_workers,
    wait_until,
)

SOON_S = 1.0  # a change is seen by all workers; promised is a tenth of that
MANY = 40  # items that are added while folders are loaded
ASKED = 6  # connections that are dealt to two workers in turn


def best_code(recommender: Recommender, history: list[str]) -> list[int]:
    """Return the code with the highest score that a history can give."""
    items = recommender.item_ids.find_all(history).astype(np.int32)
    embedding = recommender.encoder.encode([items], [None])
    code: list[int] = recommender.index.sub_item_scores(embedding[0]).argmax(axis=1).tolist()
    return code


def by_all(service: Service, **body: Any) -> list[list[Any]]:
    """Return the answers to a question that is asked over several connections."""
    answers = []
    for _ in range(ASKED):
        found = httpx.post(f"{service.url}/recommend", json=body)
        assert found.status_code == 200, found.text
        answers.append(items_of(found.json()["answers"][0]))
    return answers


def wait_for_all(is_so: Callable[[], bool]) -> None:
    begun = time.monotonic()
    while not is_so():
        assert time.monotonic() - begun < SOON_S, "not seen by all workers soon"


def put(service: Service, external_id: str, code: list[int], **more: Any) -> httpx.Response:
    return service.post("/items", {"items": [{"id": external_id, "code": code}], **more})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("live")


@pytest.fixture(scope="module")
def recommender(place: Path) -> Recommender:
    plain = save_recommender(place / "recommender")
    count = len(plain.item_ids)
    table = {
        "item_id": [*plain.item_ids.take(range(count))],
        "price": np.arange(count, dtype=np.float64),
    }
    plain.with_attributes(Attributes.from_table(table, plain.item_ids)).save(place / "recommender")
    return plain


@pytest.fixture
def live(recommender: Recommender, tmp_path: Path) -> Path:
    recommender.make_live(tmp_path / "live").close()
    return tmp_path / "live"


@pytest.fixture
def service(place: Path, live: Path) -> Iterator[Service]:
    options = ("--live", live, "--workers", "2", "--max-waiting", "50")
    with serving(place / "recommender", *options) as running:
        wait_for_workers(running, 2)
        yield running


def test_an_item_comes_and_goes_in_all_workers(service: Service, recommender: Recommender) -> None:
    code = best_code(recommender, HISTORY)
    count = len(recommender.item_ids)
    asked = {"history": HISTORY, "k": 3}
    assert "hat" not in items_of(service.recommend(**asked))
    added = put(service, "hat", code)
    assert (added.status_code, added.json()) == (200, {"numbers": [count], "items": count + 1})
    # The worker that took it has it at once, with the score that its code has.
    answer = service.recommend(**asked)
    assert items_of(answer)[0] == "hat"
    items = recommender.item_ids.find_all(HISTORY).astype(np.int32)
    embedding = recommender.encoder.encode([items], [None])
    scores = recommender.index.sub_item_scores(embedding[0])
    score = np.float32(0)
    for split, sub_item_id in enumerate(code):
        score = score + scores[split, sub_item_id]
    assert scores_of(answer)[0] == int(np.float32(score).view(np.uint32))
    wait_for_all(lambda: all(found[0] == "hat" for found in by_all(service, **asked)))
    shown: Json = {"item": "hat", "name": None, "popularity": 0, "code": code}
    shown["attributes"] = {"price": None}
    assert service.client.get("/items/hat").json() == shown
    near = service.client.get("/items/hat/similar", params={"k": 400}).json()
    assert len(near["items"]) == count
    twins = [item["item"] for item in near["items"] if item["score"] == 1.0]
    known_codes = recommender.index.item_codes()
    assert set(recommender.item_ids.find_all(twins)) == set(
        np.flatnonzero((known_codes == code).all(axis=1))
    )
    assert service.client.get("/items", params={"query": "hat"}).json()["items"] == [
        {"item": "hat", "name": None}
    ]
    ready = service.client.get("/readyz").json()
    assert (ready["items"], ready["live"]) == (count + 1, True)
    assert service.metric("recprune_index_items") == count + 1
    assert service.metric("recprune_live_fault") == 0

    assert items_of(service.recommend(**asked, exclude=["hat"]))[0] != "hat"
    assert items_of(service.recommend(history=[], k=3, allow=["hat"])) == ["hat"]
    boosts = [{"item": "hat", "boost": 1e6}]
    assert items_of(service.recommend(history=[], k=3, boosts=boosts))[0] == "hat"
    assert "hat" not in items_of(service.recommend(history=["hat"], k=200))
    assert service.recommend(history=["hat"], k=1)["unknown"] == ["hat"]
    # Nothing is known of what it is like.
    assert "hat" not in items_of(service.recommend(**asked, where="price >= 0"))
    assert items_of(service.recommend(**asked, where="price is null")) == ["hat"]

    removed = service.client.delete("/items/hat")
    assert (removed.status_code, removed.json()) == (200, {"items": count})
    assert "hat" not in items_of(service.recommend(**asked))
    wait_for_all(lambda: all("hat" not in found for found in by_all(service, **asked)))
    for history in ([], HISTORY, ["hat"]):
        assert all("hat" not in found for found in by_all(service, history=history, k=500))
    assert service.client.get("/items/hat").status_code == 404
    assert service.client.get("/items/hat/similar").status_code == 404
    assert service.client.delete("/items/hat").status_code == 404
    # So do items that the model was trained with, popular or not.
    popular = by_all(service, history=[], k=1)[0][0]
    assert service.client.delete(f"/items/{popular}").status_code == 200
    wait_for_all(lambda: all(popular not in found for found in by_all(service, history=[], k=500)))
    assert service.client.get("/items", params={"query": popular}).json()["items"] == []
    first: list[str] = []
    for _ in range(3):  # what has left is in nobody's way
        found = service.client.get("/items", params={"query": "tea", "limit": 1}).json()["items"]
        first.append(found[0]["item"])
        assert service.client.delete(f"/items/{first[-1]}").status_code == 200
    assert len({*first}) == 3
    assert service.recommend(history=[popular], k=1)["unknown"] == []  # the encoder knows it
    assert service.metric("recprune_index_items") == count - 4


def test_all_of_a_change_is_made_or_nothing(service: Service, recommender: Recommender) -> None:
    code = best_code(recommender, HISTORY)
    count = len(recommender.item_ids)

    def refused(*items: Json, **more: Any) -> tuple[int, str, str]:
        return error_of(service.post("/items", {"items": [*items], **more}))

    good: Json = {"id": "good", "code": code}
    bad: Json
    for bad, message in (
        ({"id": "bad", "code": code[:-1]}, "items[1].code has 7 sub-item ids, expected 8"),
        ({"id": "bad", "code": [*code[:-1], 16]}, "items[1].code[7] is 16, expected 0 to 15"),
        ({"id": "good", "code": code}, "items[1].id is 'good', as is an earlier one"),
        ({"id": "bad", "code": code, "bias": 0.5}, "items[1].bias: items of this catalogue have"),
    ):
        status, kind, text = refused(good, bad)
        assert (status, kind) == (422, "invalid")
        assert text.startswith(message)
    for bad in ({"id": "", "code": code}, {"id": "bad", "code": [-1]}, {"id": "bad", "code": []},
                {"id": "bad", "code": [0.5]}, {"id": "bad"}, {"id": "bad", "code": code, "x": 1},
                {"id": "bad", "code": [65536]}):  # fmt: skip
        assert refused(good, bad)[:2] == (422, "invalid")
    assert refused()[:2] == (422, "invalid")
    assert refused(*({"id": str(place), "code": code} for place in range(1001)))[0] == 422
    status, kind, text = refused(good, {"id": "a", "code": code})
    assert (status, kind) == (409, "item_exists")
    assert text == "items[1].id is 'a', which is there already: replace gives it another code"
    assert service.client.get("/readyz").json()["items"] == count
    body = {"items": [good, {"id": "a", "code": code}], "replace": True}
    changed = service.post("/items", body).json()
    assert changed == {"numbers": [count, 0], "items": count + 1}
    assert service.client.get("/items/a").json()["code"] == code
    best = items_of(service.recommend(history=HISTORY, k=2, exclude_seen=False))
    assert best == ["a", "good"]  # equal scores: the lower number first
    # A number may be an id as well: here it is text.
    assert put(service, "x", code).status_code == 200
    assert service.post("/items", {"items": [{"id": 7, "code": code}]}).status_code == 200
    assert service.client.get("/items/7").json()["item"] == "7"


def test_what_was_acknowledged_survives(
    place: Path, live: Path, service: Service, recommender: Recommender
) -> None:
    code = best_code(recommender, HISTORY)
    for turn in range(4):
        before = service.workers
        assert put(service, f"hat {turn}", code).status_code == 200
        for worker in before:
            os.kill(worker, signal.SIGKILL)
        wait_until(lambda: len({*service.workers} - {*before}) == 2, "two new workers")  # noqa: B023
        service.client.close()
        service.client = httpx.Client(base_url=service.url)  # what was open is gone with them
    assert service.client.delete("/items/hat 0").status_code == 200
    service.kill_all()
    with serving(place / "recommender", "--live", live) as again:
        best = items_of(again.recommend(history=HISTORY, k=3))
        assert best == ["hat 1", "hat 2", "hat 3"]
        assert "hat 0" not in items_of(again.recommend(history=[], k=500))
    with LiveIndex.open(live) as opened:  # the command line has the same folder
        assert opened.find(["hat 0", "hat 3"]).tolist() == [-1, len(recommender.item_ids) + 3]


def test_changes_from_elsewhere_are_served(
    live: Path, service: Service, recommender: Recommender
) -> None:
    code = best_code(recommender, HISTORY)
    with LiveIndex.open(live) as elsewhere:
        elsewhere.put(["hat"], np.array([code], np.uint8))
        wait_for_all(
            lambda: all(found[0] == "hat" for found in by_all(service, history=HISTORY, k=1))
        )
        elsewhere.compact().result()
        assert all(found[0] == "hat" for found in by_all(service, history=HISTORY, k=1))
    assert service.client.delete("/items/hat").status_code == 200


def test_a_moment_that_shards_do_not_know_any_more_is_followed_by_the_next(
    place: Path, live: Path
) -> None:
    engine = load_engine(ServeSettings(folder=place / "recommender", live=live))
    assert engine.live is not None
    asked: list[Engine] = []

    def question(moment: Engine) -> int:
        asked.append(moment)
        if len(asked) == 1:
            with LiveIndex.open(live) as elsewhere:
                elsewhere.remove([0])
            raise PastMomentError("is past")
        return moment.num_present

    first = engine.now()
    assert engine.ask(first, question) == first.num_present - 1
    assert [id(one) for one in asked] == [id(first), id(engine.now())]
    assert engine.ask(engine.now(), question) == first.num_present - 1
    engine.close()


def test_attributes_of_new_items_come_with_a_reload(
    place: Path, live: Path, recommender: Recommender, tmp_path: Path
) -> None:
    code = best_code(recommender, HISTORY)
    attributes, table = tmp_path / "attributes", tmp_path / "items.parquet"

    def describe(prices: dict[str, float]) -> None:
        pl.DataFrame({"item_id": [*prices], "price": [*prices.values()]}).write_parquet(table)
        command = [*CLI, "attributes", str(live), str(table), "--out", str(attributes)]
        subprocess.run(command, check=True, capture_output=True)

    describe({"a": 5.0, "b": 50.0})
    options = ("--live", live, "--attributes", attributes)
    with serving(place / "recommender", *options) as service:
        asked: Json = {"history": [], "k": 5, "where": "price < 10"}
        assert put(service, "hat", code).status_code == 200
        assert items_of(service.recommend(**asked)) == ["a"]
        describe({"a": 15.0, "b": 50.0, "hat": 7.5})
        assert items_of(service.recommend(**asked)) == ["a"]
        assert service.client.post("/admin/reload").status_code == 200
        assert items_of(service.recommend(**asked)) == ["hat"]
        assert put(service, "cap", code).status_code == 200
        assert items_of(service.recommend(**asked)) == ["hat"]


def test_changing_needs_a_key_of_its_own_scope(
    place: Path, live: Path, recommender: Recommender, tmp_path: Path
) -> None:
    file = tmp_path / "keys.json"
    keys = {scope: add_key(file, scope, scope) for scope in ("ask", "events", "items", "admin")}
    body = {"items": [{"id": "hat", "code": best_code(recommender, HISTORY)}]}
    with serving(place / "recommender", "--live", live, "--keys", file) as service:
        for scope in ("ask", "events", None):
            headers = {"authorization": f"Bearer {keys[scope]}"} if scope else {}
            status = 403 if scope else 401
            assert service.client.post("/items", json=body, headers=headers).status_code == status
            assert service.client.delete("/items/a", headers=headers).status_code == status
        for scope in ("items", "admin"):
            headers = {"authorization": f"Bearer {keys[scope]}"}
            assert service.client.post("/items", json=body, headers=headers).status_code == 200
            assert service.client.delete("/items/hat", headers=headers).status_code == 200
        headers = {"authorization": f"Bearer {keys['items']}"}
        assert service.client.get("/items/a", headers=headers).status_code == 403
        assert service.post("/recommend", {"history": []}, **headers).status_code == 403


def test_a_catalogue_that_does_not_change_says_so(place: Path, recommender: Recommender) -> None:
    with serving(place / "recommender") as service:
        expected = (409, "no_live_index")
        assert error_of(put(service, "hat", best_code(recommender, HISTORY)))[:2] == expected
        assert error_of(service.client.delete("/items/a"))[:2] == expected
        assert service.client.get("/readyz").json()["live"] is False


def test_a_live_index_of_something_else_is_not_served(
    place: Path, live: Path, tmp_path: Path
) -> None:
    save_recommender(tmp_path / "other", seed=1)
    with pytest.raises(AssertionError, match="live: the live index was not made from this"):
        Service(tmp_path / "other", "--live", live)
    save_index(tmp_path / "index", 10)
    with pytest.raises(AssertionError, match="index holds a saved index, expected a recommender"):
        Service(tmp_path / "index", "--live", live)
    with pytest.raises(AssertionError, match="not a live index: it has no file CURRENT"):
        Service(place / "recommender", "--live", tmp_path)
    with pytest.raises(
        AssertionError, match="of its own, which --ray searches; give --live or --shards"
    ):
        Service(place / "recommender", "--live", live, "--ray", "local", "--shards", tmp_path)


def add_many(service: Service, code: list[int]) -> set[int]:
    """Add items one after the other, each over a connection of its own; return the statuses."""
    worst = [*code[:-1], (code[-1] + 1) % 16]  # behind what is looked for
    return {
        httpx.post(
            f"{service.url}/items", json={"items": [{"id": f"sock {turn}", "code": worst}]}
        ).status_code
        for turn in range(MANY)
    }


def test_reloads_take_a_recommender_with_its_live_index(tmp_path: Path) -> None:
    saved = save_two_recommenders(tmp_path)
    recommenders = [Recommender.load(folder) for folder in saved]
    folder = shutil.copytree(saved[0], tmp_path / "served")
    live = tmp_path / "live"
    recommenders[0].make_live(live).close()
    code = best_code(recommenders[0], HISTORY)
    options = ("--live", live, "--workers", "2", "--max-waiting", "50")
    with serving(folder, *options) as service:
        wait_for_workers(service, 2)
        assert put(service, "hat", code).status_code == 200
        versions = [service.client.get("/readyz").json()["version"]]
        with Load(service, keep_alive=True).running() as load:
            # The same folder: the catalogue is what it was, with what is added meanwhile.
            with ThreadPoolExecutor(1) as pool:
                adding = pool.submit(add_many, service, code)
                for _ in range(3):
                    assert service.client.post("/admin/reload").status_code == 200
            assert adding.result() == {200}
            with LiveIndex.open(live) as opened:
                assert (opened.find([f"sock {turn}" for turn in range(MANY)]) >= 0).all()
            assert put(service, "cap", code).status_code == 200
            assert items_of(service.recommend(history=HISTORY, k=2)) == ["hat", "cap"]
            load.more(20)
            # Another model, whose vectors are not those of the catalogue.
            replace(folder, saved[1])
            status, kind, message = error_of(service.client.post("/admin/reload"))
            assert (status, kind) == (409, "reload_failed")
            assert message.startswith("live: the live index was not made from this recommender")
            assert items_of(service.recommend(history=HISTORY, k=2)) == ["hat", "cap"]
            load.more(20)
            # And with a catalogue of its own in the same place.
            shutil.rmtree(live)
            for exists in (False, True):
                if exists:
                    recommenders[1].make_live(live).close()
                # What is there by now is not what is served.
                for refused in (put(service, "scarf", code), service.client.delete("/items/hat")):
                    assert error_of(refused)[:2] == (503, "catalogue_unavailable")
                    assert "retry-after" in refused.headers
            answer = service.client.post("/admin/reload")
            assert answer.status_code == 200, answer.text
            versions.append(answer.json()["version"])
            done = time.monotonic()
            load.more(40)
            assert {version for asked, version, _ in load.answers if asked > done} == {versions[1]}
            best = recommenders[1].recommend([HISTORY], 5).items[0]
            assert all(items == best for asked, _, items in load.answers if asked > done)
            better = best_code(recommenders[1], HISTORY)
            assert put(service, "hat", better).json()["numbers"] == [len(recommenders[1].item_ids)]
            assert items_of(service.recommend(history=HISTORY, k=1)) == ["hat"]
        assert not load.failures
        assert versions[0] != versions[1]
        assert service.metric('recprune_reloads{outcome="failed"}') == 1
