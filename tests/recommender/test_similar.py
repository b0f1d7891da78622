"""Similar items are those with the greatest cosines: by hand, and as scoring every item says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from recprune import Attributes, Index, InputError, Recommender
from recprune.recommender import cosine
from recprune.recommender.cosine import CosineSearch
from tests.support.trainings import Trained, bits_of

NONE = np.empty(0, np.int64)


def brute_force(
    vectors: NDArray[Any], item: int, k: int, eligible: NDArray[np.bool_]
) -> tuple[list[int], NDArray[np.float32]]:
    """Return the best k by NumPy's own norms and products."""
    wide = vectors.astype(np.float64)
    lengths = np.linalg.norm(wide, axis=1) * np.linalg.norm(wide[item])
    cosines = np.divide(wide @ wide[item], lengths, out=np.zeros(len(wide)), where=lengths > 0)
    rounded = cosines.astype(np.float32)
    others = np.flatnonzero(eligible & (np.arange(len(wide)) != item))
    best = others[np.lexsort((others, -rounded[others]))][:k]
    return best.tolist(), rounded[best]


def vectors_of(index: Index) -> NDArray[Any]:
    codes, embeddings = index.item_codes(), index.sub_item_embeddings()
    return np.concatenate([part[codes[:, m]] for m, part in enumerate(embeddings)], axis=1)


def test_cosines_by_hand() -> None:
    # Items: (3, 4), (3, -4), (6, 8) scaled in one split only is not the same direction: (6, 4),
    # (0, 4), and nothing at all.
    embeddings = np.array([[[3], [6], [0]], [[4], [-4], [0]]], np.float32)
    codes = np.array([[0, 0], [0, 1], [1, 0], [2, 0], [2, 2], [0, 0]], np.uint8)
    search = CosineSearch(Index.build(codes, embeddings))
    best, cosines = search.best(0, 9, exclude=NONE)
    # 1; 34 / (5 √52); 16 / (5 · 4); 0; (9 − 16) / 25
    assert best.tolist() == [5, 2, 3, 4, 1]
    assert cosines == pytest.approx([1.0, 34 / (5 * 52**0.5), 0.8, 0.0, -0.28])
    # The inner product prefers the longer vector, and the cosine does not.
    assert [3 * 6 + 4 * 4, 3 * 3 + 4 * 4] == [34, 25]
    best, cosines = search.best(4, 3, exclude=NONE)
    assert (best.tolist(), cosines.tolist()) == ([0, 1, 2], [0.0, 0.0, 0.0])
    best, _ = search.best(0, 2, exclude=np.array([5]), allow=np.arange(6) != 3)
    assert best.tolist() == [2, 4]


