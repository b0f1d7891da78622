"""Learnt codes: what the model sees is what is saved, gradients go through, centroids follow."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recprune import InputError
from recprune.models.architectures import build_learning_model, with_embedding
from recprune.models.learnt_codes import LearntEmbedding
from recprune.models.ranking import encode_histories, target_ranks
from recprune.models.settings import ModelSettings, Settings

torch.set_num_threads(1)


def embedding_of(
    num_items: int = 50, num_splits: int = 2, num_sub_items: int = 4
) -> LearntEmbedding:
    torch.manual_seed(0)
    settings = ModelSettings(
        width=8, codes="learnt", num_splits=num_splits, num_sub_items=num_sub_items
    )
    return LearntEmbedding(num_items, settings)


def cut(embedding: LearntEmbedding) -> LearntEmbedding:
    embedding.cut(np.random.default_rng(0))
    return embedding


def test_full_vectors_are_seen_until_they_are_cut() -> None:
    embedding = embedding_of()
    items = torch.arange(50)
    assert torch.equal(embedding.vectors(items), embedding.item_embeddings)
    cut(embedding)
    seen = embedding.vectors(items)
    assert len(torch.unique(seen[:, :4], dim=0)) == 4  # as many as there are sub-items
    assert not torch.equal(seen, embedding.item_embeddings)


def test_every_item_has_its_nearest_centroids() -> None:
    embedding = cut(embedding_of())
    parts = embedding.item_embeddings.detach().view(50, 2, 4)
    distances = (parts.unsqueeze(2) - embedding.sub_item_embeddings).square().sum(-1)
    assert torch.equal(embedding.codes().long(), distances.argmin(-1))


def test_what_is_left_scores_as_what_was_trained() -> None:
    """To the bit where the arithmetic is the same, and by sub-item scores as near as rounding."""
    settings = ModelSettings(
        width=8, length=6, num_blocks=1, codes="learnt", num_splits=2, num_sub_items=4
    )
    torch.manual_seed(0)
    model = build_learning_model(settings, 50)
    learning = model.embedding
    assert isinstance(learning, LearntEmbedding)
    cut(learning)
    deployed = with_embedding(model, learning.as_recjpq())
    items = torch.arange(50)
    torch.testing.assert_close(
        deployed.embedding.vectors(items), learning.vectors(items), rtol=0.0, atol=1e-7
    )
    histories = [np.array(history, np.int32) for history in ([1, 2, 3], [4, 9], [49])]
    ours, theirs = (encode_histories(one, 6, histories) for one in (model, deployed))
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-5)
    wanted = np.array([7, 8, 9], np.int32)
    codes = learning.codes().numpy()
    alone = [item for item in wanted if (codes == codes[item]).all(1).sum() == 1]
    ranks = [target_ranks(one, theirs, wanted) for one in (model, deployed)]
    for place, item in enumerate(wanted):
        if item in alone:  # items with one code tie, and rounding may part them
            assert abs(int(ranks[0][place]) - int(ranks[1][place])) <= 3


def test_the_gradient_goes_straight_through_to_the_full_vectors() -> None:
    embedding = cut(embedding_of())
    direction = torch.arange(8.0)
    (embedding.vectors(torch.tensor([3, 3, 7])) @ direction).sum().backward()  # type: ignore[no-untyped-call]
    gradient = embedding.item_embeddings.grad
    assert gradient is not None
    assert torch.equal(gradient[3], 2 * direction)
    assert torch.equal(gradient[7], direction)
    assert gradient.count_nonzero() == 14  # of two items, the first dimension has none


def test_distortion_draws_a_vector_to_its_centroids() -> None:
    embedding = cut(embedding_of())
    item = torch.tensor([5])
    full, seen = embedding.item_embeddings[5].detach(), embedding.vectors(item)[0].detach()
    value = embedding.distortion(item)
    assert value.item() == pytest.approx(0.5 * float((full - seen).square().sum()))
    value.sum().backward()  # type: ignore[no-untyped-call]
    gradient = embedding.item_embeddings.grad
    assert gradient is not None
    torch.testing.assert_close(gradient[5], full - seen)


def test_centroids_follow_the_mean_of_their_items() -> None:
    """By hand: with a load of 4 and sums of 4 c, one step of 0.99 brings (3.96 c + 0.02 e)/3.98."""
    embedding = cut(embedding_of())
    embedding.loads.fill_(4.0)
    embedding.sums.copy_(4.0 * embedding.sub_item_embeddings)
    before = embedding.sub_item_embeddings.clone()
    code = int(embedding.codes()[9, 0])
    part = embedding.item_embeddings[9, :4].detach()
    embedding.follow(torch.tensor([9, 9]))
    moved = (3.96 * before[0, code] + 0.02 * part) / 3.98
    torch.testing.assert_close(embedding.sub_item_embeddings[0, code], moved)
    others = [sub_item for sub_item in range(4) if sub_item != code]
    torch.testing.assert_close(embedding.sub_item_embeddings[0, others], before[0, others])


def test_sub_items_that_serve_hardly_any_item_are_put_where_items_are() -> None:
    embedding = cut(embedding_of())
    embedding.loads.fill_(10.0)
    embedding.loads[1, 2] = 0.1
    before = embedding.sub_item_embeddings.clone()
    assert embedding.revive(np.random.default_rng(0)) == 1
    moved = embedding.sub_item_embeddings[1, 2]
    assert (embedding.item_embeddings[:, 4:] == moved).all(1).any()
    before[1, 2] = moved
    assert torch.equal(embedding.sub_item_embeddings, before)
    assert embedding.revive(np.random.default_rng(0)) == 0


def test_the_report_counts_shared_codes_and_unused_sub_items() -> None:
    embedding = cut(embedding_of(num_items=6, num_splits=2, num_sub_items=4))
    with torch.no_grad():
        embedding.sub_item_embeddings.zero_()
        embedding.sub_item_embeddings[:, 1] = 1.0
        embedding.sub_item_embeddings[:, 2] = 2.0
        embedding.sub_item_embeddings[:, 3] = 3.0
        embedding.item_embeddings.fill_(0.0)
        embedding.item_embeddings[0, :4] = 1.0
        embedding.item_embeddings[1, 4:] = 2.2
    report = embedding.report()
    assert report.items_sharing_a_code == 4
    assert report.unused_sub_items == 4  # each split has two in use
    spread = 4 * (1 - 1 / 6) + 4 * 2.2**2 * (1 - 1 / 6)
    assert report.quantisation_error == pytest.approx(4 * 0.2**2 / spread, rel=1e-5)


def test_fewer_items_than_sub_items_lose_nothing() -> None:
    embedding = cut(embedding_of(num_items=3, num_sub_items=16))
    torch.testing.assert_close(embedding.vectors(torch.arange(3)), embedding.item_embeddings)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_sub_items": 257}, "num_sub_items is 257, expected 2 to 256"),
        ({"num_splits": 7}, "width 512 is not a multiple of num_splits 7"),
        ({"max_epochs": 20}, "full_epochs is 20, expected less than max_epochs 20"),
        ({"pruning_weight": 0.1}, "pruning_weight needs codes that stay"),
        ({"commitment": -1.0}, "commitment is -1.0"),
    ],
)
def test_settings_that_cannot_be(values: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Settings().with_values({"codes": "learnt"} | values)
