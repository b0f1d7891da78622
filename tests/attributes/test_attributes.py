"""Which items a condition is true of: by columns and bits as by a walk over the rows."""

from __future__ import annotations

import gc
import random
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recprune import Attributes, Index, InputError, IntegerIds, StorageError, StringIds
from recprune.attributes.binding import bind
from recprune.attributes.grammar import parse_condition
from recprune.data.identifiers import RowNumbers, number_texts
from recprune.storage import Saved, save_folder
from tests.support.attribute_cases import (
    SCHEMA,
    attributes_of,
    by_item,
    condition,
    some_rows,
    true_of,
)


def found(attributes: Attributes, where: str) -> list[int]:
    """Return the items that a condition is true of."""
    return np.flatnonzero(true_of(attributes.where(where), attributes.num_items)).tolist()


@pytest.mark.parametrize("seed", range(12))
def test_bits_are_what_a_walk_over_the_rows_finds(seed: int) -> None:
    rng = random.Random(seed)
    num_items = rng.choice([1, 63, 64, 65, 130])
    rows = some_rows(rng, rng.sample(range(num_items), rng.randint(0, num_items)))
    attributes, known = attributes_of(rows, num_items), by_item(rows, num_items)
    for _ in range(120):
        text, twin = condition(rng)
        expected = [twin(row) is True for row in known]
        assert true_of(attributes.where(text), num_items) == expected, text
        assert true_of(attributes.where(f" ( {text} ) "), num_items) == expected, text


