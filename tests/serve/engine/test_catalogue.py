"""The catalogue: names, item sets, and a search over both."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from recprune import InputError, IntegerIds
from recprune.data.identifiers import RowNumbers
from recprune.serve.engine.catalogue import Catalogue


def catalogue(path: Path | None) -> Catalogue:
    ids = IntegerIds(np.array([-5, 10, 20, 30]))
    return Catalogue(ids, np.array([1, 4, 2, 3]), path)


@pytest.mark.parametrize("kind", ["csv", "parquet", "text parquet"])
def test_names_are_read_from_csv_and_parquet(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"names.{kind.rpartition(' ')[2]}"
    ids = [10, 99, 20, -5]
    if kind == "csv":
        path.write_text(
            '\ufeffTitle,extra,Item_Id\n One  tea,x,10\nnone,x,99\n"Two\nlines",,20\n,,-5\n'
        )
    else:
        table = pl.DataFrame({"item": ids, "name": [" One  tea", "none", "Two\nlines", None]})
        if kind == "text parquet":
            table = table.with_columns(pl.col("item").cast(pl.String))
        table.write_parquet(path)
    read = catalogue(path)
    assert [read.name(item) for item in range(4)] == [None, "One tea", "Two lines", None]
    assert read.has_names
    assert read.search("LINES", 5) == [2]
    assert read.search("10 one", 5) == [1], "id and name are one line"
    assert read.search("0", 5) == [1, 3, 2], "popular ones first"
    assert read.search("0", 2) == [1, 3]
    assert read.search("20", 5) == [2]
    assert read.search("one tea 20", 5) == [], "no match goes over the end of a line"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"", "has the columns none; expected item_id and name"),
        ("a.csv", b"item_id,label\n1,x\n", "has the columns item_id, label"),
        ("a.csv", b"item_id,name\n1\n", "row 2: 1 columns"),
        ("a.csv", b"item_id,name\n1,\xff\n", "not a text in UTF-8"),
        ("a.parquet", b"PAR1 or so", "not readable as Parquet"),
        ("missing.csv", None, "cannot be read: No such file"),
    ],
)
def test_bad_files_of_names_are_named(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        catalogue(path)


def test_item_sets_are_bits(tmp_path: Path) -> None:
    path = tmp_path / "set.txt"
    path.write_text("10\n\n 30 \n77\n10\n")
    assert catalogue(None).item_set(path).tolist() == [0b1010]
    rows = Catalogue(RowNumbers(200), None, None)
    assert rows.bits(np.array([0, 63, 64, 199])).tolist() == [1 | 1 << 63, 1, 0, 1 << 7]
    assert rows.bits(np.empty(0, np.int64)).tolist() == [0, 0, 0, 0]
    assert [rows.find(item) for item in (199, "199", 200, -1, "x")] == [199, 199, -1, -1, -1]
    with pytest.raises(InputError, match="cannot be read"):
        rows.item_set(tmp_path / "missing")


def test_without_names_and_popularity_items_are_found_by_their_ids() -> None:
    rows = Catalogue(RowNumbers(200), None, None)
    assert rows.search("19", 4) == [19, 119, 190, 191]
    assert rows.search("", 4) == []
    assert rows.name(3) is None
