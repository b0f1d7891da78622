"""A recommender answers what its model answers."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

from recprune import METHODS, Index, InputError
from recprune.data.identifiers import ExternalId
from recprune.models.ranking import encode_histories
from tests.support.small_models import LENGTH
from tests.support.trainings import Trained, bits_of, histories_of


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


def test_nobody_asked_nobody_answered(sasrec: Trained) -> None:
    found = sasrec.recommender.recommend([], 5)
    assert (found.items, found.unknown, found.ids.shape) == ([], [], (0, 5))
    for histories in ([sasrec.external([3]), []], []):
        with pytest.raises(InputError, match="k is 0, expected 1 to"):
            sasrec.recommender.recommend(histories, 0)


def test_histories_may_be_arrays_tuples_and_generators(trainings: dict[str, Trained]) -> None:
    trained = trainings["bert4rec"]
    ids = trained.external([5, 17, 3])
    expected = trained.recommender.recommend([ids], 5)
    generated: Any = (item for item in ids)
    arrays: Any = np.array([ids])
    five: Any = np.int64(5)
    for given in (arrays, [tuple(ids)], [generated], ([*ids],)):
        assert trained.recommender.recommend(given, five).items == expected.items


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


def test_recommendations_as_a_frame(trained: Trained) -> None:
    histories = [trained.external([5, 17]), trained.external([3])]
    found = trained.recommender.recommend(histories, 200)
    frame = found.to_frame(["anna", "bob"])
    assert frame.columns == ["user_id", "rank", "item_id", "score"]
    for place, user in enumerate(("anna", "bob")):
        rows = frame.filter(frame["user_id"] == user)
        assert rows["item_id"].to_list() == found.items[place]
        assert rows["rank"].to_list() == list(range(1, len(found.items[place]) + 1))
        assert np.array_equal(rows["score"].to_numpy(), found.scores[place][: len(rows)])
    assert found.to_frame()["user_id"].unique().sort().to_list() == [0, 1]
    with pytest.raises(InputError, match="1 users, but 2 histories"):
        found.to_frame(["anna"])
