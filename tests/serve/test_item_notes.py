"""Items are posted with their names and attributes, and both are changed while they are served."""

from __future__ import annotations

import os
import shutil
import signal
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
from recprune.serve.keys import add_key
from tests.support.serving import (
    Json,
    Service,
    error_of,
    items_of,
    save_recommender,
    serving,
    wait_for_workers,
    wait_until,
)

SOON_S = 1.0  # a change is seen by all workers; promised is a tenth of that
ASKED = 6  # connections that are dealt to two workers in turn
COLUMNS = {
    "price": "number",
    "in_stock": "boolean",
    "category": "text",
    "colours": "list of text",
    "since": "time",
    "stock": "integer",
}
SAID = {
    "price": 19.9,
    "in_stock": True,
    "category": "shoes",
    "colours": ["red", "blue"],
    "since": "2026-01-31T18:30:00Z",
    "stock": 3,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notes")


@pytest.fixture(scope="module")
def recommender(place: Path) -> Recommender:
    plain = save_recommender(place / "plain")
    count = len(plain.item_ids)
    table = pl.DataFrame(
        {
            "item_id": [*plain.item_ids.take(range(count))],
            "price": np.arange(100.0, 100.0 + count, dtype=np.float32),
            "in_stock": [True] * count,
            "category": ["food"] * count,
            "colours": [["green"]] * count,
            "since": [None] * count,
            "stock": [7] * count,
        },
        schema_overrides={"since": pl.Datetime("us", "UTC")},
    )
    made = plain.with_attributes(Attributes.from_table(table, plain.item_ids))
    made.save(place / "recommender")
    return made


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


@pytest.fixture
def code(recommender: Recommender) -> list[int]:
    found: list[int] = recommender.index.item_codes()[5].tolist()
    return found


def put(service: Service, external_id: str, code: list[int], **more: Any) -> httpx.Response:
    return service.post("/items", {"items": [{"id": external_id, "code": code, **more}]})


def amend(service: Service, external_id: str, **said: Any) -> httpx.Response:
    return service.client.patch(f"/items/{external_id}", json=said)


def wait_for_all(service: Service, where: str, expected: Callable[[list[Any]], bool]) -> None:
    """Ask over several connections until every worker answers as expected."""
    begun = time.monotonic()
    while True:
        found = []
        for _ in range(ASKED):
            body = {"history": [], "k": 9, "where": where}
            answer = httpx.post(f"{service.url}/recommend", json=body).json()["answers"][0]
            found.append(expected([(item["item"], item["name"]) for item in answer["items"]]))
        if all(found):
            return
        assert time.monotonic() - begun < SOON_S, "not seen by all workers soon"


def test_what_is_posted_is_filtered_by_with_the_next_question(
    service: Service, code: list[int]
) -> None:
    asked: Json = {"history": [], "k": 9, "where": "price < 50"}
    assert items_of(service.recommend(**asked)) == []
    assert put(service, "hat", code, name=" Hat,  red\n", attributes=SAID).status_code == 200
    [hat] = service.recommend(**asked)["items"]
    assert (hat["item"], hat["name"]) == ("hat", "Hat, red")
    for where in (
        "in_stock and category = 'shoes'",
        "'red' in colours and not 'green' in colours",
        "since = '2026-01-31T19:30:00+01:00'",
        "stock = 3 and price = 19.9",
    ):
        assert items_of(service.recommend(**asked | {"where": where})) == ["hat"], where
    wait_for_all(service, "price < 50", lambda found: found == [("hat", "Hat, red")])
    shown = service.client.get("/items/hat").json()
    assert (shown["name"], shown["attributes"]) == ("Hat, red", SAID)

    changed = amend(service, "hat", attributes={"in_stock": False, "price": None})
    assert changed.status_code == 200
    said = SAID | {"in_stock": False, "price": None}
    assert changed.json() == {**shown, "attributes": said}
    assert items_of(service.recommend(**asked)) == []
    assert items_of(service.recommend(**asked | {"where": "not in_stock"})) == ["hat"]
    wait_for_all(service, "not in_stock", lambda found: found == [("hat", "Hat, red")])
    assert amend(service, "hat", name="Cap").json()["name"] == "Cap"
    wait_for_all(service, "price is null", lambda found: found == [("hat", "Cap")])
    assert amend(service, "hat", name=None).json()["name"] is None

    # Of items that the model was trained with too, whose other values stay.
    known = service.client.get("/items/a").json()
    assert amend(service, "a", attributes={"stock": 0}).status_code == 200
    assert items_of(service.recommend(**asked | {"where": "stock = 0"})) == ["a"]
    attributes = known["attributes"] | {"stock": 0}
    assert service.client.get("/items/a").json() == {**known, "attributes": attributes}
    limited = service.recommend(history=[], k=9, at_most={"column": "category", "count": 1})
    assert len(limited["items"]) == 2

    # Another code takes nothing away; an item that has left does.
    body = {"items": [{"id": "hat", "code": code[::-1]}], "replace": True}
    assert service.post("/items", body).status_code == 200
    assert items_of(service.recommend(**asked | {"where": "not in_stock"})) == ["hat"]
    body["items"][0]["attributes"] = {"in_stock": True}  # type: ignore[index]
    assert service.post("/items", body).status_code == 200
    assert service.client.get("/items/hat").json()["attributes"] == said | {"in_stock": True}
    assert service.client.delete("/items/hat").status_code == 200
    assert put(service, "hat", code).status_code == 200
    found = service.client.get("/items/hat").json()
    assert (found["name"], {*found["attributes"].values()}) == (None, {None})


def test_two_who_change_one_item_at_once_lose_nothing(service: Service) -> None:
    """Each says something of a column of its own, over connections to both workers."""

    def say(name: str, values: list[Any]) -> None:
        for value in values:
            answer = httpx.patch(f"{service.url}/items/a", json={"attributes": {name: value}})
            assert answer.status_code == 200, answer.text
            assert answer.json()["attributes"][name] == value

    with ThreadPoolExecutor(3) as threads:
        for said in [
            threads.submit(say, "stock", [*range(15)]),
            threads.submit(say, "price", [0.5 * turn for turn in range(15)]),
            threads.submit(say, "category", [f"kind {turn}" for turn in range(15)]),
        ]:
            said.result()
    where = "stock = 14 and price = 7 and category = 'kind 14'"
    wait_for_all(service, where, lambda found: [item for item, _ in found] == ["a"])


def test_words_find_the_names_that_were_posted(service: Service, code: list[int]) -> None:
    def found(words: str) -> list[tuple[str, str | None]]:
        answer = service.client.get("/items", params={"query": words, "limit": 5}).json()
        return [(one["item"], one["name"]) for one in answer["items"]]

    put(service, "x1", code, name="Straw Hat")
    put(service, "x2", code, name="Straw bag")
    assert found("straw") == [("x1", "Straw Hat"), ("x2", "Straw bag")]
    amend(service, "x1", name="Felt hat")
    assert found("STRAW") == [("x2", "Straw bag")]
    # What the model knows comes first, as it is more popular, under its other name alone.
    amend(service, "a", name="Straw mat")
    assert found("straw") == [("a", "Straw mat"), ("x2", "Straw bag")]
    service.client.delete("/items/x2")
    assert found("straw") == [("a", "Straw mat")]


def test_what_no_column_has_room_for_is_refused(
    service: Service, live: Path, code: list[int]
) -> None:
    wrong: dict[str, tuple[Any, str]] = {
        "price": ("cheap", "'cheap' is given for 'price', which is a number: expected a number"),
        "in_stock": (1, "1 is given for 'in_stock', which is a boolean: expected true or false"),
        "category": (["a"], "['a'] is given for 'category', which is text: expected text"),
        "colours": (
            "red",
            "'red' is given for 'colours', which is a list of text: expected a list",
        ),
        "since": ("soon", "'soon' is given for 'since', which is a time: expected a time as text"),
        "stock": (2.5, "2.5 is given for 'stock', which is an integer: expected an integer of 64"),
        "prize": (1, "no column is called 'prize'; similar: 'price' (number)"),
    }
    before = service.client.get("/items/a").json()
    for name, (value, message) in wrong.items():
        for place, answer in (
            ("", amend(service, "a", name="x", attributes={name: value})),
            ("items[0].", put(service, "hat", code, attributes={"stock": 1, name: value})),
        ):
            status, kind, text = error_of(answer)
            assert (status, kind) == (422, "invalid")
            assert text.startswith(f"{place}attributes: {message}")
    bodies: list[Json] = [
        {}, {"attributes": {}}, {"name": " "}, {"name": 3}, {"name": "x" * 1001}, {"attributes": []},
        {"attributes": {"price": 1e39}}, {"attributes": {"stock": 2**63}}, {"code": code},
        {"attributes": {"category": "é" * 9000}}, {"attributes": {"colours": [None]}},
    ]  # fmt: skip
    for body in bodies:
        assert error_of(service.client.patch("/items/a", json=body))[:2] == (422, "invalid"), body
    long = error_of(amend(service, "a", attributes={"category": "é" * 9000}))[2]
    assert "expected at most 16,384" in long
    assert error_of(put(service, "hat", code, name=""))[:2] == (422, "invalid")
    assert error_of(amend(service, "nobody", name="x"))[:2] == (404, "not_found")
    assert service.client.get("/items/hat").status_code == 404
    assert service.client.get("/items/a").json() == before
    with LiveIndex.open(live) as opened:
        assert opened.snapshot().sequence == 0


def test_what_was_said_survives(
    place: Path, live: Path, service: Service, code: list[int], tmp_path: Path
) -> None:
    asked: Json = {"history": [], "k": 9, "where": "price < 50"}
    before = service.workers
    assert put(service, "hat", code, name="Hat", attributes=SAID).status_code == 200
    assert amend(service, "a", attributes={"price": 5}).status_code == 200
    for worker in before:
        os.kill(worker, signal.SIGKILL)
    wait_until(lambda: len({*service.workers} - {*before}) == 2, "two new workers")
    service.client.close()
    service.client = httpx.Client(base_url=service.url)  # what was open is gone with them
    assert items_of(service.recommend(**asked)) == ["a", "hat"]
    with LiveIndex.open(live) as elsewhere:
        elsewhere.compact().result()
        number = int(elsewhere.find(["hat"])[0])
        elsewhere.note([number], lambda _, said: {**(said or {}), "name": "Elsewhere"})
    wait_for_all(service, "price < 50", lambda found: ("hat", "Elsewhere") in found)
    assert service.client.post("/admin/reload").status_code == 200
    assert items_of(service.recommend(**asked)) == ["a", "hat"]
    service.kill_all()
    # Other columns: what no column has room for is passed over, and counted in the log.
    other = tmp_path / "recommender"
    shutil.copytree(place / "plain", other)
    plain = Recommender.load(other)
    table = {"item_id": [*plain.item_ids.take([0])], "price": [1.0], "stock": ["many"]}
    plain.with_attributes(Attributes.from_table(table, plain.item_ids)).save(other)
    with serving(other, "--live", live) as again:
        assert {*items_of(again.recommend(**asked))} == {"a", "hat"}
        shown = again.client.get("/items/hat").json()
        assert (shown["name"], shown["attributes"]) == ("Elsewhere", {"price": 19.9, "stock": None})
        [logged] = [line for line in again.logged() if line["event"] == "values passed over"]
        assert logged["values"] == 5
        # What is said in a column that is gone can be taken back, and no more than that.
        assert amend(again, "hat", attributes={"colours": None, "stock": "few"}).status_code == 200
        with LiveIndex.open(live) as opened:
            [number] = opened.find(["hat"]).tolist()
            said = opened.snapshot().notes[number]["attributes"]
        assert said == {name: SAID[name] for name in ("price", "in_stock", "category", "since")} | {
            "stock": "few"
        }
        for name in ("colours", "anything"):  # the first one is no longer said
            assert error_of(amend(again, "hat", attributes={name: None}))[:2] == (422, "invalid")
        assert error_of(amend(again, "hat", attributes={"since": "2026"}))[:2] == (422, "invalid")


def test_a_service_without_columns_says_how_to_have_some(
    place: Path, live: Path, code: list[int]
) -> None:
    with serving(place / "plain", "--live", live) as service:
        status, kind, text = error_of(put(service, "hat", code, attributes={"price": 5}))
        assert (status, kind) == (422, "invalid")
        assert text.startswith("items[0].attributes: this service has no attributes of its items")
        assert "recprune attributes" in text
        assert put(service, "hat", code, name="Hat").status_code == 200
        shown = service.client.get("/items/hat").json()
        assert (shown["name"], shown["attributes"]) == ("Hat", None)
        assert error_of(amend(service, "hat", attributes={"price": 5}))[:2] == (422, "invalid")
    with serving(place / "plain") as service:
        assert error_of(amend(service, "a", name="x"))[:2] == (409, "no_live_index")


def test_amending_needs_a_key_of_the_scope_items(place: Path, live: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    keys = {scope: add_key(file, scope, scope) for scope in ("ask", "events", "items")}
    with serving(place / "recommender", "--live", live, "--keys", file) as service:
        for scope, status in (("ask", 403), ("events", 403), ("items", 200)):
            headers = {"authorization": f"Bearer {keys[scope]}"}
            found = service.client.patch("/items/a", json={"name": "x"}, headers=headers)
            assert found.status_code == status
        assert service.client.patch("/items/a", json={"name": "x"}).status_code == 401
