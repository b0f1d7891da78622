"""Cold items: the nearest trained items by content, against slow twins, and kept on disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recprune import (
    ColdItems,
    Content,
    InputError,
    Interactions,
    find_cold_items,
    interactions_from_columns,
)
from recprune.preparation import neighbours as nearest
from recprune.preparation.cold_items import like_by_company
from recprune.preparation.neighbours import nearest_by_text, nearest_by_vector, text_words
from recprune.preparation.prepared import Prepared
from recprune.types import no_progress
from tests.conftest import log_of
from tests.preparation.test_prepared import held_out


def test_words_of_titles_and_paths() -> None:
    assert text_words("The HTMLParser2 of x_y") == ["the", "html", "parser", "2", "of", "x", "y"]
    assert text_words("net/ipv4/tcpInput.c") == [
        "net", "ipv", "4", "tcp", "input", "c", "net/", "net/ipv4/", "/tcpInput.c"
    ]  # fmt: skip
    assert text_words("größe 東京\nA/b") == ["größe", "東京", "a", "b", "A/", "/b"]


def slow_similarities(texts: list[str]) -> np.ndarray:
    """Cosines of TF-IDF, one pair at a time."""
    sets = [set(text_words(text)) for text in texts]
    idf = {
        word: np.log(len(texts) / sum(word in other for other in sets))
        for word in set().union(*sets)
    }
    lengths = [np.sqrt(sum(idf[word] ** 2 for word in words)) for words in sets]
    found = np.zeros((len(texts), len(texts)))
    for left, right in np.ndindex(*found.shape):
        common = sum(idf[word] ** 2 for word in sets[left] & sets[right])
        found[left, right] = common / (lengths[left] * lengths[right]) if common else 0.0
    return found


def test_nearest_by_text_are_those_of_a_slow_twin() -> None:
    rng = np.random.default_rng(0)
    words = ["net", "tcp", "udp", "drivers", "usb", "core", "hub", "test"]
    texts = ["/".join(rng.choice(words, rng.integers(1, 5))) + ".c" for _ in range(60)]
    asked, among = np.arange(0, 60, 3), np.setdiff1d(np.arange(60), np.arange(0, 60, 3))
    places, similarities = nearest_by_text(texts, asked, among, 4, no_progress)
    expected = slow_similarities(texts)[np.ix_(asked, among)]
    assert np.allclose(similarities, -np.sort(-expected, axis=1)[:, :4], atol=1e-6)
    found = np.take_along_axis(expected, np.searchsorted(among, places), axis=1)
    assert np.allclose(found[similarities > 0], similarities[similarities > 0], atol=1e-6)


def test_words_of_very_many_items_bring_no_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearest, "_MOST_SHARED", 2)
    texts = ["common rare", "common", "common", "rare", "other", "other words"]
    places, similarities = nearest_by_text(
        texts, np.array([0, 1]), np.array([2, 3, 4, 5]), 2, no_progress
    )
    assert places[0, 0] == 3
    assert (similarities[0] > 0).tolist() == [True, False]
    assert not similarities[1].any()


def test_nearest_by_vector_are_the_largest_cosines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearest, "_SCORES_AT_ONCE", 100)  # in several parts
    rng = np.random.default_rng(1)
    vectors = rng.normal(size=(80, 5)).astype(np.float32)
    asked, among = np.arange(30), np.arange(30, 80)
    places, similarities = nearest_by_vector(vectors, asked, among, 3, no_progress)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = unit[:30] @ unit[30:].T
    order = np.argsort(-cosines, axis=1, kind="stable")[:, :3]
    assert np.array_equal(places, order + 30)
    assert np.allclose(similarities, np.take_along_axis(cosines, order, axis=1))


def test_what_points_away_is_no_neighbour() -> None:
    vectors = np.array([[1, 0], [-1, 0], [1, 1]], np.float32)
    places, similarities = nearest_by_vector(
        vectors, np.array([0]), np.array([1, 2]), 2, no_progress
    )
    assert places[0, 0] == 2
    assert similarities[0].tolist() == pytest.approx([0.5**0.5, 0.0])


@pytest.fixture
def train() -> Interactions:
    """Items 0 … 5, of which 1 and 4 have no interaction in training."""
    log = log_of(*(("u", item, item) for item in range(6)))
    return log.select(~np.isin(log.items, [1, 4]))


def test_untrained_items_are_found_with_shares_that_sum_to_one(train: Interactions) -> None:
    # Given in no order; item 4 is like nothing that was trained.
    items = np.array([5, 4, 3, 1, 0])
    texts = ["a/b", "z", "a/b", "a/b", "q"]
    cold = find_cold_items(Content(items, texts), train, num_neighbours=3)
    assert cold.items.tolist() == [1]
    assert cold.neighbours[0, :2].tolist() == [5, 3]
    assert cold.weights[0].tolist() == pytest.approx([0.5, 0.5, 0.0])
    assert cold.weights.dtype == np.float32


def test_no_content_and_no_cold_items_are_fine(train: Interactions) -> None:
    nothing = find_cold_items(Content(np.empty(0, np.int64), []), train)
    assert len(nothing) == 0
    warm = find_cold_items(Content(np.array([0, 2]), None, np.eye(2, dtype=np.float32)), train)
    assert len(warm) == 0
    only_cold = find_cold_items(Content(np.array([1]), None, np.ones((1, 2), np.float32)), train)
    assert len(only_cold) == 0


def test_content_must_fit(train: Interactions) -> None:
    with pytest.raises(InputError, match="one text for every item, or one vector"):
        Content(np.array([0, 1]), ["only one"])
    with pytest.raises(InputError, match="num_neighbours is 0"):
        find_cold_items(Content(np.array([1]), ["a"]), train, num_neighbours=0)
    with pytest.raises(InputError, match="as many neighbours as weights"):
        ColdItems(np.zeros(2, np.int32), np.zeros((2, 3), np.int32), np.zeros((2, 2), np.float32))


def test_cold_items_are_kept_and_older_folders_have_none(tmp_path: Path) -> None:
    _, plain = held_out()
    cold = ColdItems(
        np.array([3], np.int32), np.array([[1, 2]], np.int32), np.array([[0.75, 0.25]], np.float32)
    )
    with_cold = replace(plain, cold=cold)
    plain.save(tmp_path / "plain")
    with_cold.save(tmp_path / "cold")
    assert Prepared.load(tmp_path / "plain").cold is None
    loaded = Prepared.load(tmp_path / "cold").cold
    assert loaded is not None
    for part in ("items", "neighbours", "weights"):
        assert np.array_equal(getattr(loaded, part), getattr(cold, part))
        assert getattr(loaded, part).dtype == getattr(cold, part).dtype
    # What was trained without content stays valid, what was trained with it is told apart.
    assert with_cold.checksum(with_cold=False) == plain.checksum()
    assert with_cold.checksum() != plain.checksum()


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("items", [3, 1], "stands twice, or is a neighbour"),
        ("items", [1, 9], "not one of 0 to 8"),
        ("items", [-1, 3], "not one of 0 to 8"),
        ("neighbours", [[0, 1], [2, 0]], "is a neighbour of another"),
        ("neighbours", [[0.5, 2.0], [2.0, 0.0]], "are integers"),
        ("weights", [[np.nan, 0.5], [1.0, 0.0]], "not a number from 0 on"),
    ],
)
def test_what_a_file_says_of_cold_items_is_checked(part: str, value: Any, message: str) -> None:
    whole: dict[str, Any] = {
        "items": np.array([1, 3], np.int32),
        "neighbours": np.array([[0, 2], [2, 1]], np.int32),  # the last does not count
        "weights": np.array([[0.5, 0.5], [1.0, 0.0]], np.float32),
    }
    ColdItems(**whole).check_items(9)
    changed = np.array(value)
    kind = np.int32 if changed.dtype.kind == "i" else np.float32
    with pytest.raises(InputError, match=message):
        ColdItems(**whole | {part: changed.astype(kind)}).check_items(9)


def test_company_is_what_stands_beside_an_item() -> None:
    """Held against a walk over all pairs of events."""
    rng = np.random.default_rng(0)
    users, items = rng.integers(0, 12, 300), rng.integers(0, 25, 300)
    log = interactions_from_columns(users, items, np.arange(300), min_interactions=1)
    asked = np.arange(log.num_items) % 4 == 0
    found = like_by_company(log, asked, ~asked, num_neighbours=3)
    found.check_items(log.num_items)
    popularity = np.bincount(log.items, minlength=log.num_items)
    sums = np.zeros((log.num_items, log.num_items))
    for user in range(log.num_users):
        history = log.history(user).tolist()
        for place, item in enumerate(history):
            for other in history[max(0, place - 5) : place] + history[place + 1 : place + 6]:
                if asked[item] and not asked[other]:
                    sums[item, other] += 1 / np.sqrt(popularity[other])
    assert found.items.tolist() == np.flatnonzero(sums.any(axis=1)).tolist()
    for item, neighbours, weights in zip(found.items, found.neighbours, found.weights, strict=True):
        best = np.sort(sums[item])[::-1][:3]
        assert np.allclose(sums[item, neighbours][weights > 0], best[best > 0], rtol=1e-5)
        assert np.allclose(weights, best / best.sum(), rtol=1e-5)
