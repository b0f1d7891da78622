"""A folder that a stranger may have made: opened whole and right, or refused by name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from recprune import Index, InputError, StorageError
from recprune.search import reference
from recprune.storage import Saved, load_folder, save_folder
from recprune.types import Float32Array, Json
from tests.support.search_cases import Case, assert_same

NUM_ITEMS = 700
NO_ITEM = 2**32 - 1


def built(layout: Any = "full", num_sub_items: int = 100, num_splits: int = 8) -> Index:
    rng = np.random.default_rng(num_sub_items)
    dtype = np.uint8 if num_sub_items <= 256 else np.uint16
    codes: Any = rng.integers(0, num_sub_items, (NUM_ITEMS, num_splits)).astype(dtype)
    codes[:, 0] %= 5  # lists of several blocks
    embeddings = rng.standard_normal((num_splits, num_sub_items, 2)).astype(np.float32)
    bias = rng.standard_normal(NUM_ITEMS).astype(np.float32)
    return Index.build(codes, embeddings, item_bias=bias, layout=layout)


INDEXES = {
    "full": built(),
    "cells": built(num_sub_items=20),
    "odd cells": built(num_sub_items=20, num_splits=11),
    "short ring": built(num_sub_items=20, num_splits=5),
    "slim": built("slim", num_sub_items=20),
    "slim, odd": built("slim", num_sub_items=20, num_splits=11),
    "slim, wide": built("slim", num_sub_items=300),
    "compact": built("compact"),
    "wide": built(num_sub_items=300),
    "few splits": built(num_splits=3),
    "no items": Index.of_no_items(np.ones((2, 4, 3), np.float32)),
}


def changed(
    parts: Saved, name: str, change: Callable[[NDArray[Any]], NDArray[Any] | None]
) -> Saved:
    """Parts with one array changed in place, replaced, or, where that returns None, left out."""
    array = parts.arrays[name].copy()
    after = change(array)
    arrays = {key: value for key, value in parts.arrays.items() if key != name}
    return replace(parts, arrays=arrays if after is None else {**arrays, name: after})


def setting(place: Any, value: Any) -> Callable[[NDArray[Any]], NDArray[Any]]:
    def change(array: NDArray[Any]) -> NDArray[Any]:
        assert not np.array_equal(array[place], value)
        array[place] = value
        return array

    return change


def exchanging(one: Any, other: Any) -> Callable[[NDArray[Any]], NDArray[Any]]:
    def change(array: NDArray[Any]) -> NDArray[Any]:
        assert array[one] != array[other]
        array[one], array[other] = array[other], array[one]
        return array

    return change


@pytest.mark.parametrize("name", INDEXES)
def test_what_was_built_is_opened(name: str, tmp_path: Path) -> None:
    INDEXES[name].save(tmp_path / "index")
    assert Index.load(tmp_path / "index").describe() == INDEXES[name].describe()


@pytest.mark.parametrize(
    ("index", "name", "change", "message"),
    [
        ("full", "codes", setting((3, 7), 100), r"codes\[3, 7\] is 100, expected less than 100"),
        ("full", "codes", setting((3, 7), 99), "whose code there is not that in codes"),
        ("wide", "codes", setting((699, 2), 300), r"codes\[699, 2\] is 300, expected less than"),
        ("wide", "codes", lambda a: a.astype(np.uint8), r"codes is uint8\[700, 8\], expected uint1"),
        ("full", "codes", lambda a: a[:-1], r"codes is uint8\[699, 8\], expected uint8\[700, 8\]"),
        ("full", "codes", lambda _: None, "index has no codes"),
        ("compact", "list_items", lambda _: None, "index has no list_items"),
        ("cells", "cell_items", lambda _: None, "index has no cell_items"),
        ("full", "transposed_embeddings", lambda _: None, "index has no transposed_embeddings"),
        ("full", "transposed_embeddings", lambda a: a[0], "transposed_embeddings is float32"),
        ("full", "transposed_embeddings", lambda a: a.astype("f8"), "float64"),
        ("full", "transposed_embeddings", lambda a: a[:, :, :50].copy(), "num_sub_items is 100"),
        ("full", "transposed_embeddings", setting((1, 1, 1), np.nan), r"embeddings\[301\] is nan"),
        ("full", "item_bias", setting(5, np.inf), r"item_bias\[5\] is inf, expected a finite"),
        ("full", "item_bias", lambda a: a[:5], r"item_bias is float32\[5\], expected float32\[700\]"),
        ("compact", "list_offsets", setting(0, 1), r"list_offsets\[0\] is 1, expected 0"),
        ("compact", "list_offsets", setting(1, -1), r"list_offsets\[1\] is -1, expected no less"),
        ("compact", "list_offsets", setting(100, 99), r"list_offsets\[100\] is 99, expected 1\d"),
        ("compact", "list_second_codes", setting((0, 9), 100), "second_codes.0, 9. is 100, expected"),
        ("compact", "list_second_codes", exchanging((0, 3), (0, 4)), "expected more than the one"),
        ("compact", "list_bases", setting(0, 1), r"list_bases\[0\] does not go on"),
        ("compact", "list_bases", setting(1, 255), r"list_(bases|steps)\[1\] does not go on"),
        ("compact", "list_steps", setting(0, 2**64 - 1), r"list_bases\[0\] does not go on"),
        ("compact", "list_codes", setting((2, 0, 0), 100), r"list_codes\[2, 0\] is 100, expected"),
        ("compact", "list_items", setting((1, 5), NUM_ITEMS), r"list_items\[1, 5\] is 700, expected"),
        ("compact", "list_items", setting((1, 5), NO_ITEM), r"list_items\[1, 5\] is padding"),
        ("compact", "list_items", setting((0, 0), 0), "list_items"),
        ("full", "list_items", exchanging((0, 0), (1, 0)), "list_items"),
        ("full", "list_codes", setting((0, 0, 0), 50), "is not that in codes"),
        ("cells", "cell_pair_lines", setting(0, 1), r"cell_pair_lines\[0\] is 1, expected 0"),
        ("cells", "cell_pair_lines", setting(1, 399), r"pair_lines\[1\] leaves a pair fewer lines"),
        ("cells", "cell_overflow", setting(0, 399), r"cell_overflow\[0\] of pair 0 is 399, expected"),
        ("cells", "cell_overflow", setting(400, 2**31), r"overflow\[400\] of pair 0 is 2147483648"),
        ("cells", "cell_overflow", setting(402, 2**31), r"overflow\[1\] of pair 1 is 2147483648"),
        ("cells", "cell_starts", setting(0, 1), "cell_starts of pair 0 has other items"),
        ("cells", "cell_starts", setting(300, 701), r"cell_starts\[\d+\] of pair 0 is \d+, expected"),
        ("cells", "cell_items", setting((3, 0), NO_ITEM), r"cell_items\[3, 0\] is 4294967295, expect"),
        ("cells", "cell_items", exchanging((1, 0), (1, 600)), "which does not belong there"),
        ("cells", "cell_lines", setting((0, 0), 99), "codes of item \\d+ are not those in codes"),
        ("cells", "cell_last_keys", setting((0, 5), 9), "codes of item \\d+ are not those in codes"),
        ("odd cells", "cell_items", setting((5, 0), NO_ITEM), r"cell_items\[5, 0\] is 4294967295"),
        ("odd cells", "cell_second_lines", setting((3, 0), 99), "are not those in codes"),
        ("short ring", "cell_lines", setting((0, 16), 99), "are not those in codes"),
        ("short ring", "cell_last_keys", lambda a: a.reshape(700, 0), r"cell_last_keys is uint16"),
        ("few splits", "list_codes", lambda a: a[:0], r"list_codes is uint8\[0"),
        ("slim", "codes", setting((3, 7), 3), "does not belong there|are not those in codes"),
        ("slim", "cell_items", exchanging((1, 0), (1, 600)), "which does not belong there"),
        ("slim", "cell_lines", setting((0, 0), 99), "codes of item \\d+ are not those in codes"),
        ("slim", "cell_last_keys", lambda _: np.zeros((4, 700), np.uint16), "cell_last_keys is uint1"),
        ("slim, odd", "cell_second_lines", setting((3, 0), 99), "are not those in codes"),
    ],
)  # fmt: skip
def test_a_wrong_array_is_named(index: str, name: str, change: Any, message: str) -> None:
    parts = changed(INDEXES[index].parts(), name, change)
    with pytest.raises(StorageError, match=f"^mine: .*{message}"):
        Index.from_parts(parts, "mine")


def test_an_item_in_two_lists_is_noticed_without_codes() -> None:
    """Item-major codes would say in which list it belongs; a compact index has none."""
    parts = INDEXES["compact"].parts()
    items = parts.arrays["list_items"].copy()
    # An item of the first list as the first one of the last, which it does not put out of order.
    start = int(parts.arrays["list_offsets"][4])
    twice = int(items[0].min())
    assert items[start, 0] > twice
    items[start, 0] = twice
    with pytest.raises(StorageError, match=f"mine: list_items has item {twice} twice"):
        Index.from_parts(replace(parts, arrays={**parts.arrays, "list_items": items}), "mine")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_items": 701}, "expected float32.701"),
        ({"num_items": -1}, "num_items is -1"),
        ({"num_items": 2**40}, "num_items is 1099511627776"),
        ({"num_items": 700.0}, "num_items is 700.0"),
        ({"num_items": None}, "num_items is None"),
        ({"num_sub_items": 10**6}, "num_sub_items is 1000000, transposed_embeddings has 100"),
        ({"num_sub_items": 5}, "num_sub_items is 5, transposed_embeddings has 100"),
        ({"layout": "compact"}, "has codes, which"),
        ({"layout": "slim"}, "has list_steps, which"),
        ({"layout": "round"}, "layout is 'round'"),
        ({"layout": []}, "layout is"),
        ({"more": 1}, "more"),
    ],
)
def test_wrong_settings_are_named(settings: Json, message: str) -> None:
    parts = INDEXES["full"].parts()
    with pytest.raises(StorageError, match=f"^mine: .*{message}"):
        Index.from_parts(replace(parts, settings={**parts.settings, **settings}), "mine")


def test_checksums_are_compared_unless_waived(tmp_path: Path) -> None:
    INDEXES["wide"].save(tmp_path / "index")
    path = tmp_path / "index" / "item_bias.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # another number, and as good as the one before
    path.write_bytes(content)
    with pytest.raises(StorageError, match="item_bias.npy: checksum does not match"):
        Index.load(tmp_path / "index")
    assert Index.load(tmp_path / "index", verify=False).num_items == NUM_ITEMS


STRANGER = """
import sys
import numpy as np
from recprune import Index, StorageError, METHODS
try:
    index = Index.load(sys.argv[1], verify=False)
