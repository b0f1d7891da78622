"""A recommender answers what its model answers, from memory, from disk, and without torch."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from recprune import (
    METHODS,
    Index,
    InputError,
    Interactions,
    MissingExtraError,
    StorageError,
    assign_svd,
    interactions_from_columns,
    leave_one_out,
    temporal_holdout,
)
from recprune.data.identifiers import ExternalId
from recprune.models.architectures import SequenceModel
from recprune.models.boost_heads import BoostHeads, add_boosts
from recprune.models.ranking import encode_histories
from recprune.models.settings import ModelSettings, Settings
from recprune.models.transitions import count_transitions
from recprune.preparation.holdout import Holdout
from recprune.preparation.prepared import Prepared, prepare
from recprune.recommender import KIND, EncoderKind, Recommendations, Recommender
from recprune.search import reference
from recprune.search.question import ItemBits
from recprune.storage import Saved, load_folder, save_folder
from recprune.training.checkpoint import MODEL, load_model
from recprune.training.loop import train
from recprune.types import Float32Array, Timeline

torch.set_num_threads(1)  # of tiny models, threads would only wait for each other

LENGTH = 10
SMALL: dict[str, Any] = {
    "width": 32, "length": LENGTH, "num_blocks": 1, "num_heads": 1, "num_negatives": 8,
    "batch_size": 20, "max_epochs": 2, "learning_rate": 0.01,
}  # fmt: skip


def walks(num_users: int, num_items: int, ids: str, seed: int = 0) -> Interactions:
    """Everybody walks round a cycle of items, and jumps now and then."""
    rng = np.random.default_rng(seed)
    names: list[Any] = (
        ["a", "b", "n", "p", *(f"tea é{item}" for item in range(4, num_items))]
        if ids == "strings"
        else [7 * item - 100 for item in range(num_items)]
    )
    users, items, times = [], [], []
    for user in range(num_users):
        place = int(rng.integers(num_items))
        for step in range(int(rng.integers(20, 30))):
            place = int(rng.integers(num_items)) if rng.random() < 0.2 else place + 1
            users.append(f"user {user}")
            items.append(names[place % num_items])
            times.append(1_500_000_000 + 1000 * step + user)
    return interactions_from_columns(users, items, times, time_format="seconds")


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
            heads = ModelSettings(repeats=12, transitions=2)
            boost = BoostHeads(weights, heads, count_transitions(self.prepared))
            own = boost(embedding[None], [np.array(items, np.int32)]).total()
            boosts = add_boosts(None if own is None else own[0], boosts)
        ids, scores = reference.exhaustive(table, codes, k, eligible=eligible, boosts=boosts)
        missing = k - len(ids)
        return (
            np.concatenate([ids, np.full(missing, -1)]),
            np.concatenate([scores, np.full(missing, -np.inf, np.float32)]),
        )


# Name: kind of ids, splits, sub-items, settings. Few sub-items make items with equal scores.
MODELS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "sasrec": ("strings", 8, 16, {}),
    "bert4rec": ("integers", 2, 6, {"architecture": "bert4rec", "num_heads": 2}),
    "full table": ("strings", 2, 4, {"embedding": "full", "width": 16}),
    "timed": ("integers", 4, 8, {"architecture": "timed", "num_blocks": 2, "num_heads": 2}),
    "repeats": (
        "strings",
        2,
        4,
        {
            "architecture": "esasrec",
            "codes": "learnt",
            "num_splits": 4,
            "num_sub_items": 16,
            "full_epochs": 1,
            "repeats": 12,
            "transitions": 2,
        },
    ),
}


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    made = {}
    for name, (ids, num_splits, num_sub_items, values) in MODELS.items():
        place = tmp_path_factory.mktemp(name)
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


@pytest.fixture(params=MODELS)
def trained(request: pytest.FixtureRequest, trainings: dict[str, Trained]) -> Trained:
    return trainings[request.param]


@pytest.fixture
def sasrec(trainings: dict[str, Trained]) -> Trained:
    return trainings["sasrec"]


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


def assert_same_answers(first: Recommendations, second: Recommendations) -> None:
    """The same items for everybody; scores may differ by what rounding explains."""
    assert first.items == second.items
    assert np.array_equal(first.ids, second.ids)
    # Equal ids have −∞ at the same places.
    assert np.allclose(first.scores, second.scores, rtol=1e-4, atol=1e-4)
    assert first.unknown == second.unknown
    assert np.array_equal(first.by_popularity, second.by_popularity)


# Answers -----------------------------------------------------------------------------------------


def bits_of(mask: NDArray[np.bool_]) -> ItemBits:
    padded = np.pad(mask, (0, -len(mask) % 64))
    return ItemBits(np.packbits(padded, bitorder="little").view(np.uint64))


@pytest.mark.parametrize("exclude_seen", [True, False])
@pytest.mark.parametrize("allowed", ["all", "ids", "mask", "bits"])
@pytest.mark.parametrize("excluded", [0, 25])
@pytest.mark.parametrize("k", [1, 10, 200])
def test_recommendations_are_those_of_scoring_the_whole_catalogue(
    trained: Trained, exclude_seen: bool, allowed: str, excluded: int, k: int
) -> None:
    num_items = trained.prepared.num_items
    assert num_items < 200
    rng = np.random.default_rng(8)
    mask = np.ones(num_items, bool) if allowed == "all" else rng.random(num_items) < 0.3
    allow: Any = {
        "all": None,
        "ids": trained.external(rng.permutation(np.flatnonzero(mask)).tolist()),
        "mask": mask,
        "bits": bits_of(mask),
    }[allowed]
    left_out = rng.permutation(num_items)[:excluded].tolist()
    for history in histories_of(num_items):
        found = trained.recommender.recommend(
            [trained.external(history)],
            k,
            exclude_seen=exclude_seen,
            exclude=[*trained.external(left_out), "nobody knows"],
            allow=allow,
        )
        eligible = mask.copy()
        eligible[left_out] = False
        if exclude_seen:
            eligible[history] = False
        ids, scores = trained.expected(history, k, eligible)
        assert np.array_equal(found.ids[0], ids)
        assert np.array_equal(found.scores[0].view(np.uint32), scores.view(np.uint32))
        assert found.ids.dtype == np.int64
        assert found.scores.dtype == np.float32
        # Names are not padded: as many as there are, and no more.
        assert found.items == [trained.external(ids[ids >= 0].tolist())]
        assert len(found.items[0]) == min(k, int(eligible.sum()))
        assert found.unknown == [[]]
        assert not found.by_popularity.any()
        assert found.stats is not None
        assert found.stats.exact.all()


def test_equal_scores_stand_in_the_order_of_the_ids(trainings: dict[str, Trained]) -> None:
    trained = trainings["bert4rec"]
    found = trained.recommender.recommend([trained.external([5, 17, 3])], 200, exclude_seen=False)
    scores = found.scores[0, : len(found.items[0])]
    ties = np.flatnonzero(scores[1:] == scores[:-1])
    assert len(ties) > 20  # two splits of six sub-items tell 36 items apart
    assert (found.ids[0, ties] < found.ids[0, ties + 1]).all()


def test_a_score_is_the_product_of_sequence_embedding_and_item_vector(trained: Trained) -> None:
    history = [5, 17, 3, 40]
    found = trained.recommender.recommend([trained.external(history)], 200, exclude_seen=False)
    num_items = trained.prepared.num_items
    with torch.no_grad():
        vectors = trained.model.embedding.vectors(torch.arange(num_items)).numpy()
        # As in training's own validation, which pads and batches.
        state = encode_histories(trained.model, LENGTH, [np.array(history, np.int32)] * 3)[1]
    products = vectors.astype(np.float64) @ state.numpy().astype(np.float64)
    if found.learnt.repeats is not None:
        items, boosts = found.learnt.repeats[0]
        assert sorted(items.tolist()) == sorted(history)
        products[items] += boosts
        assert found.learnt.transitions is not None
        items, boosts = found.learnt.transitions[0]
        assert len(items) > 1
        products[items] += boosts
    ids = found.ids[0, :num_items]
    assert sorted(ids.tolist()) == [*range(num_items)]
    assert np.allclose(found.scores[0, :num_items], products[ids], atol=1e-4)


def test_a_batch_is_answered_like_one_after_the_other(trained: Trained) -> None:
    histories: list[list[ExternalId]] = [
        *(trained.external(history) for history in histories_of(trained.prepared.num_items)),
        [],
        ["nobody knows", *trained.external([8, 9]), 10**6],
        ["nobody knows"],
    ]
    together = trained.recommender.recommend(histories, 12)
    assert together.ids.shape == together.scores.shape == (len(histories), 12)
    for place, history in enumerate(histories):
        alone = trained.recommender.recommend([history], 12)
        assert alone.items == [together.items[place]]
        assert alone.unknown == [together.unknown[place]]
        assert alone.by_popularity.tolist() == [together.by_popularity[place]]
        assert np.array_equal(alone.ids[0], together.ids[place])
        assert np.allclose(alone.scores[0], together.scores[place], atol=1e-5)


def test_only_the_last_items_of_a_long_history_are_looked_at(trained: Trained) -> None:
    recent = [5, 17, 3, 40, 41, 42, 1, 2, 30, 31]
    assert len(recent) == LENGTH
    older = [50, 51, 52, 53]
    recommend = trained.recommender.recommend
    others = np.ones(trained.prepared.num_items, np.bool_)
    others[[*older, *recent]] = False  # these a repeat head sees, as far as it looks back
    short = recommend([trained.external(recent)], 5, allow=others)
    long = recommend([trained.external([*older, *recent])], 5, allow=others)
    assert np.array_equal(short.ids, long.ids)
    assert np.array_equal(short.scores, long.scores)
    # But what is longer ago was seen as well.
    unseen = recommend([trained.external([*older, *recent])], 200, exclude_seen=True)
    assert not set(unseen.ids[0].tolist()) & {*older, *recent}
    # The order matters to the model: it is the last ones, not the first, that it looks at.
    other = recommend([trained.external([*recent, *older])], 5, allow=others)
    assert not np.array_equal(short.scores, other.scores)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_same_answer(sasrec: Trained, method: str) -> None:
    histories = [sasrec.external(history) for history in histories_of(sasrec.prepared.num_items)]
    expected = sasrec.recommender.recommend(histories, 15)
    found = sasrec.recommender.recommend(histories, 15, method=method, threads=2)
    assert np.array_equal(found.ids, expected.ids)
    assert np.array_equal(found.scores, expected.scores)


def test_another_index_of_the_same_items_may_answer(sasrec: Trained) -> None:
    whole = sasrec.recommender.index
    bias = np.zeros(whole.num_items, np.float32)
    bias[60] = 1000.0
    other = Index.build(whole.item_codes(), whole.sub_item_embeddings(), item_bias=bias)
    histories = [sasrec.external([5, 17, 3]), []]
    expected = sasrec.recommender.recommend(histories, 7)
    found = sasrec.recommender.recommend(histories, 7, index=other)
    assert found.ids[0].tolist() == [60, *expected.ids[0].tolist()[:6]]
    assert found.items[1] == expected.items[1], "popularity is the recommender's own"


def test_an_index_of_other_items_is_refused(sasrec: Trained) -> None:
    whole = sasrec.recommender.index
    other = Index.build(whole.item_codes()[:50], whole.sub_item_embeddings())
    with pytest.raises(InputError, match="index has 50 items of width"):
        sasrec.recommender.recommend([[]], 7, index=other)


def test_an_array_of_unsigned_ids_is_one_of_ids(trainings: dict[str, Trained]) -> None:
    trained = trainings["bert4rec"]
    everything = trained.external([*range(trained.prepared.num_items)])
    wanted = [item for item in everything if isinstance(item, int) and item >= 0][:4]
    history = everything[:1]
    expected = trained.recommender.recommend([history], 3, allow=wanted)
    unsigned: Any = np.array(wanted, np.uint64)
    found = trained.recommender.recommend([history], 3, allow=unsigned)
    assert found.items == expected.items
    assert len(found.items[0]) == 3


def test_lists_of_exclusions_are_refused(sasrec: Trained) -> None:
    rows: Any = [sasrec.external([1, 2])]
    with pytest.raises(InputError, match=r"exclude\[0\] is \[.*\], expected an item id"):
        sasrec.recommender.recommend([[]], 7, exclude=rows)


def test_a_deadline_stops_a_search_or_is_refused(sasrec: Trained) -> None:
    history = sasrec.external([5, 17, 3])
    expected = sasrec.recommender.recommend([history], 7)
    far = sasrec.recommender.recommend([history], 7, deadline=time.monotonic() + 60)
    assert far.items == expected.items
    never = sasrec.recommender.recommend([history], 7, deadline=float("inf"))
    assert never.items == expected.items
    with pytest.raises(InputError, match="deadline is nan"):
        sasrec.recommender.recommend([history], 7, deadline=float("nan"))
    past = sasrec.recommender.recommend(
        [history], 7, method="recjpqprune", deadline=time.monotonic() - 60
    )
    assert past.stats is not None
    assert not past.stats.exact[0], "it had no time at all"
    with pytest.raises(InputError, match="method pqtopk cannot stop early; auto, cells, scan and"):
        sasrec.recommender.recommend([[]], 7, method="pqtopk", deadline=time.monotonic() + 60)


def test_times_of_all_stages_add_up(sasrec: Trained) -> None:
    found = sasrec.recommender.recommend([sasrec.external([5, 17, 3])], 7)
    stages = ["look up", "encode", "sub-item scores", "search", "answer"]
    assert [*found.milliseconds] == stages
    assert all(spent >= 0.0 for spent in found.milliseconds.values())
    assert found.stats is not None
    assert 0 < found.stats.sub_item_score_nanoseconds[0] < found.stats.nanoseconds[0]
    within = found.milliseconds["sub-item scores"] + found.milliseconds["search"]
    assert within >= found.stats.nanoseconds[0] / 1e6


def test_popular_items_are_chosen_by_the_same_rules(sasrec: Trained) -> None:
    recommend = sasrec.recommender.recommend
    num_items = sasrec.prepared.num_items
    everything = recommend([[]], num_items).ids[0]
    mask = np.random.default_rng(3).random(num_items) < 0.5
    left_out = everything[:5].tolist()
    kept = [item for item in everything if mask[item] and item not in left_out][:10]
    for allow in (mask, bits_of(mask)):
        found = recommend([[]], 10, exclude=sasrec.external(left_out), allow=allow)
        assert found.ids[0, : len(kept)].tolist() == kept
        assert found.by_popularity.all()


def test_boosts_are_added_to_the_scores_of_all_histories(trained: Trained) -> None:
    num_items = trained.prepared.num_items
    rng = np.random.default_rng(4)
    items = rng.permutation(num_items)[: num_items // 2]
    values = rng.choice([0.5, -0.5, 3.0, -0.0], len(items)).astype(np.float32)
    named = dict(zip(trained.external(items.tolist()), values.tolist(), strict=True))
    histories = histories_of(num_items)
    allow = rng.random(num_items) < 0.8
    found = trained.recommender.recommend(
        [trained.external(history) for history in histories], 20, allow=allow, boosts=named
    )
    for place, history in enumerate(histories):
        eligible = allow.copy()
        if not trained.recommender.repeats:  # which is asked to repeat, unless told otherwise
            eligible[history] = False
        ids, scores = trained.expected(history, 20, eligible, (items, values))
        assert np.array_equal(found.ids[place], ids)
        # The encoders of one history and of many may round differently in their last bits.
        np.testing.assert_allclose(found.scores[place], scores, rtol=1e-5)
    nothing = trained.recommender.recommend([trained.external(histories[0])], 20, boosts={})
    plain = trained.recommender.recommend([trained.external(histories[0])], 20)
    assert np.array_equal(nothing.ids, plain.ids)


def test_popular_items_that_are_boosted_alike_stand_in_the_order_of_their_ids(
    sasrec: Trained,
) -> None:
    """So much is added that float32 forgets how popular each was."""
    popularity = sasrec.prepared.training_counts()
    first, second = np.argsort(popularity)[[20, -1]]  # of which the second is more popular
    pair = sorted([int(first), int(second)])
    boosts = dict.fromkeys(sasrec.external(pair), 1e9)
    found = sasrec.recommender.recommend([[]], 2, boosts=boosts)
    assert found.scores[0, 0] == found.scores[0, 1]
    assert found.ids[0].tolist() == pair


def test_what_was_seen_comes_again_where_a_model_has_learnt_to_repeat(
    trainings: dict[str, Trained],
) -> None:
    trained = trainings["repeats"]
    history = [5, 17, 5, 40]
    recommend = trained.recommender.recommend
    everything = recommend([trained.external(history)], 200)
    assert {5, 17, 40} <= set(everything.ids[0].tolist())
    assert_same_answers(everything, recommend([trained.external(history)], 200, exclude_seen=False))
    without = recommend([trained.external(history)], 200, exclude_seen=True)
    assert not {5, 17, 40} & set(without.ids[0].tolist())
    assert everything.learnt.repeats is not None
    assert without.learnt.repeats is None  # nothing is left that they would be added to
    by_rank = trained.recommender.rank([np.array(history, np.int32)], 20)
    assert np.array_equal(by_rank.ids[0], everything.ids[0, :20])


def test_a_repeat_head_is_told_how_long_ago_things_were(trainings: dict[str, Trained]) -> None:
    trained = trainings["repeats"]
    history, times = [5, 17, 5, 40], [0.0, 50.9, 100.0, 160.2]
    named = [*trained.external(history[:2]), "unknown", *trained.external(history[2:])]
    recommend = trained.recommender.recommend
    found = recommend([named], 90, times=[[*times[:2], 70.0, *times[2:]]], now=1000)
    timeline = Timeline(np.array([0, 50, 100, 160]), 1000)
    expected = trained.recommender.rank([np.array(history, np.int32)], 90, timelines=[timeline])
    assert np.array_equal(found.ids, expected.ids)
    assert np.array_equal(found.scores, expected.scores)
    # Without a time it is asked for at the last event, and without times nothing is known of them.
    at_last = recommend([trained.external(history)], 90, times=[times])
    assert_same_answers(at_last, recommend([trained.external(history)], 90, times=[times], now=160))
    untimed = recommend([trained.external(history)], 90)
    assert not np.array_equal(untimed.scores, at_last.scores)
    assert_same_answers(untimed, recommend([trained.external(history)], 90, times=[None], now=1000))


def test_an_encoder_is_told_how_long_ago_things_were(trainings: dict[str, Trained]) -> None:
    trained = trainings["timed"]
    history, times = [5, 17, 5, 40], [0.0, 50.9, 100.0, 160.2]
    named = trained.external(history)
    served = Recommender.load(trained.saved, encoder="onnx")
    ask: dict[str, Any] = {"k": 90, "exclude_seen": False}
    answers = []
    for now in (None, 160, 200, 10**8):
        found = trained.recommender.recommend([named], times=[times], now=now, **ask)
        assert_same_answers(served.recommend([named], times=[times], now=now, **ask), found)
        timeline = Timeline(np.array([0, 50, 100, 160]), 160 if now is None else now)
        items = [np.array(history, np.int32)]
        expected = trained.recommender.rank(items, 90, timelines=[timeline])
        assert np.array_equal(found.ids, expected.ids)
        assert np.array_equal(found.scores, expected.scores)
        answers.append(found.scores)
    at_last, same, later, much_later = answers
    assert np.array_equal(at_last, same)
    untimed = trained.recommender.recommend([named], **ask).scores
    for first, second in combinations((untimed, at_last, later, much_later), 2):
        assert not np.array_equal(first, second)
    # One that is not known stands for no event, and so does its time.
    gapped = [*named[:2], 10**9, *named[2:]]
    found = trained.recommender.recommend([gapped], times=[[*times[:2], 70, *times[2:]]], **ask)
    assert np.array_equal(found.scores, at_last)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"times": [[1.0]]}, r"times\[0\] has 1 times for 2 items"),
        ({"times": [[1.0, 2.0], [3.0]]}, "times has 2 entries for 1 histories"),
        ({"times": [[1.0, float("nan")]]}, r"times\[0\] is .*, expected seconds since 1970"),
        ({"times": [["a", "b"]]}, r"times\[0\] is .*, expected seconds since 1970"),
        ({"times": [[1, 2]], "now": float("inf")}, "now is inf, expected seconds since 1970"),
        ({"now": "soon"}, "now is 'soon', expected seconds since 1970"),
        ({"times": 5}, "times is 5, expected the times of each history"),
        ({"times": [[1.7e12, 1.7e12]]}, "expected seconds since 1970"),  # these are milliseconds
    ],
)
def test_times_that_are_none(sasrec: Trained, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sasrec.recommender.recommend([sasrec.external([5, 17])], **arguments)


def test_boosts_are_added_to_numbers_of_interactions(sasrec: Trained) -> None:
    recommend = sasrec.recommender.recommend
    popularity = sasrec.recommender.popularity
    num_items = len(popularity)
    ranked = recommend([[]], num_items).ids[0]
    boosts = {int(ranked[-1]): 10_000.5, int(ranked[0]): -10_000.0, int(ranked[5]): 0.25}
    named = dict(zip(sasrec.external([*boosts]), boosts.values(), strict=True))
    totals = popularity.astype(np.float64)
    totals[[*boosts]] += [*boosts.values()]
    order = np.lexsort((np.arange(num_items), -totals))
    for k in (1, 7, num_items):
        found = recommend([[]], k, boosts=named)
        assert found.ids[0].tolist() == order[:k].tolist()
        assert found.scores[0].tolist() == totals[order[:k]].astype(np.float32).tolist()
    left_out = sasrec.external([int(order[0])])
    mask = np.arange(num_items) != order[1]
    found = recommend([[]], 5, boosts=named, exclude=left_out, allow=mask)
    assert found.ids[0].tolist() == order[2:7].tolist()
    assert recommend([[]], num_items, boosts=named).ids[0, -1] == ranked[0]


@pytest.mark.parametrize(
    ("boosts", "message"),
    [
        ({"nobody knows": 1.0}, "boosts: 'nobody knows': not in the catalogue"),
        ({"FIRST": float("nan")}, r"boosts\[.*\] is nan, expected a finite number"),
        ({"FIRST": 1e39}, r"boosts\[.*\] is 1e\+39, expected a finite number"),
        ({"FIRST": "1"}, r"boosts\[.*\] is '1', expected a finite number"),
        ({"FIRST": True}, r"boosts\[.*\] is True, expected a finite number"),
        ([("FIRST", 1.0)], "boosts is .*, expected a mapping from item ids to numbers"),
    ],
)
def test_boosts_that_are_none(sasrec: Trained, boosts: Any, message: str) -> None:
    if isinstance(boosts, dict) and "FIRST" in boosts:
        boosts = {sasrec.external([0])[0]: boosts["FIRST"]}
    for history in ([], sasrec.external([3])):
        with pytest.raises(InputError, match=message):
            sasrec.recommender.recommend([history], 5, boosts=boosts)


def test_nobody_asked_nobody_answered(sasrec: Trained) -> None:
    found = sasrec.recommender.recommend([], 5)
    assert (found.items, found.unknown, found.ids.shape) == ([], [], (0, 5))
    nothing = sasrec.recommender.recommend([sasrec.external([3]), []], 0)
    assert nothing.items == [[], []]
    assert nothing.ids.shape == nothing.scores.shape == (2, 0)


def test_histories_may_be_arrays_tuples_and_generators(trainings: dict[str, Trained]) -> None:
    trained = trainings["bert4rec"]
    ids = trained.external([5, 17, 3])
    expected = trained.recommender.recommend([ids], 5)
    generated: Any = (item for item in ids)
    arrays: Any = np.array([ids])
    five: Any = np.int64(5)
    for given in (arrays, [tuple(ids)], [generated], ([*ids],)):
        assert trained.recommender.recommend(given, five).items == expected.items


# What nobody knows -------------------------------------------------------------------------------


def test_unknown_ids_are_left_out_and_reported_in_order(trained: Trained) -> None:
    known = trained.external([5, 17, 3])
    wrong: list[Any] = ["zzz", -3, "", 10**30, True, None, 2.5, "aaa"]
    history = [wrong[0], known[0], *wrong[1:5], known[1], wrong[5], wrong[6], known[2], wrong[7]]
    found = trained.recommender.recommend([history, known], 7)
    assert found.unknown == [wrong, []]
    assert found.items[0] == found.items[1]
    assert found.by_popularity.tolist() == [False, False]


@pytest.mark.parametrize("ids", ["sasrec", "bert4rec"])
@pytest.mark.parametrize("text", ["\ud800", "\x00", "e\u0301"])
def test_no_text_is_too_odd_to_be_unknown(
    trainings: dict[str, Trained], ids: str, text: str
) -> None:
    found = trainings[ids].recommender.recommend([[text]], 3)
    assert found.unknown == [[text]]
    assert found.by_popularity.all()


def most_popular(trained: Trained) -> list[int]:
    counts = [0] * trained.prepared.num_items
    for user in range(trained.prepared.num_users):
        start, end = trained.prepared.offsets[user], trained.prepared.train_ends[user]
        for item in trained.prepared.items[start:end]:
            counts[item] += 1
    assert len(set(counts)) < len(counts)  # there are ties
    return sorted(range(len(counts)), key=lambda item: (-counts[item], item))


@pytest.mark.parametrize("history", [[], ["zzz", 1], [True]])
def test_without_known_items_the_most_popular_are_recommended(
    trained: Trained, history: list[ExternalId]
) -> None:
    order = most_popular(trained)
    found = trained.recommender.recommend([history], 200)
    assert found.by_popularity.tolist() == [True]
    assert found.unknown == [history]
    assert found.items == [trained.external(order)]
    num_items = len(order)
    assert found.ids[0, :num_items].tolist() == order
    assert (found.ids[0, num_items:] == -1).all()
    assert (
        found.scores[0, :num_items].tolist() == trained.prepared.training_counts()[order].tolist()
    )
    assert (found.scores[0, num_items:] == -np.inf).all()
    assert found.stats is None
    # Only from what is allowed, in the same order.
    mask = np.arange(num_items) % 3 == 1
    allowed = [item for item in order if mask[item]]
    by_mask = trained.recommender.recommend([history], 5, allow=mask)
    by_ids = trained.recommender.recommend([history], 5, allow=trained.external(allowed))
    assert by_mask.items == by_ids.items == [trained.external(allowed[:5])]
    nothing = trained.recommender.recommend([history], 5, allow=[])
    assert nothing.items == [[]]
    assert (nothing.ids == -1).all()


def test_a_batch_tells_who_was_answered_by_popularity(trained: Trained) -> None:
    known = trained.external([5, 17])
    found = trained.recommender.recommend([[], known, ["zzz"], known], 4)
    assert found.by_popularity.tolist() == [True, False, True, False]
    assert found.items[0] == found.items[2] == trained.external(most_popular(trained)[:4])
    assert found.items[1] == found.items[3]


# Bad arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"histories": "nap"}, "histories is 'nap', expected a sequence"),
        ({"histories": b"nap"}, "histories is b'nap', expected a sequence"),
        ({"histories": 5}, "histories is"),
        ({"histories": None}, "histories is"),
        ({"histories": [["a"], "nap"]}, r"histories\[1\] is 'nap'"),
        ({"histories": ["a", "b"]}, r"histories\[0\] is 'a'"),
        ({"histories": [["a"], ["b"], 7]}, r"histories\[2\] is 7"),
        ({"histories": [None]}, r"histories\[0\] is None"),
        ({"k": -1}, "k is -1"),
        ({"k": True}, "k is True"),
        ({"k": 5.0}, "k is 5.0"),
        ({"k": "5"}, "k is '5'"),
        ({"k": 2**40}, f"k is {2**40}"),
        ({"allow": ["a", "nap"]}, r"allow\[1\] is 'nap'"),
        ({"allow": [3]}, r"allow\[0\] is 3"),
        ({"allow": "nap"}, "allow is"),  # n, a and p are items
        ({"allow": 5}, "allow is"),
        ({"allow": np.ones(4, bool)}, r"allow has shape \[4\]"),
        ({"allow": np.ones((1, 90), bool)}, r"allow has shape \[1, 90\], expected \[90\]"),
        ({"method": "fast"}, "method is 'fast'"),
        ({"threads": 0}, "threads is 0"),
    ],
)
def test_bad_arguments_are_named(sasrec: Trained, arguments: dict[str, Any], message: str) -> None:
    assert sasrec.prepared.num_items == 90
    with pytest.raises(InputError, match=message):
        sasrec.recommender.recommend(**{"histories": [["a", "b"]]} | arguments)


@pytest.mark.parametrize("arguments", [{"method": "fast"}, {"threads": 0}, {"k": -1}])
def test_bad_arguments_are_named_even_where_popularity_answers(
    sasrec: Trained, arguments: dict[str, Any]
) -> None:
    (name,) = arguments
    with pytest.raises(InputError, match=f"{name} is"):
        sasrec.recommender.recommend([[]], **arguments)


# On disk -----------------------------------------------------------------------------------------


def questions(trained: Trained) -> list[list[Any]]:
    known = [trained.external(history) for history in histories_of(trained.prepared.num_items)]
    return [*known, [], ["zzz", *known[1]]]


@pytest.mark.parametrize("encoder", ["auto", "onnx", "torch"])
def test_a_saved_recommender_gives_the_same_answers(trained: Trained, encoder: Any) -> None:
    loaded = Recommender.load(trained.saved, encoder=encoder, verify=True)
    for exclude_seen in (True, False):
        expected = trained.recommender.recommend(questions(trained), 10, exclude_seen=exclude_seen)
        found = loaded.recommend(questions(trained), 10, exclude_seen=exclude_seen)
        assert_same_answers(found, expected)
    histories = [np.array(history) for history in histories_of(trained.prepared.num_items)]
    difference = loaded.encoder.encode(histories) - trained.recommender.encoder.encode(histories)
    assert np.abs(difference).max() < 1e-4
    assert type(loaded.encoder).__name__ == (
        "TorchEncoder" if encoder == "torch" else "OnnxEncoder"
    )
    assert loaded.encoder.length == LENGTH
    assert loaded.settings == trained.recommender.settings
    assert repr(loaded) == repr(trained.recommender)
    assert np.array_equal(loaded.popularity, trained.recommender.popularity)


def test_a_loaded_recommender_can_be_saved_again_even_over_itself(
    trained: Trained, tmp_path: Path
) -> None:
    trained.recommender.save(tmp_path / "saved")
    loaded = Recommender.load(tmp_path / "saved")
    expected = loaded.recommend(questions(trained), 10)
    loaded.save(tmp_path / "saved")
    assert_same_answers(loaded.recommend(questions(trained), 10), expected)
    kinds: tuple[EncoderKind, ...] = ("onnx", "torch")
    for encoder in kinds:
        again = Recommender.load(tmp_path / "saved", encoder=encoder, verify=True)
        assert_same_answers(again.recommend(questions(trained), 10), expected)


def test_a_saved_recommender_needs_no_torch(trainings: dict[str, Trained]) -> None:
    code = """
