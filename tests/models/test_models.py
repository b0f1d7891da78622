"""Embeddings, encoders and the ranking of targets."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from recprune import InputError, assign_random
from recprune.models.architectures import ARCHITECTURES, SequenceModel, build_model
from recprune.models.bert4rec import MASK, BERT4Rec
from recprune.models.embedding import FullEmbedding, RecJPQEmbedding
from recprune.models.ranking import encode_histories, pad_histories, target_ranks, top_items
from recprune.models.settings import Architecture, ModelSettings
from recprune.types import CodeArray, Int32Array

torch.set_num_threads(1)  # of tiny models, threads would only wait for each other

NUM_ITEMS, WIDTH, LENGTH = 50, 16, 10


def codes_of(num_items: int, num_splits: int = 4, num_sub_items: int = 8) -> CodeArray:
    return assign_random(num_items, num_splits=num_splits, num_sub_items=num_sub_items).codes


def shaken(model: SequenceModel) -> SequenceModel:
    """Give every weight a value that matters: biases begin at 0 and would hide mistakes."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name and name.endswith("weight"):
                parameter.copy_(1.0 + 0.2 * noise)
            else:
                parameter.copy_(0.4 * noise)
    return model.eval()


def model_of(
    architecture: str = "sasrec", embedding: str = "recjpq", num_heads: int = 1, **others: Any
) -> SequenceModel:
    settings = ModelSettings(
        architecture,  # type: ignore[arg-type]
        embedding,  # type: ignore[arg-type]
        num_heads=num_heads,
        **({"width": WIDTH, "length": LENGTH, "num_blocks": 2} | others),
    )
    return shaken(build_model(settings, codes_of(NUM_ITEMS), 8))


def some_histories(*lengths: int, seed: int = 0) -> list[Int32Array]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, NUM_ITEMS, length, dtype=np.int32) for length in lengths]


def state_alone(model: SequenceModel, items: list[int]) -> Tensor:
    """Return all states of one history without any padding, [length, d]."""
    with torch.no_grad():
        states: Tensor = model(torch.tensor([items]), torch.tensor([len(items)]))[0]
    return states


EMBEDDINGS = ("recjpq", "full")
EVERY_ENCODER = pytest.mark.parametrize(
    ("architecture", "embedding", "num_heads"),
    [
        (architecture, embedding, heads)
        for architecture in ARCHITECTURES
        for embedding in EMBEDDINGS
        for heads in (1, 2)
    ],
)
EVERY_SASREC = pytest.mark.parametrize(
    ("embedding", "num_heads"), [(embedding, heads) for embedding in EMBEDDINGS for heads in (1, 2)]
)


# Embeddings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_splits", "num_sub_items", "dtype"),
    [(1, 8, np.uint8), (4, 8, np.uint8), (8, 256, np.uint8), (4, 300, np.uint16)],
)
def test_recjpq_scores_are_products_with_the_reconstructed_vectors(
    num_splits: int, num_sub_items: int, dtype: type[np.generic]
) -> None:
    codes = codes_of(150, num_splits, num_sub_items)
    assert codes.dtype == dtype
    torch.manual_seed(0)
    embedding = RecJPQEmbedding(codes, num_sub_items, 32)
    table = embedding.sub_item_embeddings.detach().numpy().astype(np.float64)
    # Written out: split after split, the vector of the sub-item that the code names.
    dense = np.stack(
        [
            np.concatenate([table[split, codes[item, split]] for split in range(num_splits)])
            for item in range(150)
        ]
    )
    with torch.no_grad():
        vectors = embedding.vectors(torch.arange(150))
        assert np.array_equal(vectors.double().numpy(), dense)
        queries = torch.randn(7, 32)
        expected = queries.double().numpy() @ dense.T
        scale = float(np.abs(expected).max())
        everything = torch.arange(150).expand(7, 150)
        by_item = embedding.scores(queries, everything)
        by_range = embedding.scores_of_range(embedding.score_table(queries), 0, 150)
    np.testing.assert_allclose(by_item.numpy(), expected, atol=1e-6 * scale)
    np.testing.assert_allclose(by_range.numpy(), expected, atol=1e-6 * scale)