except StorageError as error:
    print("refused", error)
    sys.exit()
rng = np.random.default_rng(0)
for method in METHODS:
    for _ in range(20):
        index.search_visibly(rng.standard_normal(16).astype(np.float32), 100, method=method)
"""


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("num_sub_items", None),
        ("list_items", lambda a: np.where(a == NO_ITEM, a, a + 2**31).astype(np.uint32)),
        ("cell_overflow", lambda a: a + np.uint32(2**31)),
        ("cell_starts", lambda a: a + np.uint32(2**31)),
        ("cell_pair_lines", lambda a: a * 1000),
        ("cell_items", lambda a: a + np.uint32(2**31)),
        ("codes", lambda a: np.full_like(a, 255)),
        ("list_bases", lambda a: a + np.uint8(1)),
        ("list_codes", lambda a: np.full_like(a, 255)),
    ],
)
def test_no_folder_reaches_foreign_memory(tmp_path: Path, name: str, change: Any) -> None:
    """In a process of its own: what is not refused could end it."""
    INDEXES["cells"].save(tmp_path / "index")
    parts = load_folder(tmp_path / "index", kind="index", version=5)
    if change is None:
        parts = replace(parts, settings={**parts.settings, name: 2})
    else:
        parts = changed(parts, name, change)
    save_folder(tmp_path / "index", parts)
    command = [sys.executable, "-c", STRANGER, str(tmp_path / "index")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"refused {tmp_path}"), result.stdout
    assert name in result.stdout


@pytest.mark.parametrize("num_splits", [1, 2, 3])
def test_a_saved_index_of_few_splits(tmp_path: Any, num_splits: int) -> None:
    rng = np.random.default_rng(num_splits)
    codes = rng.integers(0, 5, (300, num_splits)).astype(np.uint8)
    embeddings = rng.standard_normal((num_splits, 5, 2)).astype(np.float32)
    Index.build(codes, embeddings, layout="compact").save(tmp_path / "index")
    loaded = Index.load(tmp_path / "index", verify=True)
    phi = rng.standard_normal(2 * num_splits).astype(np.float32)
    scores = reference.sub_item_scores(phi, embeddings)
    assert_same(loaded.search(phi, 7), reference.exhaustive(scores, codes, 7), num_splits)


@pytest.mark.parametrize(
    "name",
    ["codes", "list_offsets", "list_second_codes", "list_bases", "list_steps", "list_codes",
     "list_items", "cell_pair_lines", "cell_overflow", "cell_lines", "cell_starts",
     "cell_last_keys", "cell_items", "item_bias"],
)  # fmt: skip
def test_parts_that_do_not_fit_together_are_refused(
    trained: tuple[Index, Float32Array, Case], name: str
) -> None:
    index, _, case = trained
    bias = np.zeros(len(case.codes), np.float32)
    index = Index.build(case.codes, index.sub_item_embeddings(), item_bias=bias)
    parts = index.parts()
    arrays = {**parts.arrays, name: parts.arrays[name][:-1].copy()}
    with pytest.raises(StorageError, match=r"mine: \w+ is \w+\[.*\], expected \w+\["):
        Index.from_parts(replace(parts, arrays=arrays), "mine")


def test_parts_of_another_kind_or_version_are_refused(
    trained: tuple[Index, Float32Array, Case],
) -> None:
    parts = trained[0].parts()
    with pytest.raises(StorageError, match="mine: index format version 99, this recprune reads 4"):
        Index.from_parts(replace(parts, version=99), "mine")
    with pytest.raises(StorageError, match="mine: holds a saved codebook, not an index"):
        Index.from_parts(replace(parts, kind="codebook"), "mine")


def test_an_index_of_the_version_before_gets_new_cells(
    trained: tuple[Index, Float32Array, Case],
) -> None:
    index, phi, _ = trained
    parts = index.parts()
    arrays = {name: array for name, array in parts.arrays.items() if name[:5] != "cell_"}
    arrays["cell_offsets"] = arrays["cell_keys"] = arrays["cell_items"] = np.zeros(3, np.uint32)
    older = Index.from_parts(replace(parts, version=4, arrays=arrays), "mine")
    assert older.describe() == index.describe()
    assert np.array_equal(older.search(phi, 10, method="cells").ids, index.search(phi, 10).ids)
    arrays["codes"] = np.full_like(arrays["codes"], 7)
    with pytest.raises(StorageError, match="mine: "):
        Index.from_parts(replace(parts, version=4, arrays=arrays), "mine")


@pytest.mark.parametrize("layout", ["full", "slim", "compact"])
def test_a_saved_index_answers_the_same(
    trained: tuple[Index, Float32Array, Case], tmp_path: Any, layout: Any
) -> None:
    _, phi, case = trained
    embeddings = np.random.default_rng(5).standard_normal((8, 256, 16)).astype(np.float32)
    bias = np.random.default_rng(6).random(20_000).astype(np.float32)
    index = Index.build(case.codes, embeddings, item_bias=bias, layout=layout)
    index.save(tmp_path / "index")
    loaded = Index.load(tmp_path / "index", verify=True)
    assert loaded.describe() == index.describe()
    one, other = index.search(phi, 10), loaded.search(phi, 10)
    assert np.array_equal(one.ids, other.ids)
    assert np.array_equal(one.scores, other.scores)


def test_a_slim_layout_has_neither_lists_nor_last_keys(
    trained: tuple[Index, Float32Array, Case], tmp_path: Path
) -> None:
    full, phi, case = trained
    Index.build(case.codes, full.sub_item_embeddings(), layout="slim").save(tmp_path / "slim")
    slim = Index.load(tmp_path / "slim")
    assert slim.describe()["bytes_per_item"] < full.describe()["bytes_per_item"] - 15
    assert not slim.has_lists
    assert slim.describe()["parts"] == [
        *sorted(name for name in full.describe()["parts"] if not name.startswith("list_"))
    ]
    for k in (1, 10, 1000):
        for allow in (None, np.arange(slim.num_items) % 300 == 0):
            found, expected = (index.search(phi, k, allow=allow) for index in (slim, full))
            assert_same(found, (expected.ids, expected.scores), k)
            assert found.stats.exact.all()
    with pytest.raises(InputError, match="method scan needs another layout"):
        slim.search(phi, method="scan")


def test_a_slim_layout_is_scored_where_cells_do_not_pay(
    trained: tuple[Index, Float32Array, Case],
) -> None:
    full, phi, case = trained
    slim = Index.build(case.codes, full.sub_item_embeddings(), layout="slim")
    wanted = len(case.codes) // 2
    found = slim.search(phi[:3], wanted)
    assert set(found.stats.method) == {"pqtopk"}
    expected = full.search(phi[:3], wanted, method="pqtopk")
    assert_same(found, (expected.ids, expected.scores), wanted)