@pytest.mark.parametrize("seed", range(8))
def test_after_changes_all_is_as_if_made_anew(seed: int) -> None:
    """Whatever was asked before: of what is kept, only what changed is asked again."""
    rng = random.Random(seed)
    num_items = rng.choice([40, 64, 300])
    rows = some_rows(rng, rng.sample(range(num_items), num_items // 2))
    attributes, known = attributes_of(rows, num_items), by_item(rows, num_items)
    conditions = [condition(rng) for _ in range(40)]
    for _ in range(4):
        before = {text: attributes.where(text).words.copy() for text, _ in conditions[::2]}
        earlier = attributes
        num_items += rng.choice([0, 0, 1, 70])
        some = rng.sample(range(num_items), rng.choice([0, 1, 3, 20]))
        columns = rng.sample(SCHEMA.names[1:], rng.randint(1, 9))
        changed = some_rows(rng, some)
        known += [dict.fromkeys(SCHEMA.names[1:]) for _ in range(num_items - len(known))]
        for row in changed:
            known[row["item_id"]] = known[row["item_id"]] | {name: row[name] for name in columns}
        table = pa.Table.from_pylist(changed, schema=SCHEMA).select(["item_id", *columns])
        attributes = attributes.updated(table, RowNumbers(num_items))
        for text, twin in conditions:
            expected = [twin(row) is True for row in known]
            assert true_of(attributes.where(text), num_items) == expected, text
        for text, words in before.items():  # the earlier version is as it was
            assert np.array_equal(earlier.where(text).words, words)


def test_versions_go_as_soon_as_nothing_has_them() -> None:
    """Every change makes one: they must not wait for the collector of cycles."""
    rows = {"item_id": [0, 1], "name": ["b", "d"]}
    attributes = Attributes.from_table(rows, RowNumbers(2))
    gc.disable()
    try:
        versions = []
        for turn in range(3):
            attributes = attributes.with_values({"name": {0: f"x{turn}"}})
            assert found(attributes, f"name = 'x{turn}'") == [0]
            versions.append(weakref.ref(attributes))
        assert [version() is not None for version in versions] == [False, False, True]
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["text", "numbers", "lists"])
def test_what_no_item_has_any_more_takes_bounded_memory(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("recprune.attributes.column._SPARE_BYTES", 2_000)

    def value(turn: int) -> Any:
        text = f"value {turn % 300} " + "x" * 50
        return {"text": text, "numbers": float(turn), "lists": [text, "kept"]}[kind]

    others = [value(1_000_000 + item) for item in range(20)]
    table = {"item_id": [*range(20)], "one": others}
    attributes = Attributes.from_table(table, RowNumbers(20))
    most = 2 * attributes.columns["one"].nbytes + 5_000
    for turn in range(2_000):
        attributes = attributes.with_values({"one": {3: value(turn)}})
        column = attributes.columns["one"]
        assert column.nbytes <= most
        if turn % 97 == 0:
            expected = [*others[:3], value(turn), *others[4:]]
            assert [column.value_at(item) for item in range(20)] == expected
            where = f"one = {value(turn)!r}" if kind != "lists" else f"{value(turn)[0]!r} in one"
            assert 3 in found(attributes, where)
    # Values that are used are never thrown out, however many they become.
    for item in range(20):
        attributes = attributes.with_values({"one": {item: value(item)}})
    assert [attributes.columns["one"].value_at(item) for item in range(20)] == [
        value(item) for item in range(20)
    ]


def test_new_values_find_their_place_among_the_others() -> None:
    rows = {"item_id": [0, 1], "name": ["b", "d"], "size": [20, 40]}
    attributes = Attributes.from_table(rows, RowNumbers(3))
    more = {"item_id": [2, 0], "name": ["c", "é"], "size": [30, 10]}
    changed = attributes.updated(more, RowNumbers(4))
    assert found(changed, "name >= 'c' and name < 'e'") == [1, 2]
    assert found(changed, "name > 'd'") == [0]
    assert found(changed, "size < 35") == [0, 2]
    assert found(changed, "name is null") == [3]
    gone = changed.updated({"item_id": [1, 2], "name": [None, None]}, RowNumbers(4))
    assert found(gone, "name is null") == [1, 2, 3]
    wrong: dict[str, dict[str, Any]] = {
        "the column 'size' is string, expected integer": {"item_id": [0], "size": ["x"]},
        "no column is called 'nam'; similar: 'name'": {"item_id": [0], "nam": ["x"]},
        "the column 'name' is list": {"item_id": [0], "name": [["x"]]},
    }
    for message, table in wrong.items():
        with pytest.raises(InputError, match=message):
            attributes.updated(table, RowNumbers(3))
    with pytest.raises(InputError, match="2 items, expected the 3 of before"):
        attributes.updated(more, RowNumbers(2))


def test_lists_that_are_gone_or_empty() -> None:
    rows = {"item_id": [0, 1, 2], "tags": [["a"], ["a", "b"], None]}
    attributes = Attributes.from_table(rows, RowNumbers(3))
    gone = attributes.updated({"item_id": [0], "tags": [None]}, RowNumbers(3))
    empty = attributes.updated({"item_id": [0], "tags": [[]]}, RowNumbers(3))
    for changed in (gone, empty):
        assert found(changed, "'a' in tags") == [1]
    assert found(gone, "tags is null") == [0, 2]
    assert found(empty, "tags is null") == [2]
    assert found(empty, "'a' not in tags") == [0]


def test_many_values_of_one_column() -> None:
    """Codes of one, two and four bytes, at the edges; a few values, and tables of many."""
    for count in (254, 255, 256, 257, 65_534, 65_535, 65_536, 65_537):
        values = np.random.default_rng(count).permutation(count)
        attributes = Attributes.from_table(
            {"item_id": np.arange(count), "value": values}, RowNumbers(count)
        )
        numbers = [0, 1, 254, 255, 256, 65_535, count - 1, count, -1]
        for number in numbers:
            for sign, expected in (("<", values < number), (">=", values >= number)):
                assert found(attributes, f"value {sign} {number}") == [*np.flatnonzero(expected)]
            between = (values > 3) & (values <= number)
            assert found(attributes, f"value>3 and value<={number}") == [*np.flatnonzero(between)]
        chosen = [*range(0, count, 7)][:999]
        listed = ", ".join(map(str, chosen))
        expected = np.isin(values, chosen)
        assert found(attributes, f"value in ({listed})") == [*np.flatnonzero(expected)]
        assert found(attributes, f"value not in ({listed})") == [*np.flatnonzero(~expected)]


# What is kept ------------------------------------------------------------------------------------


def key_of(attributes: Attributes, text: str) -> str:
    return bind(parse_condition(text), attributes.columns).key


def test_what_means_the_same_is_kept_once() -> None:
    attributes = attributes_of(some_rows(random.Random(1), [*range(20)]), 20)
    alike = [
        ["price < 50 and in_stock", "in_stock AND 50 > price", "(in_stock = true) and price<50"],
        ["not (price < 50 or in_stock)", "not price < 50 and not in_stock"],
        ["category in ('a', 'b')", "category = 'b' or category == 'a' or category in ('a')"],
        ["category != 'a'", "not category = 'a'", "category not in ('a')"],
        ["added = '2020-01-01'", "added = '2020-01-01T01:00:00+01:00'"],
        ["'x' in tags", "tags contains 'x'", 'not not tags contains "x"'],
    ]
    keys = [{key_of(attributes, text) for text in texts} for texts in alike]
    assert [len(same) for same in keys] == [1] * len(alike)
    assert len(set().union(*keys)) == len(alike)
    for texts in alike:
        assert len({id(attributes.where(text).words) for text in texts}) == 1


def test_different_conditions_are_told_apart() -> None:
    attributes = attributes_of(some_rows(random.Random(2), [*range(20)]), 20)
    different = ["category = '1'", "category = '1 or'", "stock = 1", "price = 1", "price <= 1",
                 "price < 1", "'1' in tags", "1 in sizes", "in_stock", "not in_stock",
                 "in_stock is null", "in_stock is not null"]  # fmt: skip
    assert len({key_of(attributes, text) for text in different}) == len(different)


def test_no_more_is_kept_than_there_is_room_for() -> None:
    num_items = 1 << 20  # 128 KiB of bits
    rng = np.random.default_rng(0)
    price = rng.random(num_items)
    attributes = Attributes.from_table(
        {"item_id": np.arange(num_items), "price": price}, RowNumbers(num_items)
    )
    first = attributes.where("price < 0.5").words
    assert attributes.where("price < 0.5").words is first
    for number in range(520):
        attributes.where(f"price < 0.{number}1")
    again = attributes.where("price < 0.5").words
    assert again is not first
    assert np.array_equal(again, first)
    assert attributes._cache._bytes <= attributes._cache.max_bytes
    with pytest.raises(ValueError, match="read-only"):
        again[0] = 0


def test_texts_of_conditions_count_towards_what_is_kept() -> None:
    table = {"item_id": np.arange(64), "price": np.arange(64.0)}
    attributes = Attributes.from_table(table, RowNumbers(64))
    for number in range(100):
        attributes.where(f"price in ({', '.join(str(number + at / 1000) for at in range(999))})")
    assert attributes._cache._bytes > 100 * 999  # eight bytes each of bits
    assert attributes._cache._bytes <= attributes._cache.max_bytes


def test_numbers_beyond_32_bits_are_not_infinity() -> None:
    values = np.array([1.0, np.finfo(np.float32).max, np.inf, -np.inf], np.float32)
    attributes = Attributes.from_table({"item_id": np.arange(4), "g": values}, RowNumbers(4))
    assert found(attributes, "g = 1e300") == []
    assert found(attributes, "g <= 1e300") == [0, 1, 3]
    assert found(attributes, "g > -1e300") == [0, 1, 2]


def test_times_before_1970_are_rounded_down() -> None:
    moments = pa.array([-1, 0, 999, -1001], pa.timestamp("ns"))
    table = pa.table({"item_id": np.arange(4), "added": moments})
    attributes = Attributes.from_table(table, RowNumbers(4))
    assert found(attributes, "added < '1970-01-01'") == [0, 3]
    assert found(attributes, "added = '1970-01-01'") == [1, 2]


def test_threads_share_what_is_kept() -> None:
    rng = random.Random(3)
    rows = some_rows(rng, [*range(200)])
    attributes, known = attributes_of(rows, 200), by_item(rows, 200)
    conditions = [condition(rng) for _ in range(60)]
    expected = [[twin(row) is True for row in known] for _, twin in conditions]

    def ask(number: int) -> None:
        own = random.Random(number)
        for _ in range(150):
            place = own.randrange(len(conditions))
            assert true_of(attributes.where(conditions[place][0]), 200) == expected[place]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))


