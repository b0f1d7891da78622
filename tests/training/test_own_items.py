"""A repeat head in training: what it scores is what is served, and a habit is learnt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recprune import assign_random
from recprune.models.architectures import SequenceModel, build_model
from recprune.models.ranking import encode_histories, model_boosts
from recprune.models.repeats import event_features
from recprune.models.settings import Settings
from recprune.models.timelines import UNKNOWN_TIME
from recprune.preparation.holdout import Targets
from recprune.preparation.prepared import Prepared
from recprune.recommender.recommender import Recommender
from recprune.training.checkpoint import attach_tables
from recprune.training.loop import train, validation_ndcg
from recprune.training.minibatches import (
    Minibatch,
    make_minibatch,
    minibatch_part,
    padded_minibatch,
)
from recprune.training.negatives import Negatives
from recprune.training.own_items import OwnItems
from recprune.training.sparse_scores import SparseScores
from recprune.types import Timeline
from tests.preparation.test_prepared import prepared_of
from tests.training.test_minibatches import settings_of

torch.set_num_threads(1)

CPU = torch.device("cpu")
NUM_ITEMS = 30


def habits(num_users: int = 12, length: int = 20, seed: int = 0) -> Prepared:
    """Every user returns to three items of their own, and to hardly anything else."""
    rng = np.random.default_rng(seed)
    histories = []
    for _ in range(num_users):
        favourites = rng.permutation(NUM_ITEMS)[:3]
        others = rng.integers(0, NUM_ITEMS, length)
        chosen = favourites[rng.integers(0, 3, length)]
        histories.append(np.where(rng.random(length) < 0.85, chosen, others).tolist())
    codes = assign_random(NUM_ITEMS, num_splits=2, num_sub_items=8).codes
    return prepared_of(histories, codes, 8)


def timed_habits(num_users: int = 40, seed: int = 0) -> Prepared:
    prepared = habits(num_users, 20, seed)
    gaps = np.random.default_rng(seed).integers(1, 10**9, len(prepared.items))
    # All histories begin together, so that each falls among the others.
    starts = np.repeat(prepared.offsets[:-1], np.diff(prepared.offsets))
    total = np.cumsum(gaps)
    return replace(prepared, times=total - total[starts] + 10**12)


def model_with_head(prepared: Prepared, settings: Settings) -> SequenceModel:
    torch.manual_seed(0)
    model = build_model(settings.model, prepared.codes, prepared.num_sub_items).eval()
    assert model.repeats is not None
    torch.nn.init.normal_(model.repeats.weight)
    torch.nn.init.normal_(model.repeats.bias)
    attach_tables(model, settings.model, prepared)
    return model


def scored(
    prepared: Prepared, settings: Settings, model: SequenceModel
) -> tuple[SparseScores, Any]:
    features = event_features(prepared.items, prepared.offsets)
    users = np.arange(prepared.num_users)
    minibatch = make_minibatch(prepared, users, settings, 0, 0, features)
    arrays = [torch.from_numpy(array) for array in minibatch.arrays()]
    items, places, segments, positions, _, events, now = arrays
    assert model.repeats is not None
    looks_back, share = settings.model.repeats, settings.model.own_scores
    own_items = OwnItems(
        model.embedding,
        model.repeats,
        model.longest_history,
        looks_back,
        share,
        model.activity,
        CPU,
    )
    with torch.no_grad():
        states = model.forward_packed(items, places, segments).flatten(0, 1)[positions]
        return own_items(states, events, now), minibatch


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("activity", [False, True])
@pytest.mark.parametrize(
    ("length", "looks_back", "share"), [(24, 50, 1.0), (6, 50, 0.0), (6, 4, 1.0), (6, 10, 0.5)]
)
def test_own_items_in_training_are_those_that_are_served(
    length: int,
    looks_back: int,
    share: float,
    activity: bool,
    timed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the end of every window: the user's items, each once, with the same boosts."""
    monkeypatch.setattr("recprune.training.minibatches._WITHOUT_TIMES", 0.0)
    # What others did is known up to the prediction, as it is for a model that is not saved.
    monkeypatch.setattr("recprune.training.minibatches._between", lambda own, _: own.now[3])
    prepared = habits()
    if timed:
        gaps = np.random.default_rng(5).integers(0, 10**11, len(prepared.items))
        gaps[::3] = 0  # some come together
        prepared = replace(prepared, times=np.cumsum(gaps))
    settings = settings_of(repeats=looks_back, length=length, own_scores=share, activity=activity)
    model = model_with_head(prepared, settings)
    own, minibatch = scored(prepared, settings, model)
    ends = prepared.train_ends
    shown = np.minimum(ends - prepared.offsets[:-1] - 1, length)
    for user in range(prepared.num_users):
        history = prepared.items[prepared.offsets[user] : ends[user]][:-1]  # the last is a target
        embeddings = encode_histories(model, length, [history])
        timeline = None
        if prepared.times is not None:
            seconds = prepared.times[prepared.offsets[user] : ends[user]] // 1_000_000
            timeline = Timeline(seconds[:-1], int(seconds[-1]))
        boosts = model_boosts(model, settings.model, embeddings, [history], [timeline])
        assert boosts is not None
        ((items, values),) = boosts
        at = int(np.cumsum(shown)[user]) - 1
        valid = own.valid[at]
        found = dict(
            zip(own.items[at][valid].tolist(), own.boosts[at][valid].tolist(), strict=True)
        )
        assert len(found) == int(valid.sum())  # each once
        assert sorted(found) == sorted(items.tolist())
        for item, value in zip(items.tolist(), values.tolist(), strict=True):
            assert found[item] == pytest.approx(value, abs=1e-4)
    assert minibatch.own is not None


