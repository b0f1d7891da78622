"""Attributes and conditions on them, as typed: `recprune attributes`, `--where`, `--at-most`."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from recprune import Attributes, Index
from recprune.cli import main
from recprune.recommender.recommender import Recommender
from tests.support.shops import SETTINGS, SIZES, Shop, lines_of, run_shown


@pytest.fixture
def items(shop: Shop, tmp_path: Path) -> str:
    """A file with what the shop's items are like, and an item that it does not have."""
    ids = Recommender.load(shop.recommender).item_ids
    count = len(ids)
    frame = pl.DataFrame(
        {
            "item_id": [*ids.take(range(count)), "nosuch"],
            "price": [float(item) for item in range(count + 1)],
            "brand": [f"brand {item % 4}" for item in range(count + 1)],
            "vector": [[0.5]] * (count + 1),
        }
    )
    frame.write_parquet(tmp_path / "items.parquet")
    return str(tmp_path / "items.parquet")


@pytest.fixture
def filtered(shop: Shop, items: str, tmp_path: Path) -> str:
    """The shop's recommender, with attributes."""
    folder = tmp_path / "recommender"
    shutil.copytree(shop.recommender, folder)
    run_shown("attributes", str(folder), items, "--columns", "price, brand")
    return str(folder)


def test_attributes_are_kept_with_a_recommender(shop: Shop, items: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shown = run_shown("attributes", shop.recommender, items, "--out", str(out))
    assert shown.splitlines()[-5:] == [
        "price: number",
        "brand: text",
        "vector: list of number",
        "1 rows of items that the catalogue does not have: left out",
        f"saved Attributes(price, brand, vector; 60 items) in {out}",
    ]
    loaded = Recommender.load(out)
    assert loaded.attributes is not None
    assert loaded.attributes.kinds["brand"] == "text"
    assert Recommender.load(shop.recommender).attributes is None


def test_export_in_place_of_a_recommender_keeps_its_attributes(shop: Shop, filtered: str) -> None:
    words = ("export", shop.prepared, shop.model, "--out", filtered)
    before = Recommender.load(filtered)
    assert "kept the attributes price, brand\n" in run_shown(*words)
    after = Recommender.load(filtered)
    for condition in ("price < 20", "brand = 'brand 1'"):
        expected = before.recommend([["tea5"]], 9, where=condition)
        found = after.recommend([["tea5"]], 9, where=condition)
        assert (found.items, found.scores.tolist()) == (expected.items, expected.scores.tolist())
    # An encoder of 8 bits is another recommender of the same items; one elsewhere has no such past.
    run_shown(*words, "--encoder-precision", "int8")
    assert Recommender.load(filtered).attributes is not None
    assert "attributes" not in run_shown(
        "export", shop.prepared, shop.model, "--out", f"{filtered}2"
    )


def test_export_keeps_attributes_by_external_ids(
    shop: Shop, numbered: Shop, items: str, tmp_path: Path
) -> None:
    # A catalogue with half of the shop's items, which have other numbers there, and one that is new.
    lines = Path(shop.folder, "log.csv").read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if any(f"tea{n}," in line for n in range(30, 60))]
    users = sorted({line.split(",")[0] for line in kept})
    new = [f"{user},aaa,1500000001" for user in users]
    log = tmp_path / "log.csv"
    log.write_text("\n".join([lines[0], *kept, *new]) + "\n", encoding="utf-8")
    prepared, model = str(tmp_path / "prepared"), str(tmp_path / "model")
    run_shown("prepare", str(log), "--out", prepared, *SIZES)
    run_shown("train", prepared, "--out", model, "--device", "cpu", *SETTINGS)
    folder = tmp_path / "recommender"
    shutil.copytree(shop.recommender, folder)
    run_shown("attributes", str(folder), items, "--columns", "price")
    prices = dict(pl.read_parquet(items).select("item_id", "price").iter_rows())
    shown = run_shown("export", prepared, model, "--out", str(folder))
    assert "kept the attributes price of 30 items; 1 are new and have none" in shown
    small = Recommender.load(folder)
    assert small.attributes is not None
    for item in ("tea30", "tea59"):
        where = f"price = {prices[item]}"
        assert small.recommend([["aaa"]], 31, where=where).items == [[item]]
    assert small.recommend([["tea30"]], 31, where="price is null").items == [["aaa"]]
    # Another catalogue altogether.
    shown = run_shown("export", numbered.prepared, numbered.model, "--out", str(folder))
    assert "no item is the same as before, so that the attributes price are gone" in shown
    assert f"`recprune attributes {folder} FILE` adds them again" in shown
    assert Recommender.load(folder).attributes is None


def test_export_over_a_damaged_recommender_says_that_attributes_may_be_gone(
    shop: Shop, filtered: str
) -> None:
    (victim,) = Path(filtered).glob("**/item_ids_pool*")
    victim.write_bytes(b"x" + victim.read_bytes()[1:])
    shown = run_shown("export", shop.prepared, shop.model, "--out", filtered)
    assert "if the recommender of before had attributes, they are gone: `recprune attrib" in shown
    assert Recommender.load(filtered).attributes is None