def test_full_scores_are_products_with_the_vectors() -> None:
    torch.manual_seed(0)
    embedding = FullEmbedding(150, 32)
    queries = torch.randn(7, 32)
    with torch.no_grad():
        dense = embedding.vectors(torch.arange(150)).double().numpy()
        assert np.array_equal(dense, embedding.item_embeddings.double().numpy())
        expected = queries.double().numpy() @ dense.T
        scale = float(np.abs(expected).max())
        by_item = embedding.scores(queries, torch.arange(150).expand(7, 150))
        by_range = embedding.scores_of_range(embedding.score_table(queries), 0, 150)
    np.testing.assert_allclose(by_item.numpy(), expected, atol=1e-6 * scale)
    np.testing.assert_allclose(by_range.numpy(), expected, atol=1e-6 * scale)


@pytest.mark.parametrize("kind", EMBEDDINGS)
def test_scores_of_some_items_are_those_of_the_range(kind: str) -> None:
    embedding = model_of(embedding=kind).embedding
    queries, items = torch.randn(6, WIDTH), torch.randint(NUM_ITEMS, (6, 9))
    with torch.no_grad():
        table = embedding.score_table(queries)
        before = table.clone()
        everything = embedding.scores_of_range(table, 0, NUM_ITEMS)
        torch.testing.assert_close(
            embedding.scores(queries, items), everything.gather(1, items), rtol=1e-5, atol=1e-5
        )
        for first, last in ((0, 1), (3, 17), (NUM_ITEMS - 1, NUM_ITEMS), (20, 20)):
            torch.testing.assert_close(
                embedding.scores_of_range(table, first, last),
                everything[:, first:last],
                rtol=1e-5,
                atol=1e-5,
            )
        assert torch.equal(table, before)  # it is used again


@pytest.mark.parametrize("kind", EMBEDDINGS)
def test_vectors_keep_the_shape_of_the_items(kind: str) -> None:
    embedding = model_of(embedding=kind).embedding
    items = torch.randint(NUM_ITEMS, (3, 5))
    found = embedding.vectors(items)
    assert found.shape == (3, 5, WIDTH)
    assert torch.equal(found[1, 2], embedding.vectors(items[1, 2].view(1))[0])


