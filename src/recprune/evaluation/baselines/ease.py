"""EASE: a linear model of what goes together, in closed form.

Harald Steck: Embarrassingly Shallow Autoencoders for Sparse Data. WWW 2019.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recprune.data.interactions import Interactions
from recprune.evaluation.baselines.baseline import check_question
from recprune.evaluation.baselines.fitting import FittingUsers
from recprune.evaluation.baselines.popularity import Popularity, fill_up
from recprune.evaluation.baselines.user_items import best_scored, user_item_matrix
from recprune.types import Float32Array, InputError, Int32Array, Int64Array, needs_extra

REGULARISATIONS = (10.0, 50.0, 200.0, 1000.0)  # NDCG is flat in λ: such steps are fine enough
DEFAULT_REGULARISATION = 200.0  # where there are no users to fit it on
# A dense matrix over them is inverted once for each λ: 0.9 GB, and 3 · 10¹² multiplications.
MAX_ITEMS = 15_000
QUICK_ITEMS = 4_000  # for which all five inversions take some ten seconds on two cores
_ROWS_AT_ONCE = 512


class Ease:
    """Items that go with what the user had, by weights that are learnt at once; then popular ones.

    X is the binary user–item matrix. B minimises ‖X − X B‖² + λ ‖B‖² with a diagonal of 0, so that
    no item explains itself: with P = (XᵀX + λ I)⁻¹ it is B_ij = −P_ij / P_jj. The score of item j
    is the sum of B_ij over the items i of the history, each once; what scores 0 or less is left to
    popularity. A catalogue has at most `MAX_ITEMS` items.
    """

    def __init__(
        self, train: Interactions, *, regularisation: float = DEFAULT_REGULARISATION
    ) -> None:
        if not regularisation > 0.0:
            raise InputError(f"regularisation is {regularisation}, expected more than 0")
        if why := why_no_ease(train):
            raise InputError(f"EASE cannot be computed: {why}")
        self.name = f"EASE, λ = {regularisation:g}"
        self._popularity = Popularity(train)
        self.weights = _weights(train, regularisation)

    @classmethod
    def fitted(
        cls, train: Interactions, users: FittingUsers, *, exclude_seen: bool = False
    ) -> Ease:
        """Regularise by the λ of `REGULARISATIONS` that gives users of the log the best NDCG@10.

        Of equally good ones it is the largest; without users it is `DEFAULT_REGULARISATION`.
        """

        def ndcg(regularisation: float) -> float:
            one = cls(users.train, regularisation=regularisation)
            return users.ndcg(one, exclude_seen=exclude_seen)

        best = max(reversed(REGULARISATIONS), key=ndcg) if len(users) else DEFAULT_REGULARISATION
        return cls(train, regularisation=best)

    def recommend(
        self, histories: Sequence[Int32Array], k: int, *, exclude_seen: bool
    ) -> Int64Array:
        """Return the k items with the largest sums of weights for every user."""
        check_question(histories, k, self._popularity.num_items)

        def best(history: Int32Array) -> Int32Array:
            scores = self.weights[np.unique(history)].sum(axis=0)
            return best_scored(scores, k + len(history))

        return fill_up(histories, k, exclude_seen, self._popularity, best)


def why_no_ease(train: Interactions, *, slow: bool = True) -> str | None:
    """Say why a log has no EASE; None if it has. Minutes are too long unless it may be `slow`."""
    if train.num_items > MAX_ITEMS:
        given = f"{train.num_items:,} are more than {MAX_ITEMS:,}"
        return f"it inverts a matrix over all items, and {given}"
    if train.num_items > QUICK_ITEMS and not slow:
        return (
            f"for {train.num_items:,} items, more than {QUICK_ITEMS:,}, it takes minutes: "
            "--slow-baselines (slow=True) has it all the same"
        )
    return None


def _weights(train: Interactions, regularisation: float) -> Float32Array:
    """Return B, [items, items]."""
    if train.num_items == 0:
        return np.zeros((0, 0), np.float32)
    with needs_extra("data"):
        from scipy.linalg.lapack import spotrf, spotri
    had = user_item_matrix(train, np.float32)
    gram = (had.T @ had).toarray(order="F")
    gram[np.diag_indices_from(gram)] += np.float32(regularisation)
    # In place, as the matrix may have a gigabyte: G = L Lᵀ, and from L the lower half of P.
    factor, failed = spotrf(gram, lower=1, overwrite_a=1)
    if not failed:
        inverse, failed = spotri(factor, lower=1, overwrite_c=1)
    if failed:
        raise InputError(
            f"regularisation is {regularisation}: too little for EASE's matrix, which cannot be "
            "inverted in float32"
        )
    weights: Float32Array = inverse.T  # by rows; it is the upper half that holds P now
    for first in range(0, len(weights), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        upper = np.triu(weights[rows, rows])
        weights[rows, rows] = upper + np.triu(upper, 1).T
        weights[rows.stop :, rows] = weights[rows, rows.stop :].T
    weights /= -np.diag(weights).copy()
    np.fill_diagonal(weights, 0.0)
    return weights
