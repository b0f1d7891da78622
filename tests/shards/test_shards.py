"""Shards on disk, questions cut for them and answers put together: one index, in pieces."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from recprune import Index, InputError, StorageError
from recprune.cli import main
from recprune.search import reference
from recprune.search.methods import METHODS, Auto, Method, RecJPQPrune, Scan
from recprune.search.question import Question, checked_question
from recprune.search.top_k import RECORD, TopK
from recprune.shards.answers import (
    Answer,
    answer,
    best_possible_scores,
    highest_boosts,
    kth_scores,
    merge,
    merge_records,
    message_for,
    plan_rounds,
    read_answer,
)
from recprune.shards.folder import (
    KIND,
    Shard,
    ShardInputs,
    load_shard,
    read_folder,
    shard_folder,
    shard_ranges,
    write_shards,
)
from recprune.shards.wire import method_from_json, method_to_json, pack, unpack
from recprune.storage import MANIFEST, Saved, json_checksum, load_folder, save_folder
from recprune.types import Float32Array
from tests.support.search_cases import Case, cases, methods_for, some_boosts

Pieces = list[tuple[Shard, Index]]


def pieces_of(case: Case, num_shards: int, layout: Any = "auto") -> Pieces:
    """The shards of a case that have items."""
    num_splits, num_sub_items = case.scores.shape
    embeddings = np.ones((num_splits, num_sub_items, 1), np.float32)
    pieces = []
    for number, (first, num_items) in enumerate(shard_ranges(len(case.codes), num_shards)):
        bias = None if case.bias is None else case.bias[first : first + num_items]
        codes = case.codes[first : first + num_items]
        if num_items:
            index = Index.build(codes, embeddings, item_bias=bias, layout=layout)
            pieces.append((Shard(number, first, num_items, "", 0.0, 0.0), index))
    return pieces


def search_pieces(
    pieces: Pieces, question: Question, rounds: int, start: int
) -> tuple[NDArray[np.int64], Float32Array, NDArray[Any]]:
    """Lead a batch through the shards as the sharded index does, without a cluster."""
    found = []
    for rows, steps in plan_rounds(len(question.queries), len(pieces), rounds, start):
        answers: dict[int, Answer] = {}
        for step in steps:
            floors = kth_scores(list(answers.values()), question.k)
            for place in step:
                shard, index = pieces[place]
                message = message_for(question, rows, shard, floors)
                answers[place] = read_answer(answer(index, message))
        ordered = [(pieces[place][0], answers[place]) for place in sorted(answers)]
        ids, scores = merge(ordered, rows.stop - rows.start, question.k)
        records = merge_records([part for _, part in ordered], scores)
        found.append((ids, scores, records))
    ids, scores, records = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return ids, scores, records


def assert_equal(
    found: tuple[NDArray[np.int64], Float32Array, NDArray[Any]], expected: TopK, where: object
) -> None:
    ids, scores, records = found
    assert np.array_equal(ids, expected.ids), where
    assert np.array_equal(scores.view(np.uint32), expected.scores.view(np.uint32)), where
    assert np.array_equal(records["threshold"], expected.stats.threshold), where


def question_of(
    tables: Float32Array,
    k: int,
    method: str | Method,
    exclude: Any,
    allow: Any,
    num_items: int,
    boosts: Any = None,
) -> Question:
    shape = SimpleNamespace(
        num_items=num_items, num_splits=tables.shape[1], num_sub_items=tables.shape[2], width=0
    )
    return checked_question(
        shape, tables, k, method, exclude, allow, boosts=boosts, name="sub_item_scores"
    )


# What a shard has ------------------------------------------------------------------------------


@given(st.integers(0, 3000), st.integers(1, 40))
def test_ranges_cover_all_items_once_and_begin_between_words(num_items: int, count: int) -> None:
    ranges = shard_ranges(num_items, count)
    assert len(ranges) == count
    covered = [item for first, size in ranges for item in range(first, first + size)]
    assert covered == list(range(num_items))
    assert all(first % 64 == 0 for first, size in ranges if size)
    assert max(size for _, size in ranges) - min(size for _, size in ranges) <= 127


@pytest.mark.parametrize("count", [0, -1, 10_001])
def test_an_odd_number_of_shards_is_refused(count: int) -> None:
    with pytest.raises(InputError, match=f"num_shards is {count}, expected 1 to 10000"):
        shard_ranges(100, count)


@given(st.integers(0, 5000), st.integers(1, 9), st.integers(1, 12), st.integers(0, 20))
def test_every_query_meets_every_shard_once(
    num_queries: int, num_shards: int, rounds: int, start: int
) -> None:
    plan = plan_rounds(num_queries, num_shards, rounds, start)
    rows = [row for part, _ in plan for row in range(part.start, part.stop)]
    assert rows == list(range(num_queries))
    for part, steps in plan:
        assert sorted(shard for step in steps for shard in step) == list(range(num_shards))
        assert len(steps) == min(rounds, num_shards)
        assert part.stop - part.start <= 1024
    if rounds > 1 and num_queries >= num_shards:
        # The parts' first shards take turns: nobody waits for the first round of another.
        firsts = [steps[0][0] for _, steps in plan]
        assert sorted(firsts[:num_shards]) == list(range(num_shards))


# Exactness -------------------------------------------------------------------------------------


@settings(max_examples=250)
@given(
    case=cases(),
    num_shards=st.sampled_from([1, 2, 3, 4, 7, 30]),
    rounds=st.integers(1, 5),
    num_queries=st.sampled_from([1, 2, 5, 9]),
    layout=st.sampled_from(["full", "slim", "compact"]),
    start=st.integers(0, 5),
    seed=st.integers(0, 2**32 - 1),
)
def test_shards_return_what_one_index_returns(
    case: Case, num_shards: int, rounds: int, num_queries: int, layout: str, start: int, seed: int
) -> None:
    """Empty shards, more shards than items, ties by the hundred, k beyond n, filters, biases."""
    num_items = len(case.codes)
    if not num_items:
        return
    if case.codes.dtype != np.uint8:
        layout = "full"
    rng = np.random.default_rng(seed)
    tables = np.stack([rng.permuted(case.scores, axis=1) for _ in range(num_queries)])
    exclude = None
    if case.exclude is not None:
        exclude = [rng.permutation(case.exclude)[: rng.integers(30)] for _ in tables]
    allow = case.allow
    if allow is not None and rng.random() < 0.5:
        allow = np.stack([rng.permutation(allow) for _ in tables])
    boosts = None
    if case.boosts is not None:
        boosts = [some_boosts(rng, num_items, rng.random() * 0.5) for _ in tables]
        boosts[0] = case.boosts
    whole = case.index(layout)
    pieces = pieces_of(case, num_shards, layout)
    for method in methods_for(whole):
        expected = whole.search_scores(
            tables, case.k, method=method, exclude=exclude, allow=allow, boosts=boosts
        )
        question = question_of(tables, case.k, method, exclude, allow, num_items, boosts)
        found = search_pieces(pieces, question, rounds, start)
        assert_equal(found, expected, method)
        assert found[2]["exact"].all()
        assert np.array_equal(found[2]["upper_bound"], found[2]["threshold"])


@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_thousands_of_ties_fall_to_the_lowest_ids_of_all_shards(rounds: int) -> None:
    codes = np.zeros((5_000, 8), np.uint8)
    codes[::3] = 1  # also worth 0, but negative: −0.0 and 0.0 are equal, and keep their bits
    tables = np.zeros((6, 8, 256), np.float32)
    tables[:, :, 1] = -0.0
    case = Case(codes, tables[0], 3_000, None, None, None)
    exclude = [list(range(query, 5_000, 7)) for query in range(6)]
    expected = case.index().search_scores(tables, 3_000, exclude=exclude)
    assert np.signbit(expected.scores[0]).any()
    assert not np.signbit(expected.scores[0]).all()
    question = question_of(tables, 3_000, "auto", exclude, None, 5_000)
    found = search_pieces(pieces_of(case, 4), question, rounds, 0)
    assert_equal(found, expected, rounds)


def test_later_rounds_score_fewer_items() -> None:
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 256, (40_000, 8)).astype(np.uint8)
    tables = rng.standard_normal((8, 8, 256)).astype(np.float32)
    case = Case(codes, tables[0], 10, None, None, None)
    expected = case.index().search_scores(tables, 10)
    question = question_of(tables, 10, "scan", None, None, 40_000)
    scored, sent = {}, {}
    for rounds in (1, 2, 4):
        found = search_pieces(pieces_of(case, 4), question, rounds, 0)
        assert_equal(found, expected, rounds)
        scored[rounds] = int(found[2]["items_scored"].sum())
    assert scored[4] < scored[2] < scored[1]
    shard, index = pieces_of(case, 4)[3]
    for name, floors in (("without", None), ("with", expected.scores[:, -1])):
        sent[name] = len(answer(index, message_for(question, slice(0, 8), shard, floors)))
    assert sent["with"] < sent["without"], "what lies below the floor is not sent"


@pytest.mark.parametrize("method", [Scan(over_inflation=0.5), Scan(max_steps=2), RecJPQPrune(2)])
def test_bounds_of_unsafe_searches_hold_for_all_shards(method: Any) -> None:
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 256, (20_000, 8)).astype(np.uint8)
    tables = rng.standard_normal((5, 8, 256)).astype(np.float32)
    case = Case(codes, tables[0], 10, None, None, None)
    boosts = [some_boosts(rng, 20_000, share) for share in (1e-4, 0.01, 0.3, 0.001, 0.002)]
    exact = case.index().search_scores(tables, 40_000, boosts=boosts)
    for rounds in (1, 2, 3):
        question = question_of(tables, 10, method, None, None, 20_000, boosts)
        found = search_pieces(pieces_of(case, 3), question, rounds, 0)
        ids, _, records = found
        for query in range(5):
            missing = ~np.isin(exact.ids[query], ids[query]) & (exact.ids[query] >= 0)
            best_missing = exact.scores[query][missing].max()
            assert best_missing <= records["upper_bound"][query]
            if records["exact"][query]:
                assert ids[query].tolist() == exact.ids[query, :10].tolist()
    assert not records["exact"].all(), "a limit that nothing came up against proves nothing"


@given(case=cases())
def test_no_item_scores_above_the_best_possible_score(case: Case) -> None:
    if not len(case.codes):
        return
    bias = float(case.bias.max()) if case.bias is not None else 0.0
    bound = best_possible_scores(case.scores[None], bias)
    top = case.index().search_scores(case.scores, 1)
    assert top.scores[0] <= bound[0]


def test_no_boosted_item_of_a_missing_shard_scores_above_its_bound() -> None:
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 3, (300, 4)).astype(np.uint8)
    tables = rng.standard_normal((5, 4, 3)).astype(np.float32)
    boosts = [some_boosts(rng, 300, 0.3) for _ in tables]
    question = question_of(tables, 10, "auto", None, None, 300, boosts)
    shards = [Shard(number, first, 100, "", 0.0, 0.0) for number, first in enumerate((0, 100, 200))]
    rows = slice(1, 5)
    for missing in ([shards[1]], [shards[0], shards[2]]):
        highest = highest_boosts(question, rows, missing)
        bound = best_possible_scores(tables[rows], 0.0) + highest
        for place, query in enumerate(range(1, 5)):
            ids, scores = reference.exhaustive(tables[query], codes, 300, boosts=boosts[query])
            theirs = np.isin(ids // 100, [shard.number for shard in missing])
            assert scores[theirs].max() <= bound[place]
            boosted = dict(zip(*(array.tolist() for array in boosts[query]), strict=True))
            values = [boosted[item] for item in ids[theirs].tolist() if item in boosted]
            assert highest[place] == max([0.0, *values])


@given(
    st.lists(st.sampled_from(["u1", "u4", "i8", "f4", None]), max_size=5),
    st.lists(st.integers(0, 5), min_size=1, max_size=2),
)
def test_a_message_holds_what_was_packed(types: list[str | None], shape: list[int]) -> None:
    rng = np.random.default_rng(0)
    arrays = [None if kind is None else rng.integers(0, 99, shape).astype(kind) for kind in types]
    settings, found = unpack(pack([1, "ü", 0.1, None], arrays))
    assert settings == [1, "ü", 0.1, None]
    for array, other in zip(arrays, found, strict=True):
        assert (array is None) == (other is None)
        if array is not None and other is not None:
            assert array.dtype == other.dtype
            assert array.shape == other.shape
            assert np.array_equal(array, other)
            assert other.flags.aligned


@pytest.mark.parametrize(
    "method", [*METHODS.values(), Auto(deadline_us=0.1), RecJPQPrune(7, 0.25, 1e5, 3)]
)
def test_methods_survive_a_message(method: Any) -> None:
    assert method_from_json(*unpack(pack(method_to_json(method), []))[0]) == method


def test_nobody_answered_is_an_empty_answer() -> None:
    ids, scores = merge([], 2, 3)
    assert ids.tolist() == [[-1] * 3] * 2
    assert np.isneginf(scores).all()


def test_figures_of_shards_are_added_up() -> None:
    def said(*values: Any) -> Answer:
        record = np.array([values], RECORD)
        ids = np.array([[7]], np.uint32)
        return ids, np.array([[1.0]], np.float32), record.view(np.int64).reshape(1, -1)

    first = said(3, 1, 1, 10, 100, 1000, 1.0, 1.0, 5, 3, 8)
    second = said(2, 0, 2, 20, 200, 2000, 1.0, 9.0, 5, 4, 1)
    merged = merge_records([first, second], np.array([[1.0, 1.0]], np.float32))
    assert merged[0].tolist() == (2, 0, 3, 30, 300, 3000, 1.0, 9.0, 0, 4, 8)


# On disk -----------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> tuple[NDArray[np.uint8], Float32Array, Float32Array]:
    rng = np.random.default_rng(4)
    codes = rng.integers(0, 256, (1_000, 8)).astype(np.uint8)
    embeddings = rng.standard_normal((8, 256, 2)).astype(np.float32)
    bias = rng.standard_normal(1_000).astype(np.float32)
    for name, array in (("codes", codes), ("embeddings", embeddings), ("bias", bias)):
        np.save(tmp_path / f"{name}.npy", array)
    return codes, embeddings, bias


def test_a_folder_of_version_1_is_still_read(
    model: tuple[NDArray[np.uint8], Float32Array, Float32Array], tmp_path: Path
) -> None:
    """Its vectors had no version, and it knew shards by the checksums of their manifests' files."""
    codes, embeddings, _ = model
    folder = tmp_path / "sharded"
    write_shards(codes, embeddings, folder, 2)
    new = load_folder(folder, kind=KIND, version=2)
    entries = [dict(entry) for entry in new.settings["shards"]]
    for entry in entries:
        manifest = shard_folder(folder, entry["number"]) / MANIFEST
        entry["manifest_sha256"] = hashlib.sha256(manifest.read_bytes()).hexdigest()
    arrays = {"transposed_embeddings": new.parts["vectors"].arrays["transposed_embeddings"]}
    old = Saved(KIND, 1, {**new.settings, "shards": entries, "num_sub_items": 256}, arrays)
    save_folder(tmp_path / "old", old)
    for name in ("transposed_embeddings.npy", MANIFEST):
        (tmp_path / "old" / name).replace(folder / name)
    opened = read_folder(folder)
    assert np.array_equal(opened.vectors.sub_item_embeddings(), embeddings)
    for shard in opened.shards:
        assert load_shard(shard_folder(folder, shard.number), shard).num_items
    with pytest.raises(StorageError, match="holds another index"):
        load_shard(shard_folder(folder, 0), opened.shards[1])