def test_times_are_hidden_for_some_users() -> None:
    prepared = replace(habits(40), times=np.arange(40 * 20) * 10**9)
    settings = settings_of(repeats=50, length=24)
    features = event_features(prepared.items, prepared.offsets)
    own = make_minibatch(prepared, np.arange(40), settings, 0, 0, features).own
    assert own is not None
    hidden = own.now[3] == UNKNOWN_TIME
    for user in range(40):
        assert len(set(hidden[own.now[0] == user].tolist())) == 1
    assert 0.05 < hidden.mean() < 0.6


def test_a_target_that_was_there_before_has_its_boost_and_is_no_negative() -> None:
    prepared = habits()
    settings = settings_of(repeats=50, length=24, num_negatives=3)
    model = model_with_head(prepared, settings)
    own, minibatch = scored(prepared, settings, model)
    negatives = Negatives(model, settings.training, prepared, CPU)
    wanted = torch.from_numpy(minibatch.targets)
    states = torch.randn(len(wanted), settings.model.width)
    drawn = torch.zeros((len(wanted), 3), dtype=torch.int64)
    with torch.no_grad():
        plain = negatives.scores(states, wanted, drawn)
        boosted = negatives.scores(states, wanted, drawn, own)
    shift = float(np.log(3 / NUM_ITEMS))  # as rarely as any other item is drawn
    for at in range(len(wanted)):
        events = [
            event
            for event in range(own.items.shape[1])
            if own.valid[at, event] and own.items[at, event] == wanted[at]
        ]
        expected = float(own.boosts[at, events[0]]) + shift if events else 0.0
        assert float(boosted[0][at] - plain[0][at]) == pytest.approx(expected, abs=1e-4)
        added = boosted[1][at, 3:]
        counted = added > -1e8
        assert int(counted.sum()) == int(own.valid[at].sum()) - len(events)
    assert torch.equal(boosted[1][:, :3], plain[1])


def test_cross_entropy_has_boosts_at_the_items_themselves() -> None:
    prepared = habits()
    settings = settings_of(repeats=50, length=24, loss="cross_entropy")
    model = model_with_head(prepared, settings)
    own, minibatch = scored(prepared, settings, model)
    negatives = Negatives(model, settings.training, prepared, CPU)
    wanted = torch.from_numpy(minibatch.targets)
    states = torch.randn(len(wanted), settings.model.width)
    nothing = negatives.draw(wanted, len(wanted))
    with torch.no_grad():
        _, plain = negatives.scores(states, wanted, nothing)
        _, boosted = negatives.scores(states, wanted, nothing, own)
    difference = boosted - plain
    for at in range(len(wanted)):
        valid = own.valid[at]
        had = set(own.items[at][valid].tolist()) - {int(wanted[at])}
        changed = difference[at].abs() > 0
        assert set(changed.nonzero().flatten().tolist()) <= had
        for item, boost in zip(own.items[at][valid], own.boosts[at][valid], strict=True):
            if item != wanted[at]:
                assert float(difference[at, item]) == pytest.approx(float(boost), abs=1e-3)


def test_parts_and_padding_score_the_same() -> None:
    prepared = timed_habits(12)
    settings = settings_of(repeats=50, length=24, activity=True)
    model = model_with_head(prepared, settings)
    features = event_features(prepared.items, prepared.offsets)
    whole = make_minibatch(prepared, np.arange(12), settings, 0, 0, features)
    assert model.repeats is not None
    own_items = OwnItems(model.embedding, model.repeats, 24, 50, 1.0, model.activity, CPU)
    states = torch.randn(len(whole.targets), settings.model.width)

    def scores_of(minibatch: Minibatch, chosen: torch.Tensor) -> torch.Tensor:
        events, now = (torch.from_numpy(array) for array in minibatch.arrays()[5:])
        with torch.no_grad():
            own = own_items(chosen, events, now)
        return own.scores().masked_fill(~own.valid, 0.0)

    expected = scores_of(whole, states)
    for number in range(3):
        part, kept = minibatch_part(whole, number, 3)
        torch.testing.assert_close(scores_of(part, states[kept]), expected[kept])
    padded = padded_minibatch(whole, 8, 64)
    more = torch.randn(len(padded.targets) - len(states), settings.model.width)
    found = scores_of(padded, torch.cat([states, more]))[: len(states)]
    torch.testing.assert_close(found[:, : expected.shape[1]], expected)
    assert (found[:, expected.shape[1] :] == 0.0).all()


