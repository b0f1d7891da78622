"""An index of vectors behind HTTP: its answers are those of the library, bit by bit."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from recprune import Attributes, InputError, VectorIndex
from recprune.attributes.diversity import Limit, search_at_most
from recprune.cli import main
from recprune.search.methods import find_method
from recprune.serve.configuration import read_settings
from recprune.serve.engine.backend import sharded_folder
from recprune.types import Float32Array
from tests.support.serving import (
    Json,
    Service,
    error_of,
    items_of,
    replace,
    save_index,
    scores_of,
    serving,
)

COUNT = 3000
WIDTH = 22  # which eight splits do not divide: turned vectors are 24 wide
NAMES = [f"tea é{7 * number % COUNT:04}" for number in range(COUNT)]  # not sorted
LIMITS = ("--max-rerank", "200", "--max-batch-items", "300")


def drawn(count: int, seed: int) -> Float32Array:
    rng = np.random.default_rng(seed)
    found: Float32Array = (rng.standard_normal((count, WIDTH)) * np.linspace(3, 0.2, WIDTH)).astype(
        np.float32
    )
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vectors")


@pytest.fixture(scope="module")
def vectors(place: Path) -> VectorIndex:
    VectorIndex.build(drawn(COUNT, 1), NAMES, num_splits=8).save(place / "index")
    return VectorIndex.load(place / "index")


@pytest.fixture(scope="module")
def attributes(place: Path, vectors: VectorIndex) -> Attributes:
    """Made by the command from a file whose rows are in an order of their own."""
    rows = {
        "item_id": NAMES,
        "price": range(COUNT),
        "brand": [f"b{row % 9}" for row in range(COUNT)],
    }
    pl.DataFrame(rows).write_parquet(place / "items.parquet")
    words = [place / "index", place / "items.parquet", "--out", place / "attributes"]
    assert main(["attributes", *map(str, words)]) == 0
    made = Attributes.load(place / "attributes")
    assert made.num_items == vectors.num_items
    return made


@pytest.fixture(scope="module")
def service(place: Path, attributes: Attributes) -> Iterator[Service]:
    (place / "half.txt").write_text("\n".join(NAMES[::2]), encoding="utf-8")
    (place / "names.csv").write_text(f"item_id,name\n{NAMES[3]},Assam\n", encoding="utf-8")
    more = ("--item-set", f"half={place / 'half.txt'}", "--names", place / "names.csv")
    with serving(place / "index", "--attributes", place / "attributes", *more, *LIMITS) as running:
        assert running.client.get("/readyz").json()["attributes"] == attributes.kinds
        yield running


def asked(service: Service, queries: Float32Array, **more: Any) -> list[Json]:
    response = service.post("/search", {"batch": queries.tolist(), **more})
    assert response.status_code == 200, response.text
    answers: list[Json] = response.json()["answers"]
    return answers


def check(answers: list[Json], vectors: VectorIndex, top: Any) -> None:
    assert [items_of(answer) for answer in answers] == vectors.external_ids(top)
    expected = [row[ids >= 0] for row, ids in zip(top.scores, top.ids, strict=True)]
    assert [scores_of(answer) for answer in answers] == [
        row.view(np.uint32).tolist() for row in expected
    ]


@pytest.mark.parametrize("rerank", [0, 5, 60])
@pytest.mark.parametrize("how", ["plain", "ids", "boosts", "where", "method", "timeout"])
def test_answers_are_those_of_the_library(
    service: Service, vectors: VectorIndex, attributes: Attributes, how: str, rerank: int
) -> None:
    queries = drawn(3, 2)
    best = vectors.search(queries, 9).ids
    item_ids = vectors.item_ids
    named = [str(item) for item in item_ids.take(best[:, :3].ravel().tolist())]
    question: Json = {"k": 7, "rerank": rerank}
    options: dict[str, Any] = {"k": 7, "rerank": rerank}
    if how == "ids":
        question |= {"exclude": [*named, "unknown"], "allow": "half"}
        allow = np.zeros(COUNT, np.bool_)
        allow[item_ids.find_all(NAMES[::2])] = True
        options |= {"allow": allow, "exclude": [item_ids.find_all(named)] * 3}
    elif how == "boosts":
        raised = {named[0]: -3.0, named[1]: 2.5, NAMES[17]: 1000.0}
        question["boosts"] = [{"item": item, "boost": boost} for item, boost in raised.items()]
        pair = item_ids.find_all(list(raised)), np.array(list(raised.values()), np.float32)
        options["boosts"] = [pair] * 3
    elif how == "where":
        where = "price < 900 and brand in ('b1', 'b2')"
        question["where"], options["allow"] = where, attributes.where(where)
    elif how == "method":
        question["method"] = options["method"] = "recjpqprune"
    elif how == "timeout":
        question["timeout_ms"] = 50_000
    answers = asked(service, queries, **question)
    top = vectors.search(queries, **options)
    check(answers, vectors, top)
    if how == "boosts":
        assert {items_of(answer)[0] for answer in answers} == {NAMES[17]}
    for answer in answers:
        assert answer["exact"] is True
        assert answer["reranked"] == (max(7, rerank) if rerank else 0)
        assert answer["gap"] == (None if rerank else 0.0)
        stages = ["search"] + ["rerank"] * bool(rerank) + ["filter"] * (how == "where")
        assert sorted(answer["milliseconds"]) == sorted(stages)
    one = service.post("/search", question | {"sequence_embedding": queries[1].tolist()}).json()
    assert one["answers"][0]["items"] == answers[1]["items"]


@pytest.mark.parametrize("rerank", [0, 40])
def test_at_most_so_many_of_one_value(
    service: Service, vectors: VectorIndex, attributes: Attributes, rerank: int
) -> None:
    """Candidates are what a search by codes returns that is asked for so many."""
    queries = drawn(2, 3)
    limit = Limit(attributes.limited("brand", 6), 6)
    by_codes = search_at_most(
        vectors.index,
        vectors.turned(queries),
        rerank or 9,
        limit,
        method=lambda: find_method("auto"),
    )
    top = vectors.reranked(queries, by_codes, 9) if rerank else by_codes
    at_most = {"column": "brand", "count": 6}
    check(asked(service, queries, k=9, at_most=at_most, rerank=rerank), vectors, top)


def test_more_candidates_than_there_are(service: Service, vectors: VectorIndex) -> None:
    queries, few = drawn(1, 4), NAMES[5:11]
    answers = asked(service, queries, k=50, rerank=200, allow=few)
    allow = np.zeros(COUNT, np.bool_)
    allow[vectors.item_ids.find_all(few)] = True
    check(answers, vectors, vectors.search(queries, 50, rerank=200, allow=allow))
    assert answers[0]["reranked"] == 6


def test_what_cannot_be_asked_is_refused(service: Service) -> None:
    query = [0.5] * WIDTH
    batch = {"batch": [query] * 3, "sequence_embedding": None}
    for body, message in (
        ({"sequence_embedding": [0.5] * 24}, "a sequence embedding has 24 numbers, expected 22"),
        ({"rerank": 201}, "rerank is 201, the service allows 200"),
        (batch | {"rerank": 101}, "rerank times batch is 303, the service allows 300"),
        ({"rerank": -1}, "rerank: Input should be greater than or equal to 0"),
        ({"rerank": 10, "explain": True}, "explain: looks into the search by codes: ask for it "
         "without rerank"),
        ({"sequence_embedding": [3e38] * WIDTH}, "sequence embeddings[0] is more than float32 can "
         "hold, turned"),
    ):  # fmt: skip
        refused = error_of(service.post("/search", {"sequence_embedding": query} | body))
        assert (refused[0], refused[2]) == (422, message)
    status, code, message = error_of(service.post("/recommend", {"history": NAMES[:2]}))
    assert (status, code) == (409, "no_encoder")
    status, _, message = error_of(service.post("/recommend", {"history": ["a"], "rerank": 5}))
    assert status == 422
    assert "rerank" in message


def test_a_search_by_codes_is_explained(service: Service, vectors: VectorIndex) -> None:
    query = drawn(1, 6)
    (answer,) = asked(service, query, k=3, explain=True)
    check([answer], vectors, vectors.search(query, 3))
    told = answer["explanation"]
    assert [entry["item"] for entry in told["top"]] == items_of(answer)
    assert [entry["score"] for entry in told["top"]] == [item["score"] for item in answer["items"]]
    assert all(run["identical"] for run in told["methods"] if run["unavailable"] is None)


def test_items_are_known_by_their_ids(service: Service, vectors: VectorIndex) -> None:
    ready = service.client.get("/readyz").json()
    assert (ready["kind"], ready["items"], ready["reranks"]) == ("vector index", COUNT, True)
    found = service.client.get(f"/items/{NAMES[3]}").json()
    (row,) = vectors.item_ids.find_all([NAMES[3]])
    code = vectors.index.item_codes()[row].tolist()
    assert found == {
        "item": NAMES[3],
        "name": "Assam",
        "popularity": None,
        "code": code,
        "attributes": {"price": 3, "brand": "b3"},
    }
    assert service.client.get("/items", params={"query": "assam"}).json()["items"] == [
        {"item": NAMES[3], "name": "Assam"}
    ]
    similar = service.client.get(f"/items/{NAMES[3]}/similar", params={"k": 4}).json()
    assert len({*items_of(similar), NAMES[3]}) == 5


def test_without_ids_items_are_rows_and_without_vectors_nothing_is_reranked(
    tmp_path: Path,
) -> None:
    index = VectorIndex.build(drawn(400, 7), num_splits=4, keep_vectors=False)
    index.save(tmp_path / "index")
    query = drawn(1, 8)
    with serving(tmp_path / "index") as service:
        check(asked(service, query, k=5), index, index.search(query, 5))
        assert service.client.get("/readyz").json()["reranks"] is False
        body = {"sequence_embedding": query[0].tolist(), "rerank": 5}
        status, _, message = error_of(service.post("/search", body))
        assert (status, message.partition(":")[0]) == (422, "rerank")
        assert "no vectors to rank by" in message


def test_a_product_beyond_float32_is_refused(tmp_path: Path) -> None:
    VectorIndex.from_codes(
        np.array([[0], [1]], np.uint8), np.array([[[1.0], [2.0]]], np.float32), ["far", "near"],
        vectors=[[1e20], [2.0]],
    ).save(tmp_path / "index")  # fmt: skip
    with serving(tmp_path / "index") as service:
        assert items_of(asked(service, np.full((1, 1), 1e20, np.float32))[0]) == ["near", "far"]
        body = {"sequence_embedding": [1e20], "rerank": 2}
        status, _, message = error_of(service.post("/search", body))
        assert status == 422
        assert message.endswith("its product with a vector is more than float32 can hold")


def test_a_reload_takes_other_vectors_and_other_kinds(vectors: VectorIndex, tmp_path: Path) -> None:
    folder = tmp_path / "served"
    vectors.save(folder)
    other = VectorIndex.build(drawn(500, 9)[:, :20], range(7, 507), num_splits=4)
    other.save(tmp_path / "other")
    bare = save_index(tmp_path / "bare", 300)
    damaged = shutil.copytree(tmp_path / "other", tmp_path / "damaged")
    content = bytearray((damaged / "vectors.npy").read_bytes())
    content[-1] ^= 1
    (damaged / "vectors.npy").write_bytes(content)
    query = drawn(1, 10)
    with serving(folder, "--workers", "2") as service:
        check(asked(service, query, rerank=30), vectors, vectors.search(query, rerank=30))
        replace(folder, tmp_path / "other")
        assert service.client.post("/admin/reload").json()["workers"] == 2
        fewer = np.ascontiguousarray(query[:, :20])
        check(asked(service, fewer, rerank=30), other, other.search(fewer, rerank=30))
        replace(folder, damaged)
        status, code, message = error_of(service.client.post("/admin/reload"))
        assert (status, code) == (409, "reload_failed")
        assert message.startswith("vectors.npy")
        check(asked(service, fewer), other, other.search(fewer))
        replace(folder, tmp_path / "bare")
        assert service.client.post("/admin/reload").status_code == 200
        assert service.client.get("/readyz").json()["kind"] == "index"
        wide = np.ones((1, bare.width), np.float32)
        assert items_of(asked(service, wide)[0]) == bare.search(wide).ids[0].tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ray": "local"}, "--ray: .* holds a saved vector index, which is not searched in shards"),
        ({"live": "live"}, "--live: .* holds a saved vector index, expected a recommender"),
    ],
)
@pytest.mark.usefixtures("vectors")
def test_options_that_do_not_go_with_it(place: Path, options: Json, message: str) -> None:
    with pytest.raises(InputError, match=message):
        sharded_folder(read_settings({"folder": place / "index", **options}))
