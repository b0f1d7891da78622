"""What targets are compared with in training: which items are drawn, and how often that happens.

Every position has negatives of its own, as in the paper, or all positions of a minibatch share
them: then a draw costs one vector and one matrix product, so that there can be thousands. Untrained
items that get their place from content are no negatives of any target: that nobody had them says
that they are new, not that they are unwanted.
"""

from __future__ import annotations

import math

import numpy as np

from recprune.models.architectures import SequenceModel
from recprune.models.learnt_codes import LearntEmbedding
from recprune.models.settings import TrainingSettings
from recprune.preparation.prepared import Prepared
from recprune.training.sparse_scores import SparseScores
from recprune.types import needs_extra

with needs_extra("train"):
    import torch
    from torch import Tensor

# The score of a negative that is the target itself. Not −∞, which has no gradient where it is the
# only one.
_NEVER = -1e9


class Negatives:
    """Draws negatives, and scores them beside the targets."""

    def __init__(
        self,
        model: SequenceModel,
        training: TrainingSettings,
        prepared: Prepared,
        device: torch.device,
    ) -> None:
        self._embedding = model.embedding
        self._training = training
        self._device = device
        self._spared: Tensor | None = None  # [items]: whether an item is never drawn
        self._drawn_from: Tensor | None = None  # the others, where some are spared
        if prepared.cold is not None and len(prepared.cold):
            spared = torch.zeros(prepared.num_items, dtype=torch.bool)
            spared[torch.from_numpy(prepared.cold.items.astype(np.int64))] = True
            self._spared = spared.to(device)
            self._drawn_from = torch.nonzero(~spared).flatten().to(device)
        self.num_items = prepared.num_items - (0 if prepared.cold is None else len(prepared.cold))
        # How often an item is drawn where a boosted one always is; logq corrects for that already.
        rate = min(1.0, training.num_negatives / self.num_items)
        self._own_shift = 0.0 if training.logq else math.log(rate)
        self._log_counts: Tensor | None = None  # [items]: of how often a draw brings them
        if training.logq:
            counts = torch.from_numpy(prepared.training_counts()).double()
            in_batch = training.num_in_batch * counts / counts.sum()
            expected = in_batch + training.num_negatives / self.num_items
            self._log_counts = expected.log().float().to(device)

    def draw(self, targets: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Return negatives for `count` positions, [count, c], or for all of them together, [c].

        `targets` are those of the whole minibatch, padding (−1) last.
        """
        training, where = self._training, self._device
        if training.loss in ("cross_entropy", "digits"):  # all other items, or none
            return torch.empty(0, dtype=torch.int64, device=where)
        shape = (
            (count, training.num_negatives)
            if training.negatives == "own"
            else (training.num_negatives,)
        )
        drawn = torch.randint(self.num_items, shape, device=where, generator=generator)
        if self._drawn_from is not None:
            drawn = self._drawn_from[drawn]
        if not training.num_in_batch:
            return drawn
        chance = torch.rand(training.num_in_batch, device=where, generator=generator)
        in_batch = targets[(chance * (targets >= 0).sum()).long()]
        return torch.cat([drawn, in_batch])

    def scores(
        self, states: Tensor, wanted: Tensor, negatives: Tensor, own: SparseScores | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the scores of targets, [positions], and of negatives, [positions, c].

        Items that heads boost, `own`, are among the negatives.
        """
        if self._training.loss == "cross_entropy":
            scores = _products(states, self._embedding.all_vectors())
            if own is not None:
                boosts = own.boosts.masked_fill(~own.valid, 0.0)
                scores = scores.scatter_add(1, own.items, boosts)
            if self._spared is not None:
                scores = scores.masked_fill(self._spared, _NEVER)
            positive = scores.gather(1, wanted.unsqueeze(1)).squeeze(1)
            return positive, scores.scatter(1, wanted.unsqueeze(1), _NEVER)
        if self._training.negatives == "own":
            candidates = torch.cat([wanted.unsqueeze(1), negatives], dim=1)
            both = self._embedding.scores(states, candidates).float()
            positive, scores = both[:, 0], both[:, 1:]
        else:
            positive = (states.float() * self._embedding.vectors(wanted)).sum(-1)
            scores = _products(states, self._embedding.vectors(negatives))
            if self._log_counts is not None:
                scores = scores - self._log_counts[negatives]
            scores = scores.masked_fill(negatives == wanted.unsqueeze(1), _NEVER)
        return (positive, scores) if own is None else self._with_own(positive, scores, wanted, own)

    def _with_own(
        self, positive: Tensor, scores: Tensor, wanted: Tensor, own: SparseScores
    ) -> tuple[Tensor, Tensor]:
        """Put the boost on targets that have one, and all that is boosted to the negatives."""
        is_target = own.valid & (own.items == wanted.unsqueeze(1))
        boost = own.boosts.masked_fill(~is_target, 0.0).sum(1)
        lowered = torch.where(is_target.any(1), self._own_shift, 0.0)
        negatives = (own.scores() + self._own_shift).masked_fill(~own.valid | is_target, _NEVER)
        return positive + boost + lowered, torch.cat([scores, negatives], dim=1)

    def follow(self, targets: Tensor, negatives: Tensor) -> None:
        """Let the centroids of learnt codes follow the items that a step has looked at.

        Of negatives that every position has its own of, one for each.
        """
        embedding = self._embedding
        if isinstance(embedding, LearntEmbedding) and embedding.quantises:
            drawn = negatives
            if negatives.dim() == 2:
                drawn = torch.where(targets >= 0, negatives[: len(targets), 0], -1)
            embedding.follow(torch.cat([targets, drawn]))


def _products(states: Tensor, vectors: Tensor) -> Tensor:
    with torch.autocast(states.device.type, enabled=False):  # not in bfloat16
        return states.float() @ vectors.T
