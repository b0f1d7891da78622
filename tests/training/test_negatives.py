"""What targets are compared with: shared draws, their correction, and the whole catalogue."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from recprune import InputError
from recprune.models.architectures import build_model
from recprune.models.losses import find_loss
from recprune.models.settings import Settings
from recprune.training.negatives import Negatives
from tests.preparation.test_prepared import cycle, prepared_of
from tests.training.test_minibatches import settings_of

torch.set_num_threads(1)

CPU = torch.device("cpu")
SHARED = {"negatives": "shared", "loss": "softmax"}


def negatives_of(**values: Any) -> tuple[Negatives, Any]:
    settings = settings_of(**values)
    prepared = cycle()
    torch.manual_seed(0)
    model = build_model(settings.model, prepared.codes, prepared.num_sub_items)
    return Negatives(model, settings.training, prepared, CPU), model


def test_own_negatives_are_drawn_for_every_position_and_shared_ones_once() -> None:
    targets = torch.arange(7)
    own, _ = negatives_of(num_negatives=5)
    assert own.draw(targets, 7).shape == (7, 5)
    shared, _ = negatives_of(num_negatives=5, **SHARED)
    assert shared.draw(targets, 7).shape == (5,)
    everything, _ = negatives_of(loss="cross_entropy")
    assert everything.draw(targets, 7).shape == (0,)


def test_targets_of_the_batch_join_the_shared_ones_without_its_padding() -> None:
    negatives, _ = negatives_of(num_negatives=2, num_in_batch=500, **SHARED)
    targets = torch.tensor([3, 5, 5, -1, -1])
    drawn = negatives.draw(targets, 5)
    assert drawn.shape == (502,)
    in_batch = drawn[2:]
    assert set(in_batch.tolist()) == {3, 5}
    assert 0.55 < float((in_batch == 5).float().mean()) < 0.78  # two of three


@pytest.mark.parametrize("embedding", ["recjpq", "full"])
def test_shared_scores_are_those_of_the_same_items_one_by_one(embedding: str) -> None:
    negatives, model = negatives_of(embedding=embedding, num_negatives=3, **SHARED)
    states = torch.randn(4, 16)
    wanted, drawn = torch.tensor([1, 2, 3, 4]), torch.tensor([9, 2, 9])
    positive, scores = negatives.scores(states, wanted, drawn)
    each = torch.cat([wanted.unsqueeze(1), drawn.expand(4, 3)], dim=1)
    expected = model.embedding.scores(states, each)
    torch.testing.assert_close(positive, expected[:, 0])
    hit = drawn == wanted.unsqueeze(1)
    assert hit.sum() == 1
    torch.testing.assert_close(scores[~hit], expected[:, 1:][~hit])
    assert scores[hit].max() < -1e8  # a target is not compared with itself


def test_logq_takes_off_the_logarithm_of_how_often_an_item_is_drawn() -> None:
    """By hand: item 0 has 3 of 4 training interactions, of two items the catalogue has in all."""
    prepared = prepared_of([[0, 0, 1, 0], [0, 1]], np.zeros((2, 4), np.uint8), 4)
    counts = prepared.training_counts()
    assert counts.tolist() == [3, 1]
    values = SHARED | {"logq": True, "num_negatives": 8, "num_in_batch": 4}
    settings = settings_of(**values)
    model = build_model(settings.model, prepared.codes, prepared.num_sub_items)
    plain = Negatives(model, settings.with_values({"logq": False}).training, prepared, CPU)
    corrected = Negatives(model, settings.training, prepared, CPU)
    states, wanted, drawn = torch.randn(1, 16), torch.tensor([1]), torch.tensor([0])
    before, after = (one.scores(states, wanted, drawn) for one in (plain, corrected))
    assert torch.equal(before[0], after[0])
    difference = float((before[1] - after[1]).detach())
    assert difference == pytest.approx(math.log(8 / 2 + 4 * 3 / 4), abs=1e-5)


def test_cross_entropy_is_that_of_the_whole_catalogue() -> None:
    negatives, model = negatives_of(loss="cross_entropy")
    states, wanted = torch.randn(6, 16), torch.tensor([0, 3, 19, 7, 7, 2])
    values = find_loss(settings_of(loss="cross_entropy").training, 20)(
        *negatives.scores(states, wanted, negatives.draw(wanted, 6))
    )
    logits = model.embedding.scores(states, torch.arange(20).expand(6, 20))
    expected = torch.nn.functional.cross_entropy(logits, wanted, reduction="none")
    torch.testing.assert_close(values, expected)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"negatives": "all"}, "negatives is 'all', expected one of own, shared"),
        ({"num_in_batch": 5}, "need shared negatives"),
        ({"logq": True}, "need shared negatives"),
        ({"logq": True, "negatives": "shared"}, "logq corrects the loss softmax; loss is gbce"),
        ({"num_in_batch": -1}, "num_in_batch is -1, expected 0 or a positive integer"),
    ],
)
def test_settings_that_do_not_go_together(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Settings().with_values(values)
