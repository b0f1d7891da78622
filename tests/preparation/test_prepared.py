"""A prepared log is the hold-out that it came from, whole, in a folder that needs NumPy alone."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recprune import (
    Holdout,
    InputError,
    IntegerIds,
    Interactions,
    StorageError,
    Targets,
    assign_random,
    assign_svd,
    interactions_from_columns,
    leave_one_out,
    temporal_holdout,
)
from recprune.cli import main
from recprune.preparation.prepared import KIND, Prepared, prepare
from recprune.storage import load_folder, save_folder
from tests.support.small_models import walks

ARRAYS = ("offsets", "items", "train_ends", "codes")
PARTS = ("users", "items", "starts", "ends")


def cycle(
    num_users: int = 40,
    num_items: int = 20,
    length: int = 14,
    *,
    num_splits: int = 4,
    num_sub_items: int = 16,
    seed: int = 0,
) -> Prepared:
    """All users walk round one cycle: item i is always followed by item i + 1.

    The last two items of every user are the validation and the test target.
    """
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, num_items, num_users)
    histories = (starts[:, None] + np.arange(length)) % num_items
    codes = assign_random(
        num_items, num_splits=num_splits, num_sub_items=num_sub_items, seed=seed
    ).codes
    return prepared_of([row.tolist() for row in histories], codes, num_sub_items)


def prepared_of(histories: list[list[int]], codes: Any, num_sub_items: int) -> Prepared:
    """Test on every user's last item, validate on the one before, train on the others.

    Users with two items or fewer keep all of them for training.
    """
    lengths = np.array([len(history) for history in histories], np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    items = np.array([item for history in histories for item in history], np.int32)
    held_out = np.where(lengths > 2, 2, 0)
    train_ends = offsets[1:] - held_out
    users = np.flatnonzero(held_out).astype(np.int32)
    ends = train_ends[users]
    return Prepared(
        offsets,
        items,
        train_ends,
        Targets(users, items[ends], offsets[users], ends),
        Targets(users.copy(), items[ends + 1], offsets[users], ends + 1),
        codes,
        num_sub_items,
        IntegerIds(np.arange(len(histories), dtype=np.int64)),
        IntegerIds(np.arange(len(codes), dtype=np.int64)),
        {},
    )


def dated(prepared: Prepared, seed: int = 0) -> Prepared:
    """Return the same with times: between events lie seconds to weeks."""
    gaps = np.exp(np.random.default_rng(seed).uniform(14, 28, len(prepared.items)))
    return replace(prepared, times=10**15 + np.cumsum(gaps.astype(np.int64)))


def random_log(ids: str = "integers") -> Interactions:
    rng = np.random.default_rng(5)
    users, items = rng.integers(0, 50, 900), rng.integers(0, 120, 900)
    columns: tuple[Any, Any] = (
        (users * 3, items + 1000)
        if ids == "integers"
        else ([f"u{user}" for user in users], [f"é{item}" for item in items])
    )
    times = rng.permutation(900) + 1_500_000_000
    return interactions_from_columns(columns[0], columns[1], times, time_format="seconds")


def held_out(ids: str = "integers") -> tuple[Holdout, Prepared]:
    holdout = temporal_holdout(random_log(ids), validation_users=20, seed=3)
    codebook = assign_svd(holdout.train, num_splits=4, num_sub_items=16, seed=1)
    return holdout, prepare(holdout, codebook, {"holdout": "temporal"})


@pytest.mark.parametrize("ids", ["integers", "strings"])
def test_everything_comes_back_from_disk(tmp_path: Path, ids: str) -> None:
    _, prepared = held_out(ids)
    prepared.save(tmp_path / "prepared")
    loaded = Prepared.load(tmp_path / "prepared")
    for name in (*ARRAYS, "times"):
        saved, found = getattr(prepared, name), getattr(loaded, name)
        assert np.array_equal(saved, found)
        assert saved.dtype == found.dtype
        assert not found.flags.writeable
    for name in ("validation", "test"):
        for part in PARTS:
            saved = getattr(getattr(prepared, name), part)
            found = getattr(getattr(loaded, name), part)
            assert np.array_equal(saved, found)
            assert saved.dtype == found.dtype
    assert (loaded.num_items, loaded.num_users) == (prepared.num_items, prepared.num_users)
    assert loaded.num_sub_items == 16
    assert loaded.settings == prepared.settings
    assert loaded.settings["holdout"] == "temporal"
    assert loaded.settings["codebook"]["method"] == "svd"
    users, items = range(loaded.num_users), range(loaded.num_items)
    assert loaded.user_ids.take(users) == prepared.user_ids.take(users)
    assert loaded.item_ids.take(items) == prepared.item_ids.take(items)


@pytest.mark.parametrize("protocol", ["temporal", "leave one out"])
def test_a_prepared_log_is_the_hold_out_that_it_came_from(protocol: str) -> None:
    log = random_log()
    holdout = (
        temporal_holdout(log, validation_users=20, min_history=3, seed=3)
        if protocol == "temporal"
        else leave_one_out(log, validation_users=20, seed=3)
    )
    codebook = assign_random(log.num_items, num_splits=4, num_sub_items=16)
    prepared = prepare(holdout, codebook, {})
    assert (prepared.num_users, prepared.num_items) == (log.num_users, log.num_items)
    assert len(prepared.validation) == 20
    for user in range(log.num_users):
        training = prepared.items[prepared.offsets[user] : prepared.train_ends[user]]
        assert np.array_equal(training, holdout.train.history(user))
    assert np.array_equal(prepared.train_log().times, holdout.train.times)
    assert np.array_equal(prepared.train_log().items, holdout.train.items)
    for targets, same in ((prepared.validation, holdout.validation), (prepared.test, holdout.test)):
        assert len(targets) == len(same) > 0
        for target in range(len(same)):
            assert targets.items[target] == same.items[target]
            expected = holdout.history(same, target)
            assert np.array_equal(prepared.history(targets, target), expected)
        assert np.array_equal(log.items[same.ends], same.items)
    assert prepared.is_temporal() == (protocol == "temporal")


def holdouts() -> dict[str, Holdout]:
    log = walks(40, 60, "strings", seed=4)
    return {
        "temporal": temporal_holdout(log, validation_users=15),
        "short training": temporal_holdout(
            log, train_fraction=0.1, validation_users=5, min_history=3
        ),
        "leave one out": leave_one_out(log, validation_users=0),
    }


@pytest.mark.parametrize("protocol", holdouts())
def test_the_training_log_is_the_training_part_of_the_hold_out(
    tmp_path: Path, protocol: str
) -> None:
    holdout = holdouts()[protocol]
    codebook = assign_svd(holdout.train, num_splits=2, num_sub_items=4)
    prepared = prepare(holdout, codebook, {})
    prepared.save(tmp_path / "prepared")
    for source in (prepared, Prepared.load(tmp_path / "prepared")):
        log = source.train_log()
        assert (log.num_users, log.num_items) == (holdout.log.num_users, holdout.log.num_items)
        assert log.num_interactions == holdout.train.num_interactions
        for user in range(log.num_users):
            assert log.history(user).tolist() == holdout.train.history(user).tolist()
        assert log.items.dtype == holdout.train.items.dtype
        assert log.offsets.dtype == holdout.train.offsets.dtype
        assert np.array_equal(log.times, holdout.train.times)
        assert log.item_ids.take(range(60)) == holdout.log.item_ids.take(range(60))
    if protocol == "short training":
        assert len(holdout.dropped_users)


def test_a_folder_of_the_version_without_times_is_read(tmp_path: Path) -> None:
    _, prepared = held_out()
    prepared.save(tmp_path / "prepared")
    saved = load_folder(tmp_path / "prepared", kind=KIND, version=2)
    arrays = {name: np.array(array) for name, array in saved.arrays.items() if name != "times"}
    save_folder(tmp_path / "prepared", replace(saved, version=1, arrays=arrays))
    old = Prepared.load(tmp_path / "prepared")
    assert old.times is None
    assert not old.train_log().times.any()
    assert prepared.is_temporal()
    assert not old.is_temporal()  # cannot be known
    assert old.checksum() == prepared.checksum()  # its models are still its own


def test_training_counts_count_training_alone() -> None:
    holdout, prepared = held_out()
    expected = np.zeros(prepared.num_items, np.int64)
    for user in range(prepared.num_users):
        for item in holdout.train.history(user):
            expected[item] += 1
    counts = prepared.training_counts()
    assert np.array_equal(counts, expected)
    assert counts.sum() == holdout.train.num_interactions < holdout.log.num_interactions
    # Two users; 5 is validated and 6 tested; 3 is the only thing that the second user ever had.
    small = prepared_of([[1, 1, 4, 5, 6], [3]], np.zeros((8, 1), np.uint8), 1)
    assert small.training_counts().tolist() == [0, 2, 0, 1, 1, 0, 0, 0]


def test_what_is_prepared_cannot_be_written_to() -> None:
    prepared = cycle()
    for name in ARRAYS:
        with pytest.raises(ValueError, match="read-only"):
            getattr(prepared, name)[0] = 0


@pytest.mark.parametrize(
    "missing", [*ARRAYS, "validation_starts", "test_items", "user_ids_numbers", "item_ids_numbers"]
)
def test_a_folder_that_lacks_an_array_is_refused(tmp_path: Path, missing: str) -> None:
    folder = tmp_path / "prepared"
    cycle().save(folder)
    saved = load_folder(folder, kind=KIND, version=2)
    rest = {name: np.array(array) for name, array in saved.arrays.items() if name != missing}
    save_folder(folder, replace(saved, arrays=rest))
    with pytest.raises(StorageError, match=f"has no {missing.removesuffix('_numbers')}"):
        Prepared.load(folder)


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("offsets", 0, 1, "offsets does not ascend from 0"),
        ("offsets", 3, 10**6, "offsets does not ascend"),
        ("offsets", -1, 2, "offsets does not ascend"),
        ("items", 7, 20, r"items\[7\] is 20, expected 0 to 19"),
        ("items", 7, -1, r"items\[7\] is -1, expected 0 to 19"),
        ("train_ends", 2, 0, "train_ends has one that is outside its history"),
        ("train_ends", 2, 10**6, "train_ends has one that is outside its history"),
        ("times", 3, 0, "times has a history that does not ascend"),
        ("codes", (3, 1), 16, r"codes\[3, 1\] is 16, expected less than 16"),
        ("validation_users", 0, 40, r"validation_users\[0\] is 40, expected 0 to 39"),
        ("validation_starts", 1, 0, "validation_starts has one that is not the start"),
        ("test_ends", 1, 10**9, "test_ends has one that is outside its history"),
        ("test_ends", 1, 16, "test_ends has one that is part of training"),
        ("test_items", 1, 3, "test_items has one that is not the item at its place"),
        ("user_ids_numbers", 1, 0, r"user_ids_numbers\[1\] is 0, expected more"),
        ("item_ids_numbers", 1, 5, r"item_ids_numbers\[2\] is 2, expected more"),
        ("offsets", None, slice(0, -1), r"offsets is int64\[40\], expected int64\[41\]"),
        ("items", None, slice(0, -1), "times is int64"),
        ("codes", None, slice(0, -1), "codes has 19 items, item_ids has 20"),
        ("test_users", None, slice(0, -1), r"test_items is int32\[40\], expected int32\[39\]"),
    ],
)
def test_what_training_would_look_up_in_vain_is_refused(
    tmp_path: Path, name: str, place: Any, value: Any, message: str
) -> None:
    folder = tmp_path / "prepared"
    dated(cycle()).save(folder)
    saved = load_folder(folder, kind=KIND, version=2)
    arrays = {key: np.array(array) for key, array in saved.arrays.items()}
    if place is None:
        arrays[name] = arrays[name][value]
    else:
        assert arrays[name][place] != value
        arrays[name][place] = value
    save_folder(folder, replace(saved, arrays=arrays))
    with pytest.raises(StorageError, match=f"prepared: .*{message}"):
        Prepared.load(folder)


def test_a_folder_that_lacks_a_file_is_refused(tmp_path: Path) -> None:
    cycle().save(tmp_path / "prepared")
    (tmp_path / "prepared" / "train_ends.npy").unlink()
    with pytest.raises(StorageError, match="train_ends.npy: missing"):
        Prepared.load(tmp_path / "prepared")


def test_one_damaged_byte_anywhere_is_found(tmp_path: Path) -> None:
    cycle().save(tmp_path / "whole")
    files = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert len(files) == 15  # 14 arrays and the manifest
    for name in files:
        folder = tmp_path / "damaged"
        shutil.copytree(tmp_path / "whole", folder)
        content = bytearray((folder / name).read_bytes())
        content[len(content) * 3 // 4] ^= 4
        (folder / name).write_bytes(content)
        with pytest.raises(StorageError, match=name):
            Prepared.load(folder)
        shutil.rmtree(folder)


def test_other_folders_are_not_prepared_logs(tmp_path: Path) -> None:
    assign_random(30, num_splits=2, num_sub_items=4).save(tmp_path / "codebook")
    with pytest.raises(StorageError, match="holds a saved codebook, not a prepared log"):
        Prepared.load(tmp_path / "codebook")
    with pytest.raises(StorageError, match="nowhere: not a saved prepared log"):
        Prepared.load(tmp_path / "nowhere")


def test_a_codebook_of_another_catalogue_is_refused() -> None:
    holdout = leave_one_out(random_log(), validation_users=5)
    too_small = assign_random(holdout.log.num_items - 1, num_splits=2, num_sub_items=4)
    with pytest.raises(InputError, match=f"{holdout.log.num_items}"):
        prepare(holdout, too_small, {})


# The command ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def log_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten users and twelve items; user u has u + 5 interactions, all times differ."""
    path = tmp_path_factory.mktemp("prepare") / "log.csv"
    rows = [
        f"user{user},{(user + 5 * place) % 12},{1_500_000_000 + 100 * place + user}"
        for user in range(10)
        for place in range(user + 5)
    ]
    path.write_text("\n".join(["user_id,item_id,timestamp", *rows]) + "\n")
    return path


