"""Rankings from files: their order by hand, and every way in which they can be wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from recprune import InputError, Interactions
from recprune.evaluation.rankings import ReadRanking, read_ranking, write_rankings
from tests.conftest import log_of

# Users a, b, c; items 10, 20, 30, 40 are 0, 1, 2, 3.
LOG = log_of(("a", 10, 1), ("b", 20, 2), ("c", 30, 3), ("c", 40, 4))


def read(
    path: Path, k: int = 3, users: tuple[int, ...] = (0, 2), log: Interactions = LOG, **more: Any
) -> ReadRanking:
    return read_ranking(path, k, np.array(users), log.user_ids, log.item_ids, **more)


def written(path: Path, *rows: str) -> Path:
    path.write_text("\n".join(rows) + "\n")
    return path


def test_ranks_and_scores_by_hand(tmp_path: Path) -> None:
    rows = ["user,item,rank", "c,40,7", "a,20,2", "b,10,1", "a,30,1", "a,10,3", "a,40,4"]
    found = read(written(tmp_path / "ranks.csv", *rows))
    assert found.ids.tolist() == [[2, 1, 0], [3, -1, -1]]  # the rows of b are not asked for
    assert (found.missing.tolist(), found.shorter, found.others) == ([], 1, 1)
    # The largest score is best, ties by item.
    rows = ["user_id\titem_id\tscore", "a\t30\t-0.5", "a\t20\t-1e3", "a\t10\t-0.5", "b\t10\t1"]
    found = read(written(tmp_path / "scores.tsv", *rows))
    assert found.ids.tolist() == [[0, 2, 1], [-1, -1, -1]]
    assert (found.missing.tolist(), found.shorter, found.others) == ([1], 0, 1)
    # Where a file has both, it is the rank that counts; the order of users is that of the question.
    frame = pl.DataFrame(
        {"user_id": ["a", "a", "c"], "item_id": [10, 20, 10], "rank": [1, 0, 5], "score": [9, 1, 1]}
    )
    frame.write_parquet(tmp_path / "both.parquet")
    assert read(tmp_path / "both.parquet", 2, (2, 0)).ids.tolist() == [[0, -1], [1, 0]]


def test_several_runs_in_one_file(tmp_path: Path) -> None:
    file = tmp_path / "runs.parquet"
    runs = {"one": np.array([[0, 1], [2, -1]]), "other": np.array([[3, 2], [-1, -1]])}
    write_rankings(file, runs, np.array([0, 2]), LOG.user_ids, LOG.item_ids)
    assert pl.read_parquet(file).rows()[:3] == [
        ("one", "a", 10, 1),
        ("one", "a", 20, 2),
        ("one", "c", 30, 1),
    ]
    for name, ids in runs.items():
        assert read(file, 2, run=name).ids.tolist() == ids.tolist()
    with pytest.raises(InputError, match="has no run 'third'; its runs are one, other"):
        read(file, run="third")
    write_rankings(file, {"one": runs["one"]}, np.array([0, 2]), LOG.user_ids, LOG.item_ids)
    assert read(file, 2, run="third").ids.tolist() == runs["one"].tolist()  # there is one


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["user,item", "a,10"], "has the columns user, item; expected rank or score"),
        (["who,item,rank", "a,10,1"], "which column is the user"),
        (
            ["user,item,rank", "a,10,1", "z,10,1", "y,10,1"],
            "row 2: the user 'z' is not in the prepared log, as are 1 others",
        ),
        (["user,item,rank", "a,11,1"], "row 1: the item '11' is not in the prepared log"),
        (["user,item,rank", "a,,1"], "row 1: the item '' is not in the prepared log"),
        (["user,item,rank", "a,10,1", "a,20,x"], "row 2: the rank is 'x', expected a number"),
        (["user,item,score", "a,10,nan"], "row 1: the score is 'nan', expected a number"),
        (
            ["user,item,score", "a,10,1", "c,10,1", "a,10,2"],
            "rows 1 and 3 both give the user 'a' the item '10'",
        ),
        (
            ["user,item,rank", "a,10,1", "c,10,1", "a,20,1"],
            "rows 1 and 3 both give the user 'a' the rank '1'",
        ),
        (["user,item,rank", "b,10,1"], "none of its 1 rows is of a test user"),
        (
            ["run,user,item,rank", "x,a,10,1", "y,a,10,1", "y,a,99,2"],
            "row 3: the item '99' is not in the prepared log",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, rows: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(written(tmp_path / "ranking.csv", *rows), run="y")


def test_missing_values_and_files_are_named(tmp_path: Path) -> None:
    file = tmp_path / "ranking.parquet"
    frame = pl.DataFrame({"user_id": ["a", None], "item_id": [10, 20], "rank": [1, 2]})
    frame.write_parquet(file)
    with pytest.raises(InputError, match="row 2: the user is missing"):
        read(file)
    with pytest.raises(InputError, match="nowhere"):
        read(tmp_path / "nowhere.csv")