# What does not fit the columns -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("in_stock and prize < 5", "character 14: no column is called 'prize'; similar: 'price' (number)"),
        ("x = 1", "character 1: no column is called 'x'; there are 'category' (text), 'stock' (integer),"),
        ("x = 1", "'sizes' (list of integer) and 1 more"),
        ("price < 'cheap'", "character 9: 'cheap' is text, and 'price' is a number: expected a number"),
        ("stock = '5'", "'5' is text, and 'stock' is an integer: expected a number"),
        ("stock = true", "True is true or false, and 'stock' is an integer"),
        ("category = 5", "5 is a number, and 'category' is text: expected text in quotes"),
        ("category in ('a', 5)", "character 19: 5 is a number"),
        ("in_stock = 1", "1 is a number, and 'in_stock' is a boolean: expected true or false"),
        ("in_stock < true", "'in_stock' is a boolean, which is compared by = and != only"),
        ("price", "character 1: 'price' is a number, expected a comparison with a value after it"),
        ("not tags", "'tags' is a list of text: say … in tags"),
        ("tags = 'x'", "'tags' is a list of text: say … in tags"),
        ("'x' in category", "character 8: 'category' is text, expected a list: compare it by ="),
        ("5 in tags", "character 1: 5 is a number, and 'tags' is a list of text: expected text"),
        ("added > 5", "5 is a number, and 'added' is a time: expected a time in quotes, such as"),
        ("added > 'soon'", "character 9: 'soon' is no time, and 'added' is: expected a time"),
        ("added > '2026-13-01'", "is no time"),
        ("category < '" + "x" * 300 + "' and stock > '" + "y" * 300 + "'", "'yyyyyyy"),
    ],
)  # fmt: skip
def test_a_condition_that_does_not_fit_is_refused_by_name(text: str, message: str) -> None:
    attributes = attributes_of([], 5)
    with pytest.raises(InputError) as refused:
        attributes.where(text)
    assert message in str(refused.value)
    assert len(str(refused.value)) < 400


