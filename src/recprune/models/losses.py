"""What a model is penalised for at each position: pure functions of scores.

All are written with softplus(x) = log(1 + eˣ), which neither overflows nor loses small values, so
they are as exact in float32 as their inputs. −log σ(s) is softplus(−s), −log(1 − σ(s)) is
softplus(s).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from recprune.models.settings import Loss, TrainingSettings
from recprune.types import InputError, needs_extra

with needs_extra("train"):
    import torch
    from torch import Tensor
    from torch.nn.functional import cross_entropy, softplus


# Of the softmax over digits. A split has few numbers, and its best sub-item must stand out among
# hundreds by them alone; with a temperature of 1 they take long to become as large as that needs.
_TEMPERATURE = 0.25

LossFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def find_loss(settings: TrainingSettings, num_items: int) -> LossFunction:
    """Return the loss of that name, for a catalogue of so many items.

    All take the scores of positives, [positions], and negatives, [positions, negatives], and return
    a value for each position, [positions]. `digits` has no negatives, and is apart.
    """
    beta = gbce_beta(settings.num_negatives, num_items, settings.calibration)
    # What all scores have in common changes no ranking, but against hundreds of negatives a model
    # that knows nothing yet must push all of them far down. If it had to do that with its vectors,
    # they would all turn the same way and take long to part again; so it begins there.
    offset = math.log(beta / settings.num_negatives)
    # Further negatives, the own items of users, add to the sum, but not to what it is divided by:
    # there are more or fewer of them by the padding of a minibatch.
    drawn = settings.num_negatives + settings.num_in_batch
    losses: dict[Loss, LossFunction] = {
        "bce": lambda positive, negatives: bce(positive, negatives, drawn),
        "gbce": lambda positive, negatives: gbce(
            positive + offset, negatives + offset, beta, drawn
        ),
        "softmax": sampled_softmax,
        "cross_entropy": sampled_softmax,  # over negatives that are all other items
    }
    return losses[settings.loss]


def bce(positive: Tensor, negatives: Tensor, count: int | None = None) -> Tensor:
    """Binary cross-entropy, the loss of SASRec: the mean over all 1 + k decisions of a position."""
    return gbce(positive, negatives, beta=1.0, count=count)


def gbce(positive: Tensor, negatives: Tensor, beta: float, count: int | None = None) -> Tensor:
    """Generalised binary cross-entropy (Petrov and Macdonald, RecSys 2023).

    −(log σ^β(s⁺) + Σ log(1 − σ(s⁻))) / (k + 1). As the power is inside the logarithm, it is just a
    factor. k is `count`, or the number of negatives.
    """
    positive, negatives = positive.float(), negatives.float()
    total = beta * softplus(-positive) + softplus(negatives).sum(-1)
    return total / (1 + (negatives.shape[-1] if count is None else count))


def gbce_beta(num_negatives: int, num_items: int, calibration: float) -> float:
    """Return β for a calibration t: α (t (1 − 1/α) + 1/α), with α = k / (|I| − 1).

    t = 0 gives β = 1, plain BCE; t = 1 gives β = α, with which scores become probabilities.
    """
    if num_items < 2:
        raise InputError(f"{num_items} items: there is nothing to sample negatives from")
    rate = min(1.0, num_negatives / (num_items - 1))
    return rate * (calibration * (1.0 - 1.0 / rate) + 1.0 / rate)


def sampled_softmax(positive: Tensor, negatives: Tensor) -> Tensor:
    """Cross-entropy of choosing the positive among it and its negatives."""
    positive, negatives = positive.float(), negatives.float()
    return softplus(torch.logsumexp(negatives - positive.unsqueeze(-1), dim=-1))


def agreement(sub_item_scores: Tensor, codes: Tensor) -> Tensor:
    """Penalise a target that is not the best in every split: [positions, M, B] and [positions, M].

    The cross-entropy of choosing its sub-item, the mean over splits. Where the best item is made of
    the best sub-items, its score is near the bound of all that pruning has not seen yet.
    """
    by_split = sub_item_scores.transpose(0, 1)  # which is how a score table lies in memory
    wanted = codes.long().T.reshape(-1)
    values = cross_entropy(by_split.flatten(0, 1), wanted, reduction="none")
    return values.view(by_split.shape[:2]).mean(0)


def digits(sub_item_scores: Tensor, codes: Tensor) -> Tensor:
    """Cross-entropy of all digits of a target's code at once: [positions, M, B], [positions, M].

    The loss of RPG (Hou et al., KDD 2025), a generative model that predicts them in parallel.
    Σ log p_m is Σ S_m less Σ log Z_m, which is the same for all items: the most probable code is
    the one of the highest score, at any temperature.
    """
    return agreement(sub_item_scores / _TEMPERATURE, codes)


def concentration(sub_item_scores: Tensor) -> Tensor:
    """Penalise sub-item scores that crowd below the best of their split: [positions, M, B].

    The logarithm of Σ exp(S − max), which counts the sub-items near the top, the mean over splits:
    every one of them is a posting list, or a row of cells, that pruning has to look into.
    """
    best = sub_item_scores.amax(-1)
    return (torch.logsumexp(sub_item_scores, dim=-1) - best).mean(-1)
