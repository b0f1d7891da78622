"""New items are recommended to whom they suit: by who took them first, by content, or by both."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from recprune import InputError, LiveIndex, Recommender, fold_in
from recprune.cli import main
from recprune.recommender.newcomers.evidence import DatedEvents, states_after
from tests.recommender.newcomers.conftest import NUM_ITEMS, Walkers
from tests.support.trainings import Trained

LEAVING = {"new hat": 30, "new shoe": 70, "new coat": 3}  # after which place they are taken


def rank_of(recommender: Recommender, item: str, history: list[str]) -> int:
    """Return how many items stand above one, of all that are there."""
    assert recommender.live is not None
    found = recommender.recommend([history], recommender.live.num_items, exclude_seen=False)
    return found.items[0].index(item)


def put(walkers: Walkers, folder: Path, **given: object) -> tuple[Recommender, LiveIndex]:
    live = walkers.recommender.make_live(folder)
    folded = fold_in(walkers.recommender, **given)  # type: ignore[arg-type]
    live.put(folded.item_ids, folded.codes)
    return walkers.recommender.with_live(live), live


@pytest.mark.parametrize("takers", [1, 3, 10])
def test_those_who_are_where_it_was_taken_get_it(
    walkers: Walkers, tmp_path: Path, takers: int
) -> None:
    recommender, live = put(walkers, tmp_path / "live", log=walkers.log(LEAVING, takers))
    with live:
        for item, place in LEAVING.items():
            assert rank_of(recommender, item, walkers.walk(place)) < 5
            ranks = [rank_of(recommender, item, walkers.walk(at)) for at in range(NUM_ITEMS)]
            assert np.median(ranks) > NUM_ITEMS / 4  # but not everybody


def test_what_was_looked_at_is_told(walkers: Walkers) -> None:
    log = walkers.log(LEAVING, takers=4)
    folded = fold_in(walkers.recommender, log, events=3)
    assert sorted(folded.item_ids) == sorted(LEAVING)
    assert folded.events.tolist() == [3, 3, 3]
    assert not folded.by_content.any()
    assert folded.left_out == []
    assert folded.codes.shape == (3, 4)
    assert folded.codes.dtype == np.uint8


def test_the_same_is_found_again(walkers: Walkers) -> None:
    log = walkers.log(LEAVING, takers=3)
    first, second = (fold_in(walkers.recommender, log) for _ in range(2))
    assert first.item_ids == second.item_ids
    np.testing.assert_array_equal(first.codes, second.codes)


def test_an_event_with_nothing_before_it_says_nothing(walkers: Walkers) -> None:
    log = walkers.log({"new hat": 30}, takers=2)
    hat = log.item_ids.find("new hat")
    rows = np.ones(log.num_interactions, np.bool_)
    for user in range(log.num_users):
        if log.history(user)[-1] == hat:  # who keeps what they took, and nothing else
            rows[log.offsets[user] : log.offsets[user + 1] - 1] = False
    folded = fold_in(walkers.recommender, log.select(rows))
    assert len(folded) == 0
    assert folded.left_out == ["new hat"]


def test_chosen_items_alone(walkers: Walkers) -> None:
    log = walkers.log(LEAVING, takers=2)
    folded = fold_in(walkers.recommender, log, items=["new shoe", "never seen"])
    assert folded.item_ids == ["new shoe"]
    assert folded.left_out == ["never seen"]


@pytest.fixture
def titles(walkers: Walkers, tmp_path: Path) -> Path:
    """Every item of the cycle has a word of its own; a new one has that of another item."""
    rows = {name: f"word{at}" for at, name in enumerate(walkers.cycle)}
    rows |= {"new hat": "word31", "new bag": "word50 word50", "odd one": "nothing like it"}
    path = tmp_path / "titles.csv"
    lines = [f"{name},{text}" for name, text in rows.items()]
    path.write_text("\n".join(["item_id,title", *lines]) + "\n", encoding="utf-8")
    return path


def test_content_alone_gives_the_code_of_what_is_alike(walkers: Walkers, titles: Path) -> None:
    folded = fold_in(walkers.recommender, content=titles)
    assert folded.item_ids == ["new hat", "new bag"]
    assert folded.left_out == ["odd one"]
    assert folded.by_content.all()
    assert not folded.events.any()
    codes = walkers.recommender.index.item_codes()
    for code, like in zip(folded.codes, (31, 50), strict=True):
        known = codes[walkers.recommender.item_ids.find(walkers.cycle[like])]
        assert (code != known).sum() <= 1  # the shares of sub-items have a say


def test_the_column_of_ids_is_found_or_named(walkers: Walkers, titles: Path) -> None:
    expected = fold_in(walkers.recommender, content=titles)
    text = titles.read_text(encoding="utf-8")
    for name, given in (("id", None), ("code_of_it", "code_of_it")):
        titles.write_text(text.replace("item_id", name, 1), encoding="utf-8")
        folded = fold_in(walkers.recommender, content=titles, content_item=given)
        assert folded.item_ids == expected.item_ids
        assert np.array_equal(folded.codes, expected.codes)
    with pytest.raises(InputError, match="give it with --content-item"):
        fold_in(walkers.recommender, content=titles)


def test_who_took_it_outweighs_content(walkers: Walkers, titles: Path, tmp_path: Path) -> None:
    """The hat's title says place 31, ten takers say 60."""
    given = {"log": walkers.log({"new hat": 60}, takers=10), "content": titles}
    recommender, live = put(walkers, tmp_path / "live", **given)
    with live:
        assert rank_of(recommender, "new hat", walkers.walk(60)) < 5


