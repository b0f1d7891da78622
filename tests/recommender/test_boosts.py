"""Boosts are added to what a recommender would say without them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from recprune import InputError
from tests.support.trainings import Trained, histories_of


def test_boosts_are_added_to_the_scores_of_all_histories(trained: Trained) -> None:
    num_items = trained.prepared.num_items
    rng = np.random.default_rng(4)
    items = rng.permutation(num_items)[: num_items // 2]
    values = rng.choice([0.5, -0.5, 3.0, -0.0], len(items)).astype(np.float32)
    named = dict(zip(trained.external(items.tolist()), values.tolist(), strict=True))
    histories = histories_of(num_items)
    allow = rng.random(num_items) < 0.8
    found = trained.recommender.recommend(
        [trained.external(history) for history in histories], 20, allow=allow, boosts=named
    )
    for place, history in enumerate(histories):
        eligible = allow.copy()
        if not trained.recommender.repeats:  # which is asked to repeat, unless told otherwise
            eligible[history] = False
        ids, scores = trained.expected(history, 20, eligible, (items, values))
        assert np.array_equal(found.ids[place], ids)
        # The encoders of one history and of many may round differently in their last bits.
        np.testing.assert_allclose(found.scores[place], scores, rtol=1e-5)
    nothing = trained.recommender.recommend([trained.external(histories[0])], 20, boosts={})
    plain = trained.recommender.recommend([trained.external(histories[0])], 20)
    assert np.array_equal(nothing.ids, plain.ids)


def test_boosts_are_added_to_numbers_of_interactions(sasrec: Trained) -> None:
    recommend = sasrec.recommender.recommend
    popularity = sasrec.recommender.popularity
    num_items = len(popularity)
    ranked = recommend([[]], num_items).ids[0]
    boosts = {int(ranked[-1]): 10_000.5, int(ranked[0]): -10_000.0, int(ranked[5]): 0.25}
    named = dict(zip(sasrec.external([*boosts]), boosts.values(), strict=True))
    totals = popularity.astype(np.float64)
    totals[[*boosts]] += [*boosts.values()]
    order = np.lexsort((np.arange(num_items), -totals))
    for k in (1, 7, num_items):
        found = recommend([[]], k, boosts=named)
        assert found.ids[0].tolist() == order[:k].tolist()
        assert found.scores[0].tolist() == totals[order[:k]].astype(np.float32).tolist()
    left_out = sasrec.external([int(order[0])])
    mask = np.arange(num_items) != order[1]
    found = recommend([[]], 5, boosts=named, exclude=left_out, allow=mask)
    assert found.ids[0].tolist() == order[2:7].tolist()
    assert recommend([[]], num_items, boosts=named).ids[0, -1] == ranked[0]


def test_popular_items_that_are_boosted_alike_stand_in_the_order_of_their_ids(
    sasrec: Trained,
) -> None:
    """So much is added that float32 forgets how popular each was."""
    popularity = sasrec.prepared.training_counts()
    first, second = np.argsort(popularity)[[20, -1]]  # of which the second is more popular
    pair = sorted([int(first), int(second)])
    boosts = dict.fromkeys(sasrec.external(pair), 1e9)
    found = sasrec.recommender.recommend([[]], 2, boosts=boosts)
    assert found.scores[0, 0] == found.scores[0, 1]
    assert found.ids[0].tolist() == pair


@pytest.mark.parametrize(
    ("boosts", "message"),
    [
        ({"nobody knows": 1.0}, "boosts: 'nobody knows': not in the catalogue"),
        ({"FIRST": float("nan")}, r"boosts\[.*\] is nan, expected a finite number"),
        ({"FIRST": 1e39}, r"boosts\[.*\] is 1e\+39, expected a finite number"),
        ({"FIRST": "1"}, r"boosts\[.*\] is '1', expected a finite number"),
        ({"FIRST": True}, r"boosts\[.*\] is True, expected a finite number"),
        ([("FIRST", 1.0)], "boosts is .*, expected a mapping from item ids to numbers"),
    ],
)
def test_boosts_that_are_none(sasrec: Trained, boosts: Any, message: str) -> None:
    if isinstance(boosts, dict) and "FIRST" in boosts:
        boosts = {sasrec.external([0])[0]: boosts["FIRST"]}
    for history in ([], sasrec.external([3])):
        with pytest.raises(InputError, match=message):
            sasrec.recommender.recommend([history], 5, boosts=boosts)