# Where they come from ----------------------------------------------------------------------------


def test_every_type_of_arrow_that_has_values() -> None:
    types: dict[str, tuple[pa.DataType, list[Any], str, list[int]]] = {
        "int8": (pa.int8(), [1, None, -3], "x < 0", [2]),
        "uint64": (pa.uint64(), [1, None, 2**63 - 1], "x > 1", [2]),
        "half": (pa.float16(), [1.5, None, 2.5], "x < 2", [0]),
        "decimal": (pa.decimal128(9, 2), [Decimal("19.99"), None, Decimal(-1)], "x = 19.99", [0]),
        "nan": (pa.float64(), [float("nan"), None, 1.0], "x is null", [0, 1]),
        "large": (pa.large_string(), ["a", None, "b"], "x = 'b'", [2]),
        "view": (pa.string_view(), ["a", None, "b"], "x >= 'b'", [2]),
        "dictionary": (pa.dictionary(pa.int8(), pa.string()), ["a", None, "b"], "x = 'a'", [0]),
        "date": (pa.date32(), [date(2020, 1, 1), None, date(2021, 1, 1)], "x > '2020-06-01'", [2]),
        "date64": (pa.date64(), [date(2020, 1, 1), None, date(2021, 1, 1)], "x <= '2020'", []),
        "seconds": (pa.timestamp("s"), [0, None, 1], "x > '1970-01-01T00:00:00'", [2]),
        "nanos": (pa.timestamp("ns", "Asia/Tokyo"), [1500, None, 999], "x = '1970-01-01T00:00:00.000001Z'", [0]),
        "fixed": (pa.list_(pa.float32(), 2), [[0.1, 2.0], None, [3.0, 4.0]], "0.1 in x", [0]),
        "empty": (pa.list_(pa.bool_()), [[], None, [True]], "true not in x", [0]),
        "words": (pa.list_(pa.dictionary(pa.int8(), pa.string())), [["a"], None, ["b", None]], "'b' in x", [2]),
    }  # fmt: skip
    for name, (kind, values, where, expected) in types.items():
        table = pa.table({"item_id": [0, 1, 2], "x": pa.array(values, kind)})
        attributes = Attributes.from_table(table, RowNumbers(3))
        if name == "date64":  # a year alone is no moment
            with pytest.raises(InputError, match="'2020' is no time"):
                attributes.where(where)
            continue
        assert found(attributes, where) == expected, name


