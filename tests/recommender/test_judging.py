"""A recommender is judged by what each user had last: by hand, and as each user alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recprune import InputError, RankedUsers, read_interactions
from recprune.evaluation.evaluation import evaluate
from recprune.recommender import judging
from recprune.types import Timeline
from tests.support.small_models import walks
from tests.support.trainings import Trained

BEGIN = 1_600_000_000


def log_of(histories: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return the columns of a log."""
    rows = [
        (user, item, BEGIN + 1_000 * step)
        for user, history in histories.items()
        for step, item in enumerate(history)
    ]
    users, items, times = (list(column) for column in zip(*rows, strict=True))
    return {"user_id": users, "item_id": items, "timestamp": times}


def test_figures_by_hand(trainings: dict[str, Trained]) -> None:
    """Of histories that nothing is known of, the most popular items are the answer."""
    recommender = trainings["sasrec"].recommender
    popular = recommender.recommend([[]], 3).items[0]
    log = log_of(
        {
            "first": ["who?", popular[0]],
            "third": ["what?", "who?", popular[2]],
            "unknown": ["who?", "nobody knew"],
            "unknown again": ["who?", "what?", "who?"],
            "alone": [popular[0]],
        }
    )
    found = recommender.evaluate(log, 3, name="the popular ones")
    assert (found.name, found.num_users, found.unknown_targets) == ("the popular ones", 4, 2)
    means = {name: one.mean for name, one in found.metrics.items()}
    assert means == pytest.approx(
        {
            "NDCG@3": (1 + 0.5) / 4,  # 1 / log2(1 + 1) and 1 / log2(3 + 1)
            "Recall@3": 2 / 4,
            "Hit@3": 2 / 4,
            "MRR@3": (1 + 1 / 3) / 4,
            "MAP@3": (1 + 1 / 3) / 4,
        }
    )
    assert found.coverage[3] == pytest.approx(3 / 90)
    counts = recommender.popularity[recommender.item_ids.find_all(popular)]
    wanted = (counts[0] + counts[2]) / 4
    assert found.popularity_bias[3] == pytest.approx(counts.mean() / wanted)
    # One of the unknown targets is in its own history, and another one that is unknown is not.
    assert found.repeats is not None
    assert found.repeats.num_users == 1
    assert found.cold is not None
    assert found.cold.num_users == 2
    assert found.from_json(found.to_json()) == found
    assert found.to_frame()["run"].unique().to_list() == ["the popular ones"]


@pytest.mark.parametrize("name", ["sasrec", "timed", "repeats"])
def test_every_user_is_asked_about_when_the_target_came(
    trainings: dict[str, Trained], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = trainings[name]
    log = walks(60, 90, "integers" if name == "timed" else "strings")
    assert [*log.item_ids.take(range(90))] == trained.external([*range(90)])
    monkeypatch.setattr(judging, "_USERS_AT_ONCE", 7)
    found = trained.recommender.evaluate(log, 5, exclude_seen=False)
    histories, timelines, targets = [], [], []
    for user in range(log.num_users):
        begin, end = log.offsets[user : user + 2]
        histories.append(log.items[begin : end - 1])
        times = log.times[begin:end] // 1_000_000
        timelines.append(Timeline(times[:-1], int(times[-1])))
        targets.append(log.items[end - 1])
    ranked = trained.recommender.rank(histories, 5, timelines=timelines)
    popularity = np.repeat(np.arange(90), trained.recommender.popularity)
    train = trained.prepared.train_log()
    assert np.array_equal(np.sort(train.items), popularity)
    expected = evaluate(
        RankedUsers.of_targets(ranked.ids, np.array(targets)),
        train,
        name="recommender",
        histories=histories,
        cutoffs=(5,),
    )
    assert found == expected
    assert found.unknown_targets == 0
    assert found.metrics["NDCG@5"].mean > 0.0


def test_users_are_drawn_by_the_seed(trainings: dict[str, Trained]) -> None:
    recommender = trainings["sasrec"].recommender
    log = walks(60, 90, "strings")
    some = [recommender.evaluate(log, 5, users=20, seed=seed) for seed in (1, 1, 2)]
    assert some[0] == some[1] != some[2]
    assert [one.num_users for one in some] == [20] * 3
    assert recommender.evaluate(log, 5, users=200).num_users == 60
    # What was seen is left out, as it is when the recommender is asked; here nobody repeats more.
    whole = recommender.evaluate(log, 5)
    assert whole == recommender.evaluate(log, 5, exclude_seen=True)
    assert whole.repeats is not None
    assert all(one.mean == 0.0 for one in whole.repeats.metrics.values())


def test_users_count_whose_target_is_new(trainings: dict[str, Trained]) -> None:
    recommender = trainings["sasrec"].recommender
    log = log_of({"early": ["a", "b"], "on time": ["a", "b", "n"], "late": ["b", "a", "n", "p"]})
    assert recommender.evaluate(log, 5).num_users == 3
    found = recommender.evaluate(log, 5, since=BEGIN + 2000)
    assert found.num_users == 2
    longer = {"on time": ["a", "b", "n"], "late": ["b", "a", "n", "p"]}
    assert found.metrics == recommender.evaluate(log_of(longer), 5).metrics
    with pytest.raises(InputError, match="no user's last interaction is of 1600004000 or later"):
        recommender.evaluate(log, since=BEGIN + 4000)
    with pytest.raises(InputError, match="since is nan, expected seconds"):
        recommender.evaluate(log, since=float("nan"))


def test_a_live_catalogue_is_judged_as_it_is(trainings: dict[str, Trained], tmp_path: Path) -> None:
    recommender = trainings["sasrec"].recommender
    popular = recommender.recommend([[]], 2).items[0]
    with recommender.make_live(tmp_path / "live") as live:
        live.remove(recommender.item_ids.find_all(popular[:1]))
        changing = recommender.with_live(live)
        log = log_of({"gone": ["who?", popular[0]], "first now": ["who?", popular[1]]})
        found = changing.evaluate(log, 1)
    assert found.unknown_targets == 1
    assert found.metrics["Hit@1"].mean == 0.5


def test_what_cannot_be_judged_is_refused(trainings: dict[str, Trained]) -> None:
    recommender = trainings["sasrec"].recommender
    alone = read_interactions(log_of({"anna": ["a"], "ben": ["b"]}), min_interactions=1)
    with pytest.raises(InputError, match="no user has two interactions or more"):
        recommender.evaluate(alone)
    log = log_of({"anna": ["a", "b"]})
    with pytest.raises(InputError, match="users is 0, expected at least 1"):
        recommender.evaluate(log, users=0)
    with pytest.raises(InputError, match="k is 0, expected at least 1"):
        recommender.evaluate(log, 0)
    with pytest.raises(InputError, match="now has 2 entries for 1 histories"):
        recommender.recommend([["a"]], times=[[5]], now=[7, 8])
