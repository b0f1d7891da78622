"""What all torch peers share: one thread, no gradients, and the sub-item scores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from recprune.experiments.peers.peer import threads_set
from recprune.types import Float32Array

if TYPE_CHECKING:
    import torch


def torch_threads(count: int) -> AbstractContextManager[None]:
    """Let torch use so many threads for a while."""
    import torch

    return threads_set(count, torch.get_num_threads, torch.set_num_threads)


@contextmanager
def inference() -> Iterator[None]:
    """Compute on one thread, and nothing for gradients."""
    import torch

    with torch_threads(1), torch.inference_mode():
        yield


def sub_item_scores(query: Float32Array, sub_item_embeddings: torch.Tensor) -> torch.Tensor:
    """Return S, [M, B], for a query [1, d]."""
    import torch

    num_splits, _, split_width = sub_item_embeddings.shape
    parts = torch.tensor(query).view(num_splits, split_width, 1)
    return torch.matmul(sub_item_embeddings, parts).squeeze(2)