def stamps(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.glob("shard-*")}


def test_a_sharded_folder_has_ordinary_indexes(model: Any, tmp_path: Path) -> None:
    codes, embeddings, bias = model
    folder = tmp_path / "sharded"
    write_shards(codes, embeddings, folder, 3, item_bias=bias)
    saved = read_folder(folder)
    assert saved.num_items == 1_000
    assert np.array_equal(saved.vectors.sub_item_embeddings(), embeddings)
    for shard in saved.shards:
        index = load_shard(shard_folder(folder, shard.number), shard)
        items = slice(shard.first, shard.stop)
        assert np.array_equal(index.item_codes(), codes[items])
        assert shard.highest_bias == bias[items].max()
        assert shard.largest_bias == np.abs(bias[items]).max()
    assert not list(folder.glob(".*"))
    assert not (folder / "unfinished").exists()


def test_what_is_finished_is_not_built_again(model: Any, tmp_path: Path) -> None:
    codes, embeddings, _ = model
    folder = tmp_path / "sharded"

    def stop_at_the_third(step: str) -> None:
        if step == "shard 3 of 4":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shards(codes, embeddings, folder, 4, progress=stop_at_the_third)
    with pytest.raises(StorageError, match="was never finished; the same command goes on"):
        read_folder(folder)
    before = stamps(folder)
    assert {"shard-00000", "shard-00001"} <= set(before)
    (shard_folder(folder, 1) / "codes.npy").write_bytes(b"short")  # as a full disk leaves it
    write_shards(codes, embeddings, folder, 4)
    after = stamps(folder)
    assert after["shard-00000"] == before["shard-00000"], "it was whole"
    assert after["shard-00001"] != before["shard-00001"], "it was damaged"
    assert read_folder(folder).num_items == 1_000

    path = shard_folder(folder, 2) / "codes.npy"
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1  # of the same size
    path.write_bytes(damaged)
    shard = read_folder(folder).shards[2]
    with pytest.raises(StorageError, match="changed or damaged"):
        load_shard(path.parent, shard)
    write_shards(codes, embeddings, folder, 4)
    load_shard(path.parent, shard)
    after = stamps(folder)

    changed = codes.copy()
    changed[999, 0] ^= 1
    write_shards(changed, embeddings, folder, 4)
    last = stamps(folder)
    assert last["shard-00002"] == after["shard-00002"], "nothing of it has changed"
    assert last["shard-00003"] != after["shard-00003"]
    write_shards(changed, embeddings, folder, 2)
    assert len(read_folder(folder).shards) == 2
    assert {path.name for path in folder.glob("shard-*") if path.is_dir()} == {
        "shard-00000",
        "shard-00001",
    }


