"""Ids that are not in the catalogue, and the most popular items where no other is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from recprune import InputError
from recprune.data.identifiers import ExternalId
from tests.support.trainings import Trained, bits_of


def test_unknown_ids_are_left_out_and_reported_in_order(trained: Trained) -> None:
    known = trained.external([5, 17, 3])
    wrong: list[Any] = ["zzz", -3, "", 10**30, True, None, 2.5, "aaa"]
    history = [wrong[0], known[0], *wrong[1:5], known[1], wrong[5], wrong[6], known[2], wrong[7]]
    found = trained.recommender.recommend([history, known], 7)
    assert found.unknown == [wrong, []]
    assert found.items[0] == found.items[1]
    assert found.by_popularity.tolist() == [False, False]


@pytest.mark.parametrize("ids", ["sasrec", "bert4rec"])
@pytest.mark.parametrize("text", ["\ud800", "\x00", "e\u0301"])
def test_no_text_is_too_odd_to_be_unknown(
    trainings: dict[str, Trained], ids: str, text: str
) -> None:
    found = trainings[ids].recommender.recommend([[text]], 3)
    assert found.unknown == [[text]]
    assert found.by_popularity.all()


def most_popular(trained: Trained) -> list[int]:
    counts = [0] * trained.prepared.num_items
    for user in range(trained.prepared.num_users):
        start, end = trained.prepared.offsets[user], trained.prepared.train_ends[user]
        for item in trained.prepared.items[start:end]:
            counts[item] += 1
    assert len(set(counts)) < len(counts)  # there are ties
    return sorted(range(len(counts)), key=lambda item: (-counts[item], item))


@pytest.mark.parametrize("history", [[], ["zzz", 1], [True]])
def test_without_known_items_the_most_popular_are_recommended(
    trained: Trained, history: list[ExternalId]
) -> None:
    order = most_popular(trained)
    found = trained.recommender.recommend([history], 200)
    assert found.by_popularity.tolist() == [True]
    assert found.unknown == [history]
    assert found.items == [trained.external(order)]
    num_items = len(order)
    assert found.ids[0, :num_items].tolist() == order
    assert (found.ids[0, num_items:] == -1).all()
    assert (
        found.scores[0, :num_items].tolist() == trained.prepared.training_counts()[order].tolist()
    )
    assert (found.scores[0, num_items:] == -np.inf).all()
    assert found.stats is None
    # Only from what is allowed, in the same order.
    mask = np.arange(num_items) % 3 == 1
    allowed = [item for item in order if mask[item]]
    by_mask = trained.recommender.recommend([history], 5, allow=mask)
    by_ids = trained.recommender.recommend([history], 5, allow=trained.external(allowed))
    assert by_mask.items == by_ids.items == [trained.external(allowed[:5])]
    nothing = trained.recommender.recommend([history], 5, allow=[])
    assert nothing.items == [[]]
    assert (nothing.ids == -1).all()


def test_a_batch_tells_who_was_answered_by_popularity(trained: Trained) -> None:
    known = trained.external([5, 17])
    found = trained.recommender.recommend([[], known, ["zzz"], known], 4)
    assert found.by_popularity.tolist() == [True, False, True, False]
    assert found.items[0] == found.items[2] == trained.external(most_popular(trained)[:4])
    assert found.items[1] == found.items[3]


def test_popular_items_are_chosen_by_the_same_rules(sasrec: Trained) -> None:
    recommend = sasrec.recommender.recommend
    num_items = sasrec.prepared.num_items
    everything = recommend([[]], num_items).ids[0]
    mask = np.random.default_rng(3).random(num_items) < 0.5
    left_out = everything[:5].tolist()
    kept = [item for item in everything if mask[item] and item not in left_out][:10]
    for allow in (mask, bits_of(mask)):
        found = recommend([[]], 10, exclude=sasrec.external(left_out), allow=allow)
        assert found.ids[0, : len(kept)].tolist() == kept
        assert found.by_popularity.all()


@pytest.mark.parametrize("arguments", [{"method": "fast"}, {"threads": 0}, {"k": -1}])
def test_bad_arguments_are_named_even_where_popularity_answers(
    sasrec: Trained, arguments: dict[str, Any]
) -> None:
    (name,) = arguments
    with pytest.raises(InputError, match=f"{name} is"):
        sasrec.recommender.recommend([[]], **arguments)
