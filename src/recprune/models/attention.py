"""What encoders share: positions, the division into heads, and weights as they are exported."""

from __future__ import annotations

from recprune.types import Float64Array, needs_extra

with needs_extra("train"):
    import torch
    from torch import Tensor, nn


class LearnedPositions(nn.Module):
    """The newest item always has the same position, however long the history is."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.length = length
        self.table = nn.Parameter(torch.randn(length, width) * 0.02)

    def forward(self, places: Tensor) -> Tensor:
        """Return the vectors of places, [..., d]; the last place is `length` − 1."""
        return nn.functional.embedding(places, self.table)

    def places(self, lengths: Tensor, padded: int) -> Tensor:
        """Return [batch, padded] for histories of the given lengths, padded at the right."""
        steps = torch.arange(padded, device=lengths.device)
        # What stands in the padding is never looked at, but must exist.
        return ((self.length - lengths).unsqueeze(1) + steps).clamp(max=self.length - 1)

    def last(self, count: int) -> Tensor:
        """Return the positions of one whole history of `count` items, [count, d]."""
        return self.table[self.length - count :]


def same_segment(segments: Tensor) -> Tensor:
    """Say which positions belong to the same history, for every head: [batch, 1, length, length].

    Padding, which is a segment too, sees itself: attention to nothing would be NaN.
    """
    return (segments.unsqueeze(2) == segments.unsqueeze(1)).unsqueeze(1)


def no_later(items: Tensor) -> Tensor:
    """Say which positions (columns) are not later than which (rows), [length, length]."""
    steps = torch.arange(items.shape[1], device=items.device)
    return steps.unsqueeze(1) >= steps


def by_head(projected: Tensor, num_heads: int) -> Tensor:
    """Divide [batch, length, d] into [batch, heads, length, d / heads]."""
    batch, length, width = projected.shape
    return projected.view(batch, length, num_heads, width // num_heads).transpose(1, 2)


def array_of(tensor: Tensor) -> Float64Array:
    """Return a copy of some weights, wide enough that products of them lose nothing."""
    return tensor.detach().double().cpu().numpy().copy()
