"""Similar items, as typed: what `recprune similar` reads and prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from recprune.cli import main
from recprune.recommender.recommender import Recommender
from tests.support.shops import Shop, lines_of


def test_similar_prints_cosines_and_items(
    shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = Recommender.load(shop.recommender).similar(["tea5", "tea6"], 3)
    names = tmp_path / "names.csv"
    first = expected.items[0][0]
    names.write_text(f"item_id,name\ntea5,Assam  fine\n{first},Best of all\n")
    assert main(["similar", shop.recommender, "tea5", "-k", "3", "--names", str(names)]) == 0
    shown = capsys.readouterr()
    named = {first: f"{first}  Best of all", "tea5": "tea5  Assam fine"}
    lines = [
        [
            f"{score:10.4f}  {named.get(item, item)}"
            for item, score in zip(items, scores, strict=True)
        ]
        for items, scores in zip(expected.items, expected.scores.tolist(), strict=True)
    ]
    assert shown.out.splitlines() == lines[0]
    words = ["similar", shop.recommender, "tea5", "tea6", "-k", "3", "--names", str(names)]
    assert main(words) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == ["like tea5  Assam fine", *lines[0], "like tea6", *lines[1]]
    assert main([*words, "--json"]) == 0
    answers = lines_of(capsys.readouterr().out)
    assert [answer["item"] for answer in answers] == ["tea5", "tea6"]
    assert answers[0]["items"] == expected.items[0]
    assert answers[0]["scores"] == expected.scores[0].tolist()
    assert answers[0]["names"][0] == "Best of all"


def test_similar_says_what_is_wrong(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["tea5", "nosuch", "tea6", "none"], "items: not in the catalogue: 'nosuch', 'none'"),
        (["tea5", "-k", "0"], "-k is 0, expected at least 1"),
        (["tea5", "--where", "price < 5"], "has no attributes of its items"),
        (["tea5", "--attributes", "x"], "--attributes goes with --live"),
    ):
        assert main(["similar", shop.recommender, *words]) == 2
        assert message in capsys.readouterr().err


def test_similar_items_of_a_live_catalogue(
    shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recommender = Recommender.load(shop.recommender)
    with recommender.make_live(tmp_path / "live") as live:
        code = live.snapshot().item_codes(recommender.item_ids.find_all(["tea5"]))
        live.add(code, item_ids=["new"])
        live.remove(recommender.item_ids.find_all(["tea6"]))
    words = ["similar", shop.recommender, "new", "--live", str(tmp_path / "live"), "-k", "99"]
    assert main([*words, "--json"]) == 0
    (answer,) = lines_of(capsys.readouterr().out)
    assert len(answer["items"]) == len(recommender.item_ids) - 1  # one came, one left, one is asked
    assert "tea6" not in answer["items"]
    assert answer["scores"][answer["items"].index("tea5")] == 1.0
