"""iALS: matrix factorisation of who had what, by the package `implicit`.

Yifan Hu, Yehuda Koren, Chris Volinsky: Collaborative Filtering for Implicit Feedback Datasets. ICDM
2008.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from recprune.data.interactions import Interactions
from recprune.evaluation.baselines.baseline import check_question
from recprune.evaluation.baselines.fitting import FittingUsers
from recprune.evaluation.baselines.popularity import Popularity, fill_up
from recprune.evaluation.baselines.user_items import best_scored, user_item_matrix
from recprune.types import Float32Array, InputError, Int32Array, Int64Array, needs_extra

with needs_extra("data"):
    from scipy.sparse import csr_matrix
    from threadpoolctl import threadpool_limits

WEIGHTS = (2.0, 10.0, 50.0)
DEFAULT_WEIGHT = 10.0  # where there are no users to fit it on
FACTORS = 128
REGULARISATION = 1.0
ITERATIONS = 15
MAX_INTERACTIONS = 2_000_000  # factorised four times within minutes, on two cores


class ImplicitALS:
    """Items whose vectors agree with the user's, by alternating least squares; then popular ones.

    Vectors of users and items of `FACTORS` numbers minimise Σ c (p − x·y)² + `REGULARISATION`
    (Σ ‖x‖² + Σ ‖y‖²) over all pairs: p is 1 where the user had the item, with c the `weight` α, and
    0 elsewhere, with c = 1. A history is given the vector x that is best for it while items stay.
    What scores 0 or less is left to popularity.
    """

    def __init__(
        self, train: Interactions, *, weight: float = DEFAULT_WEIGHT, seed: int = 0
    ) -> None:
        if not weight > 0.0:
            raise InputError(f"weight is {weight}, expected more than 0")
        self.name = f"iALS, α = {weight:g}"
        self._popularity = Popularity(train)
        self._model = _factorised(train, weight, seed)
        self.item_vectors: Float32Array = self._model.item_factors  # [items, FACTORS]

    @classmethod
    def fitted(
        cls, train: Interactions, users: FittingUsers, *, exclude_seen: bool = False
    ) -> ImplicitALS:
        """Take the α of `WEIGHTS` that gives users of the training log the best NDCG@10.

        Of equally good ones it is the largest; without users it is `DEFAULT_WEIGHT`.
        """

        def ndcg(weight: float) -> float:
            return users.ndcg(cls(users.train, weight=weight), exclude_seen=exclude_seen)

        best = max(reversed(WEIGHTS), key=ndcg) if len(users) else DEFAULT_WEIGHT
        return cls(train, weight=best)

    def recommend(
        self, histories: Sequence[Int32Array], k: int, *, exclude_seen: bool
    ) -> Int64Array:
        """Return the k items whose vectors agree best with every user's."""
        check_question(histories, k, self._popularity.num_items)

        vectors = iter(self._vectors(histories))

        def best(history: Int32Array) -> Int32Array:
            return best_scored(self.item_vectors @ next(vectors), k + len(history))

        with threadpool_limits(1, "blas"):  # products so small take longer on several
            return fill_up(histories, k, exclude_seen, self._popularity, best)

    def _vectors(self, histories: Sequence[Int32Array]) -> Any:
        """Return the best vectors of some users, [users, factors]."""
        items = [np.unique(history) for history in histories]
        offsets = np.cumsum([0, *map(len, items)])
        distinct = np.concatenate([np.zeros(0, np.int32), *items])
        entries = (np.ones(len(distinct), np.float32), distinct, offsets)
        had = csr_matrix(entries, (len(items), self._popularity.num_items))
        return self._model.recalculate_user(np.arange(len(items)), had)


def why_no_ials(train: Interactions) -> str | None:
    """Say why a log has no iALS here; None if it has."""
    if find_spec("implicit") is None:
        return "implicit is not installed: pip install 'recprune[baselines]'"
    if train.num_interactions == 0:
        return "there is nothing to factorise"
    if train.num_interactions > MAX_INTERACTIONS:
        return f"{train.num_interactions:,} interactions are more than {MAX_INTERACTIONS:,}"
    return None


def _factorised(train: Interactions, weight: float, seed: int) -> Any:
    with needs_extra("baselines"):
        from implicit.cpu.als import AlternatingLeastSquares
    # Its own threads divide the rows; those of BLAS would come on top, which it warns of.
    with threadpool_limits(1, "blas"):
        model = AlternatingLeastSquares(
            factors=FACTORS,
            regularization=REGULARISATION,
            alpha=weight,
            iterations=ITERATIONS,
            random_state=seed,
        )
        model.fit(csr_matrix(user_item_matrix(train, np.float32)), show_progress=False)
    return model