def test_a_width_that_the_splits_do_not_divide_is_refused() -> None:
    with pytest.raises(InputError, match="width 18 is not a multiple of the 4 splits"):
        RecJPQEmbedding(codes_of(20), 8, 18)
    with pytest.raises(InputError, match="width 18 is not a multiple of the 4 splits"):
        build_model(ModelSettings(width=18), codes_of(20), 8)
    assert build_model(ModelSettings(width=18, embedding="full"), codes_of(20), 8) is not None


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        ([[0, 8]], r"codes\[0, 1\] is 8, expected 0 to 7"),
        ([[0, -1]], r"codes\[0, 1\] is -1, expected 0 to 7"),
        ([0, 1], r"codes is int64\[2\], expected integers \[n, M\]"),
        ([[0.0, 1.0]], r"codes is float64\[1, 2\]"),
        (np.zeros((0, 4), np.uint8), r"codes is uint8\[0, 4\]"),
    ],
)
def test_codes_that_are_none_are_refused(codes: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        RecJPQEmbedding(np.array(codes), 8, 16)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_recjpq_has_no_table_of_all_item_vectors(architecture: str) -> None:
    def sizes(num_items: int, embedding: str) -> dict[str, int]:
        settings = ModelSettings(architecture, embedding, WIDTH, length=LENGTH)  # type: ignore[arg-type]
        model = build_model(settings, codes_of(num_items), 8)
        return {name: tensor.numel() for name, tensor in tensors_of(model).items()}

    few, many = sizes(100, "recjpq"), sizes(200, "recjpq")
    assert max(many.values()) < 200 * WIDTH
    assert {name for name in many if many[name] != few[name]} == {"embedding.codes"}
    assert many["embedding.codes"] == 200 * 4
    # The full table is what that is to be told from.
    assert sizes(200, "full")["embedding.item_embeddings"] == 200 * WIDTH


def test_codes_are_one_byte_each_and_saved_but_not_trained() -> None:
    embedding = RecJPQEmbedding(codes_of(20), 8, 16)
    assert embedding.codes.dtype == torch.uint8
    assert set(embedding.state_dict()) == {"codes", "sub_item_embeddings"}
    assert [name for name, _ in embedding.named_parameters()] == ["sub_item_embeddings"]
    assert RecJPQEmbedding(codes_of(400, 2, 300), 300, 16).codes.max() == 299


def test_the_gradient_reaches_only_the_sub_items_of_the_items() -> None:
    codes = np.array([[0, 1], [2, 1], [3, 3]], np.uint8)
    embedding = RecJPQEmbedding(codes, 4, 4)
    embedding.vectors(torch.tensor([0, 1, 1])).sum().backward()  # type: ignore[no-untyped-call]
    gradient = embedding.sub_item_embeddings.grad
    assert gradient is not None
    # Item 0 once and item 1 twice: split 0 has ids 0 and 2, split 1 has id 1 three times.
    assert gradient[:, :, 0].tolist() == [[1.0, 0.0, 2.0, 0.0], [0.0, 3.0, 0.0, 0.0]]


# Encoders ----------------------------------------------------------------------------------------


@EVERY_SASREC
def test_no_state_of_sasrec_depends_on_a_later_item(embedding: str, num_heads: int) -> None:
    model = model_of("sasrec", embedding, num_heads)
    items = torch.from_numpy(np.stack(some_histories(LENGTH, LENGTH, LENGTH))).long()
    lengths = torch.full((3,), LENGTH)
    with torch.no_grad():
        states = model(items, lengths)
        for place in range(LENGTH):
            changed = items.clone()
            changed[:, place] = (changed[:, place] + 1 + place) % NUM_ITEMS
            found = model(changed, lengths)
            assert torch.equal(found[:, :place], states[:, :place])
            # ... and every state from there on does.
            differences = (found[:, place:] - states[:, place:]).abs().amax((0, 2))
            assert (differences > 1e-4).all()


@pytest.mark.parametrize("embedding", EMBEDDINGS)
def test_every_state_of_bert4rec_depends_on_every_item(embedding: str) -> None:
    model = model_of("bert4rec", embedding)
    items = torch.from_numpy(np.stack(some_histories(LENGTH))).long()
    with torch.no_grad():
        states = model(items, torch.tensor([LENGTH]))
        for place in range(LENGTH):
            changed = items.clone()
            changed[:, place] = (changed[:, place] + 1) % NUM_ITEMS
            found = model(changed, torch.tensor([LENGTH]))
            assert ((found - states).abs().amax(2) > 1e-6).all()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-13)])
@EVERY_ENCODER
def test_padding_changes_nothing(
    architecture: str, embedding: str, num_heads: int, dtype: torch.dtype, tolerance: float
) -> None:
    model = model_of(architecture, embedding, num_heads).to(dtype)
    histories = some_histories(1, 2, 3, 5, 8, LENGTH)
    items, lengths = pad_histories(histories)
    with torch.no_grad():
        together = model(torch.from_numpy(items), torch.from_numpy(lengths))
        # What stands in the padding does not matter either.
        inside = np.arange(LENGTH) < lengths[:, None]
        other = torch.from_numpy(np.where(inside, items, NUM_ITEMS - 1))
        assert not torch.equal(other, torch.from_numpy(items))
        same = model(other, torch.from_numpy(lengths))
    for row, history in enumerate(histories):
        alone = state_alone(model, history.tolist())
        scale = float(alone.abs().max())
        for found in (together, same):
            assert float((found[row, : len(history)] - alone).abs().max()) <= tolerance * scale


@EVERY_ENCODER
def test_encode_last_is_the_last_state(architecture: str, embedding: str, num_heads: int) -> None:
    model = model_of(architecture, embedding, num_heads)
    for length in range(1, LENGTH + 1):
        items = torch.from_numpy(np.stack(some_histories(length, length, length, seed=length)))
        items = items.long()
        with torch.no_grad():
            found = model.encode_last(model.embedding.vectors(items))
            if isinstance(model, BERT4Rec):
                items = torch.cat([items, torch.full((3, 1), MASK)], dim=1)
            expected = model(items, torch.full((3,), items.shape[1]))[:, -1]
        assert found.shape == (3, WIDTH)
        torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-5)