def test_other_peoples_folders_are_left_alone(model: Any, tmp_path: Path) -> None:
    codes, embeddings, _ = model
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("mine")
    with pytest.raises(StorageError, match="something else, not a sharded index; not overwritten"):
        write_shards(codes, embeddings, precious, 2)
    Index.build(codes, embeddings).save(tmp_path / "index")
    with pytest.raises(StorageError, match="a saved index, not a sharded index; not overwritten"):
        write_shards(codes, embeddings, tmp_path / "index", 2)
    with pytest.raises(StorageError, match="holds a saved index, not a sharded index"):
        read_folder(tmp_path / "index")


def everything_in(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("mark", [b"", b"my notes on what is unfinished", b"\xff"])
def test_a_folder_with_names_like_ours_is_left_alone(
    model: Any, tmp_path: Path, mark: bytes
) -> None:
    codes, embeddings, _ = model
    precious = tmp_path / "precious"
    (precious / "shard-00007").mkdir(parents=True)
    (precious / "unfinished").write_bytes(mark)
    (precious / "shard-notes.txt").write_text("mine")
    (precious / "shard-00007" / "letter").write_text("dear")
    before = everything_in(precious)
    with pytest.raises(StorageError, match="is something else; not overwritten"):
        write_shards(codes, embeddings, precious, 2)
    with pytest.raises(StorageError, match="not a saved sharded index"):
        read_folder(precious)
    assert everything_in(precious) == before


def test_only_what_we_wrote_is_swept(model: Any, tmp_path: Path) -> None:
    codes, embeddings, _ = model
    folder = tmp_path / "sharded"
    write_shards(codes, embeddings, folder, 4)
    (folder / "shard-00003" / "letter").write_text("dear")
    (folder / "shard-00009").mkdir()
    (folder / "shard-00009" / "letter").write_text("dear")
    for name in ("shard-notes.txt", "shard-00008.json", ".shard-of-mine"):
        (folder / name).write_text("mine")
    others = {name for name in everything_in(folder) if "letter" in name or "shard-00003/" in name}
    others |= {"shard-notes.txt", "shard-00008.json", ".shard-of-mine"}
    (folder / "transposed_embeddings.npy").write_bytes(b"of version 1")
    (folder / ".shard-00001.abcdefgh").mkdir()  # as a kill leaves it
    (folder / ".shard-00001.abcdefgh" / "codes.npy").write_bytes(b"half")
    (folder / ".shard-00001.json.a_cdefg1").write_bytes(b"half")
    write_shards(codes, embeddings, folder, 2)
    kept = {"shard-00000", "shard-00001"}
    left = {name for name in everything_in(folder) if name.split("/")[0].split(".")[0] not in kept}
    assert left == others | {"manifest.json", "vectors_transposed_embeddings.npy"}


def test_half_a_mark_is_no_obstacle(model: Any, tmp_path: Path) -> None:
    codes, embeddings, _ = model
    (tmp_path / "sharded").mkdir()
    (tmp_path / "sharded" / ".unfinished.abcdefgh").touch()  # as a kill leaves it
    write_shards(codes, embeddings, tmp_path / "sharded", 2)
    assert read_folder(tmp_path / "sharded").num_items == 1_000


def test_bad_inputs_are_refused_before_anything_is_written(model: Any, tmp_path: Path) -> None:
    codes, embeddings, bias = model
    folder = tmp_path / "sharded"
    with pytest.raises(InputError, match="layout is 'tiny', expected one of"):
        write_shards(codes, embeddings, folder, 2, layout="tiny")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="codes is a list"):
        write_shards([[1]], embeddings, folder, 2)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"item_bias is float32\[5\], expected float32 \[1000\]"):
        write_shards(codes, embeddings, folder, 2, item_bias=bias[:5])
    assert not folder.exists()
    bad = codes % 200
    bad[999, 3] = 250
    with pytest.raises(InputError, match=r"shard 1 \(items 512 to 999\): codes\[487, 3\]"):
        write_shards(bad, embeddings[:, :250], folder, 2)


