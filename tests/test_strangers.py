"""Folders with changed bytes and right checksums are refused, or answer as their arrays say.

`make fuzz` and `make sanitize` ask for more. Where a change ends the process, the file `last` in
the test's temporary folder has its number.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recprune import (
    METHODS,
    Attributes,
    Codebook,
    Index,
    InputError,
    LiveIndex,
    VectorIndex,
    assign_random,
)
from recprune._native import instruction_sets
from recprune.attributes.diversity import Limit, within
from recprune.data.identifiers import RowNumbers
from recprune.models.repeats import event_features
from recprune.models.transitions import count_transitions
from recprune.preparation.cold_items import ColdItems
from recprune.preparation.holdout import temporal_holdout
from recprune.preparation.prepared import Prepared, prepare
from recprune.recommender.recommender import Recommender
from recprune.search import reference
from recprune.search.question import mask_of
from recprune.shards.answers import answer
from recprune.shards.folder import load_shard, read_folder, shard_folder, write_shards
from recprune.shards.wire import method_to_json, pack
from recprune.storage import json_checksum, read_manifest
from recprune.types import RecpruneError
from tests.support.attribute_cases import attributes_of, some_rows
from tests.support.live_cases import Shop
from tests.support.small_models import walks
from tests.support.strangers import Stranger

FUZZ = int(os.environ.get("RECPRUNE_FUZZ", "0"))
# Another beginning each time, where more are asked for.
FIRST = int.from_bytes(os.urandom(4), "little") if FUZZ else 0
ISAS = instruction_sets()


def save_index(folder: Path, layout: Any, num_sub_items: int, num_splits: int, bias: bool) -> None:
    rng = np.random.default_rng(1)
    dtype = np.uint8 if num_sub_items <= 256 else np.uint16
    codes: Any = rng.integers(0, num_sub_items, (300, num_splits)).astype(dtype)
    codes[:, 0] %= 3  # lists of several blocks
    embeddings = rng.standard_normal((num_splits, num_sub_items, 2)).astype(np.float32)
    biases = rng.standard_normal(300).astype(np.float32) if bias else None
    Index.build(codes, embeddings, item_bias=biases, layout=layout).save(folder)


def save_shards(folder: Path) -> None:
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 20, (300, 8)).astype(np.uint8)
    embeddings = rng.standard_normal((8, 20, 2)).astype(np.float32)
    bias = rng.standard_normal(300).astype(np.float32)
    write_shards(codes, embeddings, folder, 2, item_bias=bias)


def save_prepared(folder: Path, ids: str) -> None:
    holdout = temporal_holdout(walks(20, 30, ids), validation_users=10)
    codebook = assign_random(holdout.train.num_items, num_splits=2, num_sub_items=5)
    neighbours = np.array([[0, 1], [2, 0]], np.int32)
    cold = ColdItems(np.array([5, 29], np.int32), neighbours, np.full((2, 2), 0.5, np.float32))
    prepare(holdout, codebook, {"holdout": "temporal"}, cold).save(folder)


def save_attributes(folder: Path) -> None:
    attributes_of(some_rows(random.Random(4), [*range(90)]), 100).save(folder)


def save_recommender(folder: Path, ids: str, *, attributes: bool = False) -> None:
    torch = pytest.importorskip("torch")
    from recprune.models.architectures import build_model
    from recprune.models.settings import Settings

    torch.manual_seed(0)
    save_prepared(folder.with_name(f"{folder.name}-log"), ids)
    prepared = Prepared.load(folder.with_name(f"{folder.name}-log"))
    values = {"width": 8, "length": 5, "num_blocks": 1, "num_heads": 1, "repeats": 4}
    settings = Settings().with_values(values | {"transitions": 2})
    model = build_model(settings.model, prepared.codes, prepared.num_sub_items)
    model.successors = count_transitions(prepared)
    recommender = Recommender.from_model(prepared, model, settings)
    if attributes:
        count = prepared.num_items
        recommender = recommender.with_attributes(
            attributes_of(some_rows(random.Random(5), [*range(count)]), count)
        )
    recommender.save(folder)


def save_foreign(folder: Path) -> None:
    pytest.importorskip("onnx")
    from tests.support.foreign_models import as_onnx

    rng = np.random.default_rng(6)
    codes = rng.integers(0, 20, (60, 4)).astype(np.uint8)
    index = Index.build(codes, rng.standard_normal((4, 20, 2)).astype(np.float32))
    table = rng.standard_normal((61, 8)).astype(np.float32)
    ids = [f"tea {7 * number % 60:02}" for number in range(60)]
    Recommender.from_encoder(as_onnx(table, 5), index, ids, length=5, first_item=1, padding=0).save(
        folder
    )


def save_vectors(folder: Path) -> None:
    rng = np.random.default_rng(7)
    ids = [f"tea {7 * number % 60:02}" for number in range(60)]
    VectorIndex.build(rng.standard_normal((60, 7)), ids, num_splits=4).save(folder)


def save_turned(folder: Path) -> None:
    pytest.importorskip("onnx")
    from tests.support.foreign_models import as_onnx

    vectors = folder.with_name(f"{folder.name}-vectors")
    save_vectors(vectors)
    table = np.random.default_rng(8).standard_normal((60, 7)).astype(np.float32)
    Recommender.from_encoder(as_onnx(table, 5), VectorIndex.load(vectors), length=5).save(folder)


def save_live(folder: Path, ids: str, shards: int = 1, *, notes: bool = False) -> None:
    """Segments from which items have left, in as many shards, and changes in a log."""
    shape = {"num_items": 300, "has_bias": True, "ids": ids, "num_sub_items": 10}
    shop = Shop(folder, np.random.default_rng(3), **shape)
    shop.live.compact(shards=shards).result()
    shop.remove(20)
    shop.add(40, with_notes=notes)
    shop.seal()
    shop.add(10, with_notes=notes)
    shop.remove(10)
    shop.replace(10)
    shop.live.close()


# Using what was not refused ----------------------------------------------------------------------


def use_index(index: Index, rng: np.random.Generator, patch: pytest.MonkeyPatch) -> None:
    """Every method returns what scoring all items does, by the arrays that were loaded."""
    patch.setenv("RECPRUNE_ISA", str(rng.choice(ISAS)))
    codes, bias = index.item_codes(), index.item_bias
    assert codes.shape == (index.num_items, index.num_splits)
    phi = rng.standard_normal(index.width).astype(np.float32)
    k = int(rng.choice([1, 10, 60, index.num_items, index.num_items + 3]))
    boosts = None
    if index.num_items and rng.random() < 0.3:
        boosts = (rng.permutation(index.num_items)[:3], np.array([1, -1, 0.5], np.float32))
        boosts = boosts[0], boosts[1][: len(boosts[0])]
    with np.errstate(over="ignore", invalid="ignore"):  # such a query is refused
        table = reference.sub_item_scores(phi, index.sub_item_embeddings())
        ids, scores = reference.exhaustive(table, codes, k, bias=bias, boosts=boosts)
    for method in METHODS:
        try:
            top, _ = index.search_visibly(phi, k, method=method, boosts=boosts)
        except InputError:  # the index has no such method, or scores overflow
            continue
        found = top.ids >= 0
        assert np.array_equal(top.ids[found], ids), method
        assert np.array_equal(top.scores[found].view(np.uint32), scores.view(np.uint32)), method
        index.search(np.tile(phi, (3, 1)), k, method=method, threads=2)
    if index.num_items:
        index.score(phi, [0, index.num_items - 1])


def try_index(folder: Path, rng: np.random.Generator, patch: pytest.MonkeyPatch) -> None:
    use_index(Index.load(folder, verify=bool(rng.integers(2))), rng, patch)


def try_vectors(folder: Path, rng: np.random.Generator, patch: pytest.MonkeyPatch) -> None:
    vectors = VectorIndex.load(folder, verify=bool(rng.integers(2)))
    queries = rng.standard_normal((3, vectors.width)).astype(np.float32)
    for rerank in (0, 20) if vectors.vectors is not None else (0,):
        try:
            top = vectors.search(queries, 5, rerank=rerank)
        except InputError:  # scores overflow
            continue
        names = vectors.external_ids(top)
        assert [len(row) for row in names] == (top.ids >= 0).sum(axis=1).tolist()
        if rerank:
            by_codes = vectors.search(queries, 20)
            again = vectors.reranked(queries, by_codes, 5)
            assert np.array_equal(again.ids, top.ids)
    assert repr(vectors)
    assert all(0.0 <= recall.by_codes <= 1.0 for recall in vectors.recalls)
    use_index(vectors.index, rng, patch)


def try_shards(folder: Path, rng: np.random.Generator, patch: pytest.MonkeyPatch) -> None:
    whole = read_folder(folder)
    count = 0
    for shard in whole.shards:
        index = load_shard(shard_folder(folder, shard.number), shard)
        assert (shard.first, index.num_items) == (count, shard.num_items)
        count += index.num_items
        use_index(index, rng, patch)
        query = rng.standard_normal((1, whole.vectors.width)).astype(np.float32)
        settings = [False, 5, method_to_json(METHODS["auto"]), 1]
        answer(index, pack(settings, [query, *[None] * 7]))
    assert count == whole.num_items


def try_live(folder: Path, rng: np.random.Generator, patch: pytest.MonkeyPatch) -> None:
    """As a stranger would have it: the generation names the segments by the checksums they have."""
    patch.setenv("RECPRUNE_ISA", str(rng.choice(ISAS)))
    copy = folder.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    for place in (copy / "generations").iterdir():
        with suppress(RecpruneError, LookupError, TypeError, ValueError):
            manifest = read_manifest(place)
            for entry in manifest["settings"]["segments"]:
                entry[1] = read_manifest(copy / "segments" / f"{entry[0]:08}")["sha256"]
            del manifest["sha256"]
            manifest["sha256"] = json_checksum(manifest)
            (place / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    with LiveIndex.open(copy, verify=bool(rng.integers(2))) as live:
        parts = [
            LiveIndex.open(copy, shard=shard, verify=bool(rng.integers(2)))
            for shard in range(live.snapshot().division.num_shards)
        ]
        for _ in range(2):
            use_live(live, rng)
            moment = live.snapshot().moment
            numbers = [part.at(moment, 1.0).numbers() for part in parts]
            assert np.array_equal(np.sort(np.concatenate(numbers)), live.snapshot().numbers())
            more = live.snapshot().item_codes(live.snapshot().numbers()[:3])
            names: Any = [10**6, 10**6 + 1, 10**6 + 2]
            names = {"none": None, "integers": names, "strings": [*map(str, names)]}
            added = live.add(more, item_ids=names[live.snapshot().id_kind])
            live.replace(added[1:2], more[:1])
            live.remove(added)
            use_live(live, rng)
            live.compact().result()


def use_live(live: LiveIndex, rng: np.random.Generator) -> None:
    snapshot = live.snapshot()
    numbers = snapshot.numbers()
    assert len(np.unique(numbers)) == len(numbers) == snapshot.num_present
    codes, bias = snapshot.item_codes(numbers), snapshot.item_bias(numbers)
    notes = dict(snapshot.notes)
    assert notes.keys() <= {*numbers.tolist()}
    live.note([*notes], [*notes.values()])
    assert dict(live.snapshot().notes) == notes
    if snapshot.id_kind != "none":
        names: Any = snapshot.external_ids(numbers)
        snapshot.find(names)
    scores = rng.standard_normal((snapshot.num_splits, snapshot.num_sub_items)).astype(np.float32)
    k = int(rng.choice([1, 10, 60, len(numbers) + 3]))
    with np.errstate(over="ignore", invalid="ignore"):
        places, totals = reference.exhaustive(scores, codes, k, bias=bias)
    try:
        top = snapshot.search_scores(scores, k)
    except InputError:  # scores overflow
        return
    found = top.ids >= 0
    assert np.array_equal(top.ids[found], numbers[places])
    assert np.array_equal(top.scores[found].view(np.uint32), totals.view(np.uint32))


def try_prepared(folder: Path, _: np.random.Generator, __: pytest.MonkeyPatch) -> None:
    prepared = Prepared.load(folder)
    assert prepared.training_counts().sum() == prepared.train_log().num_interactions
    for targets in (prepared.validation, prepared.test):
        for target in range(len(targets)):
            assert len(prepared.history(targets, target))
            prepared.timeline(targets, target)
    prepared.is_temporal()
    prepared.checksum(with_times=True)
    event_features(prepared.items, prepared.offsets)
    count_transitions(prepared)
    for ids, count in (
        (prepared.user_ids, prepared.num_users),
        (prepared.item_ids, len(prepared.codes)),
    ):
        assert ids.find_all(ids.take(range(count))).tolist() == list(range(count))


def try_codebook(folder: Path, _: np.random.Generator, __: pytest.MonkeyPatch) -> None:
    codebook = Codebook.load(folder)
    assert codebook.occupancy().sum() == codebook.codes.size
    codebook.items_sharing_full_code()


def try_recommender(folder: Path, rng: np.random.Generator, patch: pytest.MonkeyPatch) -> None:
    recommender = Recommender.load(folder, encoder="onnx", verify=bool(rng.integers(2)))
    ids = recommender.item_ids
    known: list[Any] = list(ids.take(range(min(len(ids), 12))))
    k = int(rng.choice([1, 5, 40]))
    histories: list[list[Any]] = [[], known[:1], known, known[:3] * 3, ["nothing", 10**20]]
    for history in histories:
        found = recommender.recommend([history], k, exclude=known[:2], allow=None)
        assert len(found.items[0]) == (found.ids[0] >= 0).sum() <= len(ids)
        assert ids.find_all(found.items[0]).tolist() == found.ids[0][found.ids[0] >= 0].tolist()
        again = recommender.recommend([history], k, exclude=known[:2], method="pqtopk")
        assert found.items == again.items
    use_index(recommender.index, rng, patch)


def use_attributes(attributes: Attributes, rng: np.random.Generator) -> None:
    """Conditions are true of what the arrays say, item by item."""
    count = attributes.num_items
    for name, column in attributes.columns.items():
        place = int(rng.integers(len(column.values))) + 1 if len(column.values) else 0
        value = column.value_of(place)
        written = f"`{name.replace('`', '``')}`"
        lists = [column.codes[item : item + 1] for item in range(count)]
        if column.offsets is not None:
            lists = np.split(column.codes, column.offsets[1:-1]) if count else []
        expected = {f"{written} is null": [0 in codes for codes in lists]}
        if value is not None and not isinstance(value, str) and column.kind != "time":
            text = str(value).lower() if isinstance(value, bool) else repr(value)
            test = f"{text} in {written}" if column.is_list else f"{written} in ({text})"
            if np.isfinite(value):
                expected[test] = [place in codes for codes in lists]
        for test, found in expected.items():
            assert mask_of(attributes.where(test).words, count).tolist() == found, test
        if not column.is_list:
            assert within(Limit(column, 2), np.arange(count)).sum() <= count


def try_attributes(folder: Path, rng: np.random.Generator, _: pytest.MonkeyPatch) -> None:
    attributes = Attributes.load(folder, verify=bool(rng.integers(2)))
    use_attributes(attributes, rng)
    first = next(iter(attributes.columns), None)
    if first is not None and attributes.columns[first].kind == "text":
        rows: dict[str, Any] = {"item_id": [0], first: [["x"]]}
        if not attributes.columns[first].is_list:
            rows[first] = ["x"]
        use_attributes(attributes.updated(rows, RowNumbers(attributes.num_items)), rng)


def try_filters(folder: Path, rng: np.random.Generator, patch: pytest.MonkeyPatch) -> None:
    recommender = Recommender.load(folder, encoder="onnx", verify=bool(rng.integers(2)))
    attributes = recommender.attributes
    if attributes is None:
        return
    use_attributes(attributes, rng)
    single = [name for name, column in attributes.columns.items() if not column.is_list]
    for name in single:
        found = recommender.recommend([[], recommender.item_ids.take([0])], 5, at_most=(name, 1))
        assert found.ids.max() < len(recommender.item_ids)
    use_index(recommender.index, rng, patch)


KINDS: dict[str, tuple[Callable[[Path], None], Callable[..., None], int]] = {
    # How it is saved, how it is used, and how many changes are tried in an ordinary run.
    "full": (lambda to: save_index(to, "full", 30, 8, bias=True), try_index, 100),
    "long codes": (lambda to: save_index(to, "full", 2, 13, bias=False), try_index, 50),
    "short ring": (lambda to: save_index(to, "full", 10, 5, bias=False), try_index, 50),
    "full, all bytes": (lambda to: save_index(to, "full", 256, 8, bias=False), try_index, 50),
    "slim": (lambda to: save_index(to, "slim", 30, 8, bias=True), try_index, 100),
    "compact": (lambda to: save_index(to, "compact", 40, 8, bias=True), try_index, 100),
    "few splits": (lambda to: save_index(to, "full", 5, 1, bias=False), try_index, 40),
    "wide": (lambda to: save_index(to, "full", 300, 3, bias=True), try_index, 50),
    "shards": (save_shards, try_shards, 50),
    "live": (lambda to: save_live(to, "strings"), try_live, 60),
    "live, with notes": (lambda to: save_live(to, "strings", notes=True), try_live, 60),
    "live, in shards": (lambda to: save_live(to, "strings", 3), try_live, 60),
    "live, integers": (lambda to: save_live(to, "integers"), try_live, 30),
    "prepared": (lambda to: save_prepared(to, "strings"), try_prepared, 100),
    "prepared, integers": (lambda to: save_prepared(to, "integers"), try_prepared, 40),
    "codebook": (lambda to: assign_random(50, num_splits=2, num_sub_items=9).save(to), try_codebook, 40),
    "attributes": (save_attributes, try_attributes, 150),
    "filters": (lambda to: save_recommender(to, "integers", attributes=True), try_filters, 40),
    "recommender": (lambda to: save_recommender(to, "strings"), try_recommender, 50),
    "recommender, foreign": (save_foreign, try_recommender, 50),
    "recommender, turned": (save_turned, try_recommender, 50),
    "vectors": (save_vectors, try_vectors, 60),
    "recommender, integers": (lambda to: save_recommender(to, "integers"), try_recommender, 20),
}  # fmt: skip

USUAL = sum(usual for *_, usual in KINDS.values())


@pytest.mark.parametrize("kind", KINDS)
def test_no_change_is_more_than_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, use, usual = KINDS[kind]
    folder = tmp_path / "folder"
    save(folder)
    use(folder, np.random.default_rng(0), monkeypatch)
    stranger = Stranger(folder)
    refused = 0
    count = usual * FUZZ // USUAL if FUZZ else usual
    for number in range(FIRST, FIRST + count):
        (tmp_path / "last").write_text(str(number))
        rng = np.random.default_rng(number)
        said = stranger.change(rng)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                use(folder, rng, monkeypatch)
        except RecpruneError:
            refused += 1
        except BaseException as error:
            raise AssertionError(f"{kind}, change {number}: {said}: {error!r}") from error
        finally:
            stranger.restore()
    use(folder, np.random.default_rng(0), monkeypatch)
    assert refused > count // 4
