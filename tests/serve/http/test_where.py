"""Conditions and limits of a running service: its answers are the library's, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recprune import Attributes
from recprune.attributes.grammar import MOST_CHARACTERS
from recprune.data.identifiers import RowNumbers
from recprune.recommender.recommender import Recommender
from recprune.search.index import Index
from tests.support.serving import (
    WIDTH,
    Json,
    Service,
    error_of,
    items_of,
    save_index,
    save_recommender,
    scores_of,
    serving,
)

HISTORY = ["a", "tea é7"]


def attributes_of(recommender: Recommender, turned: bool = False) -> Attributes:
    count = len(recommender.item_ids)
    price = np.arange(count, dtype=np.float64)
    return Attributes.from_table(
        {
            "item_id": [*recommender.item_ids.take(range(count))],
            "price": price[::-1] if turned else price,
            "brand": [None if item % 4 == 0 else f"brand {item % 4}" for item in range(count)],
            "tags": [["even"] * (item % 2 == 0) for item in range(count)],
        },
        recommender.item_ids,
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("where")


@pytest.fixture(scope="module")
def recommender(place: Path) -> Recommender:
    plain = save_recommender(place / "recommender")
    made = plain.with_attributes(attributes_of(plain))
    made.save(place / "recommender")
    return made


@pytest.fixture(scope="module")
def service(place: Path, recommender: Recommender) -> Iterator[Service]:
    in_stock = place / "stock.txt"
    in_stock.write_text("\n".join(str(item) for item in recommender.item_ids.take(range(60))))
    with serving(place / "recommender", "--item-set", f"stock={in_stock}") as running:
        yield running


def test_similar_items_meet_a_condition(service: Service, recommender: Recommender) -> None:
    where = "price < 40 and brand != 'brand 1'"
    response = service.client.get("/items/a/similar", params={"k": 4, "where": where})
    expected = recommender.similar(["a"], 4, where=where)
    assert items_of(response.json()) == expected.items[0]
    assert scores_of(response.json()) == expected.scores[0].view(np.uint32).tolist()


@pytest.mark.parametrize("history", [HISTORY, []])
@pytest.mark.parametrize(
    "asked",
    [
        {"where": "price < 40 and brand != 'brand 1'"},
        {"where": "'even' in tags or price >= 80", "allow": "stock"},
        {"at_most": {"column": "brand", "count": 2}},
        {"where": "price > 10", "at_most": {"column": "brand", "count": 1}, "exclude": ["b"]},
        {"where": "price < 0"},
    ],
)
def test_answers_are_those_of_the_library(
    service: Service, recommender: Recommender, history: list[str], asked: Json
) -> None:
    limit = asked.get("at_most")
    expected = recommender.recommend(
        [history],
        12,
        where=asked.get("where"),
        at_most=None if limit is None else (limit["column"], limit["count"]),
        exclude=asked.get("exclude", ()),
        allow=np.arange(len(recommender.item_ids)) < 60 if "allow" in asked else None,
    )
    found = service.recommend(history=history, k=12, **asked)
    assert items_of(found) == expected.items[0]
    count = len(expected.items[0])
    assert scores_of(found) == expected.scores[0, :count].view(np.uint32).tolist()
    assert found["exact"] is True
    assert ("filter" in found["milliseconds"]) == ("where" in asked)


def test_a_batch_has_one_condition(service: Service, recommender: Recommender) -> None:
    where = "price < 30"
    body = {"batch": [{"history": HISTORY}, {"history": []}], "where": where, "k": 5}
    answers = service.post("/recommend", body).json()["answers"]
    expected = recommender.recommend([HISTORY, []], 5, where=where)
    assert [items_of(answer) for answer in answers] == expected.items


def test_what_is_explained_is_what_was_answered(service: Service) -> None:
    for asked in ({"where": "price > 20"}, {"at_most": {"column": "brand", "count": 1}}):
        found = service.recommend(history=HISTORY, k=8, explain=True, **asked)
        top = found["explanation"]["top"]
        assert [entry["item"] for entry in top] == items_of(found)
        assert all(run["identical"] for run in found["explanation"]["methods"])


def test_a_question_that_has_no_time_keeps_to_its_filters(service: Service) -> None:
    asked: Json = {"where": "price > 20", "at_most": {"column": "brand", "count": 1}}
    for timeout in (0.001, 5.0, 60_000.0):
        found = service.recommend(history=HISTORY, k=10, timeout_ms=timeout, **asked)
        items = Recommender.load(service_folder(service)).item_ids.find_all(items_of(found))
        assert (items > 20).all()
        limited = [item % 4 for item in items.tolist() if item % 4]
        assert len({*limited}) == len(limited)
    assert found["exact"] is True


def service_folder(service: Service) -> Path:
    return service.log.parent / "recommender"


def test_columns_are_named(service: Service) -> None:
    ready = service.client.get("/readyz").json()
    assert ready["attributes"] == {"price": "number", "brand": "text", "tags": "list of text"}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"where": "prize < 5"}, "where, character 1: no column is called 'prize'; similar: 'price' (number)"),
        ({"where": "price < 'x'"}, "where, character 9: 'x' is text, and 'price' is a number"),
        ({"where": "price <"}, "where, character 8: expected a value, found the end"),
        ({"where": ""}, "where, character 1: expected a column"),
        ({"where": "(" * 1000}, "where, character 66: more than 64 conditions in another"),
        ({"where": "x" * (MOST_CHARACTERS + 1)}, "where: String should have at most"),
        ({"where": 5}, "where: Input should be a valid string"),
        ({"at_most": {"column": "brnd", "count": 1}}, "at_most: no column is called 'brnd'; similar: 'brand' (text)"),
        ({"at_most": {"column": "tags", "count": 1}}, "at_most: 'tags' is a list of text"),
        ({"at_most": {"column": "brand", "count": 0}}, "at_most.count: Input should be greater than or equal to 1"),
        ({"at_most": {"column": "brand", "count": 10**30}}, "at_most.count: Input should be less than"),
        ({"at_most": {"brand": 1}}, "at_most.column: Field required"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(service: Service, asked: Json, message: str) -> None:
    body = {"history": HISTORY, **asked}
    status, code, said = error_of(service.post("/recommend", body))
    assert (status, code) == (422, "invalid")
    assert message in said


def test_half_a_character_is_refused(service: Service) -> None:
    body = b'{"history": ["a"], "where": "price = \'\\ud800\'"}'
    response = service.client.post(
        "/recommend", content=body, headers={"content-type": "application/json"}
    )
    assert error_of(response)[0] in (400, 422)


def test_a_service_without_attributes_says_so(place: Path) -> None:
    save_recommender(place / "plain")
    with serving(place / "plain") as running:
        assert running.client.get("/readyz").json()["attributes"] == {}
        for asked in ({"where": "price < 5"}, {"at_most": {"column": "brand", "count": 1}}):
            status, code, message = error_of(
                running.post("/recommend", {"history": HISTORY, **asked})
            )
            assert (status, code) == (422, "invalid")
            assert message == f"{next(iter(asked))}: this service has no attributes of its items"


def test_a_reload_brings_other_attributes(place: Path) -> None:
    plain = save_recommender(place / "changing")
    plain.with_attributes(attributes_of(plain)).save(place / "changing")
    ids = plain.item_ids
    with serving(place / "changing", "--workers", "2") as running:
        asked: dict[str, Any] = {"history": HISTORY, "where": "price < 3", "exclude_seen": False}
        before = set(items_of(running.recommend(**asked)))
        assert before == set(ids.take(range(3)))
        plain.with_attributes(attributes_of(plain, turned=True)).save(place / "changing")
        assert running.client.post("/admin/reload").json()["workers"] == 2
        for _ in range(4):
            after = set(items_of(running.recommend(**asked)))
            assert after == set(ids.take(range(len(ids) - 3, len(ids))))


@pytest.fixture(scope="module")
def index(place: Path) -> Index:
    return save_index(place / "index", 20_000)


def test_an_index_with_attributes_beside_it(place: Path, index: Index) -> None:
    rng = np.random.default_rng(3)
    price, brand = rng.integers(0, 1000, 20_000), rng.integers(0, 30, 20_000)
    table = {"item_id": np.arange(20_000), "price": price, "brand": brand}
    Attributes.from_table(table, RowNumbers(20_000)).save(place / "attributes")
    query = rng.standard_normal(WIDTH).astype(np.float32)
    with serving(place / "index", "--attributes", place / "attributes") as running:
        version = running.client.get("/readyz").json()["version"]
        assert "-" in version  # that of the attributes is a part of it
        for limit in (1, 20, 500, 1000):
            body = {"sequence_embedding": query.tolist(), "k": 10, "where": f"price < {limit}"}
            (answer,) = running.post("/search", body).json()["answers"]
            expected = index.search(query, 10, allow=price < limit)
            assert items_of(answer) == expected.ids[expected.ids >= 0].tolist()
        body = {"sequence_embedding": query.tolist(), "k": 20, "explain": True,
                "at_most": {"column": "brand", "count": 1}}  # fmt: skip
        (answer,) = running.post("/search", body).json()["answers"]
        found = items_of(answer)
        assert len({brand[item] for item in found}) == len(found) == 20
        assert [entry["item"] for entry in answer["explanation"]["top"]] == found


def test_attributes_of_other_items_are_not_served(place: Path, index: Index) -> None:
    table = {"item_id": [0], "price": [1.0]}
    Attributes.from_table(table, RowNumbers(7)).save(place / "few")
    assert index.num_items == 20_000
    with (
        pytest.raises(AssertionError, match="attributes of 7 items, expected those of the 20000"),
        serving(place / "index", "--attributes", place / "few"),
    ):
        pass