def test_a_foreign_shard_is_refused(model: Any, tmp_path: Path) -> None:
    codes, embeddings, _ = model
    write_shards(codes, embeddings, tmp_path / "sharded", 2)
    place = shard_folder(tmp_path / "sharded", 0)
    expected = read_folder(tmp_path / "sharded").shards[0]
    Index.build(codes[:512] ^ np.uint8(1), embeddings).save(place)
    with pytest.raises(StorageError, match="holds another index than the one that belongs here"):
        load_shard(place, expected)


def test_a_damaged_manifest_is_refused(model: Any, tmp_path: Path) -> None:
    codes, embeddings, _ = model
    folder = tmp_path / "sharded"
    write_shards(codes, embeddings, folder, 2)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["settings"]["shards"][0]["first"] = 64
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(StorageError, match="the manifest was changed or damaged"):
        read_folder(folder)


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        (0, "first", 64), (1, "first", 500), (0, "num_items", 511), (1, "number", 0),
        (0, "num_items", -1), (0, "num_items", "512"), (1, "highest_bias", float("inf")),
        (1, "largest_bias", None), (0, "manifest_sha256", 5),
    ],
)  # fmt: skip
def test_shards_that_are_no_ranges_of_all_items_are_refused(
    model: Any, tmp_path: Path, place: int, name: str, value: Any
) -> None:
    codes, embeddings, bias = model
    folder = tmp_path / "sharded"
    write_shards(codes, embeddings, folder, 2, item_bias=bias)
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["sha256"]
    manifest["settings"]["shards"][place][name] = value
    manifest["sha256"] = json_checksum(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(StorageError, match="sharded: (shard|num_items)"):
        read_folder(folder)


def test_a_shard_with_other_items_or_biases_than_the_whole_says_is_refused(
    model: Any, tmp_path: Path
) -> None:
    codes, embeddings, bias = model
    folder = tmp_path / "sharded"
    write_shards(codes, embeddings, folder, 2, item_bias=bias)
    shard = read_folder(folder).shards[1]
    for wrong in (replace(shard, num_items=1), replace(shard, largest_bias=0.0)):
        with pytest.raises(StorageError, match="other items or biases than the sharded index says"):
            load_shard(shard_folder(folder, 1), wrong)


def test_more_is_wanted_than_a_shard_has(model: Any) -> None:
    """Of all items, which is less than a shard alone would refuse."""
    codes, embeddings, _ = model
    index = Index.build(codes[:100], embeddings)
    query = np.ones((1, index.width), np.float32)
    settings = [False, 10**8, method_to_json(METHODS["auto"]), 1]
    _, (ids, _, records) = unpack(answer(index, pack(settings, [query, *[None] * 7])))
    assert ids.shape == (1, 100)
    assert records.view(RECORD)["threshold"].item() == -np.inf, "none of them is the k-th"


# The command -------------------------------------------------------------------------------------


def test_sharding_by_command(
    model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    codes, embeddings, bias = model
    files = [str(tmp_path / f"{name}.npy") for name in ("codes", "embeddings", "bias")]
    out = str(tmp_path / "from-files")
    words = ["index", "shard", *files[:2], "--item-bias", files[2], "--shards", "3", "--out", out]
    assert main(words) == 0
    assert "shards           3" in capsys.readouterr().out
    Index.build(codes, embeddings, item_bias=bias, layout="compact").save(tmp_path / "index")
    again = str(tmp_path / "from-index")
    assert main(["index", "shard", str(tmp_path / "index"), "--shards", "3", "--out", again]) == 0
    assert main(["index", "info", again]) == 0
    shown = capsys.readouterr().out
    assert "items            1000" in shown
    for number, shard in enumerate(read_folder(again).shards):
        compact = load_shard(shard_folder(again, number), shard)
        assert compact.describe()["layout"] == "compact", "as the index was"
        full = Index.load(shard_folder(out, number))
        assert full.describe()["layout"] == "full"
        phi = np.ones(16, np.float32)
        assert np.array_equal(compact.search(phi, 50).ids, full.search(phi, 50).ids)


def test_sharding_by_command_says_what_is_wrong(
    model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del model
    out = str(tmp_path / "out")
    codes, embeddings, bias = (
        str(tmp_path / f"{name}.npy") for name in ("codes", "embeddings", "bias")
    )
    for words, message in (
        ([str(tmp_path / "no")], "not a saved index: no such folder"),
        ([codes], "not a saved index"),
        ([codes, str(tmp_path / "no.npy")], "no.npy: no such file"),
        ([codes, bias], "sub_item_embeddings is float32[1000], expected float32 [M, B, d/M]"),
        ([str(tmp_path), "--item-bias", bias], "item biases go with codes and embeddings"),
        ([codes, embeddings, "--threads", "0"], "threads is 0, expected an integer from 1"),
    ):
        assert main(["index", "shard", *words, "--shards", "2", "--out", out]) == 2
        assert message in capsys.readouterr().err
    assert not Path(out).exists()


def test_inputs_may_be_a_codebook(tmp_path: Path) -> None:
    from recprune import assign_random

    codebook = assign_random(300, num_splits=8, seed=1)
    codebook.save(tmp_path / "codebook")
    np.save(tmp_path / "embeddings.npy", np.ones((8, 256, 1), np.float32))
    inputs = ShardInputs(str(tmp_path / "codebook"), str(tmp_path / "embeddings.npy"))
    codes, _, bias, layout = inputs.read()
    assert np.array_equal(codes, codebook.codes)
    assert bias is None
    assert layout == "auto"
