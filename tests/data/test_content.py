"""Content files: every format gives the same content, and what is wrong is named with its place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from recprune import InputError, IntegerIds, StringIds, read_content
from recprune.data.identifiers import ExternalIds, number_ids

TEXTS = {30: "src/net/tcp.c", 10: "src/net/udp.c", 99: "not in the log", 20: ""}
VECTORS = {30: [1.0, 2.0], 10: [0.5, -1.0], 99: [3.0, 3.0], 20: [0.0, 0.0]}


@pytest.fixture
def item_ids() -> IntegerIds:
    return IntegerIds(np.array([10, 20, 30, 40], np.int64))


def write_texts(path: Path) -> Path:
    rows = list(TEXTS.items())
    if path.name.endswith(".parquet"):
        pl.DataFrame({"item_id": list(TEXTS), "path": list(TEXTS.values())}).write_parquet(path)
    elif path.name.endswith(".jsonl"):
        lines = [json.dumps({"item_id": item, "path": text}) for item, text in rows]
        path.write_text("\n".join(lines), encoding="utf-8")
    else:
        delimiter = "\t" if ".tsv" in path.name else ","
        lines = [f"item_id{delimiter}path", *(f"{item}{delimiter}{text}" for item, text in rows)]
        content = "\n".join(lines).encode()
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.csv", "a.tsv", "a.csv.gz"])
def test_texts_are_read_from_every_format(tmp_path: Path, name: str, item_ids: IntegerIds) -> None:
    content = read_content(write_texts(tmp_path / name), item_ids)
    assert content.items.tolist() == [2, 0]  # 20 has no text, 40 is not there
    assert content.texts == ["src/net/tcp.c", "src/net/udp.c"]
    assert content.vectors is None
    assert content.unknown == 1


@pytest.mark.parametrize("kind", ["parquet", "fixed parquet", "jsonl", "npz"])
def test_vectors_are_read_from_every_format(
    tmp_path: Path, kind: str, item_ids: IntegerIds
) -> None:
    path = tmp_path / f"a.{kind.split()[-1]}"
    if kind == "npz":
        np.savez(path, ids=list(VECTORS), vectors=np.array(list(VECTORS.values())))
    elif kind == "jsonl":
        lines = [json.dumps({"item": item, "v": vector}) for item, vector in VECTORS.items()]
        path.write_text("\n".join(lines), encoding="utf-8")
    else:
        vectors = pl.Series("v", list(VECTORS.values()))
        if kind == "fixed parquet":
            vectors = vectors.cast(pl.Array(pl.Float32, 2))
        pl.DataFrame({"item": list(VECTORS), "title": "text", "v": vectors}).write_parquet(path)
    content = read_content(path, item_ids)
    assert content.items.tolist() == [2, 0]  # the vector of 20 has no direction
    assert content.vectors is not None
    assert content.vectors.dtype == np.float32
    assert content.vectors.tolist() == [[1.0, 2.0], [0.5, -1.0]]
    assert content.unknown == 1


def test_several_columns_are_parts_of_one_text(tmp_path: Path, item_ids: IntegerIds) -> None:
    frame = {"item": [10, 20, 30], "title": ["one", None, "three"], "brand": ["x", "y", None]}
    pl.DataFrame(frame | {"price": [1, 2, 3]}).write_parquet(tmp_path / "a.parquet")
    assert read_content(tmp_path / "a.parquet", item_ids).texts == ["one\nx", "y", "three"]
    chosen = read_content(tmp_path / "a.parquet", item_ids, text_columns=["title"])
    assert chosen.texts == ["one", "three"]
    priced = read_content(tmp_path / "a.parquet", item_ids, text_columns=["price"])
    assert priced.texts == ["1", "2", "3"]


def test_ids_are_matched_whatever_their_type(tmp_path: Path) -> None:
    strings, _ = number_ids(pl.Series(["10", "b"]))
    assert isinstance(strings, StringIds)
    pl.DataFrame({"item": [10, 11], "t": ["ten", "eleven"]}).write_parquet(tmp_path / "a.parquet")
    content = read_content(tmp_path / "a.parquet", strings)
    assert (content.items.tolist(), content.texts, content.unknown) == ([0], ["ten"], 1)


def refused(folder: Path, item_ids: ExternalIds, frame: dict[str, Any], **options: Any) -> str:
    path = folder / "a.parquet"
    pl.DataFrame(frame, strict=False).write_parquet(path)
    with pytest.raises(InputError) as caught:
        read_content(path, item_ids, **options)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, item_ids: IntegerIds) -> None:
    two = {"item": [10, 20]}
    assert refused(tmp_path, item_ids, two | {"t": ["a", "b"]}, text_columns=["tt"]).startswith(
        "no column 'tt' (did you mean 't'?)"
    )
    assert "which column has the items' ids?" in refused(tmp_path, item_ids, {"x": [1], "t": ["a"]})
    assert "nothing describes the items" in refused(tmp_path, item_ids, two | {"price": [1, 2]})
    assert "row 3: the item 10 is described twice, first in row 1" in refused(
        tmp_path, item_ids, {"item": [10, 20, 10], "t": ["a", "b", "c"]}
    )
    assert "row 2: the item is missing" in refused(
        tmp_path, item_ids, {"item": [10, None], "t": ["a", "b"]}
    )
    assert "row 2: a vector of 1 numbers, the first has 2" in refused(
        tmp_path, item_ids, two | {"v": [[1.0, 2.0], [1.0]]}
    )
    for broken in ([np.nan, 1.0], [np.inf, 1.0], [None, 1.0]):
        assert "row 2: the vector holds NaN or infinity" in refused(
            tmp_path, item_ids, two | {"v": [[1.0, 2.0], broken]}
        )
    vectors = [[1.0], [2.0]]
    assert "which column has the vectors: v, w?" in refused(
        tmp_path, item_ids, two | {"v": vectors, "w": vectors}
    )
    assert "expected lists of numbers" in refused(
        tmp_path, item_ids, two | {"t": ["a", "b"]}, vector_column="t"
    )


def test_broken_files_are_refused(tmp_path: Path, item_ids: IntegerIds) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_content(tmp_path / "none.csv", item_ids)
    (tmp_path / "a.csv").write_text("item,t\n1,a\n2,b,c\n", encoding="utf-8")
    with pytest.raises(InputError, match="cannot be read"):
        read_content(tmp_path / "a.csv", item_ids)
    (tmp_path / "a.npz").write_bytes(b"nothing")
    with pytest.raises(InputError, match="cannot be read"):
        read_content(tmp_path / "a.npz", item_ids)
    np.savez(tmp_path / "b.npz", ids=[1, 2], vectors=np.ones((3, 2)))
    with pytest.raises(InputError, match=r"vectors is float64\[3, 2\], expected floats \[2, c\]"):
        read_content(tmp_path / "b.npz", item_ids)
    np.savez(tmp_path / "c.npz", vectors=np.ones((3, 2)))
    with pytest.raises(InputError, match="expected ids and vectors"):
        read_content(tmp_path / "c.npz", item_ids)
