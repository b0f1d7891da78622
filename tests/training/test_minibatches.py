"""What a training step sees: windows of histories, packed into rows, by seeded chance."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from recprune import InputError, assign_random
from recprune.models.architectures import build_model
from recprune.models.bert4rec import MASK
from recprune.models.repeats import event_features
from recprune.models.settings import Settings
from recprune.models.timelines import UNKNOWN_TIME
from recprune.preparation.prepared import Prepared
from recprune.training.loop import train
from recprune.training.minibatches import Minibatch, epoch_users, make_minibatch
from tests.models.test_models import shaken
from tests.preparation.test_prepared import cycle, dated, prepared_of

torch.set_num_threads(1)  # of tiny models, threads would only wait for each other


# One that predicts the next item, one that knows its time as well, and one that fills masks.
KINDS = pytest.mark.parametrize("architecture", ["sasrec", "timed", "bert4rec"])


def settings_of(**values: Any) -> Settings:
    small = {
        "width": 16,
        "length": 12,
        "num_blocks": 1,
        "num_negatives": 4,
        "batch_size": 10,
        "max_epochs": 3,
        "learning_rate": 0.01,
    }
    return Settings().with_values(small | values)


LENGTH = 6
VALIDATED, TESTED = 160, 168  # user u's validation target is item 160 + u, the test target 168 + u


def consecutive() -> Prepared:
    """User u trains on items 20 u, 20 u + 1, ...: any piece tells whose it is and from where.

    Eight users with 2 to 20 training items, then one with a single item and one with none.
    """
    histories = [
        [*range(20 * user, 20 * user + count), VALIDATED + user, TESTED + user]
        for user, count in enumerate((2, 3, 6, 7, 8, 9, 15, 20))
    ]
    codes = assign_random(200, num_splits=2, num_sub_items=8).codes
    return dated(prepared_of([*histories, [199], []], codes, 8))


def rows_of(minibatch: Minibatch, history: int) -> NDArray[np.int64]:
    """Return where a history stands in the flattened minibatch: in one row, without a gap."""
    places = np.flatnonzero(minibatch.segments == history)
    assert len(places)
    assert np.array_equal(places, np.arange(places[0], places[0] + len(places)))
    width = minibatch.items.shape[1]
    assert places[0] // width == places[-1] // width
    return places


def windows_of(minibatch: Minibatch, settings: Settings) -> list[list[int]]:
    """Put inputs and targets together again: what each history was made from."""
    num_histories = int(minibatch.segments.max()) + 1
    predicted = dict(zip(minibatch.positions.tolist(), minibatch.targets.tolist(), strict=True))
    assert len(predicted) == len(minibatch.positions)
    fills_masks = settings.model.architecture == "bert4rec"
    last_place = settings.model.length - (0 if fills_masks else 1)
    found = []
    for history in range(num_histories):
        rows = rows_of(minibatch, history)
        inputs = minibatch.items.flat[rows].tolist()
        # The newest item has the last place, and the others those before.
        places = minibatch.places.flat[rows].tolist()
        assert places == list(range(last_place + 1 - len(rows), last_place + 1))
        targets = [predicted.pop(row, None) for row in rows.tolist()]
        if not fills_masks:
            assert targets[:-1] == inputs[1:]  # after every item, the next one
            found.append([inputs[0], *targets])
        else:
            is_masked = [item == MASK for item in inputs]
            assert is_masked == [target is not None for target in targets]
            assert any(is_masked)
            found.append(
                [
                    item if item != MASK else target
                    for item, target in zip(inputs, targets, strict=True)
                ]
            )
    assert predicted == {}  # nothing is asked in the padding
    return found


@KINDS
def test_the_last_windows_are_the_ends_of_training_histories(architecture: str) -> None:
    prepared, users = consecutive(), np.arange(8)
    settings = settings_of(architecture=architecture, length=LENGTH, windows="last")
    for number in range(10):
        minibatch = make_minibatch(prepared, users, settings, 0, number)
        for user, window in enumerate(windows_of(minibatch, settings)):
            history = prepared.items[prepared.offsets[user] : prepared.train_ends[user]].tolist()
            assert window == history[-(LENGTH + 1) :]


@KINDS
def test_random_windows_are_pieces_of_the_users_own_training_history(architecture: str) -> None:
    prepared, users = consecutive(), np.arange(8)
    settings = settings_of(architecture=architecture, length=LENGTH, windows="random")
    begins: dict[int, set[int]] = {user: set() for user in range(8)}
    for number in range(200):
        minibatch = make_minibatch(prepared, users, settings, 3, number)
        for user, window in enumerate(windows_of(minibatch, settings)):
            count = int(prepared.train_ends[user] - prepared.offsets[user])
            assert len(window) == min(count, LENGTH + 1)
            assert window == list(range(window[0], window[0] + len(window)))
            assert 20 * user <= window[0]
            assert window[-1] < 20 * user + count  # neither validation nor test
            begins[user].add(window[0] - 20 * user)
    # Every piece is shown at some time: of 20 items, those that begin at 0 to 13.
    assert begins[7] == set(range(14))
    assert begins[4] == {0, 1}
    assert begins[0] == begins[3] == {0}


@KINDS
def test_histories_are_packed_into_few_rows(architecture: str) -> None:
    prepared, users = consecutive(), np.array([6, 0, 3, 1])
    settings = settings_of(architecture=architecture, length=LENGTH)
    minibatch = make_minibatch(prepared, users, settings, 0, 0)
    assert [window[0] // 20 for window in windows_of(minibatch, settings)] == [6, 0, 3, 1]
    for array in (
        minibatch.items,
        minibatch.places,
        minibatch.segments,
        minibatch.positions,
        minibatch.targets,
    ):
        assert array.dtype == np.int64
        assert array.flags.c_contiguous
    # Windows of 7, 2, 7 and 3 items; of each, SASRec's last is only a target.
    widest = LENGTH + 1 if architecture == "bert4rec" else LENGTH
    assert (
        minibatch.items.shape == minibatch.places.shape == minibatch.segments.shape == (3, widest)
    )
    assert (minibatch.segments >= 0).sum() == (19 if architecture == "bert4rec" else 15)
    assert minibatch.segments.min() == -1


@pytest.mark.parametrize("num_heads", [1, 2])
@KINDS
def test_a_packed_history_is_encoded_as_if_alone(architecture: str, num_heads: int) -> None:
    prepared = consecutive()
    settings = settings_of(
        architecture=architecture, length=LENGTH, num_blocks=2, num_heads=num_heads
    )
    model = shaken(build_model(settings.model, prepared.codes, prepared.num_sub_items))
    minibatch = make_minibatch(prepared, np.array([6, 0, 3, 1, 2, 5]), settings, 0, 0)
    assert len(minibatch.items) < 6
    given = [minibatch.items, minibatch.places, minibatch.segments]
    given += [] if minibatch.times is None else [minibatch.times]
    packed = [torch.from_numpy(array) for array in given]
    with torch.no_grad():
        states = model.forward_packed(*packed).flatten(0, 1)
        assert torch.isfinite(states).all()  # in the padding too
        for history in range(6):
            rows = rows_of(minibatch, history)
            items = torch.from_numpy(minibatch.items.flat[rows]).unsqueeze(0)
            times = (
                [] if minibatch.times is None else [minibatch.times.reshape(2, 1, -1)[..., rows]]
            )
            alone = model(items, torch.tensor([len(rows)]), *map(torch.from_numpy, times))[0]
            torch.testing.assert_close(states[rows], alone, rtol=0.0, atol=4e-6)


@pytest.mark.parametrize("windows", ["last", "random"])
def test_every_position_has_its_time_and_that_of_its_target(windows: str) -> None:
    prepared, users = consecutive(), np.arange(8)
    settings = settings_of(architecture="timed", length=LENGTH, windows=windows)
    assert prepared.times is not None
    # An item's number tells which event it is.
    seconds = dict(zip(prepared.items.tolist(), prepared.times // 10**6, strict=True))
    hidden = []
    for number in range(30):
        minibatch = make_minibatch(prepared, users, settings, 0, number)
        assert minibatch.times is not None
        assert minibatch.times.shape == (2, *minibatch.items.shape)
        for history in range(8):
            rows = rows_of(minibatch, history)
            happened, asked = minibatch.times.reshape(2, -1)[:, rows].tolist()
            hidden.append(happened[0] == UNKNOWN_TIME)
            if hidden[-1]:  # of a history all or none
                assert set(happened) == set(asked) == {UNKNOWN_TIME}
                continue
            items = minibatch.items.flat[rows].tolist()
            assert happened == [seconds[item] for item in items]
            assert asked == [seconds[item + 1] for item in items]
    assert np.mean(hidden) == pytest.approx(0.25, abs=0.1)


def test_a_head_and_an_encoder_see_or_miss_the_same_times() -> None:
    prepared, users = consecutive(), np.arange(8)
    settings = settings_of(architecture="timed", length=LENGTH, repeats=9)
    features = event_features(prepared.items, prepared.offsets)
    minibatch = make_minibatch(prepared, users, settings, 0, 0, features)
    assert minibatch.times is not None
    assert minibatch.own is not None
    asked = minibatch.times[1].flat[minibatch.positions]
    assert np.array_equal(asked, minibatch.own.now[3])
    assert 0 < (asked == UNKNOWN_TIME).sum() < len(asked)


def test_without_times_none_is_known() -> None:
    prepared = replace(consecutive(), times=None)
    settings = settings_of(architecture="timed", length=LENGTH)
    minibatch = make_minibatch(prepared, np.arange(8), settings, 0, 0)
    assert minibatch.times is not None
    assert (minibatch.times == UNKNOWN_TIME).all()


@pytest.mark.parametrize("share", [0.2, 0.7])
def test_bert4rec_masks_about_the_share_asked_for(share: float) -> None:
    prepared = cycle(60, 20, 22)
    settings = settings_of(architecture="bert4rec", length=19, mask_share=share)
    masked, only_last = [], 0
    for number in range(40):
        minibatch = make_minibatch(prepared, np.arange(60), settings, 0, number)
        assert minibatch.items.shape == (60, 20)  # all are full
        is_masked = minibatch.items == MASK
        alone = (is_masked.sum(1) == 1) & is_masked[:, -1]
        only_last += int(alone.sum())
        masked.extend(is_masked[~alone].mean(1).tolist())
    # One window in four is for predicting the next item. A share of 0.2 of 20 items falls on the
    # last alone, or on none, for 0.8²⁰ + 0.2 · 0.8¹⁹ = 1.4 % of the others.
    assert only_last / 2400 == pytest.approx(0.25 if share > 0.5 else 0.26, abs=0.03)
    assert np.mean(masked) == pytest.approx(share, abs=0.02)


def same(first: Minibatch, second: Minibatch) -> bool:
    return all(map(np.array_equal, first.arrays(), second.arrays()))


@KINDS
def test_a_minibatch_depends_on_seed_epoch_and_number_alone(architecture: str) -> None:
    prepared, users = dated(cycle(30, 40, 30)), np.arange(30)
    settings = settings_of(architecture=architecture, length=LENGTH, windows="random")
    other_seed = settings.with_values({"seed": 1})
    minibatch = make_minibatch(prepared, users, settings, 2, 3)
    assert same(minibatch, make_minibatch(prepared, users, settings, 2, 3))
    assert not same(minibatch, make_minibatch(prepared, users, settings, 2, 4))
    assert not same(minibatch, make_minibatch(prepared, users, settings, 3, 3))
    assert not same(minibatch, make_minibatch(prepared, users, settings, 3, 2))
    assert not same(minibatch, make_minibatch(prepared, users, other_seed, 2, 3))


def test_an_epoch_shows_every_user_at_most_once() -> None:
    prepared, settings = consecutive(), settings_of()
    orders = [epoch_users(prepared, settings, epoch).tolist() for epoch in range(5)]
    for order in orders:
        assert sorted(order) == list(range(8))  # not those with fewer than two items
    assert len({tuple(order) for order in orders}) == 5
    assert orders[2] == epoch_users(prepared, settings, 2).tolist()
    assert orders[2] != epoch_users(prepared, settings.with_values({"seed": 1}), 2).tolist()


def test_a_short_epoch_shows_others_the_next_time() -> None:
    settings = settings_of(batch_size=3, batches_per_epoch=2)
    shown = [epoch_users(consecutive(), settings, epoch).tolist() for epoch in range(20)]
    assert all(len(set(users)) == 6 for users in shown)
    assert {user for users in shown for user in users} == set(range(8))


def test_a_log_without_anything_to_learn_is_refused(tmp_path: Path) -> None:
    prepared = prepared_of([[1], [2], []], np.zeros((4, 2), np.uint8), 1)
    with pytest.raises(InputError, match="no user has two training interactions"):
        train(prepared, settings_of(), tmp_path, device="cpu")
