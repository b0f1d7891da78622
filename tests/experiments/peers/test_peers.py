"""What people use instead: each peer answers our question, the exact ones as the oracle does."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recprune import Index, InputError, build_posting_lists
from recprune.experiments.framework.machine import machine
from recprune.experiments.peers.bmp_peer import BmpPeer
from recprune.experiments.peers.faiss_hnsw import FaissHNSW
from recprune.experiments.peers.faiss_peer import FaissPeer, faiss_threads
from recprune.experiments.peers.faiss_pq import FaissPQ
from recprune.experiments.peers.families import (
    FAMILIES,
    available_families,
    build,
    libraries,
    one_thread,
    why_not,
)
from recprune.experiments.peers.peer import CodesAndVectors, ModelShape, Peer
from recprune.experiments.peers.scann_peer import Scann, ScannPeer
from recprune.experiments.peers.seismic_peer import Seismic
from recprune.experiments.peers.sparse import term_weights, terms_of
from recprune.experiments.peers.torch_peer import torch_threads
from recprune.experiments.peers.torch_recjpqprune import TorchRecJPQPrune, TorchRecJPQPrunePeer
from recprune.search import reference
from recprune.types import Float32Array, Int64Array, MissingExtraError

PLENTY = 10**9
EXACT = {"torch_dense", "torch_pqtopk", "torch_recjpqprune", "faiss_flat", "faiss_pq"}
BMP = {"bmp", "bmp_large"}
TWO_SWEEPS = {"scann", "seismic"}  # of one structure
GIGABYTE = 10**9


@cache
def model() -> CodesAndVectors:
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 32, (5000, 8)).astype(np.uint8)
    return CodesAndVectors(codes, rng.standard_normal((8, 32, 4)).astype(np.float32))


@cache
def index() -> Index:
    return Index.build(model().codes, model().sub_item_embeddings)


@cache
def queries() -> Float32Array:
    return np.random.default_rng(4).standard_normal((30, 32)).astype(np.float32)


@cache
def built(family: str) -> list[Peer]:
    reason = why_not(family, model().shape, PLENTY)
    if reason is not None:
        pytest.skip(reason)
    return build(family, model(), PLENTY, threads=1)  # graphs by two threads differ every time


def recall(found: Int64Array, expected: Int64Array) -> float:
    return float(np.isin(expected, found).mean())


# The contract of every peer ----------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_peers_agree_with_the_oracle_and_others_come_close(family: str) -> None:
    expected = index().search(queries(), 10, method="pqtopk")
    for peer in built(family):
        assert peer.exact == (family in EXACT)
        found = np.array([peer.search(query, 10) for query in queries()])
        assert found.dtype == np.int64
        assert found.shape == (len(queries()), 10)
        for query, ids, ids_expected, scores in zip(
            queries(), found, expected.ids, expected.scores, strict=True
        ):
            assert len(set(ids.tolist()) - {-1}) == (ids >= 0).sum(), "an item comes once"
            assert ids.max() < len(model().codes)
            assert ids.min() >= -1
            if peer.exact:
                # Equal up to rounding: two items that nearly tie may change places.
                np.testing.assert_allclose(index().score(query, ids), scores, rtol=1e-5)
                assert recall(ids, ids_expected) >= 0.9
            if isinstance(peer, BmpPeer) and peer.share < 1:
                continue  # its scores are those of some of the terms
            real = index().score(query, ids[ids >= 0])
            rounding = 0.1 if family in BMP else 1e-4  # its scores are whole numbers of few bits
            assert (np.diff(real) <= rounding).all(), "best first"
    strongest = np.array([built(family)[-1].search(query, 10) for query in queries()])
    assert np.mean([recall(*pair) for pair in zip(strongest, expected.ids, strict=True)]) > 0.95


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - EXACT))
def test_more_effort_finds_more(family: str) -> None:
    expected = index().search(queries(), 10, method="pqtopk").ids
    for sweep in {peer.family for peer in built(family)}:
        recalls = [
            np.mean(
                [recall(peer.search(q, 10), e) for q, e in zip(queries(), expected, strict=True)]
            )
            for peer in built(family)
            if peer.family == sweep
        ]
        assert len(recalls) > 3
        assert recalls[0] < recalls[-1], "its settings make a difference"
        assert recalls == sorted(recalls)


@pytest.mark.parametrize("family", ["faiss_ivfpq", "faiss_ivfflat", "scann"])
def test_the_most_thorough_setting_looks_everywhere(family: str) -> None:
    """Two numbers of lists, or of candidates that are scored again, each up to all there is."""
    expected = index().search(queries(), 10, method="pqtopk").ids
    peers = [*built(family), *(built(f"{family}_few") if f"{family}_few" in FAMILIES else [])]
    last = {peer.family: peer for peer in peers}
    assert len(last) == 2
    for peer in last.values():
        found = [recall(peer.search(q, 10), e) for q, e in zip(queries(), expected, strict=True)]
        assert np.mean(found) > 0.99, peer.name


@pytest.mark.parametrize("family", FAMILIES)
def test_more_is_asked_for_than_there_is(family: str) -> None:
    num_items = len(model().codes)
    for peer in built(family):
        ids = peer.search(queries()[0], num_items + 5)
        assert ids.shape == (num_items + 5,)
        count = int((ids >= 0).sum())
        assert (ids[count:] == -1).all(), "padding stands at the end"
        assert len(set(ids[:count].tolist())) == count
        assert ids.max() < num_items
        assert count == num_items if peer.exact else count >= 10


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"scann"} - BMP))
@pytest.mark.parametrize("num_items", [1, 3, 70])
def test_tiny_catalogues(family: str, num_items: int) -> None:
    tiny = model().first(num_items)
    if why_not(family, tiny.shape, PLENTY) is not None:
        pytest.skip(f"{family} is not installed")
    expected = Index.build(tiny.codes, tiny.sub_item_embeddings).search(queries()[0], 5).ids
    found = build(family, tiny, PLENTY, threads=1)[-1].search(queries()[0], 5)
    assert np.array_equal(found, expected)


def test_scann_says_how_many_items_it_wants_and_works_with_as_many() -> None:
    built("scann")  # skips where it is not installed
    refused = why_not("scann", ModelShape(999), PLENTY)
    assert refused == "scann wants at least 1,000 items for its codes, and there are 999"
    small = model().first(1000)
    expected = Index.build(small.codes, small.sub_item_embeddings).search(queries()[0], 5).ids
    assert recall(build(Scann((10_000,)), small, PLENTY)[-1].search(queries()[0], 5), expected) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_names_cost_and_families(family: str) -> None:
    peers = built(family)
    names = [peer.name for peer in peers]
    assert len(set(names)) == len(names)
    assert len({peer.family for peer in peers}) == (2 if family in TWO_SWEEPS else 1)
    for peer in peers:
        assert peer.name.startswith(peer.family)
        assert 0 < peer.build_seconds < 60
        assert peer.bytes_used >= model().codes.nbytes


@pytest.mark.parametrize("family", FAMILIES)
def test_bad_questions_get_an_answer_in_words(family: str) -> None:
    peer = built(family)[0]
    with pytest.raises(InputError, match=r"has shape \[31\], expected \[32\]"):
        peer.search(queries()[0, :31], 5)
    with pytest.raises(InputError, match=r"is a batch, expected one embedding \[32\]"):
        peer.search(queries(), 5)
    with pytest.raises(InputError, match="k is 0, expected an integer of at least 1"):
        peer.search(queries()[0], 0)
    with pytest.raises(InputError, match=r"sequence_embedding\[0, 2\] is nan"):
        peer.search(np.where(np.arange(32) == 2, np.nan, queries()[0]).astype(np.float32), 5)


def test_memory_is_what_the_libraries_would_write_to_disk(tmp_path: Path) -> None:
    for family in FAMILIES:
        if family not in available_families():
            continue
        peer = built(family)[0]
        if isinstance(peer, FaissPeer):
            import faiss

            written = faiss.serialize_index(peer.index).nbytes
        elif isinstance(peer, ScannPeer):
            peer.searcher.serialize(str(tmp_path))
            written = sum(path.stat().st_size for path in tmp_path.iterdir())
        else:
            continue
        assert peer.bytes_used == pytest.approx(written, rel=0.1), peer.name


# Sparse vectors ----------------------------------------------------------------------------------


def test_a_sparse_vector_scores_an_item_but_for_a_constant() -> None:
    num_sub_items = model().shape.num_sub_items
    for query in queries():
        weights = term_weights(query[None], model().sub_item_embeddings)
        assert weights.min() == 0
        sparse = weights[terms_of(model().codes, num_sub_items)].sum(axis=1)
        constant = index().score(query, np.arange(len(model().codes))) - sparse
        np.testing.assert_allclose(constant, constant[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", sorted(BMP))
@pytest.mark.parametrize("seed", range(1, 5))
def test_bmp_is_safe_where_whole_numbers_are_all_that_scores_need(family: str, seed: int) -> None:
    thorough = built(family)[-1]
    assert isinstance(thorough, BmpPeer)
    assert (thorough.alpha, thorough.share) == (1, 1)
    # As many steps as weights of a query have, and the lowest of each split below zero.
    scores = np.random.default_rng(seed).integers(1, 1088, (8, 32)).astype(np.float32)
    scores[:, 0], scores[3, 5] = 0, 1088
    scores -= 100 * np.arange(8, dtype=np.float32)[:, None]
    table = CodesAndVectors(model().codes, scores[:, :, None].copy())
    expected, totals = reference.exhaustive(scores, table.codes, 11)
    assert len(np.unique(totals)) == 11, "no ties, which it breaks in its own way"
    found = build(family, table, PLENTY)[-1].search(np.ones(8, np.float32), 10)
    assert np.array_equal(found, expected[:10])


@pytest.mark.parametrize("family", sorted(BMP))
def test_bmp_answers_where_all_items_tie(family: str) -> None:
    assert built(family)[0].search(np.zeros(32, np.float32), 3).tolist() == [0, 1, 2]


@pytest.mark.parametrize("family", sorted(BMP))
def test_bmp_says_how_many_items_it_wants_and_works_with_as_many(family: str) -> None:
    built(family)  # skips where it is not installed
    assert why_not(family, ModelShape(999, 8, 32), PLENTY) == (
        f"{family} wants at least 1,000 items for its bounds, and there are 999"
    )
    small = model().first(1000)
    expected = Index.build(small.codes, small.sub_item_embeddings).search(queries()[0], 5).ids
    found = build(family, small, PLENTY)[-1].search(queries()[0], 5)
    assert recall(found, expected) >= 0.8


def test_terms_are_numbered_by_two_bytes() -> None:
    built("bmp"), built("seismic")  # skips where they are not installed
    wide = ModelShape(5000, 16, 4097, 64)
    assert why_not("seismic", wide, 100 * GIGABYTE) == (
        "seismic numbers terms by two bytes, and 65,552 are too many"
    )
    assert why_not("bmp", wide, 100 * GIGABYTE) == (
        "bmp numbers terms by two bytes, and 131,104 are too many"
    )


def test_seismic_has_so_many_clusters_in_a_list() -> None:
    built("seismic")  # skips where it is not installed
    assert why_not("seismic", ModelShape(13_000_000), 100 * GIGABYTE) is None
    assert why_not("seismic", ModelShape(14_000_000), 100 * GIGABYTE) == (
        "seismic has at most 65,535 clusters in a list, and a list of 328,128 items has more"
    )


def test_seismic_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    built("seismic")  # skips where it is not installed
    build(Seismic(lists=(4,)), model(), PLENTY)
    sys.stdout.write("still heard\n")
    assert capfd.readouterr().out == "still heard\n"


# Algorithm 1 -------------------------------------------------------------------------------------


def prune_peer(codes: Any, scores: Float32Array, step: int) -> TorchRecJPQPrunePeer:
    """Return the peer for which the embedding of all ones has exactly these sub-item scores."""
    table = CodesAndVectors(codes, scores[:, :, None].copy())
    [peer] = build(TorchRecJPQPrune(sub_items_per_step=step), table, PLENTY)
    assert isinstance(peer, TorchRecJPQPrunePeer)
    return peer


@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(["normal", "equal", "steps", "peaked", "negative", "rounding"]),
    num_items=st.sampled_from([1, 2, 63, 500]),
    num_splits=st.sampled_from([1, 2, 8, 11]),
    num_sub_items=st.sampled_from([2, 7, 32, 300]),
    k=st.sampled_from([1, 2, 10, 600]),
    step=st.sampled_from([1, 3, 8, 1000]),
)
def test_pruning_is_exact(
    seed: int, kind: str, num_items: int, num_splits: int, num_sub_items: int, k: int, step: int
) -> None:
    pytest.importorskip("torch")
    rng = np.random.default_rng(seed)
    codes: Any = rng.integers(0, num_sub_items, (num_items, num_splits))
    codes = codes.astype(np.uint8 if num_sub_items <= 256 else np.uint16)
    shape = (num_splits, num_sub_items)
    scores = {
        "normal": rng.standard_normal(shape),
        "equal": np.full(shape, 0.1),
        "steps": rng.integers(-2, 3, shape) / 3,
        "peaked": rng.standard_normal(shape) - 5 + 10 * (np.arange(num_sub_items) == 0),
        "negative": -np.exp(3 * rng.standard_normal(shape)),
        # Sums whose last bits depend on their order: a bound in another order would be none.
        "rounding": rng.choice([0.1, 16777216.0, 1.0000001, -16777216.0], shape),
    }[kind].astype(np.float32)
    found = prune_peer(codes, scores, step).prune(np.ones(num_splits, np.float32), k)
    items = found.items.numpy()
    _, expected = reference.exhaustive(scores, codes, k)
    assert np.array_equal(found.scores.numpy(), expected)
    assert len(set(items.tolist())) == min(k, num_items), "an item comes once"
    assert np.array_equal(reference.score_items(scores, codes[items], None), expected)


@given(seed=st.integers(0, 2**32 - 1), num_splits=st.sampled_from([2, 8, 16]))
def test_an_item_that_reaches_the_upper_bound_is_found(seed: int, num_splits: int) -> None:
    """The first step finds an item that is worse by one bit than the best one, which hides."""
    pytest.importorskip("torch")
    scores = np.zeros((num_splits, 3), np.float32)
    scores[1:, 0] = np.random.default_rng(seed).random(num_splits - 1) + 0.1
    scores[0, 1] = 0.3
    hidden = np.array([1] + [0] * (num_splits - 1), np.uint8)
    found_first = np.array([0] + [2] * (num_splits - 1), np.uint8)
    best = reference.score_items(scores, hidden[None], None)
    scores[0, 0] = np.nextafter(best[0], np.float32(0))
    codes = np.array([found_first, hidden])
    found = prune_peer(codes, scores, 1).prune(np.ones(num_splits, np.float32), 1)
    assert found.items.tolist() == [1]


@pytest.mark.parametrize("step", [1, 8, 20])
def test_pruning_does_the_steps_of_the_algorithm_and_no_more(step: int) -> None:
    pytest.importorskip("torch")
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 64, (20_000, 8)).astype(np.uint8)
    lists = build_posting_lists(codes, 64)
    for sharpness in (0, 1, 3):
        normal = rng.standard_normal((8, 64))
        scores = (normal * np.abs(normal) ** sharpness).astype(np.float32)
        found = prune_peer(codes, scores, step).prune(np.ones(8, np.float32), 10)
        _, _, steps = reference.recjpqprune(scores, codes, lists, 10, step)
        assert found.steps == steps


def test_one_step_is_enough_where_one_sub_item_outweighs_all_others() -> None:
    pytest.importorskip("torch")
    scores = np.random.default_rng(6).uniform(0, 0.01, (8, 32)).astype(np.float32)
    scores[3, 17] = 1
    found = prune_peer(model().codes, scores, 8).prune(np.ones(8, np.float32), 10)
    step = np.argsort(-scores[3])[:8]
    assert found.steps == 1
    assert found.items_scored == np.isin(model().codes[:, 3], step).sum() < len(model().codes) / 3


def test_nothing_can_be_pruned_where_all_scores_tie() -> None:
    pytest.importorskip("torch")
    codes = model().codes
    peer = prune_peer(codes, np.full((8, 32), 0.5, np.float32), 8)
    assert peer.prune(np.ones(8, np.float32), 10).items_scored == len(codes)


def test_a_step_needs_a_sub_item() -> None:
    with pytest.raises(InputError, match="sub_items_per_step is 0, expected at least 1"):
        TorchRecJPQPrune(sub_items_per_step=0)


# The registry ------------------------------------------------------------------------------------


def test_what_is_installed_is_available() -> None:
    for family in FAMILIES:
        reason = why_not(family, ModelShape(5000, 8, 256, 512), PLENTY)
        if family in available_families():
            assert reason is None
        else:
            assert reason is not None
            assert "is not installed: pip install " in reason


def test_a_missing_library_is_a_sentence() -> None:
    @dataclasses.dataclass(frozen=True)
    class Absent(FaissPQ):
        package: ClassVar[str] = "a_library_that_is_not_there"

    reason = why_not(Absent(), model().shape, PLENTY)
    assert reason == (
        "a_library_that_is_not_there is not installed: pip install a_library_that_is_not_there"
    )
    with pytest.raises(MissingExtraError, match=reason):
        build(Absent(), model(), PLENTY)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_small_budget_is_a_sentence(family: str) -> None:
    if family not in available_families():
        pytest.skip(f"{family} is not installed")
    reason = why_not(family, model().shape, 1000)
    assert reason is not None
    needed = FAMILIES[family].bytes_needed(model().shape) / 1e6
    assert reason == (f"{family} needs {needed:.3f} MB for 5,000 items, the budget is 0.001 MB")
    with pytest.raises(InputError, match="the budget is"):
        build(family, model(), 1000)


def test_item_vectors_of_a_large_catalogue_are_over_budget_and_codes_are_not() -> None:
    large = ModelShape(930_528)
    if "torch_dense" in available_families():
        assert why_not("torch_dense", large, GIGABYTE) == (
            "torch_dense needs 1.91 GB for 930,528 items, the budget is 1.00 GB"
        )
        assert why_not("torch_recjpqprune", large, GIGABYTE) is None
    if "faiss_pq" in available_families():
        assert why_not("faiss_pq", large, GIGABYTE) is None
        assert why_not("faiss_hnsw", large, 2 * GIGABYTE) is not None


@pytest.mark.parametrize("split_width", [4, 32])  # narrow and wide ones are encoded differently
def test_a_graph_over_codes_is_the_graph_over_vectors(split_width: int) -> None:
    faiss = pytest.importorskip("faiss")
    rng = np.random.default_rng(5)
    table = rng.standard_normal((8, 32, split_width)).astype(np.float32)
    wide = CodesAndVectors(model().codes, table)
    asked = rng.standard_normal((30, 8 * split_width)).astype(np.float32)
    family = FaissHNSW(ef_search=(16, 64))
    over_vectors = faiss.IndexHNSWFlat(wide.shape.width, family.links, faiss.METRIC_INNER_PRODUCT)
    over_vectors.hnsw.efConstruction = family.build_breadth
    with faiss_threads(1):
        over_vectors.add(wide.item_vectors())
    for peer, breadth in zip(build(family, wide, PLENTY, threads=1), (16, 64), strict=True):
        over_vectors.hnsw.efSearch = breadth
        expected = over_vectors.search(asked, 10)[1]
        found = np.array([peer.search(query, 10) for query in asked])
        assert (found == expected).mean() > 0.99


def test_codes_of_two_bytes_are_not_for_every_peer() -> None:
    if "faiss_pq" not in available_families():
        pytest.skip("faiss is not installed")
    for family in ("faiss_pq", "faiss_ivfpq", "faiss_hnsw"):
        assert why_not(family, ModelShape(5000, 8, 300, 512), PLENTY) == (
            f"{family} has codes of one byte, and 300 sub-items need two"
        )


def test_an_unknown_family_is_named() -> None:
    with pytest.raises(InputError, match="family is 'annoy', expected one of torch_dense, "):
        why_not("annoy", model().shape, PLENTY)


def test_a_family_with_settings_of_its_own() -> None:
    built("faiss_hnsw")  # skips where it is not installed
    [peer] = build(FaissHNSW(links=8, ef_search=(40,)), model(), PLENTY)
    assert peer.name == "FAISS HNSW, efSearch 40"
    assert peer.bytes_used < built("faiss_hnsw")[0].bytes_used


def test_a_model_without_items_has_no_peers() -> None:
    with pytest.raises(InputError, match="no items"):
        model().first(0)


def test_item_vectors_are_sub_item_vectors_side_by_side() -> None:
    small, embeddings = model().first(4), model().sub_item_embeddings
    expected = [
        np.concatenate([embeddings[split, sub_item] for split, sub_item in enumerate(code)])
        for code in small.codes
    ]
    assert np.array_equal(small.item_vectors(), expected)
    assert np.array_equal(small.vectors_of(np.array([2, 0])), [expected[2], expected[0]])


def test_searching_leaves_the_number_of_threads_alone() -> None:
    torch, faiss = pytest.importorskip("torch"), pytest.importorskip("faiss")
    with torch_threads(2), faiss_threads(2):
        for family in available_families():
            built(family)[0].search(queries()[0], 5)
            assert (torch.get_num_threads(), faiss.omp_get_max_threads()) == (2, 2), family
        with one_thread():
            assert (torch.get_num_threads(), faiss.omp_get_max_threads()) == (1, 1)
        assert (torch.get_num_threads(), faiss.omp_get_max_threads()) == (2, 2)


def test_the_machine_is_described_with_the_libraries_of_all_peers() -> None:
    found = {name: version(name) for name in libraries() if name in machine()}
    assert found.items() <= machine().items()
    assert len(found) == len({FAMILIES[key].package for key in available_families()})


def test_asking_what_there_is_loads_none_of_the_libraries() -> None:
    code = (
        "import sys; from recprune.experiments.peers.families import available_families; available_families();"
        "print({'torch', 'faiss', 'scann', 'usearch', 'bmp', 'seismic'} & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"