@EVERY_ENCODER
def test_histories_are_encoded_as_if_alone_and_in_their_order(
    architecture: str, embedding: str, num_heads: int
) -> None:
    model = model_of(architecture, embedding, num_heads)
    model.train()  # encoding puts it right
    histories = some_histories(7, 1, LENGTH, 3, 30, 2, 7, 9)
    expected = []
    for history in histories:
        items = history[-LENGTH:].tolist()
        mask = [MASK] if architecture == "bert4rec" else []
        model.eval()
        expected.append(state_alone(model, [*items, *mask])[-1])
    model.train()
    for batch_size in (1, 3, 100):
        found = encode_histories(model, LENGTH, histories, batch_size)
        assert found.shape == (len(histories), WIDTH)
        torch.testing.assert_close(found, torch.stack(expected), rtol=0.0, atol=4e-6)


@EVERY_ENCODER
def test_a_long_history_counts_by_its_last_items(
    architecture: str, embedding: str, num_heads: int
) -> None:
    model = model_of(architecture, embedding, num_heads)
    (history,) = some_histories(35)
    long = encode_histories(model, LENGTH, [history])
    assert torch.equal(long, encode_histories(model, LENGTH, [history[-LENGTH:]]))
    shorter = encode_histories(model, LENGTH, [history[-LENGTH + 1 :]])
    assert not torch.allclose(long, shorter, atol=1e-4)


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_no_histories_have_no_embeddings(architecture: str) -> None:
    assert encode_histories(model_of(architecture), LENGTH, []).shape == (0, WIDTH)


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_the_order_of_a_history_matters(architecture: str) -> None:
    model = model_of(architecture)
    first = encode_histories(model, LENGTH, [np.array([3, 4, 5], np.int32)])
    second = encode_histories(model, LENGTH, [np.array([4, 3, 5], np.int32)])
    assert not torch.allclose(first, second, atol=1e-4)


def test_what_stands_under_a_mask_does_not_matter() -> None:
    """Masks and padding are looked up as item 0 and then replaced: no trace of it may be left."""
    model = model_of("bert4rec", "full")
    assert isinstance(model, BERT4Rec)
    assert isinstance(model.embedding, FullEmbedding)
    items = torch.tensor([[7, MASK, 9, MASK, 0], [4, 5, MASK, 0, 0]])
    lengths = torch.tensor([4, 3])
    states = model(items, lengths)
    inside = [states[0, :4], states[1, :3]]
    torch.cat(inside).square().sum().backward()  # type: ignore[no-untyped-call]
    gradient = model.embedding.item_embeddings.grad
    assert gradient is not None
    assert gradient[0].abs().max() == 0.0
    assert gradient[[7, 9, 4, 5]].abs().amax(1).min() > 0.0
    assert model.mask_vector.grad is not None
    assert model.mask_vector.grad.abs().max() > 0.0
    with torch.no_grad():
        model.embedding.item_embeddings[0] = 100.0
        again = model(items, lengths)
        assert torch.equal(again[0, :4], inside[0])
        assert torch.equal(again[1, :3], inside[1])


def test_a_mask_is_no_item() -> None:
    model = model_of("bert4rec")
    masked = state_alone(model, [7, MASK, 9])
    for item in range(NUM_ITEMS):
        assert not torch.allclose(masked, state_alone(model, [7, item, 9]), atol=1e-4)


def test_the_appended_mask_is_what_bert4rec_predicts_at() -> None:
    model = model_of("bert4rec")
    (history,) = some_histories(LENGTH)
    found = encode_histories(model, LENGTH, [history])[0]
    with_mask = state_alone(model, [*history.tolist(), MASK])
    without = state_alone(model, history.tolist())
    torch.testing.assert_close(found, with_mask[-1], rtol=0.0, atol=4e-6)
    assert not torch.allclose(found, without[-1], atol=1e-3)


@EVERY_ENCODER
def test_dropout_is_for_training_alone(architecture: str, embedding: str, num_heads: int) -> None:
    dropping = model_of(architecture, embedding, num_heads, dropout=0.5)
    plain = model_of(architecture, embedding, num_heads, dropout=0.0)
    items = torch.from_numpy(np.stack(some_histories(LENGTH, LENGTH))).long()
    lengths = torch.tensor([LENGTH, LENGTH])
    with torch.no_grad():
        assert torch.equal(dropping(items, lengths), dropping(items, lengths))
        assert torch.equal(dropping(items, lengths), plain(items, lengths))
        dropping.train()
        assert not torch.equal(dropping(items, lengths), dropping(items, lengths))