def test_every_kind_of_model_folds_in(trained: Trained, tmp_path: Path) -> None:
    """Integer and string ids, full tables and codes, encoders that read times."""
    from recprune import interactions_from_columns

    names = trained.external([*range(12)])
    new = 10_001 if isinstance(names[0], int) else "new"
    histories = [[*names[at : at + 4], new] for at in range(8)]
    log = interactions_from_columns(
        [f"u{user}" for user, history in enumerate(histories) for _ in history],
        [str(item) if isinstance(new, str) else item for history in histories for item in history],
        [1_500_000_000 + step for history in histories for step, _ in enumerate(history)],
        time_format="seconds",
        min_interactions=1,
    )
    folded = fold_in(trained.recommender, log)
    assert folded.item_ids == [new]
    assert folded.events.tolist() == [8]
    with trained.recommender.make_live(tmp_path / "live") as live:
        live.put(folded.item_ids, folded.codes)
        recommender = trained.recommender.with_live(live)
        assert recommender.recommend([histories[0][:-1]], k=5).items[0]


def test_what_cannot_be_folded_in(walkers: Walkers, titles: Path) -> None:
    recommender = walkers.recommender
    log = walkers.log(LEAVING, takers=1)
    with pytest.raises(InputError, match="nothing to go by"):
        fold_in(recommender)
    with pytest.raises(InputError, match="events is 0, expected a positive number"):
        fold_in(recommender, log, events=0)
    with pytest.raises(InputError, match="'a' is an item that the recommender knows"):
        fold_in(recommender, log, items=["a"])
    with pytest.raises(InputError, match="no such file|cannot be read|does not exist"):
        fold_in(recommender, content=titles.with_name("none.csv"))


def test_ids_of_another_kind_are_refused(trainings: dict[str, Trained], walkers: Walkers) -> None:
    with pytest.raises(InputError, match="is not an id as the recommender's are: int"):
        fold_in(trainings["timed"].recommender, walkers.log(LEAVING, takers=1))


