"""One step: padding counts for nothing, losses for pruning do what they are for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from recprune import InputError
from recprune.models.architectures import build_model
from recprune.models.ranking import encode_histories
from recprune.training.checkpoint import load_model
from recprune.training.loop import train
from recprune.training.minibatches import Minibatch, make_minibatch, padded_minibatch
from recprune.training.optimiser import Optimiser
from recprune.training.steps import SingleStep
from tests.preparation.test_prepared import cycle
from tests.training.test_minibatches import KINDS, consecutive, settings_of

torch.set_num_threads(1)  # of tiny models, threads would only wait for each other


@KINDS
def test_a_padded_minibatch_holds_the_same_and_padding(architecture: str) -> None:
    settings = settings_of(architecture=architecture)
    minibatch = make_minibatch(consecutive(), np.arange(8), settings, 0, 0)
    padded = padded_minibatch(minibatch, rows=4, predictions=32)
    rows, count = len(minibatch.items), len(minibatch.targets)
    assert len(padded.items) % 4 == len(padded.targets) % 32 == 0
    assert 0 <= len(padded.items) - rows < 4
    for before, after in zip(minibatch.arrays()[:3], padded.arrays()[:3], strict=True):
        assert np.array_equal(after[:rows], before)
    assert np.array_equal(padded.positions[:count], minibatch.positions)
    assert np.array_equal(padded.targets[:count], minibatch.targets)
    assert (padded.targets[count:] == -1).all()
    assert (padded.segments[rows:] == -1).all()
    if architecture == "timed":
        assert minibatch.times is not None
        assert padded.times is not None
        assert padded.times.shape == (2, *padded.items.shape)
        assert np.array_equal(padded.times[:, :rows], minibatch.times)


@pytest.mark.parametrize("pruning_weight", [0.0, 0.5])
@KINDS
def test_padding_changes_neither_loss_nor_gradients(
    architecture: str, pruning_weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = consecutive()
    settings = settings_of(architecture=architecture, dropout=0.0, pruning_weight=pruning_weight)
    minibatch = make_minibatch(prepared, np.arange(8), settings, 0, 0)

    def same_negatives(
        _: int, shape: tuple[int, int], *, device: torch.device, generator: None
    ) -> Tensor:
        assert generator is None
        return torch.arange(shape[1], device=device).expand(shape)

    monkeypatch.setattr(torch, "randint", same_negatives)

    def one_step(shown: Minibatch) -> tuple[float, list[Tensor]]:
        torch.manual_seed(0)
        model = build_model(settings.model, prepared.codes, prepared.num_sub_items)
        optimiser = Optimiser(list(model.parameters()), 0.1, 0.0, on_gpu=False)
        step = SingleStep(model, optimiser, settings, prepared, torch.device("cpu"), compiled=False)
        loss = float(step(shown, 0, 0))
        # Not the weights: Adam magnifies rounding.
        return loss, [value.grad for value in model.parameters() if value.grad is not None]

    loss, gradients = one_step(minibatch)
    padded_loss, padded_gradients = one_step(padded_minibatch(minibatch, rows=8, predictions=64))
    assert padded_loss == pytest.approx(loss, rel=1e-5)
    assert gradients
    for before, after in zip(gradients, padded_gradients, strict=True):
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("pruning_loss", ["agreement", "concentration"])
def test_losses_for_pruning_do_what_they_are_for(tmp_path: Path, pruning_loss: str) -> None:
    prepared = cycle(60)

    def crowd(weight: float) -> tuple[float, float]:
        """Return how many sub-items crowd below the best, and how far the target's own are off."""
        values: dict[str, Any] = {"dropout": 0.0, "max_epochs": 20, "batch_size": 20}
        settings = settings_of(pruning_loss=pruning_loss, pruning_weight=weight, **values)
        out = tmp_path / str(weight)
        train(prepared, settings, out, device="cpu")
        model, _ = load_model(out, prepared)
        targets = prepared.test
        histories = [prepared.history(targets, number) for number in range(len(targets))]
        states = encode_histories(model, settings.model.length, histories)
        with torch.no_grad():
            table = model.embedding.score_table(states)  # [users, M, B]
        best = table.amax(-1)
        codes = torch.from_numpy(prepared.codes[targets.items].astype(np.int64))
        own = table.gather(-1, codes.unsqueeze(-1)).squeeze(-1)
        crowded = float((table.logsumexp(-1) - best).mean())
        return crowded, float((best - own).mean())

    without, with_loss = crowd(0.0), crowd(1.0)
    measured = 1 if pruning_loss == "agreement" else 0
    assert with_loss[measured] < 0.9 * without[measured]


def test_only_sub_items_can_be_trained_for_pruning() -> None:
    with pytest.raises(InputError, match="pruning_weight needs sub-items"):
        settings_of(embedding="full", pruning_weight=0.1)
    with pytest.raises(InputError, match="pruning_weight is -1"):
        settings_of(pruning_weight=-1)
    with pytest.raises(InputError, match="pruning_loss is 'x'"):
        settings_of(pruning_loss="x")
