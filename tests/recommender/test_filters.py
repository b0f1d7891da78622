"""Conditions and limits on what a recommender says, by the attributes of its items."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recprune import Attributes, InputError, Recommender, StorageError
from recprune.recommender.saving import KIND
from recprune.storage import Saved, load_folder, save_folder
from tests.support.trainings import Trained, assert_same_answers, bits_of, histories_of

BRANDS = ["north", "south", None]


def attributes_of(trained: Trained) -> Attributes:
    """Every third item has no brand, every fifth no price."""
    count = trained.prepared.num_items
    table = {
        "item_id": trained.external([*range(count)]),
        "brand": [BRANDS[item % 3] for item in range(count)],
        "price": [None if item % 5 == 0 else float(item) for item in range(count)],
        "tags": [["even"] if item % 2 == 0 else [] for item in range(count)],
    }
    return Attributes.from_table(table, trained.prepared.item_ids)


def test_an_answer_has_what_the_condition_is_true_of(trained: Trained) -> None:
    count = trained.prepared.num_items
    recommender = trained.recommender.with_attributes(attributes_of(trained))
    items = np.arange(count)
    cheap = (items % 5 != 0) & (items < 40) & (items % 3 == 0)
    where = "price < 40 and brand = 'north'"
    histories: list[list[Any]] = [
        *(trained.external(history) for history in histories_of(count)),
        [],
    ]
    expected = trained.recommender.recommend(histories, 10, allow=cheap)
    assert_same_answers(recommender.recommend(histories, 10, where=where), expected)
    allow = items % 2 == 0
    both = trained.recommender.recommend(histories, 10, allow=allow & cheap)
    for allowed in (allow, bits_of(allow), trained.external(items[allow].tolist())):
        found = recommender.recommend(histories, 10, where=where, allow=allowed)
        assert_same_answers(found, both)
    found = recommender.recommend(histories, 10, where=f"{where} and 'even' in tags")
    assert_same_answers(found, both)
    assert set(found.milliseconds) >= {"filter"}
    none = recommender.recommend(histories, 3, where="price < 0")
    assert none.items == [[]] * len(histories)


def test_an_answer_has_no_more_of_a_brand_than_it_may(trained: Trained) -> None:
    count = trained.prepared.num_items
    recommender = trained.recommender.with_attributes(attributes_of(trained))
    histories: list[list[Any]] = [
        *(trained.external(history) for history in histories_of(count)[:4]),
        [],
        ["?"],
    ]
    ranking = recommender.recommend(histories, count, exclude_seen=True)
    boosts = dict.fromkeys(trained.external([3, 6, 9]), 2.5)
    boosted = recommender.recommend(histories, count, exclude_seen=True, boosts=boosts)
    for whole, added in ((ranking, None), (boosted, boosts)):
        for limit, k in ((1, 10), (2, 12), (3, count), (100, 10)):
            found = recommender.recommend(
                histories, k, exclude_seen=True, at_most=("brand", limit), boosts=added
            )
            for row, order in zip(found.ids, whole.ids, strict=True):
                taken: list[int] = []
                seen: Counter[Any] = Counter()
                for item in order[order >= 0].tolist():
                    brand = BRANDS[item % 3]
                    if len(taken) < k and (brand is None or seen[brand] < limit):
                        seen[brand] += 1
                        taken.append(item)
                assert row[row >= 0].tolist() == taken
    both = recommender.recommend(histories, 5, where="price >= 0", at_most=("brand", 1))
    for row in both.ids:
        kept = row[row >= 0]
        assert (kept % 5 != 0).all()
        assert max(Counter(item % 3 for item in kept.tolist() if item % 3 != 2).values()) == 1


def test_a_saved_recommender_has_its_attributes(sasrec: Trained, tmp_path: Path) -> None:
    recommender = sasrec.recommender.with_attributes(attributes_of(sasrec))
    recommender.save(tmp_path / "with")
    loaded = Recommender.load(tmp_path / "with")
    assert loaded.attributes is not None
    assert loaded.attributes.kinds == {"brand": "text", "price": "number", "tags": "list of text"}
    histories = [sasrec.external([5, 17, 3]), []]
    asked: dict[str, Any] = {"where": "price > 20 or brand is null", "at_most": ("brand", 2)}
    expected = recommender.recommend(histories, 10, **asked)
    assert_same_answers(loaded.recommend(histories, 10, **asked), expected)
    loaded.with_attributes(None).save(tmp_path / "without")
    plain = Recommender.load(tmp_path / "without")
    assert plain.attributes is None
    # As it always was: what has no attributes is read by those who know of none.
    assert load_folder(tmp_path / "without", kind=KIND, version=5).version == 5
    assert load_folder(tmp_path / "with", kind=KIND, version=6).version == 6


def test_conditions_need_numpy_only(sasrec: Trained, tmp_path: Path) -> None:
    sasrec.recommender.with_attributes(attributes_of(sasrec)).save(tmp_path / "with")
    code = """
import sys
for name in ("torch", "onnx", "polars", "scipy", "rich", "pyarrow", "matplotlib"):
    sys.modules[name] = None
from recprune import Recommender
recommender = Recommender.load(sys.argv[1])
found = recommender.recommend([[]], 4, where="'even' in tags and price < 50", at_most=("brand", 1))
print(found.ids.tolist())
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(tmp_path / "with")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    recommender = sasrec.recommender.with_attributes(attributes_of(sasrec))
    where = "'even' in tags and price < 50"
    found = recommender.recommend([[]], 4, where=where, at_most=("brand", 1))
    assert done.stdout.strip() == str(found.ids.tolist())


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"where": "prize < 5"}, "where, character 1: no column is called 'prize'; similar: 'price'"),
        ({"where": "price <"}, "where, character 8: expected a value, found the end"),
        ({"where": 5}, "where is an int, expected a condition as text"),
        ({"at_most": "brand"}, "at_most is 'brand', expected the name of a column and a number"),
        ({"at_most": ("brand", 0)}, "at_most: the number is 0"),
        ({"at_most": ("tags", 1)}, "at_most: 'tags' is a list of text"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(sasrec: Trained, asked: dict[str, Any], message: str) -> None:
    recommender = sasrec.recommender.with_attributes(attributes_of(sasrec))
    for history in ([], sasrec.external([3])):
        with pytest.raises(InputError, match=message):
            recommender.recommend([history], 5, **asked)


def test_without_attributes_there_are_no_conditions(sasrec: Trained) -> None:
    for asked in ({"where": "price < 5"}, {"at_most": ("brand", 1)}):
        with pytest.raises(InputError, match="this recommender has no attributes of its items"):
            sasrec.recommender.recommend([[]], 5, **asked)


def test_attributes_of_other_items_are_refused(sasrec: Trained, tmp_path: Path) -> None:
    attributes = attributes_of(sasrec)
    fewer = Attributes(
        {name: column.take(np.arange(50)) for name, column in attributes.columns.items()}, 50
    )
    with pytest.raises(InputError, match="attributes are of 50 items, the catalogue has 90"):
        sasrec.recommender.with_attributes(fewer)
    sasrec.recommender.with_attributes(attributes).save(tmp_path / "mine")
    saved = load_folder(tmp_path / "mine", kind=KIND, version=6)
    parts = {**saved.parts, "attributes": fewer.parts()}
    save_folder(tmp_path / "mine", Saved(KIND, 6, saved.settings, saved.arrays, parts))
    with pytest.raises(StorageError, match="mine: attributes are of 50 items, the catalogue has"):
        Recommender.load(tmp_path / "mine")
