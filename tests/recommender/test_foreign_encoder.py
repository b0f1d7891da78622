"""An encoder from elsewhere recommends, is saved, served and checked like one of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from recprune import (
    Index,
    InputError,
    RankedUsers,
    Recommender,
    StorageError,
    fold_in,
    refresh,
)
from recprune.cli import main
from recprune.recommender.saving import KIND
from recprune.search import reference
from recprune.storage import Saved, load_folder, save_folder
from recprune.types import Float32Array
from tests.support.foreign_models import as_function, as_onnx
from tests.support.serving import items_of, serving
from tests.support.small_models import walks

LENGTH = 6
WIDTH = 8
COUNT = 50
NAMES = [f"tea {7 * number % COUNT:02}" for number in range(COUNT)]  # not sorted


def drawn_table() -> Float32Array:
    """Vectors of all numbers: 0 is padding, and that of the items begin with 1."""
    table = np.random.default_rng(1).standard_normal((COUNT + 1, WIDTH)).astype(np.float32)
    table[0] = 0.0
    return table


def drawn_index(**options: Any) -> Index:
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 16, (COUNT, 4)).astype(np.uint8)
    return Index.build(codes, rng.standard_normal((4, 16, 2)).astype(np.float32), **options)


def made(encoder: Any = None, **options: Any) -> Recommender:
    if encoder is None:
        encoder = as_onnx(drawn_table(), LENGTH)
    values: dict[str, Any] = {"length": LENGTH, "first_item": 1, "padding": 0}
    return Recommender.from_encoder(
        encoder,
        options.pop("index", None) or drawn_index(),
        options.pop("item_ids", NAMES),
        **(values | options),
    )


HISTORIES: list[list[Any]] = [
    NAMES[3:5], NAMES[:20], [NAMES[9]], [], ["nothing", NAMES[2]], NAMES[10:16],
]  # fmt: skip


def test_the_answer_is_the_one_worked_by_hand(tmp_path: Path) -> None:
    """Four items of two numbers each, every one a sub-item of its own."""
    vectors = np.array([[[1, 0], [0, 1], [2, 2], [-1, 3]]], np.float32)
    index = Index.build(np.arange(4, dtype=np.uint8)[:, None], vectors)
    table = np.array([[0, 0], [1, 0], [0, 1], [1, 1], [0, 0.5]], np.float32)  # 0: padding
    recommender = Recommender.from_encoder(
        as_onnx(table, 2),
        index,
        ["d", "a", "c", "b"],
        length=2,
        first_item=1,
        padding=0,
        popularity=[5, 7, 1, 7],
    )
    # The last two are c and d: ½ · (1, 1) + (1, 0) = (1.5, 0.5). Scores are d 1.5, a 0.5, c 4, b 0.
    found = recommender.recommend([["b", "c", "d"]], 4, exclude_seen=False)
    assert found.items == [["c", "d", "a", "b"]]
    assert found.scores.tolist() == [[4.0, 1.5, 0.5, 0.0]]
    assert recommender.recommend([["b", "c", "d"]], 4).items == [["a"]]
    # Of one item: (0, 1) at the last place, after a padding, or ½ · (0, 1) before it.
    assert recommender.recommend([["a"]], 1, exclude_seen=False).scores.tolist() == [[3.0]]
    right = Recommender.from_encoder(
        as_onnx(table, 2), index, ["d", "a", "c", "b"], length=2, first_item=1, padding=0,
        pad_side="right",
    )  # fmt: skip
    assert right.recommend([["a"]], 1, exclude_seen=False).scores.tolist() == [[1.5]]
    # Nothing to go by: the most popular, and of equals the one that sorts first.
    assert recommender.recommend([[]], 3).items == [["a", "b", "d"]]
    assert right.recommend([[]], 3).items == [["a", "b", "c"]]
    recommender.save(tmp_path / "saved")
    again = Recommender.load(tmp_path / "saved").recommend([["b", "c", "d"]], 4, exclude_seen=False)
    assert again.items == [["c", "d", "a", "b"]]


@pytest.mark.parametrize("layout", ["full", "slim", "compact"])
def test_answers_are_those_of_the_encoder_and_an_exhaustive_search(layout: Any) -> None:
    bias = np.random.default_rng(3).standard_normal(COUNT).astype(np.float32)
    index = drawn_index(layout=layout, item_bias=bias)
    table = drawn_table()
    recommender = made(index=index)
    assert recommender.index.layout == layout
    rows = [NAMES.index(name) for name in NAMES[3:5]]
    row = np.zeros((1, LENGTH), np.int64)
    row[0, -2:] = [place + 1 for place in rows]
    scores = index.sub_item_scores(as_function(table, LENGTH)(row))
    ids, expected = reference.exhaustive(scores[0], index.item_codes(), COUNT, bias=bias)
    found = recommender.recommend([NAMES[3:5]], COUNT, exclude_seen=False)
    assert found.items[0] == [NAMES[place] for place in ids]
    assert np.array_equal(found.scores[0].view(np.uint32), expected.view(np.uint32))
    assert found.stats is not None
    assert found.stats.exact.all()


def test_a_function_answers_as_the_model_does() -> None:
    by_model = made().recommend(HISTORIES, 10)
    recommender = made(as_function(drawn_table(), LENGTH))
    by_function = recommender.recommend(HISTORIES, 10)
    assert by_function.items == by_model.items
    assert np.allclose(by_function.scores, by_model.scores, atol=1e-5)
    assert by_function.unknown == [[], [], [], [], ["nothing"], []]
    assert repr(recommender) == "Recommender(an encoder from elsewhere, 50 items)"
    assert recommender.continuation is None
    with pytest.raises(InputError, match="a Python function, which is not saved: give an ONNX"):
        recommender.save("nowhere")


def test_who_else_asks_changes_nothing() -> None:
    """Histories are padded to one length, however many and however long the others are."""
    recommender = made()
    many = [NAMES[at % 40 : at % 40 + 1 + at % 9] for at in range(600)]
    together = recommender.recommend(many, 5)
    for at in (0, 255, 256, 599):
        alone = recommender.recommend([many[at]], 5)
        assert alone.items[0] == together.items[at]
        assert np.allclose(alone.scores[0], together.scores[at], atol=1e-5)
    one = made(as_onnx(drawn_table(), LENGTH, histories=1))
    assert one.recommend(many[:20], 5).items == together.items[:20]


def test_numbers_of_32_bits_and_integer_ids() -> None:
    narrow = as_onnx(drawn_table(), LENGTH, kind=onnx.TensorProto.INT32)
    ids = np.arange(COUNT)[::-1] * 3
    recommender = made(narrow, item_ids=ids)
    expected = made().recommend([NAMES[:4]], 5).items[0]
    found = recommender.recommend([ids[:4].tolist()], 5).items[0]
    assert found == [int(ids[NAMES.index(str(name))]) for name in expected]


def test_a_catalogue_of_a_log_is_in_order_already() -> None:
    log = walks(20, COUNT, "strings")
    index = drawn_index()
    recommender = made(index=index, item_ids=log.item_ids)
    assert recommender.index is index
    assert recommender.item_ids is log.item_ids


def test_it_is_evaluated_like_any() -> None:
    """The last item of every history is the target; what was there before may come again."""
    log = walks(30, COUNT, "strings")
    recommender = made(
        as_function(drawn_table(), LENGTH),
        item_ids=log.item_ids,
        popularity=np.bincount(log.items, minlength=COUNT),
    )
    histories = [
        log.items[first : end - 1] for first, end in zip(log.offsets, log.offsets[1:], strict=False)
    ]
    targets = log.items[log.offsets[1:] - 1]
    ranked = RankedUsers.of_targets(recommender.rank(histories, 10).ids, targets)
    outer = recommender.recommend([log.item_ids.take(history) for history in histories], 10,
                                  exclude_seen=False)  # fmt: skip
    assert np.array_equal(recommender.rank(histories, 10).ids, outer.ids)
    assert len(ranked.ids) == 30


def test_a_saved_one_answers_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "encoder.onnx"
    path.write_bytes(as_onnx(drawn_table(), LENGTH))
    recommender = made(path, popularity=np.arange(COUNT))
    expected = recommender.recommend(HISTORIES, 5)
    recommender.save(tmp_path / "saved")
    loaded = Recommender.load(tmp_path / "saved", encoder="onnx")
    loaded.save(tmp_path / "saved")
    for again in (loaded, Recommender.load(tmp_path / "saved", threads=2)):
        found = again.recommend(HISTORIES, 5)
        assert found.items == expected.items
        assert np.array_equal(found.scores, expected.scores)
    assert np.array_equal(loaded.popularity, recommender.popularity)
    with pytest.raises(StorageError, match="which torch does not run"):
        Recommender.load(tmp_path / "saved", encoder="torch")
    asked = ",".join(HISTORIES[1])
    assert (
        main(["recommend", str(tmp_path / "saved"), "--history", asked, "-k", "5", "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["items"] == expected.items[1]


def test_it_is_served_and_answers_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import polars as pl

    recommender = made()
    recommender.save(tmp_path / "saved")
    (expected,) = recommender.recommend([NAMES[3:9]], 4).items
    with serving(tmp_path / "saved", "--workers", "1") as service:
        answer = service.recommend(history=NAMES[3:9], k=4)
    assert items_of(answer) == expected
    pl.DataFrame({"user_id": [1], "history": [NAMES[3:9]]}).write_parquet(tmp_path / "h.parquet")
    out = tmp_path / "out"
    words = [tmp_path / "saved", "--histories", tmp_path / "h.parquet", "--out", out, "-k", 4]
    assert main(["batch", *map(str, words)]) == 0, capsys.readouterr().err
    (written,) = out.glob("*.parquet")
    assert pl.read_parquet(written)["items"].to_list() == [expected]


def test_new_items_get_codes_by_who_took_them() -> None:
    log = walks(40, COUNT + 3, "strings")
    known = log.item_ids.take(range(COUNT))
    folded = fold_in(made(item_ids=known), log)
    assert folded.item_ids == log.item_ids.take(range(COUNT, COUNT + 3))
    assert (folded.events > 0).all()


def test_what_needs_a_training_is_refused(tmp_path: Path) -> None:
    recommender = made()
    recommender.save(tmp_path / "saved")
    with pytest.raises(InputError, match="refresh needs a model that recprune trained"):
        refresh(tmp_path / "saved", walks(20, COUNT, "strings"))
    table = tmp_path / "content.csv"
    table.write_text("item_id,text\n" + "".join(f"{name},tea\n" for name in [*NAMES, "new"]))
    with pytest.raises(InputError, match="content needs a model that recprune trained"):
        fold_in(recommender, content=table)


def test_a_catalogue_that_changes(tmp_path: Path) -> None:
    recommender = made()
    with recommender.make_live(tmp_path / "live") as live:
        over = recommender.with_live(live)
        (best, *_), = over.recommend([NAMES[3:9]], 4).items  # fmt: skip
        assert over.recommend([NAMES[3:9]], 4).items == recommender.recommend([NAMES[3:9]], 4).items
        live.remove(live.snapshot().find([best]))
        assert best not in over.recommend([NAMES[3:9]], 4).items[0]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"length": 5}, r"'history' int64\[histories, 6\] and 'embedding' float\[histories, 8\], not"
         r" one input, int32 or int64 \[histories, 5\], and one output, float32 \[histories, 8\]"),
        ({"length": 0}, "length is 0, expected 1 to 65536"),
        ({"length": 2.0}, "length is 2.0, expected an integer"),
        ({"padding": 7}, "padding is 7, which is the number of item"),
        ({"padding": -2}, "padding is -2"),
        ({"pad_side": "both"}, "pad_side is 'both', expected left or right"),
        ({"first_item": -1}, "first_item is -1"),
        ({"first_item": 2}, r"out of data bounds.* \(its items have the numbers 2 to 51, and padding"),
        ({"popularity": [1]}, r"popularity is int64\[1\], expected integers \[50\]"),
        ({"popularity": np.full(COUNT, -1)}, "popularity is -1 somewhere"),
        ({"item_ids": NAMES[:3]}, "3 item_ids, but 50 items in the index"),
        ({"item_ids": ["a"] * COUNT}, "'a', which is there twice"),
        ({"index": 5}, "index is an int, expected an Index or a VectorIndex"),
        ({"encoder": 5}, "encoder is an int, expected an ONNX model, as a path or bytes, or a fun"),
        ({"encoder": "none.onnx"}, "none.onnx: no such file"),
        ({"encoder": Path()}, "cannot be read: Is a directory"),
        ({"encoder": as_onnx(drawn_table(), LENGTH).replace(b"history", b"h\xffstory")},
         "not a usable ONNX model: .*utf-8"),
        ({"encoder": b"onnx"}, "not a usable ONNX model"),
        ({"encoder": as_onnx(drawn_table(), LENGTH, kind=onnx.TensorProto.INT32, second_input=True)},
         r"'history' int32\[histories, 6\], 'mask' int32\[histories, 6\]"),
        ({"encoder": as_onnx(drawn_table()[:, :4], LENGTH)}, r"float\[histories, 4\], not"),
        ({"encoder": as_onnx(drawn_table(), LENGTH, histories=4)}, "takes 4 histories, no more"),
        ({"encoder": lambda rows: rows[:, :3]}, "vectors of the index are 8 wide"),
        ({"encoder": lambda rows: np.full((len(rows), WIDTH), np.nan)}, r"returns\[0\] holds NaN"),
        ({"encoder": lambda _: None}, r"what the encoder returns is object\[\]"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_when_made(changed: Any, message: str) -> None:
    unusable = message.startswith("not a usable")
    with pytest.raises(StorageError if unusable else InputError, match=message):
        made(**changed)


def test_weights_in_another_file_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where they are found: the recommender would be saved without them."""
    path = tmp_path / "encoder.onnx"
    model = onnx.load_from_string(as_onnx(drawn_table(), LENGTH))
    onnx.save(model, path, save_as_external_data=True, location="weights", size_threshold=1000)
    monkeypatch.chdir(tmp_path)
    assert (tmp_path / "weights").exists()
    with pytest.raises(InputError, match=r"encoder.onnx: .*external_data=False"):
        made(path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "encoder_items",
            np.zeros(3, np.int32),
            r"encoder_items is int32\[3\], expected int32\[50",
        ),
        ("encoder_items", np.full(COUNT, -1, np.int32), "encoder_items is -1 somewhere"),
        ("encoder_items", np.arange(100, 100 + COUNT, dtype=np.int32), "out of data bounds"),
        ("encoder_items", None, "has no encoder_items"),
        ("encoder_onnx", np.zeros(9, np.uint8), "not a usable ONNX model"),
        ("settings", {"encoder": {"length": 6}}, "encoder is {'length': 6}, expected length, padd"),
        ("settings", {"encoder": {"length": 7, "padding": 0, "pad_side": "left"}}, "not one input"),
        ("settings", {"encoder": {"length": 6, "padding": 3, "pad_side": "left"}}, "padding is 3"),
    ],
)
def test_a_folder_that_was_changed_is_refused(
    name: str, value: Any, message: str, tmp_path: Path
) -> None:
    made().save(tmp_path / "saved")
    saved = load_folder(tmp_path / "saved", kind=KIND, version=7)
    assert saved.version == 7
    settings, arrays = saved.settings, dict(saved.arrays)
    if name == "settings":
        settings = value
    elif value is None:
        del arrays[name]
    else:
        arrays[name] = value
    save_folder(tmp_path / "changed", Saved(KIND, 7, settings, arrays, saved.parts))
    with pytest.raises(StorageError, match=message):
        Recommender.load(tmp_path / "changed")


def test_nothing_but_the_answer_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="out of data bounds"):
        made(first_item=30)
    assert capfd.readouterr() == ("", "")