def test_every_type_of_polars_that_has_values() -> None:
    words = ["a", None, "b"]
    moments = [datetime(2020, 1, 1), None, datetime(2021, 1, 1)]  # as frames have them
    lists = [["a"], None, ["b", None]]
    columns: dict[str, tuple[pl.Series, str]] = {
        "text": (pl.Series(words), "x = 'b'"),
        "categorical": (pl.Series(words, dtype=pl.Categorical), "x = 'b'"),
        "enum": (pl.Series(words, dtype=pl.Enum(["a", "b"])), "x > 'a'"),
        "times": (pl.Series(moments), "x > '2020-06-01'"),
        "dates": (pl.Series(moments).cast(pl.Date), "x = '2021-01-01'"),
        "decimals": (pl.Series([Decimal("0.1"), None, Decimal("0.3")]), "x = 0.3"),
        "lists": (pl.Series(lists), "'b' in x"),
        "lists of categories": (pl.Series(lists, dtype=pl.List(pl.Categorical)), "'b' in x"),
        "arrays": (pl.Series([[1, 2], None, [3, 4]], dtype=pl.Array(pl.Int64, 2)), "4 in x"),
        "flags": (pl.Series([False, None, True]), "x"),
    }
    for name, (series, where) in columns.items():
        frame = pl.DataFrame({"item_id": [0, 1, 2], "x": series})
        attributes = Attributes.from_table(frame, RowNumbers(3))
        assert found(attributes, where) == [2], name
        assert found(attributes, f"not ({where})") == [0], name
        assert found(attributes, "x is null") == [1], name


@pytest.mark.parametrize("ids", ["integers", "strings", "rows"])
def test_rows_find_their_items(ids: str, tmp_path: Path) -> None:
    catalogue: Any = {
        "integers": IntegerIds(np.array([5, 17, 23])),
        "strings": number_texts(pl.Series(["17", "23", "5"]))[0],
        "rows": RowNumbers(3),
    }[ids]
    names = [catalogue[item] for item in (2, 0)]
    unknown = "nowhere" if isinstance(catalogue, StringIds) else 99
    frame = pl.DataFrame({"item_id": [*names, unknown], "price": [2.0, 0.5, 9.0]})
    frame.write_parquet(tmp_path / "items.parquet")
    with pa.OSFile(str(tmp_path / "items.arrow"), "wb") as file:
        table = frame.to_arrow()
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    for attributes in (
        Attributes.from_table(frame, catalogue),
        Attributes.from_table(frame.to_arrow(), catalogue),
        Attributes.from_table(frame.to_dict(as_series=False), catalogue),
        Attributes.read(tmp_path / "items.parquet", catalogue),
        Attributes.read(tmp_path / "items.arrow", catalogue),
    ):
        assert attributes.unknown == 1
        assert attributes.kinds == {"price": "number"}
        assert found(attributes, "price < 1") == [0]
        assert found(attributes, "price > 1") == [2]
        assert found(attributes, "price is null") == [1]
        assert repr(attributes) == "Attributes(price; 3 items)"
        values = attributes.columns["price"].values
        assert np.asarray(values).tolist() == [0.5, 2.0]  # those of the catalogue's items alone


