"""A transition head in training: what it scores is what is served, less what it is to predict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recprune import assign_random
from recprune.models.architectures import SequenceModel, build_model
from recprune.models.ranking import model_boosts
from recprune.models.settings import Settings
from recprune.models.transitions import (
    COUNT_BOUNDS,
    COUNT_BUCKETS,
    PROBABILITY_BUCKETS,
    RATIO_BOUNDS,
    SuccessorTable,
    buckets,
    count_transitions,
)
from recprune.preparation.prepared import Prepared
from recprune.training.checkpoint import load_model
from recprune.training.loop import train, validation_ndcg
from recprune.training.minibatches import make_minibatch
from recprune.training.sparse_scores import SparseScores, merged
from recprune.training.successors import Successors, bucketized
from recprune.types import Int32Array, Int64Array
from tests.preparation.test_prepared import prepared_of
from tests.training.test_minibatches import settings_of

torch.set_num_threads(1)

CPU = torch.device("cpu")
NUM_ITEMS = 30


def wandering(num_users: int = 12, length: int = 12, num_items: int = NUM_ITEMS) -> Prepared:
    """After every item comes one of three that it has, mostly the first of them."""
    rng = np.random.default_rng(0)
    ways = rng.integers(0, num_items, (num_items, 3))
    histories = []
    for _ in range(num_users):
        history = [int(rng.integers(num_items))]
        while len(history) < length:
            history.append(int(ways[history[-1], rng.choice(3, p=[0.8, 0.1, 0.1])]))
        histories.append(history)
    codes = assign_random(num_items, num_splits=2, num_sub_items=8).codes
    return prepared_of(histories, codes, 8)


def model_with_head(prepared: Prepared, settings: Settings) -> SequenceModel:
    torch.manual_seed(0)
    model = build_model(settings.model, prepared.codes, prepared.num_sub_items).eval()
    assert model.transitions is not None
    torch.nn.init.normal_(model.transitions.weight)
    torch.nn.init.normal_(model.transitions.bias)
    model.successors = count_transitions(prepared)
    return model


def without(table: SuccessorTable, source: int, successor: int) -> SuccessorTable:
    """Return a table with one transition less."""
    entries = np.arange(table.offsets[source], table.offsets[source + 1])
    (entry,) = entries[table.successors[entries] == successor]
    counts, totals = table.counts.copy(), table.totals.copy()
    counts[entry] -= 1
    totals[source] -= 1
    if counts[entry]:
        return replace(table, counts=counts, totals=totals)
    offsets = table.offsets.copy()
    offsets[source + 1 :] -= 1
    kept = np.arange(len(counts)) != entry
    return SuccessorTable(offsets, table.successors[kept], counts[kept], totals)


def trained_buckets(counts: Int32Array, totals: Int32Array) -> tuple[Int64Array, Int64Array]:
    bounds = (torch.from_numpy(RATIO_BOUNDS), torch.from_numpy(COUNT_BOUNDS))
    found = bucketized(torch.from_numpy(counts), torch.from_numpy(totals), *bounds)
    return found[0].numpy(), found[1].numpy()


def reached(number: int, of: int, num_buckets: int) -> int:
    """Return how many of √2, 2, 2 √2, … a quotient reaches, in integers: the square of both."""
    halves = range(1, num_buckets)
    return sum(number * number >= of * of << half for half in halves)


def test_buckets_are_how_often_a_number_doubles_by_halves() -> None:
    largest = 300
    for total in range(1, largest):
        counts = np.arange(1, total + 1, dtype=np.int32)
        likely, often = buckets(counts, np.int32(total))
        ratios = [reached(total, int(count), PROBABILITY_BUCKETS) for count in counts]
        assert likely.tolist() == ratios
        times = [reached(int(count), 1, COUNT_BUCKETS) for count in counts]
        assert (often - PROBABILITY_BUCKETS).tolist() == times
    assert set(ratios) == set(range(PROBABILITY_BUCKETS))  # of the last total
    assert set(times) == set(range(COUNT_BUCKETS)) - {1}  # nothing lies between 1 and 2


@given(total=st.integers(1, 2**31 - 1), data=st.data())
def test_buckets_are_the_same_in_training_and_served(total: int, data: st.DataObject) -> None:
    """Also where a quotient is within a millionth of a bound, and where it would not fit 32 bits."""
    bound = data.draw(st.integers(1, PROBABILITY_BUCKETS)) / 2
    near = round(total / 2**bound) + np.arange(-3, 4)
    free = data.draw(st.lists(st.integers(1, total), max_size=20))
    counts = np.clip(np.array([*near, *free, 1, total]), 1, total).astype(np.int32)
    served = buckets(counts, np.int32(total))
    trained = trained_buckets(counts, np.full(len(counts), total, np.int32))
    assert [part.tolist() for part in served] == [part.tolist() for part in trained]
    assert served[0].max() < PROBABILITY_BUCKETS <= served[1].min()
    assert served[1].max() < PROBABILITY_BUCKETS + COUNT_BUCKETS


@pytest.mark.parametrize("looks_back", [1, 3])
def test_successors_in_training_are_those_that_are_served(looks_back: int) -> None:
    prepared = wandering()
    settings = settings_of(transitions=looks_back, length=24)
    model = model_with_head(prepared, settings)
    assert model.transitions is not None
    assert model.successors is not None
    minibatch = make_minibatch(prepared, np.arange(prepared.num_users), settings, 0, 0)
    arrays = [torch.from_numpy(array) for array in minibatch.arrays()]
    items, places, segments, positions, targets = arrays
    successors = Successors(model.embedding, model.transitions, looks_back, model.successors, CPU)
    with torch.no_grad():
        states = model.forward_packed(items, places, segments).flatten(0, 1)[positions]
        found = merged(successors(states, items, segments, positions, targets))
        expected_products = model.embedding.scores(states, found.items)
    torch.testing.assert_close(found.products, expected_products)
    whole = model.successors
    at = 0
    for user in range(prepared.num_users):
        events = prepared.items[prepared.offsets[user] : prepared.train_ends[user]]
        for last in range(1, len(events)):
            history = events[:last]
            model.successors = without(whole, int(history[-1]), int(events[last]))
            boosts = model_boosts(model, settings.model, states[at : at + 1], [history])
            assert boosts is not None
            valid = found.valid[at]
            served = dict(zip(boosts[0][0].tolist(), boosts[0][1].tolist(), strict=True))
            boosted = found.boosts[at][valid].tolist()
            trained = dict(zip(found.items[at][valid].tolist(), boosted, strict=True))
            assert len(trained) == int(valid.sum())  # each once
            assert trained == pytest.approx(served, abs=1e-4)
            at += 1
    assert at == len(targets)


def test_boosts_of_one_item_are_added_up() -> None:
    def part(items: list[int], boosts: list[float], valid: list[bool]) -> SparseScores:
        numbers = torch.tensor([items]).float()
        return SparseScores(
            torch.tensor([items]), numbers, torch.tensor([boosts]), torch.tensor([valid])
        )

    both = merged(
        [
            part([4, 7, 4], [1.0, 2.0, 3.0], [False, True, True]),
            part([7, 5, 4], [10.0, 20.0, 30.0], [True, True, False]),
            part([5, 7, 9], [100.0, 200.0, 300.0], [True, True, True]),
        ]
    )
    valid = both.valid[0]
    found = dict(zip(both.items[0][valid].tolist(), both.scores()[0][valid].tolist(), strict=True))
    assert found == {7: 7 + 212.0, 4: 4 + 3.0, 5: 5 + 120.0, 9: 9 + 300.0}
    assert int(valid.sum()) == 4


@pytest.mark.parametrize(
    "values", [{"loss": "softmax", "negatives": "shared"}, {"loss": "cross_entropy"}]
)
def test_what_counting_knows_is_learnt(tmp_path: Path, values: dict[str, str]) -> None:
    """A model of four numbers cannot tell what follows each of 400 items; with counts it can."""
    prepared = wandering(200, 20, 400)

    def quality(looks_back: int) -> float:
        settings = settings_of(
            transitions=looks_back, width=4, max_epochs=6, num_negatives=16, dropout=0.0, **values
        )
        out = tmp_path / str(looks_back)
        train(prepared, settings, out, device="cpu")
        model, _ = load_model(out, prepared)
        return validation_ndcg(model, prepared, settings)

    assert quality(1) > 0.7 > 0.3 > quality(0)
