"""Small models, trained, beside the recommenders that are made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recprune import assign_svd, temporal_holdout
from recprune.data.identifiers import ExternalId
from recprune.models.activity import measure_activity
from recprune.models.architectures import SequenceModel
from recprune.models.boost_heads import BoostHeads, add_boosts
from recprune.models.settings import ModelSettings, Settings
from recprune.models.transitions import count_transitions
from recprune.preparation.prepared import Prepared, prepare
from recprune.recommender.recommender import Recommendations, Recommender
from recprune.search import reference
from recprune.search.question import ItemBits
from recprune.training.checkpoint import load_model
from recprune.training.loop import train
from recprune.types import Float32Array
from tests.support.small_models import LENGTH, MODELS, SMALL, walks

torch.set_num_threads(1)  # of tiny models, threads would only wait for each other


@dataclass
class Trained:
    """A training, the recommender made of it, and the model itself to compare with."""

    prepared: Prepared
    folder: Path  # of the training
    saved: Path  # the recommender's own
    recommender: Recommender
    model: SequenceModel

    def external(self, items: list[int]) -> list[ExternalId]:
        return list(self.prepared.item_ids.take(items))

    def sequence_embedding(self, items: list[int]) -> Float32Array:
        """Return φ as the model itself computes it."""
        with torch.inference_mode():
            history = torch.tensor([items[-LENGTH:]])
            embedding = self.model.encode_last(self.model.embedding.vectors(history))
        return np.asarray(embedding[0].numpy(), np.float32)

    def expected(
        self, items: list[int], k: int, eligible: NDArray[np.bool_], boosts: Any = None
    ) -> tuple[NDArray[np.int64], Float32Array]:
        """Score the whole catalogue and return the best k of the eligible, padded."""
        weights = {name: value.numpy() for name, value in self.model.state_dict().items()}
        if "embedding.item_embeddings" in weights:
            vectors = weights["embedding.item_embeddings"][None]
            codes: Any = np.arange(self.prepared.num_items)[:, None]
        else:
            vectors = weights["embedding.sub_item_embeddings"]
            codes = weights["embedding.codes"]
        embedding = self.sequence_embedding(items)
        table = reference.sub_item_scores(embedding, vectors)
        if "repeats.weight" in weights:
            heads = ModelSettings(repeats=12, transitions=2, own_scores=0.25, activity=True)
            boost = BoostHeads(
                weights,
                heads,
                count_transitions(self.prepared),
                lambda _, chosen: reference.score_items(table, codes[chosen], None),
                measure_activity(self.prepared),
            )
            own = boost(embedding[None], [np.array(items, np.int32)]).total()
            boosts = add_boosts(None if own is None else own[0], boosts)
        ids, scores = reference.exhaustive(table, codes, k, eligible=eligible, boosts=boosts)
        missing = k - len(ids)
        return (
            np.concatenate([ids, np.full(missing, -1)]),
            np.concatenate([scores, np.full(missing, -np.inf, np.float32)]),
        )


def train_models(new_folder: Callable[[str], Path]) -> dict[str, Trained]:
    """Train every model, and save its recommender."""
    made = {}
    for name, (ids, num_splits, num_sub_items, values) in MODELS.items():
        place = new_folder(name)
        holdout = temporal_holdout(walks(60, 90, ids), validation_users=20)
        codebook = assign_svd(holdout.train, num_splits=num_splits, num_sub_items=num_sub_items)
        prepared = prepare(holdout, codebook, {"holdout": "temporal"})
        folder, saved = place / "training", place / "recommender"
        train(prepared, Settings().with_values(SMALL | values), folder, device="cpu")
        recommender = Recommender.from_training(prepared, folder)
        recommender.save(saved)
        model, _ = load_model(folder, prepared)
        made[name] = Trained(prepared, folder, saved, recommender, model)
    return made


def histories_of(num_items: int) -> list[list[int]]:
    """One item, some, repeated ones, more than the model looks at, and all there are."""
    rng = np.random.default_rng(3)
    return [
        [4],
        [5, 17, 3],
        [9, 9, 2, 9, 2],
        rng.integers(0, num_items, LENGTH).tolist(),
        rng.integers(0, num_items, 3 * LENGTH).tolist(),
        [11] * (LENGTH + 5),
        [*range(num_items)],
    ]


def questions(trained: Trained) -> list[list[Any]]:
    known = [trained.external(history) for history in histories_of(trained.prepared.num_items)]
    return [*known, [], ["zzz", *known[1]]]


def bits_of(mask: NDArray[np.bool_]) -> ItemBits:
    padded = np.pad(mask, (0, -len(mask) % 64))
    return ItemBits(np.packbits(padded, bitorder="little").view(np.uint64))


def assert_same_answers(first: Recommendations, second: Recommendations) -> None:
    """The same items for everybody; scores may differ by what rounding explains."""
    assert first.items == second.items
    assert np.array_equal(first.ids, second.ids)
    # Equal ids have −∞ at the same places.
    assert np.allclose(first.scores, second.scores, rtol=1e-4, atol=1e-4)
    assert first.unknown == second.unknown
    assert np.array_equal(first.by_popularity, second.by_popularity)