import json, sys
for name in ("torch", "onnx", "polars", "scipy", "rich", "pyarrow", "matplotlib"):
    sys.modules[name] = None
from recprune.recommender import Recommender
for folder, histories in json.load(sys.stdin):
    found = Recommender.load(folder).recommend(histories, 10)
    print(json.dumps([found.items, found.unknown, found.by_popularity.tolist()]))
"""
    asked = [(str(trained.saved), questions(trained)) for trained in trainings.values()]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        input=json.dumps(asked), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(trainings)
    for trained, (items, unknown, by_popularity) in zip(trainings.values(), answers, strict=True):
        expected = trained.recommender.recommend(questions(trained), 10)
        assert items == expected.items
        assert unknown == expected.unknown
        assert by_popularity == expected.by_popularity.tolist()


def test_torch_steps_in_where_there_is_no_onnx_runtime(
    sasrec: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = sasrec.recommender.recommend(questions(sasrec), 10)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert_same_answers(Recommender.load(sasrec.saved).recommend(questions(sasrec), 10), expected)
    with pytest.raises(MissingExtraError, match=r"recprune\[onnx\]"):
        Recommender.load(sasrec.saved, encoder="onnx")


def test_an_encoder_that_does_not_exist_is_refused(sasrec: Trained) -> None:
    wrong: Any = "onyx"
    with pytest.raises(InputError, match="encoder is 'onyx'"):
        Recommender.load(sasrec.saved, encoder=wrong)


@pytest.mark.parametrize("threads", [0, -1, True, 1.5])
def test_an_encoder_runs_on_one_thread_or_more(sasrec: Trained, threads: Any) -> None:
    with pytest.raises(InputError, match=f"threads is {threads}"):
        Recommender.load(sasrec.saved, threads=threads)


@pytest.fixture
def copy(sasrec: Trained, tmp_path: Path) -> Path:
    """A recommender of one's own to damage."""
    sasrec.recommender.save(tmp_path / "mine")
    return tmp_path / "mine"


