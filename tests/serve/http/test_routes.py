"""Every route, limit and error of a running service; its answers are the library's, bit by bit."""

from __future__ import annotations

import json
import math
import re
import sqlite3
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from recprune.recommender.cosine import CosineSearch
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

LIMITS = (
    "--max-history", "20", "--max-k", "50", "--max-batch", "4", "--max-body-bytes", "20000",
    "--max-item-ids", "30", "--max-batch-items", "150", "--max-waiting", "64",
)  # fmt: skip
IN_STOCK = [f"tea é{number}" for number in range(10, 40)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("routes")


@pytest.fixture(scope="module")
def recommender(place: Path) -> Recommender:
    return save_recommender(place / "recommender")


@pytest.fixture(scope="module")
def service(place: Path, recommender: Recommender) -> Iterator[Service]:
    names = place / "names.csv"
    rows = [f'"tea é{number}","Täe No. {number}, ""fine"""' for number in range(4, 80)]
    names.write_text("\n".join(["item_id,name", 'a,"Apple  pie"', "gone,Nobody", *rows]))
    in_stock = place / "in stock.txt"
    in_stock.write_text("\n".join([*IN_STOCK, "", "not in the catalogue"]))
    item_set = ("--item-set", f"in-stock={in_stock}")
    with serving(place / "recommender", "--names", names, *item_set, *LIMITS) as running:
        assert recommender.item_ids.find("a") >= 0
        yield running


@pytest.fixture(scope="module")
def index(place: Path) -> Index:
    return save_index(place / "index", 300_000)


@pytest.fixture(scope="module")
def index_service(place: Path, index: Index) -> Iterator[Service]:
    with serving(place / "index", "--max-batch", "8") as running:
        assert index.num_items == 300_000
        yield running


# Recommend ---------------------------------------------------------------------------------------


def test_times_go_with_their_history(service: Service) -> None:
    asked = {"history": ["a", "b"], "times": [1_700_000_000, 1_700_000_060], "k": 3}
    assert service.post("/recommend", asked | {"time": 1_700_000_100.5}).status_code == 200
    in_batch = {"batch": [{"history": ["a"], "times": [5]}, {"history": ["b"]}]}
    assert service.post("/recommend", in_batch).status_code == 200
    for wrong, why in (
        (asked | {"times": [1]}, "1 times for a history of 2"),
        ({"user": "anna", "times": [1]}, "times are those of a history"),
        (asked | {"time": -1}, "time"),
        (asked | {"times": [1, 1e12]}, "times"),
    ):
        status, code, message = error_of(service.post("/recommend", wrong))
        assert (status, code) == (422, "invalid")
        assert why in message


@pytest.mark.parametrize("method", ["auto", "cells", "scan", "recjpqprune", "pqtopk", "default"])
@pytest.mark.parametrize("exclude_seen", [True, False])
def test_recommendations_are_those_of_the_library(
    service: Service, recommender: Recommender, method: str, exclude_seen: bool
) -> None:
    history = ["a", "tea é7", "who?", "n", "tea é7"]
    found = service.recommend(history=history, k=12, method=method, exclude_seen=exclude_seen)
    expected = recommender.recommend([history], 12, exclude_seen=exclude_seen, method=method)
    assert expected.stats is not None
    assert items_of(found) == expected.items[0]
    assert scores_of(found) == expected.scores[0].view(np.uint32).tolist()
    assert found["unknown"] == ["who?"]
    assert found["exact"] is True
    assert found["gap"] == 0.0
    assert not found["by_popularity"]
    assert [found["method"]] == expected.stats.method
    assert found["items_scored"] > 0
    assert set(found["milliseconds"]) == {"encode", "search"}


def test_names_come_with_the_items(service: Service) -> None:
    found = service.recommend(history=["n"], k=50)["items"]
    names = {item["item"]: item["name"] for item in found}
    named = [item for item in names if item.startswith("tea") and int(item[5:]) < 80]
    assert named
    for item in named:
        assert names[item] == f'Täe No. {item[5:]}, "fine"'
    assert {names[item] for item in names if item not in named} <= {None, "Apple pie"}


def test_a_batch_is_answered_in_its_order(service: Service) -> None:
    histories = [["a"], [], ["tea é7", "b"], ["nobody", "knows"]]
    response = service.post(
        "/recommend", {"batch": [{"history": history} for history in histories], "k": 4}
    )
    answers = response.json()["answers"]
    alone = [service.recommend(history=history, k=4) for history in histories]
    assert [answer["items"] for answer in answers] == [answer["items"] for answer in alone]
    assert [answer["by_popularity"] for answer in answers] == [False, True, False, True]
    assert answers[3]["unknown"] == ["nobody", "knows"]


def test_what_is_asked_at_the_same_time_is_answered_as_if_alone(service: Service) -> None:
    known = ["a", "b", "n", "tea é7", "tea 12", "tea 33"]
    rng = np.random.default_rng(3)
    asked: list[Json] = []
    for number in range(120):
        history = rng.choice([*known, "who?", "nobody"], rng.integers(0, 12)).tolist()
        asked.append({"history": history, "k": 3 + number % 2, "exclude_seen": number % 3 == 0})
    alone = [service.recommend(**question) for question in asked]
    with ThreadPoolExecutor(24) as threads:
        together = list(threads.map(lambda question: service.recommend(**question), asked))
    same = ("items", "unknown", "by_popularity", "method", "exact", "gap")
    for one, other in zip(alone, together, strict=True):
        assert [one[name] for name in same] == [other[name] for name in same]


def test_boosts_are_added_to_the_scores(service: Service, recommender: Recommender) -> None:
    history = ["a", "tea é7"]
    ranked = recommender.recommend([history], 90).items[0]
    boosts = {ranked[40]: 0.75, ranked[-1]: 100.0, ranked[0]: -100.0}
    asked = [boosted(item, boost) for item, boost in boosts.items()]
    for given in (history, []):
        expected = recommender.recommend([given], 12, boosts=boosts)
        found = service.recommend(history=given, k=12, boosts=asked)
        assert items_of(found) == expected.items[0]
        assert scores_of(found) == expected.scores[0].view(np.uint32).tolist()
        assert found["by_popularity"] == (not given)
    batch = {"batch": [{"history": history}, {"history": ["n"]}], "k": 3, "boosts": asked}
    answers = service.post("/recommend", batch).json()["answers"]
    assert [answer["items"][0]["item"] for answer in answers] == [ranked[-1]] * 2
    told = service.recommend(history=history, k=12, boosts=asked, explain=True)["explanation"]
    assert all(run["identical"] for run in told["methods"] if run["unavailable"] is None)
    for item in told["top"]:
        assert item["boost"] == boosts.get(item["item"])
        total = np.float32(item["contributions"][0])
        for part in [*item["contributions"][1:], item["boost"] or 0.0]:
            total = total + np.float32(part)
        assert item["score"] == total


def test_exclude_and_allow_restrict_the_answer(service: Service, recommender: Recommender) -> None:
    everything = recommender.recommend([["a"]], 90, exclude_seen=False).items[0]
    for allow in (IN_STOCK, "in-stock"):
        found = service.recommend(history=["a"], k=5, allow=allow, exclude=["tea é12", "unknown"])
        allowed = [item for item in everything if item in IN_STOCK and item != "tea é12"]
        assert items_of(found) == allowed[:5]
    popular = recommender.recommend([[]], 90).items[0]
    found = service.recommend(history=[], k=3, allow="in-stock", exclude=popular[:20])
    assert (
        items_of(found)
        == [item for item in popular if item in IN_STOCK and item not in popular[:20]][:3]
    )
    assert found["method"] is None
    assert list(found["milliseconds"]) == ["popularity"]
    assert found["milliseconds"]["popularity"] > 0
    nothing = service.recommend(history=["a"], allow=[])
    assert nothing["items"] == []
    assert nothing["exact"]


def test_an_event_without_a_time_is_the_latest(service: Service) -> None:
    # As after a clock that was set back: what was there already seems to be of the future.
    later = {"user": "tim", "item": "unknown 1", "timestamp": time.time() + 3600}
    for event in (later, {"user": "tim", "item": "unknown 2"}):
        assert service.post("/events", {"events": [event]}).json()["new"] == 1
    assert service.recommend(user="tim", k=5)["unknown"] == ["unknown 1", "unknown 2"]


def test_events_are_reflected_in_the_next_recommendation(service: Service) -> None:
    before = service.recommend(user="ann", k=5)
    assert before["by_popularity"]
    events = [
        {"user": "ann", "item": "tea é20", "timestamp": 20.0, "key": "x"},
        {"user": "ann", "item": "tea é10", "timestamp": 10.5},
        {"user": "ann", "item": "again", "timestamp": 30.0, "key": "x"},
    ]
    assert service.post("/events", {"events": events}).json() == {"received": 3, "new": 2}
    assert service.post("/events", {"events": events[:1]}).json() == {"received": 1, "new": 0}
    now = service.recommend(user="ann", k=5)
    assert now["items"] == service.recommend(history=["tea é10", "tea é20"], k=5)["items"]
    assert set(now["milliseconds"]) == {"histories", "encode", "search"}
    assert service.post("/events", {"events": [{"user": "ann", "item": "b"}]}).status_code == 200
    latest = service.recommend(user="ann", k=5)
    assert latest["items"] == service.recommend(history=["tea é10", "tea é20", "b"], k=5)["items"]
    both = service.post("/recommend", {"batch": [{"user": "ann"}, {"user": "ben"}], "k": 5}).json()
    assert both["answers"][0]["items"] == latest["items"]
    assert both["answers"][1]["by_popularity"]


def test_explain_says_what_happened(service: Service) -> None:
    found = service.recommend(history=["a", "n"], k=3, explain=True)
    explanation = found["explanation"]
    assert [entry["item"] for entry in explanation["top"]] == items_of(found)
    assert [entry["name"] for entry in explanation["top"]] == [
        item["name"] for item in found["items"]
    ]
    assert explanation["bottom"]["item"] not in items_of(found)
    assert all(run["identical"] for run in explanation["methods"] if not run["unavailable"])
    assert "explain" in found["milliseconds"]
    assert service.recommend(history=["a"])["explanation"] is None


def test_numbers_may_be_given_as_text(tmp_path: Path) -> None:
    recommender = save_recommender(tmp_path / "numbers", ids="integers")
    known = [int(recommender.item_ids[place]) for place in (0, 5, 80)]
    assert known[0] < 0
    with serving(tmp_path / "numbers") as service:
        found = service.recommend(history=known, k=4)
        assert items_of(found) == recommender.recommend([known], 4).items[0]
        assert service.recommend(history=list(map(str, known)), k=4)["items"] == found["items"]
        odd = ["seven", 10**30, " 5", "5_0", "--100", "-", "٥"]
        assert service.recommend(history=odd)["unknown"] == odd
        events = [{"user": 7, "item": item, "timestamp": at} for at, item in enumerate(known)]
        assert service.post("/events", {"events": events}).status_code == 200
        assert service.recommend(user="7", k=4)["items"] == found["items"]
        assert service.client.get(f"/items/{known[0]}").json()["item"] == known[0]


# Search ------------------------------------------------------------------------------------------


def embeddings_of(count: int) -> Any:
    return np.random.default_rng(5).standard_normal((count, WIDTH)).astype(np.float32)


def test_search_answers_sequence_embeddings(index_service: Service, index: Index) -> None:
    embeddings = embeddings_of(3)
    top = index.search(embeddings, 7)
    response = index_service.post("/search", {"batch": embeddings.tolist(), "k": 7})
    answers = response.json()["answers"]
    assert [items_of(answer) for answer in answers] == top.ids.tolist()
    assert [scores_of(answer) for answer in answers] == top.scores.view(np.uint32).tolist()
    assert [answer["method"] for answer in answers] == top.stats.method
    one = {"sequence_embedding": embeddings[1].tolist(), "k": 7}
    assert index_service.post("/search", one).json()["answers"][0]["items"] == answers[1]["items"]
    best, allow = int(top.ids[1, 0]), top.ids[1].tolist()
    some = index_service.post("/search", one | {"exclude": [best], "allow": allow}).json()
    assert items_of(some["answers"][0]) == allow[1:]
    raised = {"batch": embeddings.tolist(), "k": 7, "boosts": [boosted(5, 0.5), boosted(11, 90.0)]}
    answers = index_service.post("/search", raised).json()["answers"]
    top = index.search(embeddings, 7, boosts=[([5, 11], [0.5, 90.0])] * 3)
    assert [items_of(answer) for answer in answers] == top.ids.tolist()
    assert [scores_of(answer) for answer in answers] == top.scores.view(np.uint32).tolist()
    assert {items_of(answer)[0] for answer in answers} == {11}


def test_a_search_may_be_told_to_stop(index_service: Service) -> None:
    question = {"sequence_embedding": embeddings_of(1)[0].tolist(), "k": 10}
    for method in ("auto", "cells", "scan", "recjpqprune"):
        asked = question | {"method": method}
        hurried = index_service.post("/search", asked | {"timeout_ms": 1e-6}).json()["answers"][0]
        assert hurried["exact"] is False, method
        assert hurried["gap"] is None or hurried["gap"] > 0, method
        patient = index_service.post("/search", asked | {"timeout_ms": 5e4}).json()["answers"][0]
        assert patient["exact"] is True
        assert patient["gap"] == 0
    status, _, message = error_of(
        index_service.post("/search", question | {"method": "pqtopk", "timeout_ms": 5})
    )
    assert status == 422
    assert "pqtopk cannot stop early" in message


def test_a_method_that_would_take_too_much_memory_is_refused(tmp_path: Path) -> None:
    width = 1024
    save_index(tmp_path / "wide", 20_000, width=width)
    with serving(tmp_path / "wide") as service:
        question = {"sequence_embedding": [0.5] * width, "method": "default"}
        status, code, message = error_of(service.post("/search", question))
        assert (status, code) == (422, "invalid")
        assert message == (
            "method default needs 81,920,000 bytes in each worker, and the service allows "
            "67,108,864: --max-method-bytes"
        )
        assert service.post("/search", question | {"method": "pqtopk"}).status_code == 200


def test_an_index_alone_does_not_recommend_and_says_so(index_service: Service) -> None:
    status, code, message = error_of(index_service.post("/recommend", {"history": [1]}))
    assert (status, code) == (409, "no_encoder")
    assert "/search" in message
    ready = index_service.client.get("/readyz").json()
    assert ready["kind"] == "index"
    assert ready["items"] == 300_000
    assert index_service.client.get("/items/299999").json()["popularity"] is None
    assert index_service.client.get("/items/300000").status_code == 404
    assert index_service.client.get("/items/" + "9" * 5000).status_code == 404


# Items and operations ----------------------------------------------------------------------------


def test_items_are_described(service: Service, recommender: Recommender) -> None:
    found = service.client.get("/items/tea é7").json()
    item = recommender.item_ids.find("tea é7")
    assert found == {
        "item": "tea é7",
        "name": 'Täe No. 7, "fine"',
        "popularity": int(recommender.popularity[item]),
        "code": recommender.index.item_codes()[item].tolist(),
        "attributes": None,
    }
    assert error_of(service.client.get("/items/no/such"))[:2] == (404, "not_found")


def test_similar_items_are_those_of_the_library(service: Service, recommender: Recommender) -> None:
    answer = service.client.get("/items/tea é7/similar", params={"k": 5}).json()
    expected = recommender.similar(["tea é7"], 5)
    assert (answer["item"], answer["name"]) == ("tea é7", 'Täe No. 7, "fine"')
    assert answer["version"] == service.client.get("/readyz").json()["version"]
    assert items_of(answer) == expected.items[0]
    assert scores_of(answer) == expected.scores[0].view(np.uint32).tolist()
    assert len(service.client.get("/items/a/similar").json()["items"]) == 10
    for path, expected_error in (
        ("/items/no/such/similar", (404, "not_found")),
        ("/items/a/similar?k=51", (422, "limit")),
        ("/items/a/similar?k=0", (422, "invalid")),
        ("/items/a/similar?where=price", (422, "invalid")),
    ):
        assert error_of(service.client.get(path))[:2] == expected_error


def test_an_index_alone_has_similar_items_too(index_service: Service, index: Index) -> None:
    answer = index_service.client.get("/items/7/similar", params={"k": 4}).json()
    none = np.empty(0, np.int64)
    items, cosines = CosineSearch(index, every_item=index.num_items).best(7, 4, exclude=none)
    assert items_of(answer) == items.tolist()
    assert scores_of(answer) == cosines.view(np.uint32).tolist()


def test_items_are_found_by_words_popular_ones_first(
    service: Service, recommender: Recommender
) -> None:
    def find(query: str, limit: int = 100) -> list[str]:
        response = service.client.get("/items", params={"query": query, "limit": limit})
        return [entry["item"] for entry in response.json()["items"]]

    popular = recommender.recommend([[]], 90).items[0]
    assert find("TÄE no. 1") == [
        item for item in popular if item in [f"tea é{n}" for n in range(10, 20)]
    ]
    named = [f"tea é{number}" for number in range(4, 80)]
    assert find("täe", 3) == [item for item in popular if item in named][:3]
    assert find("apple   PIE") == ["a"]
    assert find("tea é85") == ["tea é85"], "by its id, having no name"
    assert find("n", 1) == ["n"], "an id that is exactly that comes first"
    assert find("nobody") == []
    assert find("\n") == []


def test_operations(service: Service) -> None:
    assert service.client.get("/healthz").json() == {"alive": True}
    ready = service.client.get("/readyz").json()
    assert ready["ready"]
    assert ready["item_sets"] == ["in-stock"]
    assert ready["has_names"]
    version = service.post("/recommend", {"history": ["a"]}).json()["version"]
    assert ready["version"] == version
    schema = service.client.get("/openapi.json").json()
    assert {"/recommend", "/search", "/events", "/items", "/metrics"} <= set(schema["paths"])
    for name in ("RecommendRequest", "SearchRequest", "EventsRequest"):
        assert schema["components"]["schemas"][name]["examples"]


def test_examples_of_the_api_are_answered(index_service: Service, service: Service) -> None:
    schemas = service.client.get("/openapi.json").json()["components"]["schemas"]
    for example in schemas["RecommendRequest"]["examples"]:
        # Their ids are not of this catalogue; a busy machine may take longer than they would wait.
        known = example | {"allow": None, "boosts": [], "timeout_ms": 10_000}
        assert service.post("/recommend", known).status_code == 200
    for example in schemas["EventsRequest"]["examples"]:
        assert service.post("/events", example).status_code == 200
    (example,) = schemas["SearchRequest"]["examples"]
    example["sequence_embedding"] *= WIDTH // len(example["sequence_embedding"])
    assert index_service.post("/search", example).status_code == 200


def test_readiness_costs_at_most_one_write_a_second(place: Path, service: Service) -> None:
    def writes() -> int:
        with closing(sqlite3.connect(place / "recommender-histories.db")) as connection:
            return int(connection.execute("SELECT last FROM arrivals").fetchone()[0])

    service.client.get("/readyz")
    before, begun = writes(), time.monotonic()
    for _ in range(50):
        assert service.client.get("/readyz").status_code == 200
    assert writes() - before <= 1 + time.monotonic() - begun


def test_metrics_count_what_happened(service: Service) -> None:
    counted = (
        'recprune_requests_total{route="/recommend",status="200"}',
        'recprune_queries_total{exact="true",method="pqtopk"}',
        "recprune_fallbacks_total",
        'recprune_stage_seconds_count{stage="encode"}',
        'recprune_stage_seconds_count{stage="search"}',
        "recprune_items_scored_count",
        "recprune_threshold_gap_count",
    )
    before = [service.metric(name) for name in counted]
    answer = service.recommend(history=["a"])
    service.recommend(history=[])
    after = [service.metric(name) for name in counted]
    assert [now - then for now, then in zip(after, before, strict=True)] == [2, 1, 1, 1, 1, 1, 1]
    scored = service.metric("recprune_items_scored_sum")
    service.recommend(history=["a"])
    assert service.metric("recprune_items_scored_sum") == scored + answer["items_scored"]
    assert service.metric("recprune_index_items") == 90
    assert service.metric("recprune_index_bytes") > 90 * 8
    assert service.metric('recprune_queue_depth{state="waiting",work="search"}') == 0


def test_the_dashboard_shows_figures_that_exist(service: Service) -> None:
    dashboard = (Path(__file__).parents[3] / "docs" / "grafana-dashboard.json").read_text()
    shown = set(re.findall(r"recprune_\w+", json.dumps(json.loads(dashboard)["panels"])))
    service.recommend(history=["a"])
    service.recommend(history=[])
    counted = set(re.findall(r"^recprune_\w+", service.client.get("/metrics").text, re.MULTILINE))
    assert len(shown) > 10
    assert shown <= counted


def test_the_page_and_its_files_are_served(service: Service) -> None:
    page = service.client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "<script" in page.text
    style = service.client.get("/page/page.css")
    assert style.headers["content-type"].startswith("text/css")
    for path in ("/page/../app.py", "/page/%2e%2e/app.py", "/page/nothing.js", "/page/"):
        assert error_of(service.client.get(path))[:2] == (404, "not_found")


def test_an_answer_has_no_padding(service: Service) -> None:
    """Three items are left of the fifty that are asked for: each has its id and its score."""
    for history in (["a"], []):
        found = service.recommend(history=history, k=50, allow=["b", "n", "p"])
        assert sorted(entry["item"] for entry in found["items"]) == ["b", "n", "p"]
        assert all(math.isfinite(entry["score"]) for entry in found["items"])


# Bad requests ------------------------------------------------------------------------------------

LARGEST = float(np.finfo(np.float32).max)


def boosted(item: str | int, boost: float) -> Json:
    return {"item": item, "boost": boost}


TOO_MUCH: list[tuple[str, Json, str]] = [
    ("/recommend", {"history": ["a"] * 21}, "history is 21, the service allows 20"),
    ("/recommend", {"batch": [{"history": ["a"] * 21}]}, "history is 21"),
    ("/recommend", {"batch": [{"history": []}] * 5}, "batch is 5, the service allows 4"),
    ("/recommend", {"history": ["a"], "k": 51}, "k is 51, the service allows 50"),
    ("/recommend", {"batch": [{"history": []}] * 4, "k": 40}, "k times batch is 160"),
    ("/search", {"batch": [[0.0] * WIDTH] * 4, "k": 40}, "k times batch is 160"),
    ("/recommend", {"history": ["a"], "exclude": ["a"] * 31}, "exclude is 31"),
    ("/recommend", {"history": ["a"], "allow": ["a"] * 31}, "allow is 31"),
    ("/recommend", {"history": ["a"], "boosts": [{"item": "a", "boost": 1}] * 31}, "boosts is 31"),
    ("/recommend", {"batch": [{"history": []}] * 2, "explain": True}, "one question at a time"),
    ("/search", {"batch": [[0.0] * WIDTH] * 5}, "batch is 5"),
    ("/events", {"events": [{"user": "u", "item": "a"}] * 65}, "events is 65"),
]
WRONG: list[tuple[str, Json, str]] = [
    ("/recommend", {}, "give one of history, user and batch"),
    ("/recommend", {"history": ["a"], "user": "u"}, "give one of"),
    ("/recommend", {"batch": [{}]}, "give either a history or a user"),
    ("/recommend", {"batch": []}, "batch"),
    ("/recommend", {"history": [1.5]}, "history.0"),
    ("/recommend", {"history": [True]}, "history.0"),
    ("/recommend", {"history": "abc"}, "history"),
    ("/recommend", {"history": ["x" * 513]}, "at most 512 characters"),
    ("/recommend", {"history": [10**4000]}, "history.0: Input should be less than 1000"),
    ("/recommend", {"history": ["a"], "exclude": [-(10**40)]}, "exclude.0"),
    ("/recommend", {"history": ["a"], "allow": [10**4000]}, "allow"),
    ("/events", {"events": [{"user": 10**4000, "item": "a"}]}, "user"),
    ("/recommend", {"history": ["a"], "k": 0}, "k: Input should be greater than or equal to 1"),
    ("/recommend", {"history": ["a"], "kk": 3}, "kk: no such field, did you mean k?"),
    ("/recommend", {"history": ["a"], "method": "fast"}, "method"),
    ("/recommend", {"history": ["a"], "timeout_ms": -1}, "timeout_ms"),
    ("/recommend", {"history": ["a"], "timeout_ms": float("nan")}, "timeout_ms"),
    ("/recommend", {"history": ["a"], "allow": ["b", "zz"]}, "allow[1] is 'zz'"),
    ("/recommend", {"history": ["a"], "allow": "sold-out"}, "no item set of the name 'sold-out'"),
    ("/recommend", {"user": ""}, "user"),
    ("/recommend", {"history": ["a"], "boosts": {"a": 1}}, "boosts"),
    ("/recommend", {"history": ["a"], "boosts": [{"item": "a"}]}, "boosts.0.boost"),
    ("/recommend", {"history": ["a"], "boosts": [boosted("zz", 1)]}, "boosts[0] is 'zz'"),
    ("/recommend", {"history": [], "boosts": [boosted("zz", 1)]}, "boosts[0] is 'zz'"),
    (
        "/recommend",
        {"history": ["a"], "boosts": [boosted("a", 1), boosted("b", 1), boosted("a", 2)]},
        "boosts[2] is 'a': boosted before",
    ),
    ("/recommend", {"history": ["a"], "boosts": [boosted("a", float("nan"))]}, "finite number"),
    ("/recommend", {"history": ["a"], "boosts": [boosted("a", 1e39)]}, "boosts[0] is inf"),
    (
        "/search",
        {"sequence_embedding": [1.0] * WIDTH, "boosts": [boosted("a", LARGEST)]},
        "overflow float32",
    ),
    ("/search", {"sequence_embedding": [1.0]}, f"has 1 numbers, expected {WIDTH}"),
    ("/search", {"sequence_embedding": [float("nan")] * WIDTH}, "finite number"),
    ("/search", {"sequence_embedding": [float("inf")] * WIDTH}, "finite number"),
    ("/search", {"sequence_embedding": [1e39] * WIDTH}, "beyond the range of float32"),
    ("/search", {"sequence_embedding": [3e38] * WIDTH}, "overflow float32"),
    ("/search", {"sequence_embedding": ["1"] * WIDTH, "batch": [[]]}, "sequence_embedding"),
    ("/search", {}, "give either sequence_embedding or batch"),
    ("/events", {"events": []}, "events"),
    ("/events", {"events": [{"user": "u"}]}, "events.0.item"),
    ("/events", {"events": [{"user": "u", "item": "a", "timestamp": 1e10}]}, "timestamp"),
    ("/events", {"events": [{"user": "u", "item": "a", "key": ""}]}, "key"),
]


@pytest.mark.parametrize(("path", "body", "message"), TOO_MUCH)
def test_too_much_is_refused(service: Service, path: str, body: Json, message: str) -> None:
    status, code, said = error_of(service.post(path, body))
    assert (status, code) == (422, "limit")
    assert message in said


@pytest.mark.parametrize(("path", "body", "message"), WRONG)
def test_what_is_wrong_is_named(service: Service, path: str, body: Json, message: str) -> None:
    text = json.dumps(body)  # as Python writes NaN, which many a client does
    headers = {"content-type": "application/json"}
    status, code, said = error_of(service.client.post(path, content=text, headers=headers))
    assert (status, code) == (422, "invalid")
    assert message in said


@pytest.mark.parametrize(
    "text",
    [b'{"history": [', b"", b"\xff\xfe", b"[" * 15_000, b'{"history": [' + b"9" * 5000 + b"]}",
     b'{"history": ["\\ud800"]}', b"null", b"[]", b'"text"'],
)  # fmt: skip
def test_what_is_no_json_or_not_the_expected_is_refused(service: Service, text: bytes) -> None:
    headers = {"content-type": "application/json"}
    status, code, _ = error_of(service.client.post("/recommend", content=text, headers=headers))
    assert status in (400, 422)
    assert code in ("invalid_json", "bad_request", "invalid")


def test_other_paths_methods_and_types_are_refused(service: Service) -> None:
    client = service.client
    assert error_of(client.get("/nothing"))[:2] == (404, "not_found")
    assert error_of(client.get("/recommend"))[:2] == (405, "not_allowed")
    assert client.get("/recommend").headers["allow"] == "POST"
    assert error_of(client.get("/items"))[:2] == (422, "invalid")
    assert error_of(client.get("/items", params={"query": "a", "limit": 0}))[0] == 422
    typed = client.post(
        "/recommend", content=b'{"history": []}', headers={"content-type": "text/plain"}
    )
    untyped = client.post("/recommend", content=b'{"history": []}')
    for refused in (typed, untyped):
        status, code, message = error_of(refused)
        assert (status, code) == (422, "invalid")
        assert message.startswith("send the header content-type: application")


def test_large_bodies_are_refused_with_and_without_a_length(service: Service) -> None:
    ten_megabytes = b" " * 10_000_000
    headers = {"content-type": "application/json"}
    declared = service.client.post("/search", content=ten_megabytes, headers=headers)
    assert error_of(declared) == (413, "too_large", "the body has more than 20000 bytes")
    parts = (ten_megabytes[start : start + 50_000] for start in range(0, 10_000_000, 50_000))
    streamed = service.client.post("/search", content=parts, headers=headers)
    assert error_of(streamed)[:2] == (413, "too_large")
    assert service.recommend(history=["a"])["exact"]


def test_security_headers_are_everywhere(service: Service) -> None:
    answers = [
        service.client.get("/"),
        service.client.get("/page/page.js"),
        service.client.get("/nothing"),
        service.post("/recommend", {"history": ["a"]}),
        service.client.post("/search", content=b" " * 30_000),
    ]
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; ")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert "access-control-allow-origin" not in answer.headers
        assert "server" not in answer.headers


def test_nobody_elses_pages_may_ask(service: Service) -> None:
    body = {"history": ["a"]}
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1"):
        assert error_of(service.post("/recommend", body, origin=origin))[:2] == (403, "forbidden")
    assert service.post("/recommend", body, origin=service.url).status_code == 200
    renamed = service.post("/recommend", body, host="evil.example")
    assert error_of(renamed)[:2] == (403, "forbidden")
    assert error_of(service.post("/recommend", body, host="["))[:2] == (400, "bad_request")
    for origin in ("http://[", "http://[::1", "[", "http://"):
        assert error_of(service.post("/recommend", body, origin=origin))[:2] == (403, "forbidden")
    port = service.port
    assert service.post("/recommend", body, host=f"localhost:{port}").status_code == 200


def test_logs_are_json_and_have_no_personal_data(service: Service) -> None:
    secrets = ["Zacharias", "tea é77", "quellenverzeichnis"]
    service.post("/events", {"events": [{"user": secrets[0], "item": secrets[1]}]})
    service.recommend(user=secrets[0])
    service.recommend(history=[secrets[1]])
    service.client.get("/items", params={"query": secrets[2]})
    service.client.get(f"/items/{secrets[1]}")
    service.client.get(f"/{secrets[2]}")
    service.post("/recommend", {"history": secrets, "method": secrets[2]})
    entries = service.logged()
    routes = {entry.get("route") for entry in entries if entry["event"] == "request"}
    assert {"/events", "/recommend", "/items", "/items/{item:path}", "none"} <= routes
    text = json.dumps(entries, ensure_ascii=False)
    for secret in (*secrets, "127.0.0.1"):
        assert secret not in text


def test_head_and_options_do_no_harm(service: Service) -> None:
    assert httpx.head(f"{service.url}/recommend").status_code == 405
    assert httpx.options(f"{service.url}/recommend").status_code == 405
    page = httpx.head(f"{service.url}/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert not page.content


def test_serving_needs_none_of_what_training_needs(place: Path, recommender: Recommender) -> None:
    code = (
        "import argparse, sys\n"
        "for name in ('torch', 'polars', 'pyarrow', 'scipy', 'rich', 'onnx', 'redis'):\n"
        "    sys.modules[name] = None\n"
        "from recprune.commands import serve\n"
        "parser = argparse.ArgumentParser()\n"
        "serve.add_arguments(parser)\n"
        "serve.run(parser.parse_args())\n"
    )
    with serving(place / "recommender", command=[sys.executable, "-c", code]) as service:
        found = service.recommend(history=["a"], k=5)
        assert items_of(found) == recommender.recommend([["a"]], 5).items[0]