def test_columns_may_be_chosen() -> None:
    table = {"sku": [1, 0], "price": [1.0, 2.0], "vector": [[0.5], [0.25]], "size": [3, 4]}
    attributes = Attributes.from_table(
        table, RowNumbers(2), item_column="sku", columns=["size", "price"]
    )
    assert attributes.kinds == {"size": "integer", "price": "number"}
    assert found(attributes, "size = 4") == [0]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"item_id": [0, 1, 0], "x": [1, 2, 3]}, "row 3: the item 0 is described twice, first in row 1"),
        ({"item_id": [0, None], "x": [1, 2]}, "row 2: the item is missing"),
        ({"thing": [0], "x": [1]}, "which column has the items' ids"),
        ({"item_id": [0]}, "0 columns beside the ids, expected 1 to 1000"),
        ({"item_id": [0], "x": [{"a": 1}]}, "the column 'x' is struct<a: int64>, expected text, numbers"),
        ({"item_id": [0], "x": [[[1]]]}, "the column 'x' is list<.*>, expected text"),
        ({"item_id": [0], "x": [None]}, "the column 'x' is null, expected text"),
        ({"item_id": [0], "x": [b"a"]}, "the column 'x' is binary"),
        ({"item_id": [0], "x": np.array([2**64 - 1], np.uint64)}, "the column 'x' cannot be read: .*18446744073709551615"),
        ({"item_id": [0], "x": pa.array([2**62], pa.timestamp("s"))}, "the column 'x' cannot be read"),
        ({"item_id": [0, 1], "x": [1]}, "which is no table of Arrow's"),
        (5, "attributes is an int, which is no table of Arrow's"),
    ],
)  # fmt: skip
def test_tables_that_cannot_be_used_are_refused(table: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Attributes.from_table(table, RowNumbers(3))


def test_text_that_is_none_is_refused() -> None:
    broken = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(np.array([0, 1], np.int32)), pa.py_buffer(b"\xff")]
    )
    with pytest.raises(InputError, match="the column 'x' cannot be read: .*UTF8"):
        Attributes.from_table(pa.table({"item_id": [0], "x": broken}), RowNumbers(1))


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "items.txt").write_text("item_id,price\n1,2\n")
    (tmp_path / "broken.parquet").write_text("nothing")
    pq.write_table(pa.table({"item_id": [0, 0], "x": [1, 1]}), tmp_path / "twice.parquet")
    for name, message in (
        ("items.txt", "items.txt: expected a file whose name ends with one of .parquet, .arrow"),
        ("nowhere.parquet", "nowhere.parquet: no such file"),
        ("broken.parquet", "broken.parquet: cannot be read"),
        ("twice.parquet", "twice.parquet: row 2: the item 0 is described twice"),
    ):
        with pytest.raises(InputError, match=message):
            Attributes.read(tmp_path / name, RowNumbers(3))


def test_an_empty_catalogue_and_an_empty_table() -> None:
    none: dict[str, Any] = {"item_id": pa.array([], pa.int64()), "x": pa.array([], pa.string())}
    assert found(Attributes.from_table(none, RowNumbers(0)), "x = 'a'") == []
    assert found(Attributes.from_table(none, RowNumbers(3)), "x is null") == [0, 1, 2]


# On disk -----------------------------------------------------------------------------------------