@EVERY_ENCODER
def test_every_weight_takes_part(architecture: str, embedding: str, num_heads: int) -> None:
    model = model_of(architecture, embedding, num_heads)
    items = torch.from_numpy(np.stack(some_histories(LENGTH, LENGTH))).long()
    if architecture == "bert4rec":
        items[:, 4] = MASK
    weights = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
    moments = torch.arange(2 * LENGTH).view(2, LENGTH).exp2().long()
    times = [torch.stack([moments, 2 * moments])] if model.reads_times else []
    (model(items, torch.tensor([LENGTH, LENGTH]), *times) * weights).sum().backward()
    # A constant added to all keys changes no softmax.
    without = {name for name, weight in model.named_parameters() if weight.grad is None}
    assert without == set()
    idle = {
        name
        for name, weight in model.named_parameters()
        if weight.grad is not None
        and weight.grad.abs().max() < 1e-4
        and not name.endswith("key.bias")
    }
    assert idle == set()


# Ranks -------------------------------------------------------------------------------------------


def brute_force_ranks(scores: Any, targets: Int32Array, seen: list[Int32Array] | None) -> list[int]:
    """Sort everything by score descending and id ascending, and look where the target is.

    One that was seen is nowhere: below all.
    """
    ranks = []
    for user, target in enumerate(targets.tolist()):
        hidden = set() if seen is None else set(seen[user].tolist())
        order = sorted(range(scores.shape[1]), key=lambda item: (-scores[user, item], item))
        left = [item for item in order if item not in hidden]
        ranks.append(left.index(target) if target in left else scores.shape[1])
    return ranks


@pytest.mark.parametrize("embedding", EMBEDDINGS)
@given(st.integers(0, 1000), st.integers(1, 6), st.booleans(), st.sampled_from([1, 64, 1 << 24]))
def test_ranks_are_those_of_a_full_sort_with_ties(
    embedding: str, seed: int, num_users: int, hide: bool, at_once: int
) -> None:
    """Small whole numbers: every score is exact, and many are equal."""
    rng = np.random.default_rng(seed)
    model = model_of(embedding=embedding)
    with torch.no_grad():
        assert isinstance(model.embedding, nn.Module)
        for parameter in model.embedding.parameters():
            parameter.copy_(torch.from_numpy(rng.integers(-1, 2, tuple(parameter.shape))))
        vectors = model.embedding.vectors(torch.arange(NUM_ITEMS)).numpy()
    queries = rng.integers(-1, 2, (num_users, WIDTH)).astype(np.float32)
    targets = rng.integers(0, NUM_ITEMS, num_users, dtype=np.int32)
    # Targets and repeated items among what was seen.
    seen = [rng.integers(0, NUM_ITEMS, rng.integers(0, 40), dtype=np.int32) for _ in targets]
    if num_users > 1:
        seen[0] = np.append(seen[0], targets[0])
    expected = brute_force_ranks(queries @ vectors.T, targets, seen if hide else None)
    found = target_ranks(model, torch.from_numpy(queries), targets, seen if hide else None, at_once)
    assert found.tolist() == expected


@pytest.mark.parametrize("at_once", [1, 1 << 24])
@pytest.mark.parametrize("num_users", [1, 40])
def test_items_of_one_code_are_tied_whatever_the_rounding(num_users: int, at_once: int) -> None:
    """Items 2k and 2k + 1 share their code: the second stands exactly one place behind."""
    codes: CodeArray = codes_of(30, 8, 16)[np.repeat(np.arange(30), 2)]
    torch.manual_seed(3)
    model = build_model(ModelSettings(width=64, length=5), codes, 16)
    queries = torch.randn(num_users, 64)
    for pair in range(30):
        first = np.full(num_users, 2 * pair, np.int32)
        ahead = target_ranks(model, queries, first, None, at_once)
        behind = target_ranks(model, queries, first + 1, None, at_once)
        assert np.array_equal(behind, ahead + 1)
        # If the first of the two was seen, it does not count.
        hidden = [np.array([2 * pair], np.int32)] * num_users
        assert np.array_equal(target_ranks(model, queries, first + 1, hidden, at_once), behind - 1)
        both = target_ranks(model, queries, first, [first[:1] + 1] * num_users, at_once)
        assert np.array_equal(both, ahead)