@pytest.mark.parametrize("loss", ["gbce", "softmax", "cross_entropy"])
def test_a_habit_is_learnt_at_once(tmp_path: Path, loss: str) -> None:
    """A head knows within an epoch or two what an encoder would have to learn by heart."""
    prepared = habits(60)
    values = {"loss": loss, "length": 24, "max_epochs": 12, "batch_size": 20, "num_negatives": 8}
    found = {}
    for repeats in (False, True):
        settings = settings_of(repeats=50 * repeats, **values)
        out = tmp_path / str(repeats)
        found[repeats] = train(prepared, settings, out, device="cpu").best_ndcg
    assert found[True] > 0.5
    assert found[True] > found[False] + 0.1


def test_what_others_did_is_known_up_to_some_moment_before_each_prediction() -> None:
    prepared = timed_habits()
    features = event_features(prepared.items, prepared.offsets)
    moments = []
    for number in range(5):
        minibatch = make_minibatch(
            prepared, np.arange(40), settings_of(repeats=30, activity=True), 0, number, features
        )
        assert minibatch.own is not None
        users, columns, _, asked_at, known_until = minibatch.own.now
        newest = minibatch.own.events[4, users, columns]
        known = asked_at != UNKNOWN_TIME
        assert 0 < known.sum() < len(known)  # some go without the time, but not without activity
        assert (known_until >= newest).all()
        assert (known_until <= asked_at)[known].all()
        moments.append(((known_until - newest) / np.maximum(asked_at - newest, 1))[known])
    assert 0.4 < np.concatenate(moments).mean() < 0.6


def test_validation_at_one_cut_knows_nothing_of_what_others_did_after_it() -> None:
    prepared = timed_habits()
    assert prepared.times is not None
    cut = int(np.quantile(prepared.times, 0.6))
    train_ends = np.array(
        [
            first + max(int((prepared.times[first:last] <= cut).sum()), 1)
            for first, last in zip(prepared.offsets[:-1], prepared.offsets[1:], strict=True)
        ]
    )
    users = np.arange(0, 40, 2, dtype=np.int32)  # the others train on all they have
    ends = train_ends[users]
    targets = Targets(users, prepared.items[ends], prepared.offsets[users], ends)
    all_ends = prepared.offsets[1:].copy()
    all_ends[users] = ends
    prepared = replace(prepared, train_ends=all_ends, validation=targets)
    settings = settings_of(repeats=30, activity=True, own_scores=0.0)
    model = model_with_head(prepared, settings)
    assert model.activity is not None
    before = validation_ndcg(model, prepared, settings)
    ended = int(model.activity.ends.searchsorted(cut // 1_000_000, side="right"))
    assert 10 < ended < len(model.activity.ends) - 10
    buckets = model.activity.buckets.copy()
    buckets[ended + 1 :] = np.random.default_rng(0).integers(0, 33, buckets[ended + 1 :].shape)
    model.activity = replace(model.activity, buckets=buckets)
    assert validation_ndcg(model, prepared, settings) == before
    buckets = buckets.copy()
    buckets[: ended + 1] = np.random.default_rng(1).integers(0, 33, buckets[: ended + 1].shape)
    model.activity = replace(model.activity, buckets=buckets)
    assert validation_ndcg(model, prepared, settings) != before


def test_a_recommender_that_is_evaluated_knows_what_was_known_at_the_time() -> None:
    """Each asked at a moment of their own, as in leave-one-out; what is served knows the end."""
    prepared = timed_habits()
    settings = settings_of(repeats=30, activity=True)
    model = model_with_head(prepared, settings)
    histories = [prepared.history(prepared.test, user) for user in range(40)]
    timelines = [prepared.timeline(prepared.test, user) for user in range(40)]
    states = encode_histories(model, settings.model.length, histories)
    expected = model_boosts(model, settings.model, states, histories, timelines)
    recommender = Recommender.from_model(prepared, model, settings)
    found = recommender.heads(states.numpy(), histories, timelines).total()
    assert expected is not None
    assert found is not None
    for (items, values), (wanted, boosts) in zip(found, expected, strict=True):
        assert items.tolist() == wanted.tolist()
        assert values.tolist() == boosts.tolist()
    assert model.activity is not None
    model.activity = model.activity.latest()
    served = Recommender.from_model(prepared, model, settings).heads
    later = served(states.numpy(), histories, timelines).total()
    assert later is not None
    assert any(
        not np.array_equal(values, boosts)
        for (_, values), (_, boosts) in zip(later, expected, strict=True)
    )