def clustered(rng: np.random.Generator, num_items: int, spread: float) -> Index:
    """Return an index in which many items are alike, with vectors of other lengths."""
    num_splits, num_sub_items = 4, 16
    families = rng.integers(0, num_sub_items, (num_items // 20, num_splits))
    codes = families[rng.integers(0, len(families), num_items)]
    own = rng.random(codes.shape) < 0.3
    codes[own] = rng.integers(0, num_sub_items, int(own.sum()))
    embeddings = rng.standard_normal((num_splits, num_sub_items, 3))
    embeddings *= rng.lognormal(0.0, spread, (num_splits, num_sub_items, 1))
    embeddings[0, 0] = 0.0
    return Index.build(codes.astype(np.uint8), embeddings.astype(np.float32))


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
def test_pruned_answers_are_those_of_all_items(
    spread: float, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(int(10 * spread))
    index = clustered(rng, 6000, spread)
    index = Index.build(index.item_codes(), index.sub_item_embeddings() * np.float32(scale))
    pruned, every = CosineSearch(index, every_item=0), CosineSearch(index)
    seen = []
    candidates = CosineSearch._candidates

    def counted(*given: Any) -> Any:
        found = candidates(*given)
        seen.append(None if found is None else len(found))
        return found

    monkeypatch.setattr(CosineSearch, "_candidates", counted)
    for item in rng.integers(0, 6000, 12).tolist():
        allow = rng.random(6000) < rng.choice([0.01, 0.5, 1.0])
        exclude = rng.integers(0, 6000, 3)
        words = bits_of(allow).words
        for k in (1, 7, 40):
            found = pruned.best(item, k, exclude=exclude, allow=words)
            expected = every.best(item, k, exclude=exclude, allow=allow)
            assert found[0].tolist() == expected[0].tolist()
            assert np.array_equal(found[1], expected[1])
            eligible = allow.copy()
            eligible[exclude] = False
            _, cosines = brute_force(vectors_of(index), item, k, eligible)
            assert np.allclose(found[1], cosines, atol=2e-7)
    pruned_share = np.mean([found is not None for found in seen])
    assert pruned_share > (0.5 if spread < 1.0 else 0.1)  # that is what was tried


def test_answers_that_pruning_does_not_suit_are_right_too() -> None:
    rng = np.random.default_rng(5)
    index = clustered(rng, 2000, 0.5)
    codes, embeddings = index.item_codes(), index.sub_item_embeddings()
    biased = Index.build(codes, embeddings, item_bias=rng.normal(size=2000).astype(np.float32))
    compact = Index.build(codes, embeddings, layout="compact")
    every = CosineSearch(index)
    for other in (index, biased, compact):
        search = CosineSearch(other, every_item=0)
        for k in (0, 10, 1999, 2500):
            found, expected = search.best(7, k, exclude=NONE), every.best(7, k, exclude=NONE)
            assert found[0].tolist() == expected[0].tolist()
            assert np.array_equal(found[1], expected[1])
            assert len(found[0]) == min(k, 1999)


def test_items_in_parts_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    index = clustered(np.random.default_rng(6), 2000, 0.5)
    whole = CosineSearch(index).best(3, 50, exclude=NONE)
    monkeypatch.setattr(cosine, "_AT_ONCE", 128)
    parts = CosineSearch(index).best(3, 50, exclude=NONE)
    assert parts[0].tolist() == whole[0].tolist()
    assert np.array_equal(parts[1], whole[1])


# The recommender ---------------------------------------------------------------------------------


def test_a_recommender_answers_by_its_own_vectors(trained: Trained) -> None:
    """Of every kind, full tables too."""
    recommender = trained.recommender
    vectors = vectors_of(recommender.index)
    num_items = len(vectors)
    items = [5, 0, num_items - 1]
    found = recommender.similar(trained.external(items), 6)
    assert found.ids.shape == found.scores.shape == (3, 6)
    for row, item in enumerate(items):
        _, cosines = brute_force(vectors, item, 6, np.ones(num_items, np.bool_))
        assert np.allclose(found.scores[row], cosines, atol=2e-7)
        assert item not in found.ids[row]
        assert found.items[row] == trained.external(found.ids[row].tolist())
    counts = recommender.popularity
    assert found.untrained == [
        name for name, item in zip(trained.external(items), items, strict=True) if not counts[item]
    ]
    loaded = Recommender.load(trained.saved).similar(trained.external(items), 6)
    assert (loaded.items, loaded.scores.tolist()) == (found.items, found.scores.tolist())
    # One item that is allowed, and padding behind it.
    (only,) = trained.external([7])
    found = recommender.similar(trained.external([5]), 3, allow=[only])
    assert found.items == [[only]]
    assert found.ids[0, 1:].tolist() == [-1, -1]
    assert np.isneginf(found.scores[0, 1:]).all()
    assert recommender.similar([], 3).items == []
    frame = recommender.similar(trained.external([5, 6]), 2, exclude=[only]).to_frame()
    assert frame.columns == ["similar_to", "rank", "item_id", "score"]
    assert frame["similar_to"].to_list() == [
        name for name in trained.external([5, 6]) for _ in range(2)
    ]
    assert frame["rank"].to_list() == [1, 2, 1, 2]


def test_conditions_hold_for_similar_items(trainings: dict[str, Trained]) -> None:
    trained = trainings["sasrec"]
    names = trained.external([*range(trained.prepared.num_items)])
    columns = {"item_id": names, "cheap": [place % 3 == 0 for place in range(len(names))]}
    items = Attributes.from_table(columns, trained.recommender.item_ids)
    found = trained.recommender.with_attributes(items).similar(names[5:6], 8, where="cheap")
    assert (found.ids % 3 == 0).all()
    assert (
        found.ids.tolist()
        == trained.recommender.similar(
            names[5:6], 8, allow=np.arange(len(names)) % 3 == 0
        ).ids.tolist()
    )


def test_unknown_items_are_named(trainings: dict[str, Trained]) -> None:
    trained = trainings["sasrec"]
    with pytest.raises(InputError, match="items: not in the catalogue: 'who\\?', 7"):
        trained.recommender.similar(["a", "who?", "b", 7])
    with pytest.raises(InputError, match="items is 'a', expected a sequence"):
        trained.recommender.similar("a")
    with pytest.raises(InputError, match="k is -1"):
        trained.recommender.similar(["a"], -1)


def test_a_live_catalogue_is_asked_as_it_is(trained: Trained, tmp_path: Path) -> None:
    live = trained.recommender.make_live(tmp_path / "live")
    recommender = trained.recommender.with_live(live)
    names = trained.external([*range(trained.prepared.num_items)])
    before = live.snapshot()
    assert (
        recommender.similar(names[5:6], 9).items == trained.recommender.similar(names[5:6], 9).items
    )
    new = 10_000 if isinstance(names[0], int) else "new"
    (number,) = live.add(trained.recommender.index.item_codes()[5:6], item_ids=[new]).tolist()
    live.remove([6, 7])
    for every_item in (0, cosine.EVERY_ITEM):
        search = CosineSearch(live.snapshot(), every_item=every_item)
        best, cosines = search.best(5, 200, exclude=NONE)
        assert number in best[cosines == 1.0]
        assert not {5, 6, 7} & set(best.tolist())
        assert len(best) == live.num_present - 1
    found = recommender.similar([new], 3)
    assert found.untrained == []
    assert names[5] in found.items[0]
    with pytest.raises(InputError, match="not in the catalogue"):
        recommender.similar([names[6]])
    with pytest.raises(InputError, match="not in the catalogue"):
        recommender.similar([new], index=before)
    live.close()
