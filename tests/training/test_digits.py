"""The loss `digits`: all digits of a code at once, and the search that decodes them exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recprune import InputError, Recommender
from recprune.models.architectures import build_model
from recprune.models.ranking import encode_histories
from recprune.training.checkpoint import load_model
from recprune.training.loop import train
from recprune.training.minibatches import make_minibatch
from recprune.training.optimiser import Optimiser
from recprune.training.steps import SingleStep
from tests.preparation.test_prepared import cycle
from tests.training.test_minibatches import consecutive, settings_of

torch.set_num_threads(1)  # of tiny models, threads would only wait for each other


@pytest.mark.parametrize("architecture", ["sasrec", "bert4rec"])
def test_the_loss_is_that_of_every_digit_by_itself(architecture: str) -> None:
    prepared = consecutive()
    settings = settings_of(architecture=architecture, dropout=0.0, loss="digits")
    minibatch = make_minibatch(prepared, np.arange(8), settings, 0, 0)
    torch.manual_seed(0)
    model = build_model(settings.model, prepared.codes, prepared.num_sub_items)
    arrays = [torch.from_numpy(array) for array in minibatch.arrays()]
    with torch.no_grad():
        states = model.forward_packed(*arrays[:3]).flatten(0, 1)[arrays[3]]
        table = model.embedding.score_table(states).double().numpy()
    total = 0.0
    for scores, target in zip(table, minibatch.targets, strict=True):
        for split, sub_item in enumerate(prepared.codes[target]):
            powers = np.exp(4.0 * scores[split])  # a temperature of 1/4
            total -= np.log(powers[sub_item] / powers.sum())
    optimiser = Optimiser(list(model.parameters()), 0.001, 1.0, on_gpu=False)
    step = SingleStep(model, optimiser, settings, prepared, torch.device("cpu"), compiled=False)
    expected = total / table.shape[1] / len(minibatch.targets)
    assert float(step(minibatch, 0, 0)) == pytest.approx(expected, rel=1e-5)


def test_a_recommender_ranks_by_the_probability_of_codes(tmp_path: Path) -> None:
    prepared = cycle(60)
    settings = settings_of(loss="digits", max_epochs=8, dropout=0.0)
    train(prepared, settings, tmp_path, device="cpu")
    model, _ = load_model(tmp_path, prepared)
    recommender = Recommender.from_training(prepared, tmp_path)
    targets = range(len(prepared.test))
    histories = [prepared.history(prepared.test, target) for target in targets]
    states = encode_histories(model, settings.model.length, histories)
    with torch.no_grad():
        scores = model.embedding.score_table(states).double()
    logarithms = scores.log_softmax(-1).numpy()  # [users, M, B]
    splits = np.arange(prepared.codes.shape[1])
    probable = logarithms[:, splits, prepared.codes].sum(-1)  # [users, items]
    found = recommender.index.search(recommender.encoder.encode(histories), 5)
    best = -np.sort(-probable, axis=1)[:, :5]
    np.testing.assert_allclose(np.take_along_axis(probable, found.ids, 1), best, atol=1e-4)
    ids, followers = found.ids[:, 0], prepared.test.items
    assert (ids == followers).mean() > 0.9  # a cycle is easy


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"embedding": "full"}, "loss digits needs sub-items: embedding is full"),
        ({"codes": "learnt", "full_epochs": 1}, "loss digits needs codes that stay"),
        ({"repeats": 5}, "loss digits compares no items: repeats"),
        ({"transitions": 1}, "loss digits compares no items: transitions"),
        ({"negatives": "shared"}, "loss digits has no negatives"),
        ({"negatives": "shared", "num_in_batch": 4}, "loss digits has no negatives"),
        ({"negatives": "shared", "logq": True}, "logq corrects the loss softmax"),
    ],
)
def test_settings_that_cannot_be(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        settings_of(loss="digits", **values)
