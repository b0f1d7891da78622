"""An encoder from elsewhere over an index of vectors: what it returns is turned as these are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recprune import InputError, LiveIndex, Recommender, StorageError, VectorIndex, fold_in
from recprune.data.identifiers import StringIds
from recprune.recommender.saving import KIND
from recprune.storage import Saved, load_folder, save_folder
from recprune.types import Float32Array
from tests.support.foreign_models import as_function, as_onnx
from tests.support.serving import error_of, items_of, scores_of, serving
from tests.support.small_models import walks

LENGTH = 5
WIDTH = 7  # which four splits do not divide: turned vectors are 8 wide
COUNT = 60
NAMES = [f"tea {7 * number % COUNT:02}" for number in range(COUNT)]  # not sorted
HISTORIES: list[list[Any]] = [NAMES[3:5], NAMES[:20], [NAMES[9]], NAMES[10:16]]


def drawn(count: int, seed: int) -> Float32Array:
    return np.random.default_rng(seed).standard_normal((count, WIDTH)).astype(np.float32)


@pytest.fixture(scope="module")
def vectors() -> VectorIndex:
    return VectorIndex.build(drawn(COUNT, 1), NAMES, num_splits=4)


def table() -> Float32Array:
    """What the encoder sums up, by its own numbers: 0 is padding, items begin with 1."""
    return np.concatenate([np.zeros((1, WIDTH), np.float32), drawn(COUNT, 2)])


def made(index: VectorIndex, item_ids: Any = NAMES, *, function: bool = False) -> Recommender:
    encoder: Any = (as_function if function else as_onnx)(table(), LENGTH)
    return Recommender.from_encoder(
        encoder, index, item_ids, length=LENGTH, first_item=1, padding=0, popularity=range(COUNT)
    )


def padded(history: list[Any], names: list[Any]) -> Any:
    row = np.zeros((1, LENGTH), np.int64)
    numbers = [names.index(item) + 1 for item in history][-LENGTH:]
    row[0, -len(numbers) :] = numbers
    return row


@pytest.mark.parametrize("order", ["the encoder's", "the index's"])
def test_answers_are_those_of_the_index_to_what_the_encoder_returns(
    vectors: VectorIndex, order: str
) -> None:
    names = NAMES if order == "the encoder's" else sorted(NAMES)
    recommender = made(vectors, names if names is NAMES else None, function=True)
    assert recommender.index is vectors.index
    assert isinstance(recommender.item_ids, StringIds)
    for history in HISTORIES:
        (query,) = as_function(table(), LENGTH)(padded(history, names))
        exclude = vectors.item_ids.find_all(history)
        expected = vectors.search(query, 12, exclude=exclude)
        found = recommender.recommend([history], 12)
        assert found.items == vectors.external_ids(expected)
        assert np.array_equal(found.scores[0].view(np.uint32), expected.scores.view(np.uint32))
    # Popularity is in the encoder's order too.
    assert recommender.recommend([[]], 2).items[0] == [names[COUNT - 1], names[COUNT - 2]]


def test_items_without_ids_are_rows_or_get_some(vectors: VectorIndex) -> None:
    rows = VectorIndex.build(drawn(COUNT, 1), num_splits=4)
    by_name = made(vectors).recommend(HISTORIES, 9)
    given = made(rows).recommend(HISTORIES, 9)
    assert given.items == by_name.items
    assert np.array_equal(given.scores, by_name.scores)
    numbers = [[NAMES.index(item) for item in history] for history in HISTORIES]
    found = made(rows, None).recommend(numbers, 9).items
    assert [[NAMES[int(row)] for row in items] for items in found] == by_name.items


@pytest.mark.parametrize("layout", ["full", "compact"])
def test_a_saved_one_answers_the_same(layout: Any, tmp_path: Path) -> None:
    index = VectorIndex.build(drawn(COUNT, 1), NAMES, num_splits=4, layout=layout)
    recommender = made(index)
    expected = recommender.recommend(HISTORIES, 12)
    recommender.save(tmp_path / "saved")
    loaded = Recommender.load(tmp_path / "saved")
    loaded.save(tmp_path / "again")
    for folder in ("saved", "again"):
        found = Recommender.load(tmp_path / folder).recommend(HISTORIES, 12)
        assert found.items == expected.items
        assert np.array_equal(found.scores.view(np.uint32), expected.scores.view(np.uint32))
    assert load_folder(tmp_path / "saved", kind=KIND, version=8).version == 8


def test_what_does_not_fit_is_refused_when_made(vectors: VectorIndex) -> None:
    options: dict[str, Any] = {"length": LENGTH, "first_item": 1, "padding": 0}
    for names, why in (
        ([*NAMES[:-1], "coffee"], "item_ids has 'coffee', which the index of vectors does not"),
        (range(COUNT), "item_ids has 0, which the index of vectors does not have"),
        (NAMES[:-1], "59 item_ids, but 60 items in the index"),
    ):
        with pytest.raises(InputError, match=why):
            made(vectors, names)
    wide = np.zeros((COUNT + 1, 8), np.float32)  # as the index is that is inside
    for encoder, why in (
        (as_onnx(wide, LENGTH), r"float32 \[histories, 7\]"),
        (as_function(wide, LENGTH), "vectors of the index are 7 wide"),
        (lambda rows: np.full((len(rows), WIDTH), 3e38), r"returns\[0\] is more than float32 can"),
    ):
        with pytest.raises(InputError, match=why):
            Recommender.from_encoder(encoder, vectors, NAMES, **options)
    with pytest.raises(InputError, match="item_ids are missing"):
        Recommender.from_encoder(as_onnx(wide, LENGTH), vectors.index, **options)


@pytest.mark.parametrize(
    ("rotation", "message"),
    [
        (np.ones((7, 7), np.float32), r"encoder_rotation is float32\[7, 7\], expected float32\[8"),
        (np.ones((8, 7)), r"encoder_rotation is float64\[8, 7\]"),
        (np.ones((8, 0), np.float32), r"encoder_rotation is float32\[8, 0\]"),
        (np.ones((8, 6), np.float32), r"float32 \[histories, 6\]"),
        (np.full((8, 7), np.inf, np.float32), "encoder_rotation is not all finite"),
        (None, r"float32 \[histories, 8\]"),
    ],
)
def test_a_folder_that_was_changed_is_refused(
    vectors: VectorIndex, rotation: Any, message: str, tmp_path: Path
) -> None:
    made(vectors).save(tmp_path / "saved")
    saved = load_folder(tmp_path / "saved", kind=KIND, version=8)
    arrays = {name: array for name, array in saved.arrays.items() if name != "encoder_rotation"}
    if rotation is not None:
        arrays["encoder_rotation"] = rotation
    save_folder(tmp_path / "changed", Saved(KIND, 8, saved.settings, arrays, saved.parts))
    with pytest.raises(StorageError, match=message):
        Recommender.load(tmp_path / "changed")


def test_it_is_served_and_takes_vectors_as_the_encoder_returns_them(
    vectors: VectorIndex, tmp_path: Path
) -> None:
    recommender = made(vectors)
    recommender.save(tmp_path / "saved")
    expected = recommender.recommend([NAMES[3:9]], 8)
    query = drawn(1, 5)[0]
    top = vectors.search(query, 8)
    with serving(tmp_path / "saved") as service:
        answer = service.recommend(history=NAMES[3:9], k=8)
        asked = {"sequence_embedding": query.tolist(), "k": 8}
        found = service.post("/search", asked).json()["answers"][0]
        wide = service.post("/search", {"sequence_embedding": [0.5] * 8})
        told = service.recommend(history=NAMES[3:9], k=8, explain=True)["explanation"]
        again = error_of(service.post("/search", asked | {"rerank": 20}))
    assert (items_of(answer), scores_of(answer)) == (
        expected.items[0], expected.scores[0].view(np.uint32).tolist()
    )  # fmt: skip
    assert items_of(found) == vectors.external_ids(top)[0]
    assert scores_of(found) == top.scores.view(np.uint32).tolist()
    assert error_of(wide)[2] == "a sequence embedding has 8 numbers, expected 7"
    assert [item["item"] for item in told["top"]] == expected.items[0]
    assert again[0] == 422
    assert again[2].startswith("rerank: this service has no vectors to rank by")


def test_over_a_catalogue_that_changes(vectors: VectorIndex, tmp_path: Path) -> None:
    recommender = made(vectors)
    with recommender.make_live(tmp_path / "live") as live:
        over = recommender.with_live(live)
        still = recommender.recommend([NAMES[3:9]], 4)
        assert over.recommend([NAMES[3:9]], 4).items == still.items
        live.remove(live.snapshot().find(still.items[0][:1]))
        assert over.recommend([NAMES[3:9]], 3).items[0] == still.items[0][1:]


def test_new_items_get_codes_by_who_took_them() -> None:
    log = walks(40, COUNT + 3, "strings")
    rows = VectorIndex.build(drawn(COUNT, 1), num_splits=4)
    folded = fold_in(made(rows, log.item_ids.take(range(COUNT))), log)
    assert folded.item_ids == log.item_ids.take(range(COUNT, COUNT + 3))
    assert (folded.events > 0).all()


def test_a_live_index_of_the_codes_of_vectors(vectors: VectorIndex, tmp_path: Path) -> None:
    """As docs/guides/vectors.md has it: queries are turned before they get there."""
    with LiveIndex.create(
        tmp_path / "live",
        vectors.index.item_codes(),
        vectors.index.sub_item_embeddings(),
        item_ids=vectors.item_ids.take(range(vectors.num_items)),
    ) as live:
        queries = drawn(9, 6)
        top = live.search(vectors.turned(queries), 7)
        expected = vectors.search(queries, 7)
        names = [live.snapshot().external_ids(row) for row in top.ids]
        assert names == vectors.external_ids(expected)
        assert np.array_equal(top.scores.view(np.uint32), expected.scores.view(np.uint32))
        assert np.array_equal(vectors.turned(queries[0]), vectors.turned(queries)[0])
        # A vector that comes later has the codes of the sub-items next to it.
        late = vectors.turned(5.0 * queries[:1]).reshape(1, 4, 2)
        parts = vectors.index.sub_item_embeddings()
        codes = ((late[:, :, None] - parts) ** 2).sum(-1).argmin(-1).astype(np.uint8)
        (number,) = live.add(codes, item_ids=["late"])
        assert live.search(vectors.turned(queries[0]), 1).ids.tolist() == [number]
