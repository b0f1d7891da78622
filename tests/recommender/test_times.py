"""A recommender tells its heads and its encoder what came again, and how long ago it was."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from recprune import InputError
from recprune.recommender.recommender import Recommender
from recprune.types import Timeline
from tests.support.trainings import Trained, assert_same_answers


def test_what_was_seen_comes_again_where_a_model_has_learnt_to_repeat(
    trainings: dict[str, Trained],
) -> None:
    trained = trainings["repeats"]
    history = [5, 17, 5, 40]
    recommend = trained.recommender.recommend
    everything = recommend([trained.external(history)], 200)
    assert {5, 17, 40} <= set(everything.ids[0].tolist())
    assert_same_answers(everything, recommend([trained.external(history)], 200, exclude_seen=False))
    without = recommend([trained.external(history)], 200, exclude_seen=True)
    assert not {5, 17, 40} & set(without.ids[0].tolist())
    assert everything.learnt.repeats is not None
    assert without.learnt.repeats is None  # nothing is left that they would be added to
    by_rank = trained.recommender.rank([np.array(history, np.int32)], 20)
    assert np.array_equal(by_rank.ids[0], everything.ids[0, :20])


def test_a_repeat_head_is_told_how_long_ago_things_were(trainings: dict[str, Trained]) -> None:
    trained = trainings["repeats"]
    history, times = [5, 17, 5, 40], [0.0, 50.9, 100.0, 160.2]
    named = [*trained.external(history[:2]), "unknown", *trained.external(history[2:])]
    recommend = trained.recommender.recommend
    found = recommend([named], 90, times=[[*times[:2], 70.0, *times[2:]]], now=1000)
    timeline = Timeline(np.array([0, 50, 100, 160]), 1000)
    expected = trained.recommender.rank([np.array(history, np.int32)], 90, timelines=[timeline])
    assert np.array_equal(found.ids, expected.ids)
    assert np.array_equal(found.scores, expected.scores)
    # Without a time it is asked for at the last event, and without times nothing is known of them.
    at_last = recommend([trained.external(history)], 90, times=[times])
    assert_same_answers(at_last, recommend([trained.external(history)], 90, times=[times], now=160))
    untimed = recommend([trained.external(history)], 90)
    assert not np.array_equal(untimed.scores, at_last.scores)
    assert_same_answers(untimed, recommend([trained.external(history)], 90, times=[None], now=1000))


def test_an_encoder_is_told_how_long_ago_things_were(trainings: dict[str, Trained]) -> None:
    trained = trainings["timed"]
    history, times = [5, 17, 5, 40], [0.0, 50.9, 100.0, 160.2]
    named = trained.external(history)
    served = Recommender.load(trained.saved, encoder="onnx")
    ask: dict[str, Any] = {"k": 90, "exclude_seen": False}
    answers = []
    for now in (None, 160, 200, 10**8):
        found = trained.recommender.recommend([named], times=[times], now=now, **ask)
        assert_same_answers(served.recommend([named], times=[times], now=now, **ask), found)
        timeline = Timeline(np.array([0, 50, 100, 160]), 160 if now is None else now)
        items = [np.array(history, np.int32)]
        expected = trained.recommender.rank(items, 90, timelines=[timeline])
        assert np.array_equal(found.ids, expected.ids)
        assert np.array_equal(found.scores, expected.scores)
        answers.append(found.scores)
    at_last, same, later, much_later = answers
    assert np.array_equal(at_last, same)
    untimed = trained.recommender.recommend([named], **ask).scores
    for first, second in combinations((untimed, at_last, later, much_later), 2):
        assert not np.array_equal(first, second)
    # One that is not known stands for no event, and so does its time.
    gapped = [*named[:2], 10**9, *named[2:]]
    found = trained.recommender.recommend([gapped], times=[[*times[:2], 70, *times[2:]]], **ask)
    assert np.array_equal(found.scores, at_last)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"times": [[1.0]]}, r"times\[0\] has 1 times for 2 items"),
        ({"times": [[1.0, 2.0], [3.0]]}, "times has 2 entries for 1 histories"),
        ({"times": [[1.0, float("nan")]]}, r"times\[0\] is .*, expected seconds since 1970"),
        ({"times": [["a", "b"]]}, r"times\[0\] is .*, expected seconds since 1970"),
        ({"times": [[1, 2]], "now": float("inf")}, "now is inf, expected seconds since 1970"),
        ({"now": "soon"}, "now is 'soon', expected seconds since 1970"),
        ({"times": 5}, "times is 5, expected the times of each history"),
        ({"times": [[1.7e12, 1.7e12]]}, "expected seconds since 1970"),  # these are milliseconds
    ],
)
def test_times_that_are_none(sasrec: Trained, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sasrec.recommender.recommend([sasrec.external([5, 17])], **arguments)
