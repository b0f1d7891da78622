"""The code that best explains who took an item: coordinate search over sub-item ids.

A model gives state φ_u and code c the score s_u(c) = Σ_m S_u[m, c_m]. Were items drawn by a softmax
of their scores, this one would be taken in state φ_v at the rate exp(s_v(c) − z_v), where z_v is
the logarithm of what its rivals sum up to. How often it is taken is then a sum of Poisson
variables, and the logarithm of the likelihood of having been taken in the states u alone

    Σ_u s_u(c) − exposure · mean_v exp(s_v(c) − z_v) + a constant,

with the mean over the states of all who come by, and as many of them as have come by, the exposure.
The second term is how often the item would be expected to be taken: it keeps a code from suiting
everybody. Priors of sub-item ids are added to the first. That is a sum over splits, so that of
those who took the item the sum of their states is all that counts, however many they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recprune.types import Float32Array, Float64Array, Int64Array

# A change has to be better by so much of the objective's size: sums in another order may differ.
TOLERANCE = 1e-9
_LARGEST_EXPONENT = 600.0  # exp of it, a thousand times over, is below the largest float64


@dataclass(frozen=True, eq=False)
class Passers:
    """States that an item might be taken in, as sub-item scores, and what its rivals sum up to."""

    scores: Float64Array  # S, [M, states, B]
    factors: Float64Array  # exp(S − the largest S of state and split), [M, states, B]
    largest: Float64Array  # [M, states]
    rivals: Float64Array  # z, [states]

    @classmethod
    def of(cls, sub_item_scores: Float32Array | Float64Array, rivals: Float64Array) -> Passers:
        """Take sub-item scores [states, M, B], and the logarithms of what rivals sum up to."""
        scores = np.ascontiguousarray(np.asarray(sub_item_scores, np.float64).transpose(1, 0, 2))
        largest = scores.max(axis=2)
        factors = np.exp(scores - largest[:, :, None])
        return cls(scores, factors, largest, np.asarray(rivals, np.float64))

    def __len__(self) -> int:
        return len(self.rivals)

    def exponents(self, code: Int64Array, *, without: int = -1) -> Float64Array:
        """Return s_v(c) − z_v of every state, without what one split adds to it."""
        total = -self.rivals
        for split, sub_item_id in enumerate(code):
            if split != without:
                total += self.scores[split, :, sub_item_id]
        return total


def best_code(
    linear: Float64Array, passers: Passers | None, exposure: float
) -> tuple[NDArray[np.int64], float]:
    """Return a code that no change of a single sub-item id makes better, and its objective.

    `linear` [M, B] is the sum of the sub-item scores of those that took the item, and of priors.
    The search begins where that alone is largest; one split after the other takes its best
    sub-item id, the lowest on a tie, until none of them changes. The objective rises with every
    change and there are finitely many codes, so that this ends.
    """
    code: NDArray[np.int64] = linear.argmax(axis=1)
    if passers is None or not len(passers) or exposure <= 0.0:
        return code, float(linear.max(axis=1).sum())
    value = objective(linear, passers, exposure, code)
    split, unchanged = 0, 0
    while unchanged < len(linear):
        values = values_in_split(linear, passers, exposure, code, split)
        best = int(values.argmax())
        unchanged += 1
        if values[best] > value + TOLERANCE * (1.0 + abs(value)):
            code[split], value, unchanged = best, float(values[best]), 1
        split = (split + 1) % len(linear)
    return code, value


def values_in_split(
    linear: Float64Array, passers: Passers, exposure: float, code: Int64Array, split: int
) -> Float64Array:
    """Return the objective for every sub-item id of one split, the others as they are, [B]."""
    exponents = passers.exponents(code, without=split) + passers.largest[split]
    weights = np.exp(np.minimum(exponents, _LARGEST_EXPONENT))
    # Not by BLAS, whose sums may depend on the number of threads.
    expected = np.einsum("v,vb->b", weights, passers.factors[split])
    others = [linear[m, sub_item_id] for m, sub_item_id in enumerate(code) if m != split]
    values: Float64Array = sum(others) + linear[split] - exposure / len(passers) * expected
    return values


def objective(linear: Float64Array, passers: Passers, exposure: float, code: Int64Array) -> float:
    """Return what `best_code` makes as large as it can."""
    exponents = np.minimum(passers.exponents(code), _LARGEST_EXPONENT)
    expected = exposure * float(np.exp(exponents).mean())
    return float(linear[np.arange(len(code)), code].sum()) - expected