@pytest.mark.parametrize("hide", [False, True])
@pytest.mark.parametrize("num_splits", [2, 8, 32])
def test_ranks_follow_scores_added_in_the_order_of_the_search(num_splits: int, hide: bool) -> None:
    """To the last bit: float32, split after split. Few codes, so that many items are tied."""
    torch.manual_seed(num_splits)
    rng = np.random.default_rng(num_splits)
    codes: CodeArray = codes_of(15, num_splits, 16)[rng.permutation(60) // 4]
    model = build_model(ModelSettings(width=64, length=5), codes, 16)
    queries = torch.randn(60, 64)
    with torch.no_grad():
        table = model.embedding.score_table(queries).numpy()  # [users, M, B]
    scores = table[:, 0, codes[:, 0]].copy()
    for split in range(1, num_splits):
        scores += table[:, split, codes[:, split]]
    assert scores.dtype == np.float32
    targets = np.arange(60, dtype=np.int32)
    seen = [rng.integers(0, 60, 25, dtype=np.int32) for _ in targets] if hide else None
    found = target_ranks(model, queries, targets, seen)
    assert found.tolist() == brute_force_ranks(scores, targets, seen)


@pytest.mark.parametrize("hide", [False, True])
@pytest.mark.parametrize("at_once", [1, 60 * 7, 1 << 20])
def test_the_best_items_are_those_of_a_full_sort_with_ties(at_once: int, hide: bool) -> None:
    torch.manual_seed(1)
    rng = np.random.default_rng(1)
    codes: CodeArray = codes_of(15, 4, 16)[rng.permutation(60) // 4]  # four items of every code
    model = build_model(ModelSettings(width=16, length=5), codes, 16)
    queries = torch.randn(60, 16)
    with torch.no_grad():
        table = model.embedding.score_table(queries)
        scores = model.embedding.scores_of_range(table, 0, 60).numpy().copy()
    exclude = [rng.choice(60, 57, replace=False).astype(np.int32) for _ in range(60)]
    expected = []
    for user, row in enumerate(scores):
        left = np.setdiff1d(np.arange(60), exclude[user] if hide else [])
        best = left[np.lexsort((left, -row[left]))][:7]
        expected.append(np.pad(best, (0, 7 - len(best)), constant_values=-1).tolist())
    found = top_items(model, queries, 7, exclude if hide else None, at_once)
    assert found.tolist() == expected


@pytest.mark.parametrize("embedding", EMBEDDINGS)
def test_who_has_seen_everything_is_recommended_nothing(embedding: str) -> None:
    model = model_of(embedding=embedding)
    torch.manual_seed(0)
    queries = torch.randn(NUM_ITEMS, WIDTH)
    targets = np.arange(NUM_ITEMS, dtype=np.int32)
    seen = [np.arange(NUM_ITEMS, dtype=np.int32)] * NUM_ITEMS
    assert target_ranks(model, queries, targets, seen).tolist() == [NUM_ITEMS] * NUM_ITEMS


@pytest.mark.parametrize("embedding", EMBEDDINGS)
def test_the_size_of_the_parts_does_not_change_the_ranks(embedding: str) -> None:
    model = model_of(embedding=embedding)
    torch.manual_seed(0)
    queries = torch.randn(20, WIDTH)
    targets = np.arange(20, dtype=np.int32)
    ranks = [
        target_ranks(model, queries, targets, None, size).tolist() for size in (1, 33, 140, 1 << 24)
    ]
    assert ranks[1:] == ranks[:-1]
    assert len(set(ranks[0])) > 10


@pytest.mark.parametrize("embedding", EMBEDDINGS)
def test_a_score_that_is_not_a_number_is_never_the_best(embedding: str) -> None:
    """A model that has diverged must not look perfect."""
    model = model_of(embedding=embedding)
    queries = torch.full((3, WIDTH), torch.nan)
    ranks = target_ranks(model, queries, np.array([3, 4, 5], np.int32))
    assert ranks.tolist() == [NUM_ITEMS - 1] * 3


def test_every_architecture_that_can_be_set_has_an_encoder() -> None:
    assert set(ARCHITECTURES) == set(get_args(Architecture))
