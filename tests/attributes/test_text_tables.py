"""Attributes from CSV, TSV and JSON lines: of which types they are, whose, and what is refused."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest

from recprune import Attributes, InputError
from recprune.data.identifiers import ExternalId, number_ids, number_integers, number_texts
from tests.support.attribute_cases import true_of

TEXTS = number_texts(pl.Series(["007", "7", "8", "9"]))[0]
NUMBERS = number_integers(pl.Series([7, 8, 9]))[0]

COMMAS = """item_id,price,stock,in_stock,brand,since,open
007,1.5,3,true,"Tea, loose",2026-01-31T18:30:00Z,08:30
8,,,FALSE,NA,2026-02-01T00:00:00+01:00,
9,2,1,,"a ""b""
c",,""
"""
TABS = COMMAS.replace(",", "\t").replace('"Tea\t loose"', "Tea, loose")
TABS = TABS.replace('"a ""b""\nc"', 'a "b"').replace('""', "")
LINES = """{"item_id": "007", "price": 1.5, "stock": 3, "in_stock": true, "brand": "Tea, loose", \
"since": "2026-01-31T18:30:00Z", "open": "08:30", "colours": ["red", "blue"]}

{"item_id": "8", "in_stock": false, "brand": "NA", "since": "2026-02-01T00:00:00+01:00"}
{"item_id": "9", "price": 2, "stock": 1, "brand": "a \\"b\\"\\nc", "open": "", "colours": []}
"""
CONDITIONS = {
    "price < 2": ["007"],
    "price is null": ["7", "8"],
    "stock = 1 and price = 2": ["9"],
    "in_stock": ["007"],
    "not in_stock": ["8"],
    "in_stock is null": ["7", "9"],
    "brand = 'Tea, loose'": ["007"],
    "brand = 'NA'": ["8"],
    "brand >= 'a \"b\"'": ["9"],
    "since < '2026-01-31T23:00:00Z'": ["007"],
    "since = '2026-01-31T23:00:00Z'": ["8"],
    "open = '08:30'": ["007"],
}


def write(path: Path, text: str) -> Path:
    with pa.output_stream(str(path), compression="detect") as stream:
        stream.write(text.encode())
    return path


def names(attributes: Attributes, condition: str) -> list[ExternalId]:
    ids = TEXTS if attributes.num_items == len(TEXTS) else NUMBERS
    mask = true_of(attributes.where(condition), len(ids))
    return [ids[item] for item, is_true in enumerate(mask) if is_true]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("items.csv", COMMAS),
        ("items.csv.gz", COMMAS),
        ("ITEMS.CSV", "\ufeff" + COMMAS.replace("\n", "\r\n").replace("\r\nc", "\nc")),
        ("items.csv.zst", COMMAS),
        (
            "items.csv",
            COMMAS.replace('"Tea, loose"', "'t").replace(",", ";").replace("'t", "Tea, loose"),
        ),
        ("items.tsv", TABS),
        ("items.tsv.gz", TABS),
        ("items.jsonl", LINES),
        ("items.ndjson.gz", LINES),
    ],
)
def test_a_file_of_text_says_what_items_are_like(tmp_path: Path, name: str, text: str) -> None:
    attributes = Attributes.read(write(tmp_path / name, text), TEXTS)
    assert {column: attributes.kinds[column] for column in ("price", "stock", "in_stock")} == {
        "price": "number",
        "stock": "integer",
        "in_stock": "boolean",
    }
    for condition, expected in CONDITIONS.items():
        assert names(attributes, condition) == expected, condition
    if "colours" in attributes.columns:
        assert names(attributes, "'blue' in colours") == ["007"]
        assert names(attributes, "colours is null") == ["7", "8"]
    else:  # an empty text is none in a format that has no types
        assert names(attributes, "open is null") == ["7", "8", "9"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "id,x\n007,1\n7,2\n+9,3\n"),
        ("a.jsonl", '{"id": "007", "x": 1}\n{"id": "7", "x": 2}\n{"id": "+9", "x": 3}\n'),
    ],
)
def test_ids_are_what_those_of_the_catalogue_are(tmp_path: Path, name: str, text: str) -> None:
    path = write(tmp_path / name, text)
    attributes = Attributes.read(path, TEXTS, item_column="id")
    assert attributes.unknown == 1
    assert [names(attributes, f"x = {x}") for x in (1, 2, 3)] == [["007"], ["7"], []]
    with pytest.raises(InputError, match="row 2: the item '7' is described twice"):
        Attributes.read(path, NUMBERS, item_column="id")
    one = write(tmp_path / f"one {name}", text.replace('"7"', '"8"').replace("\n7,", "\n8,"))
    attributes = Attributes.read(one, NUMBERS, item_column="id")
    assert [names(attributes, f"x = {x}") for x in (1, 2, 3)] == [[7], [8], [9]]


def test_ids_that_look_like_dates_stay_text(tmp_path: Path) -> None:
    ids, _ = number_ids(pl.Series(["2026-01-31", "2026-02-01"]))
    (tmp_path / "a.csv").write_text("item_id,x\n2026-01-31,1\n2026-02-01,2\n")
    (tmp_path / "a.jsonl").write_text(
        '{"x": 1, "item_id": "2026-01-31"}\n{"x": 2, "item_id": "2026-02-01"}\n'
    )
    for name in ("a.csv", "a.jsonl"):
        attributes = Attributes.read(tmp_path / name, ids)
        assert attributes.unknown == 0
        assert true_of(attributes.where("x = 2"), 2) == [False, True]
    numbers = write(tmp_path / "numbers.jsonl", '{"item_id": 8, "x": 1}\n{"item_id": 9, "x": 2}\n')
    assert names(Attributes.read(numbers, NUMBERS), "x = 2") == [9]
    assert names(Attributes.read(numbers, TEXTS), "x = 2") == ["9"]


def test_a_type_is_that_of_all_rows(tmp_path: Path) -> None:
    """Of the last one too, megabytes after the first."""
    rows = "".join(f"{item},{item},x\n" for item in range(3_000_000))
    path = write(tmp_path / "items.csv", f"item_id,code,y\n{rows}n,A7,x\n")
    attributes = Attributes.read(path, NUMBERS)
    assert attributes.kinds == {"code": "text", "y": "text"}
    assert names(attributes, "code = '8'") == [8]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "item_id,x\n7,1\n8\n", "a.csv: cannot be read: .*Row #3: Expected 2 columns, got 1"),
        ("a.csv", "item_id,x,x\n7,1,2\n", "a.csv: two columns are called 'x'"),
        ("a.csv", "item_id,x\n,1\n", "a.csv: row 1: the item is missing"),
        ("a.csv", "who,x\n7,1\n", "a.csv: .*item"),
        ("a.csv", "item_id,x\n7,\n", "the column 'x' is null, expected text"),
        ("a.csv", "", "a.csv: the file is empty"),
        ("a.csv.gz", "", "a.csv.gz: "),
        ("a.jsonl", '{"item_id": 7, "x": 1}\n\n{"item_id": 8,\n', "a.jsonl: line 3: not a JSON object"),
        ("a.jsonl", '{"item_id": 7, "x": 1}\n[8]\n', "a.jsonl: line 2: not a JSON object"),
        ("a.jsonl", '[{"item_id": 7}]', "a.jsonl: line 1: not a JSON object"),
        ("a.jsonl", '{"item_id": 7, "x": 1}\n{"item_id": 8, "x": "y"}\n', "changed from number to str"),
        ("a.jsonl", '{"item_id": 7, "x": ' + "[" * 100_000 + "\n", "a.jsonl: line 1: not a JSON obj"),
        ("a.jsonl", '{"item_id": 7, "x": {"y": 1}}\n', "the column 'x' is struct"),
    ],
)  # fmt: skip
def test_text_that_cannot_be_read_is_refused(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        Attributes.read(write(tmp_path / name, text), NUMBERS)
    (tmp_path / "folder.csv").mkdir(exist_ok=True)
    with pytest.raises(InputError, match="folder.csv: is a folder, expected a file"):
        Attributes.read(tmp_path / "folder.csv", NUMBERS)