SMALL = ["--splits", "2", "--sub-items", "4"]


def test_prepare_by_leaving_one_out(
    log_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "prepared"
    options = ["--holdout", "leave-one-out", "--validation-users", "4", "--seed", "9", *SMALL]
    assert main(["prepare", str(log_file), "--out", str(out), *options]) == 0
    shown = capsys.readouterr()
    assert "leave one out" in shown.out
    assert f"recprune train {out}" in shown.err.replace("\n", "")
    prepared = Prepared.load(out)
    assert (prepared.num_users, prepared.num_items, len(prepared.items)) == (10, 12, 95)
    assert prepared.codes.shape == (12, 2)
    assert prepared.settings["holdout"] == "leave-one-out"
    assert prepared.settings["log"] == "log.csv"
    assert prepared.settings["seed"] == 9
    assert prepared.settings["codebook"]["method"] == "svd"
    assert len(prepared.validation) == 4
    validated = set(prepared.validation.users.tolist())
    for target in range(10):
        user = int(prepared.test.users[target])
        name = str(prepared.user_ids[user])
        number = int(name.removeprefix("user"))
        assert (
            prepared.item_ids[int(prepared.test.items[target])] == (number + 5 * (number + 4)) % 12
        )
        assert len(prepared.history(prepared.test, target)) == number + 4
        trained = prepared.train_ends[user] - prepared.offsets[user]
        assert trained == number + 4 - (user in validated)


def test_prepare_cuts_in_time_by_default(log_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "prepared"
    options = ["--train-fraction", "0.5", "--validation-users", "0", "--assignment", "random"]
    assert main(["prepare", str(log_file), "--out", str(out), *options, *SMALL]) == 0
    prepared = Prepared.load(out)
    # 48 of 95 interactions: places 0 to 4 of every user (50) without users 8 and 9 at place 4.
    assert prepared.train_ends.sum() - prepared.offsets[:-1].sum() == 48
    assert prepared.settings["cut_time"].startswith("2017-07-14")
    assert prepared.settings["train_fraction"] == 0.5
    assert prepared.settings["codebook"] == {"method": "random", "seed": 0}
    # User 0 has nothing after the cut.
    assert [prepared.user_ids[int(user)] for user in prepared.test.users] == [
        f"user{user}" for user in range(1, 10)
    ]
    assert len(prepared.validation) == 0


def test_prepare_asks_validation_users_at_an_earlier_cut(log_file: Path, tmp_path: Path) -> None:
    """Users have their places 0, 1, ... one after the other, as `log_file` dates them."""
    kept = {}
    for kind in ("last", "temporal"):
        options = ["--train-fraction", "0.5", "--validation", kind, *SMALL]
        assert main(["prepare", str(log_file), "--out", str(tmp_path / kind), *options]) == 0
        kept[kind] = Prepared.load(tmp_path / kind)
        assert kept[kind].settings["validation"] == kind
    last, temporal = kept["last"], kept["temporal"]
    assert np.array_equal(temporal.test.users, last.test.users)
    assert np.array_equal(temporal.test.items, last.test.items)
    assert temporal.settings["cut_time"] == last.settings["cut_time"]
    # 24 of 48 interactions: places 0 and 1 of all ten users, and place 2 of the first four.
    assert len(temporal.validation) == 10
    lengths = temporal.validation.ends - temporal.validation.starts
    assert lengths.tolist() == [3] * 4 + [2] * 6
    assert np.array_equal(temporal.train_ends[temporal.validation.users], temporal.validation.ends)


@pytest.mark.parametrize("holdout", ["leave-one-out", "none"])
@pytest.mark.parametrize("kind", ["sitting", "temporal"])
def test_other_validation_targets_need_a_cut_in_time(
    log_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], holdout: str, kind: str
) -> None:
    options = ["--holdout", holdout, "--validation", kind, *SMALL]
    assert main(["prepare", str(log_file), "--out", str(tmp_path / "out"), *options]) == 2
    complaint = " ".join(capsys.readouterr().err.split())
    why = f"goes with --holdout temporal: {holdout} has no cut in time"
    assert f"--validation {kind} {why}" in complaint
    assert not (tmp_path / "out").exists()


def test_prepare_holds_out_nothing_on_request(
    log_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "prepared"
    assert main(["prepare", str(log_file), "--out", str(out), "--holdout", "none", *SMALL]) == 0
    shown = capsys.readouterr()
    assert "Hold-out: none, all of the log trains" in shown.out
    hint = "--epochs-of EARLIER --settings EARLIER/settings.json"
    assert hint in shown.err.replace("\n", " ")
    prepared = Prepared.load(out)
    assert prepared.settings["holdout"] == "none"
    assert len(prepared.validation) == len(prepared.test) == 0
    assert np.array_equal(prepared.train_ends, prepared.offsets[1:])
    assert prepared.train_log().num_interactions == 95
    assert not prepared.is_temporal()


def test_prepare_replaces_what_it_prepared_before(log_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "prepared"
    for splits in ("2", "3"):
        sizes = ["--splits", splits, "--sub-items", "4"]
        assert main(["prepare", str(log_file), "--out", str(out), *sizes]) == 0
        assert Prepared.load(out).codes.shape == (12, int(splits))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--splits", "0"], "num_splits is 0"),
        (["--sub-items", "70000"], "num_sub_items is 70000"),
        (["--train-fraction", "1.5"], "train_fraction is 1.5"),
        (["--min-history", "0"], "min_history is 0"),
        (["--validation-users", "-1"], "validation_users is -1"),
        (["--seed", "-1"], "seed is -1"),
        (["--user-column", "who"], "no column 'who'"),
        (["--min-interactions", "100"], "no user has 100 interactions"),
    ],
)
def test_wrong_values_are_named_and_nothing_is_written(
    log_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    out = tmp_path / "prepared"
    assert main(["prepare", str(log_file), "--out", str(out), *SMALL, *options]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--holdout", "random"], "invalid choice: 'random'"),
        (["--assignment", "pq"], "invalid choice: 'pq'"),
        (["--splits", "two"], "invalid int value: 'two'"),
        (["--split", "2", "--subitems", "4"], "--subitems"),
    ],
)
def test_wrong_words_show_the_usage_of_the_command(
    log_file: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["prepare", str(log_file), "--out", "nowhere", *options])
    shown = capsys.readouterr().err
    assert message in shown
    assert "usage: recprune prepare" in shown


def test_prepare_overwrites_nothing_else(
    log_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    assert main(["prepare", str(log_file), "--out", str(tmp_path), *SMALL]) == 2
    assert "not overwritten" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]
