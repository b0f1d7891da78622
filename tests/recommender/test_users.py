"""All users of a log are answered as each of them alone would be."""

from __future__ import annotations

from typing import Any

import pandas as pd
import polars as pl
import pytest
from polars.testing import assert_frame_equal

from recprune import InputError, read_interactions
from recprune.recommender import recommender as module
from tests.support.trainings import Trained

BEGIN = 1_600_000_000


def log_of(trained: Trained, histories: dict[str, list[int]]) -> dict[str, list[Any]]:
    """Return the columns of a log; its last row is the oldest."""
    rows = [
        (user, trained.external([item])[0], BEGIN + 1_000 * step)
        for user, history in histories.items()
        for step, item in enumerate(history)
    ]
    users, items, times = (list(column) for column in zip(*reversed(rows), strict=True))
    return {"user_id": users, "item_id": items, "timestamp": times}


@pytest.mark.parametrize("name", ["repeats", "timed"])
def test_users_of_a_log_are_answered_as_each_alone(
    trainings: dict[str, Trained], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = trainings[name]
    histories = {"anna": [5, 17, 5, 40], "ben": [8], "carl": [1, 2, 3], "dora": [3], "eve": [60, 5]}
    columns = log_of(trained, histories)
    columns["user_id"].append("nobody's")
    unknown = type(columns["item_id"][0])(10**9)  # 1000000000 or "1000000000"
    columns["item_id"].append(unknown)
    columns["timestamp"].append(BEGIN)
    monkeypatch.setattr(module, "_USERS_AT_ONCE", 2)
    recommender = trained.recommender
    for log in (pd.DataFrame(columns), read_interactions(columns, min_interactions=1)):
        found = recommender.recommend_users(log, 4, exclude_seen=True, now=BEGIN + 10**6)
        assert found.columns == ["user_id", "rank", "item_id", "score"]
        assert found["user_id"].unique(maintain_order=True).to_list() == [*histories, "nobody's"]
        for user, history in histories.items():
            alone = recommender.recommend(
                [trained.external(history)],
                4,
                exclude_seen=True,
                times=[[BEGIN + 1_000.0 * step for step in range(len(history))]],
                now=BEGIN + 10**6,
            )
            expected = alone.to_frame([user])
            # Encoders of several histories at once add up in another order.
            assert_frame_equal(found.filter(pl.col("user_id") == user), expected, rel_tol=1e-4)
        popular = recommender.recommend([[]], 4).items[0]
        assert found.filter(pl.col("user_id") == "nobody's")["item_id"].to_list() == popular


def test_a_log_that_cannot_be_read_is_refused(trainings: dict[str, Trained]) -> None:
    with pytest.raises(InputError, match="user"):
        trainings["repeats"].recommender.recommend_users(pl.DataFrame({"item_id": [1]}))