def test_saved_attributes_answer_as_before(tmp_path: Path) -> None:
    rng = random.Random(5)
    rows = some_rows(rng, rng.sample(range(100), 80))
    attributes = attributes_of(rows, 100)
    attributes.save(tmp_path / "saved")
    loaded = Attributes.load(tmp_path / "saved")
    assert loaded.kinds == attributes.kinds
    for _ in range(100):
        text, _ = condition(rng)
        assert np.array_equal(loaded.where(text).words, attributes.where(text).words), text
    table = pa.Table.from_pylist(some_rows(rng, [3, 5, 7]), schema=SCHEMA)
    changed = [one.updated(table, RowNumbers(100)) for one in (attributes, loaded)]
    for _ in range(50):
        text, _ = condition(rng)
        assert np.array_equal(changed[0].where(text).words, changed[1].where(text).words), text
    loaded.save(tmp_path / "saved")  # over itself
    assert Attributes.load(tmp_path / "saved").kinds == attributes.kinds


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("column_0_codes", lambda a: a[:-1], "column_0_codes has 99 items, expected 100"),
        ("column_0_codes", lambda a: a + np.uint8(200), "column_0_codes has .*, expected 9 at most"),
        ("column_0_codes", lambda a: a.astype(np.int64), r"column_0_codes is int64\[100\]"),
        ("column_1_values", lambda _: np.arange(300), "column_1_codes is uint8, too narrow for 300"),
        ("column_0_values_offsets", lambda a: a[::-1].copy(), "column_0_values_offsets does not"),
        ("column_1_values", lambda a: a[::-1].copy(), r"column_1_values\[1\] is .*, expected more"),
        ("column_1_values", lambda a: a.astype(np.float64), r"column_1_values is float64"),
        ("column_2_values", lambda a: np.where(a == 50, np.nan, a), r"column_2_values\[6\] is nan, expected more"),
        ("column_4_values", lambda _: np.array([0, 2], np.uint8), "column_4_values is not 0 and 1"),
        ("column_6_lists", lambda a: a + 1, "column_6_lists does not ascend from 0"),
        ("column_6_lists", lambda a: a[:-1], r"column_6_lists is int64\[100\], expected int64\[101\]"),
        ("column_6_codes", lambda a: a[:-1], "column_6_lists does not ascend from 0"),
        ("column_3_codes", None, "the attributes have no column_3_codes"),
        ("column_3_values", None, "the attributes have no column_3_values"),
        ("column_0_values_pool", None, "the attributes have no column_0_values_pool"),
    ],
)  # fmt: skip
def test_a_wrong_array_is_named(tmp_path: Path, name: str, change: Any, message: str) -> None:
    saved = attributes_of(some_rows(random.Random(6), [*range(100)]), 100).parts()
    arrays = {key: np.array(array) for key, array in saved.arrays.items()}
    array = arrays.pop(name)
    if change is not None:
        arrays[name] = change(array)
    save_folder(tmp_path / "mine", Saved(saved.kind, saved.version, saved.settings, arrays))
    with pytest.raises(StorageError, match=f"^.*/mine: {message}"):
        Attributes.load(tmp_path / "mine")


def test_an_index_takes_what_a_condition_is_true_of() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (500, 8), np.uint8)
    index = Index.build(codes, rng.standard_normal((8, 16, 2)).astype(np.float32))
    price = rng.integers(0, 100, 500)
    attributes = Attributes.from_table({"item_id": np.arange(500), "price": price}, RowNumbers(500))
    phi = rng.standard_normal((3, 16)).astype(np.float32)
    for limit in (0, 1, 5, 50, 100):
        top = index.search(phi, 10, allow=attributes.where(f"price < {limit}"))
        expected = index.search(phi, 10, allow=price < limit)
        assert np.array_equal(top.ids, expected.ids)
        assert np.array_equal(top.scores.view(np.uint32), expected.scores.view(np.uint32))


def test_times_are_moments_whatever_the_zone() -> None:
    noon = datetime(2026, 1, 31, 12, tzinfo=UTC)
    attributes = Attributes.from_table({"item_id": [0], "at": [noon]}, RowNumbers(1))
    for text in ("2026-01-31T12:00", "2026-01-31 13:00:00+01:00", "20260131T120000Z"):
        assert found(attributes, f"at = '{text}'") == [0]
    assert found(attributes, "at > '2026-01-31'") == [0]
    assert found(attributes, "at > '2026-02-01'") == []


def test_attributes_of_items_in_other_places() -> None:
    rng = random.Random(5)
    given = some_rows(rng, list(range(40)))
    attributes, rows = attributes_of(given, 40), by_item(given, 40)
    (nothing,) = by_item([], 1)
    places = np.array([rng.randrange(-1, 40) for _ in range(60)])
    moved = attributes.taken(places)
    for _ in range(50):
        text, twin = condition(rng)
        expected = [twin(rows[place] if place >= 0 else nothing) is True for place in places]
        assert true_of(moved.where(text), 60) == expected, text