def test_one_damaged_byte_anywhere_is_found(copy: Path) -> None:
    files = sorted(copy.iterdir())
    assert len(files) > 10
    for path in files:
        content = path.read_bytes()
        damaged = bytearray(content)
        damaged[len(content) * 3 // 4] ^= 4
        path.write_bytes(damaged)
        with pytest.raises(StorageError, match=f"mine/{path.name}"):
            Recommender.load(copy, verify=True)
        path.write_bytes(content)
    Recommender.load(copy, verify=True)


def test_a_missing_file_is_named(copy: Path) -> None:
    for path in sorted(copy.iterdir()):
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(StorageError, match="mine") as refused:
            Recommender.load(copy)
        assert path.name in str(refused.value)
        path.write_bytes(content)


def resaved(folder: Path, changes: dict[str, NDArray[Any] | None]) -> None:
    """Save a recommender again with some arrays replaced or left out, checksums and all."""
    saved = load_folder(folder, kind=KIND, version=4)
    index = saved.parts["index"]

    def changed(arrays: Mapping[str, NDArray[Any]], prefix: str) -> dict[str, NDArray[Any]]:
        new = {name: changes.get(prefix + name, np.array(array)) for name, array in arrays.items()}
        return {name: array for name, array in new.items() if array is not None}

    parts = {"index": replace(index, arrays=changed(index.arrays, "index_"))}
    save_folder(folder, replace(saved, arrays=changed(saved.arrays, ""), parts=parts))


def test_a_folder_of_version_3_is_still_read(trained: Trained, tmp_path: Path) -> None:
    """Its index had no version of its own: settings and arrays lay among those of the whole."""
    trained.recommender.save(tmp_path / "new")
    new = load_folder(tmp_path / "new", kind=KIND, version=4)
    index = new.parts["index"]
    settings = {"index": index.settings, "recommender": new.settings}
    arrays = {**new.arrays, **{f"index_{name}": array for name, array in index.arrays.items()}}
    save_folder(tmp_path / "old", Saved(KIND, 3, settings, arrays))
    histories = [trained.external([5, 17, 3]), []]
    found = Recommender.load(tmp_path / "old").recommend(histories, 5)
    expected = Recommender.load(tmp_path / "new").recommend(histories, 5)
    assert found.items == expected.items
    assert np.array_equal(found.scores.view(np.uint32), expected.scores.view(np.uint32))


@pytest.mark.parametrize(
    ("changes", "encoder"),
    [
        ({"popularity": None}, "auto"),
        ({"item_ids_offsets": None}, "auto"),
        ({"item_ids_pool": None}, "auto"),
        ({"index_transposed_embeddings": None}, "auto"),
        ({"encoder_onnx": None}, "auto"),
        ({"encoder_onnx": np.zeros(100, np.uint8)}, "auto"),
        ({"weights_norm.weight": None}, "torch"),
        ({"weights_norm.weight": np.zeros(3, np.float32)}, "torch"),
    ],
)
def test_a_folder_that_lacks_a_part_or_has_a_useless_one_is_named(
    copy: Path, changes: dict[str, Any], encoder: Any
) -> None:
    resaved(copy, changes)
    with pytest.raises(StorageError, match="mine"):
        Recommender.load(copy, encoder=encoder)


def test_other_folders_are_not_recommenders(sasrec: Trained, tmp_path: Path) -> None:
    sasrec.prepared.save(tmp_path / "prepared")
    with pytest.raises(StorageError, match="prepared: holds a saved prepared log, not a recomm"):
        Recommender.load(tmp_path / "prepared")
    for wrong in (tmp_path / "nowhere", sasrec.folder, sasrec.folder / MODEL):
        with pytest.raises(StorageError, match=f"{wrong.name}: not a saved recommender"):
            Recommender.load(wrong)


def test_nothing_else_is_overwritten_by_saving(sasrec: Trained, tmp_path: Path) -> None:
    sasrec.prepared.save(tmp_path / "prepared")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary.txt").write_text("dear diary")
    for name in ("prepared", "mine", "mine/diary.txt"):
        with pytest.raises(StorageError, match=f"{name}: already exists"):
            sasrec.recommender.save(tmp_path / name)
    assert (tmp_path / "mine" / "diary.txt").read_text() == "dear diary"
    Prepared.load(tmp_path / "prepared")


@pytest.mark.parametrize("encoder", ["onnx", "torch"])
def test_threads_share_one_recommender(trained: Trained, encoder: Any) -> None:
    recommender = Recommender.load(trained.saved, encoder=encoder)
    asked = questions(trained)
    expected = [recommender.recommend([history], 10) for history in asked]

    def ask(_: int) -> Iterator[tuple[int, Recommendations]]:
        for turn in range(5):
            for place, history in enumerate(asked):
                yield place, recommender.recommend([history], 10, threads=1 + turn % 2)

    with ThreadPoolExecutor(8) as pool:
        for answers in pool.map(lambda number: list(ask(number)), range(8)):
            assert len(answers) == 5 * len(asked)
            for place, found in answers:
                assert_same_answers(found, expected[place])


def test_nobody_can_change_a_recommender(sasrec: Trained) -> None:
    for recommender in (sasrec.recommender, Recommender.load(sasrec.saved)):
        with pytest.raises(ValueError, match="read-only"):
            recommender.popularity[0] = 100


# What it was trained on --------------------------------------------------------------------------


def test_a_training_on_another_codebook_makes_no_recommender(
    trainings: dict[str, Trained],
) -> None:
    with pytest.raises(InputError, match="trained on another prepared log"):
        Recommender.from_training(trainings["sasrec"].prepared, trainings["bert4rec"].folder)
    with pytest.raises(StorageError, match=f"{MODEL}: no such file"):
        Recommender.from_training(trainings["sasrec"].prepared, trainings["sasrec"].saved)


def holdouts() -> dict[str, Holdout]:
    log = walks(40, 60, "strings", seed=4)
    return {
        "temporal": temporal_holdout(log, validation_users=15),
        "short training": temporal_holdout(
            log, train_fraction=0.1, validation_users=5, min_history=3
        ),
        "leave one out": leave_one_out(log, validation_users=0),
    }


@pytest.mark.parametrize("protocol", holdouts())
def test_the_training_log_is_the_training_part_of_the_hold_out(
    tmp_path: Path, protocol: str
) -> None:
    holdout = holdouts()[protocol]
    codebook = assign_svd(holdout.train, num_splits=2, num_sub_items=4)
    prepared = prepare(holdout, codebook, {})
    prepared.save(tmp_path / "prepared")
    for source in (prepared, Prepared.load(tmp_path / "prepared")):
        log = source.train_log()
        assert (log.num_users, log.num_items) == (holdout.log.num_users, holdout.log.num_items)
        assert log.num_interactions == holdout.train.num_interactions
        for user in range(log.num_users):
            assert log.history(user).tolist() == holdout.train.history(user).tolist()
        assert log.items.dtype == holdout.train.items.dtype
        assert log.offsets.dtype == holdout.train.offsets.dtype
        assert np.array_equal(log.times, holdout.train.times)
        assert log.item_ids.take(range(60)) == holdout.log.item_ids.take(range(60))
    if protocol == "short training":
        assert len(holdout.dropped_users)
