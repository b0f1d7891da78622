"""φ continued is φ of the whole window, whatever happens to a history."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from recprune import StorageError
from recprune.models.continuation import Continuation, KeptState
from recprune.models.settings import ModelSettings
from tests.support.continued_models import NUM_ITEMS, ContinuedModel

SHAPES: list[dict[str, Any]] = [
    {},
    {"embedding": "full"},
    {"num_heads": 1, "kept_width": 7},
    {"num_blocks": 1},
    {"num_blocks": 3, "inner_share": 0.4},
    {"num_blocks": 4, "length": 3},
    {"length": 1},
    {"length": 2},
]


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def model(request: pytest.FixtureRequest) -> ContinuedModel:
    return ContinuedModel(**request.param)


def random_items(rng: np.random.Generator, count: int) -> list[int]:
    # Of few items, so that windows look alike.
    return [int(item) for item in rng.integers(0, int(rng.choice([2, 5, NUM_ITEMS])), count)]


def test_every_window_is_encoded_as_by_the_model(model: ContinuedModel) -> None:
    rng = np.random.default_rng(0)
    length = model.settings.length
    for count in [*range(1, 2 * length + 2), 5 * length]:
        history = random_items(rng, count)
        state = model.continuation.anew(np.array(history, np.int32))
        model.check(state.embedding, history)
        assert state.items.tolist() == history[-length:]
        assert len(state.rows) == min(count, max(model.settings.reaches))


def test_random_histories_continued_are_those_of_their_windows(model: ContinuedModel) -> None:
    """Events, late ones, those that drop out, several at once: thousands of questions."""
    rng = np.random.default_rng(1)
    length = model.settings.length
    history: list[int] = []
    state: KeptState | None = None
    continued = anew = 0
    for _ in range(600):
        match rng.choice(
            ["event", "events", "late", "cut", "forgotten", "again"],
            p=[0.6, 0.2, 0.05, 0.05, 0.05, 0.05],
        ):
            case "event":
                history += random_items(rng, 1)
            case "events":
                history += random_items(rng, int(rng.integers(1, length + 3)))
            case "late":
                history.insert(int(rng.integers(len(history) + 1)), int(rng.integers(NUM_ITEMS)))
            case "cut":
                history = history[int(rng.integers(len(history) + 1)) :]
            case "forgotten":
                state = None
        history = history[-3 * length :]
        if not history:
            continue
        items = np.array(history, np.int32)
        found = None if state is None else model.continuation.continued(state, items)
        continued += found is not None
        anew += found is None
        state = model.continuation.anew(items) if found is None else found
        assert state.items.tolist() == history[-length:]
        model.check(state.embedding, history)
    assert anew > 10
    if length > 3:  # else few items are what is new
        assert continued > 300


def test_a_long_way_adds_no_errors_up() -> None:
    model = ContinuedModel(width=32, length=40)
    rng = np.random.default_rng(2)
    history = rng.integers(0, NUM_ITEMS, 4000, np.int32)
    state = model.continuation.anew(history[:1])
    for count in range(2, len(history)):
        found = model.continuation.continued(state, history[:count])
        assert found is not None
        state = found
        if count % 100 == 0:
            model.check(state.embedding, history[:count].tolist())


def test_a_state_is_only_taken_for_what_it_leads_to() -> None:
    continuation = ContinuedModel().continuation  # looks at 12 items
    history = np.arange(30, dtype=np.int32)
    state = continuation.anew(history[:20])
    assert continuation.continued(state, history[:20]) is state
    for count, leads_there in ((21, True), (28, True), (19, False)):
        assert (continuation.continued(state, history[:count]) is not None) == leads_there
    # One item in the window is another, or is missing: then no part of it can be kept.
    for changed in (np.delete(history[:22], 15), np.insert(history[:20], 12, 50)):
        assert continuation.continued(state, changed) is None
    # What lies before the window does not matter, but that it was there does.
    assert continuation.continued(state, history[8:21]) is not None
    assert continuation.continued(state, history[10:20]) is None
    assert continuation.continued(state, history[14:20]) is None
    short = continuation.anew(history[:4])
    assert continuation.continued(short, history[:12]) is not None
    assert continuation.continued(short, history[1:12]) is None


def test_states_of_other_models_are_told_apart() -> None:
    first, second = ContinuedModel(seed=0), ContinuedModel(seed=1)
    assert first.continuation.fingerprint == ContinuedModel(seed=0).continuation.fingerprint
    prints = {first.continuation.fingerprint, second.continuation.fingerprint}
    for weights, vectors in ((first.weights, second.vectors), (second.weights, first.vectors)):
        prints.add(Continuation(weights, first.settings, vectors).fingerprint)
    assert len(prints) == 4


def test_weights_that_do_not_fit_are_refused() -> None:
    model = ContinuedModel()
    for name, array, message in (
        ("blocks.1.key.weight", None, "the encoder has no blocks.1.key.weight"),
        (
            "blocks.0.query.weight",
            np.zeros((3, 16), np.float32),
            r"blocks.0.query.weight is \[3, 16\], expected \[8, 16\]",
        ),
    ):
        weights = {key: value for key, value in model.weights.items() if key != name}
        if array is not None:
            weights[name] = array
        with pytest.raises(StorageError, match=message):
            Continuation(weights, model.settings, model.vectors)


def test_reaches_add_up_to_the_length() -> None:
    for length in (1, 2, 3, 10, 200):
        for blocks in (1, 2, 3, 5):
            reaches = ModelSettings("continued", length=length, num_blocks=blocks).reaches
            assert len(reaches) == blocks
            assert sum(reaches) == length - 1
            assert max(reaches) - min(reaches) <= 1