def test_states_of_histories(walkers: Walkers) -> None:
    """Histories by external ids have the states of the encoder; what says nothing is left out."""
    recommender = walkers.recommender
    walk = walkers.walk(20)
    times = [1_500_000_000.0 + step for step in range(5)]
    given = [
        DatedEvents(["unknown", *walk], [times[0], *times], times[-1]),
        DatedEvents(["unknown"], [1.0], 2.0),
        DatedEvents([], [], 2.0),
        DatedEvents(walk, [1e300] * 5, 2.0),  # no event can have been then
    ]
    states = states_after(recommender, given)
    known = recommender.item_ids.find_all(walk).astype(np.int32)
    np.testing.assert_array_equal(states, recommender.encoder.encode([known]))
    assert states_after(recommender, given[1:]).shape == (0, recommender.index.width)


# On the command line ------------------------------------------------------------------------------


def test_the_command_writes_codes(
    walkers: Walkers, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = walkers.write(tmp_path / "log.csv", LEAVING, takers=3)
    out = tmp_path / "codes.parquet"
    assert main(["items", "fold-in", str(saved), str(log), "--out", str(out)]) == 0
    written = pl.read_parquet(out)
    assert written.columns == ["item_id", "code", "events", "by_content"]
    expected = fold_in(walkers.recommender, walkers.log(LEAVING, takers=3))
    assert written["item_id"].to_list() == expected.item_ids
    assert written["events"].to_list() == [3, 3, 3]
    assert np.array(written["code"].to_list()).shape == expected.codes.shape
    assert "by events" in capsys.readouterr().out


def test_the_command_puts_items_into_a_live_index(
    walkers: Walkers,
    saved: Path,
    titles: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    live = tmp_path / "live"
    assert main(["index", "live", str(saved), "--out", str(live)]) == 0
    log = walkers.write(tmp_path / "log.csv", {"new hat": 60}, takers=10)
    words = ["items", "fold-in", str(saved), str(log), "--live", str(live)]
    assert main(words) == 0
    assert "1 items added, 0 replaced, 0 left as they were" in capsys.readouterr().err
    with LiveIndex.open(live) as opened:
        before = opened.snapshot().sequence
        recommender = walkers.recommender.with_live(opened)
        assert rank_of(recommender, "new hat", walkers.walk(60)) < 5
    assert main([*words, "--content", str(titles)]) == 0  # the hat stays, the bag comes
    assert "1 items added, 0 replaced, 1 left as they were" in capsys.readouterr().err
    assert main([*words, "--replace"]) == 0
    assert "0 items added, 1 replaced" in capsys.readouterr().err
    with LiveIndex.open(live) as opened:
        assert opened.snapshot().sequence == before + 2  # one change each
        assert opened.num_present == NUM_ITEMS + 2


def test_the_command_says_what_is_wrong(
    walkers: Walkers, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = str(walkers.write(tmp_path / "log.csv", LEAVING, takers=1))

    def said(*words: str) -> str:
        assert main(["items", "fold-in", str(saved), *words]) == 2
        return capsys.readouterr().err

    assert "nothing to go by" in said("--out", str(tmp_path / "x.parquet"))
    assert "must end in .parquet" in said(log, "--out", str(tmp_path / "x.csv"))
    assert "does not exist" in said(log, "--out", str(tmp_path / "no" / "x.parquet"))
    assert "--replace goes with --live" in said(
        log, "--out", str(tmp_path / "x.parquet"), "--replace"
    )
    content = ("--content", log, "--out", str(tmp_path / "x.parquet"))
    assert "--min-rating says how to read a log: give a LOG" in said(*content, "--min-rating", "3")
    other = tmp_path / "other"
    codes = np.zeros((3, 4), np.uint8)
    embeddings = np.zeros((4, 16, 8), np.float32)
    LiveIndex.create(other, codes, embeddings, item_ids=["a", "b", "c"]).close()
    assert "was not made from this recommender" in said(log, "--live", str(other))
    assert not [*tmp_path.glob("*.parquet")]