def test_recommend_with_a_condition(filtered: str, capsys: pytest.CaptureFixture[str]) -> None:
    recommender = Recommender.load(filtered)
    words = ["recommend", filtered, "--json", "-k", "6", "--history", "tea5"]
    where = "price < 30 and brand != 'brand 1'"
    assert main([*words, "--where", where, "--at-most", "brand=1"]) == 0
    (answer,) = lines_of(capsys.readouterr().out)
    expected = recommender.recommend([["tea5"]], 6, where=where, at_most=("brand", 1))
    assert answer["items"] == expected.items[0]
    assert len(answer["items"]) == 3
    for wrong, message in (
        (["--where", "prize < 3"], "where, character 1: no column is called 'prize'; similar: 'price'"),
        (["--where", "price <"], "where, character 8: expected a value, found the end"),
        (["--at-most", "color=1"], "at_most: no column is called 'color'; there are 'price' (number)"),
    ):  # fmt: skip
        assert main([*words, *wrong]) == 2
        assert message in capsys.readouterr().err
    for text in ("brand", "=2", "brand=", "brand=x", "brand=-1"):
        with pytest.raises(SystemExit):
            main([*words, "--at-most", text])
        assert f"{text!r} is not a column, = and a number" in capsys.readouterr().err


def test_a_recommender_without_attributes_says_so(
    shop: Shop, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recommend", shop.recommender, "--history", "tea5", "--where", "price < 3"]) == 2
    assert "where: this recommender has no attributes of its items" in capsys.readouterr().err


def test_search_with_a_condition(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (200, 8), np.uint8)
    index = Index.build(codes, rng.standard_normal((8, 16, 1)).astype(np.float32))
    index.save(tmp_path / "index")
    queries = rng.standard_normal((3, 8)).astype(np.float32)
    np.save(tmp_path / "queries.npy", queries)
    price, brand = rng.integers(0, 9, 200), rng.integers(0, 5, 200)
    pl.DataFrame({"item_id": np.arange(200), "price": price, "brand": brand}).write_parquet(
        tmp_path / "items.parquet"
    )
    folder, kept = str(tmp_path / "index"), str(tmp_path / "attributes")
    assert main(["attributes", folder, str(tmp_path / "items.parquet")]) == 2
    assert "is an index: say with --out where its attributes go" in capsys.readouterr().err
    run_shown("attributes", folder, str(tmp_path / "items.parquet"), "--out", kept)
    assert Attributes.load(kept).num_items == 200
    words = ["search", folder, str(tmp_path / "queries.npy"), "--json", "-k", "9"]
    assert main([*words, "--attributes", kept, "--where", "price in (1, 2)"]) == 0
    found = [line["ids"] for line in lines_of(capsys.readouterr().out)]
    expected = index.search(queries, 9, allow=np.isin(price, [1, 2]))
    assert found == expected.ids.tolist()
    assert main([*words, "--attributes", kept, "--at-most", "brand=1"]) == 0
    for line in lines_of(capsys.readouterr().out):
        ids = [item for item in line["ids"] if item >= 0]
        assert sorted(brand[ids].tolist()) == sorted({*brand.tolist()})
    assert main([*words, "--where", "price < 3"]) == 2
    assert "--where and --at-most are about attributes: give --attributes too" in capsys.readouterr().err  # fmt: skip
    Index.build(codes[:50], index.sub_item_embeddings()).save(tmp_path / "fewer")
    words[1] = str(tmp_path / "fewer")
    assert main([*words, "--attributes", kept, "--where", "price < 3"]) == 2
    assert "attributes of 200 items, expected those of the 50" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere", "ITEMS"], "nowhere: not a saved recommender"),
        (["RECOMMENDER", "nowhere.parquet"], "nowhere.parquet: no such file"),
        (["RECOMMENDER", "ITEMS", "--columns", "price,brnd"], "no column 'brnd' (did you mean 'brand'?)"),
        (["RECOMMENDER", "ITEMS", "--item-column", "sku"], "no column 'sku'"),
        (["RECOMMENDER", "ITEMS", "--out", "PREPARED"], "already exists and is a saved prepared log"),
    ],
)  # fmt: skip
def test_mistakes_are_named(
    shop: Shop, items: str, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    places = {"RECOMMENDER": shop.recommender, "ITEMS": items, "PREPARED": shop.prepared}
    assert main(["attributes", *(places.get(word, word) for word in words)]) == 2
    assert message in capsys.readouterr().err


def test_a_batch_with_a_condition(filtered: str, tmp_path: Path) -> None:
    histories = [["tea5"], ["tea7", "tea8"], [], ["nosuch"]]
    pl.DataFrame({"user_id": ["a", "b", "c", "d"], "history": histories}).write_parquet(
        tmp_path / "histories.parquet"
    )
    words = ["batch", filtered, "--histories", str(tmp_path / "histories.parquet"), "-k", "5"]
    where = "price >= 10 and brand in ('brand 0', 'brand 2')"
    filters = ["--where", where, "--at-most", "brand=2"]
    run_shown(*words, "--out", str(tmp_path / "out"), "--workers", "1", *filters)
    found = pl.read_parquet(tmp_path / "out" / "part-00000.parquet")
    expected = Recommender.load(filtered).recommend(histories, 5, where=where, at_most=("brand", 2))
    assert found["items"].to_list() == expected.items
    # The same command goes on there; another condition is another run.
    assert "nothing was left to do" in run_shown(
        *words, "--out", str(tmp_path / "out"), "--workers", "1", *filters
    )


def test_a_batch_with_another_condition_or_a_wrong_one_is_refused_first(
    filtered: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "histories.parquet"
    pl.DataFrame({"user_id": ["a"], "history": [["tea5"]]}).write_parquet(source)
    words = ["batch", filtered, "--histories", str(source), "--out", str(tmp_path / "out")]
    assert main([*words, "--where", "price < 'x'"]) == 2
    assert "where, character 9: 'x' is text" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    run_shown(*words, "--workers", "1", "--where", "price < 20")
    assert main([*words, "--where", "price < 21"]) == 2
    assert "belongs to another run, with different settings" in capsys.readouterr().err
