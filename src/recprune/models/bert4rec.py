"""BERT4Rec (Sun et al., CIKM 2019): a bidirectional encoder that fills in masked items.

To predict the next item, a mask is appended to the history. Normalisation comes before attention
and network, not after them as in the first publication: this trains without a warm-up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

from recprune.models.activity import Activity
from recprune.models.attention import LearnedPositions, array_of, by_head, same_segment
from recprune.models.embedding import ItemEmbedding
from recprune.models.graph_names import VECTORS
from recprune.models.settings import ModelSettings
from recprune.models.transitions import SuccessorTable
from recprune.types import needs_extra

with needs_extra("train"):
    import torch
    from torch import Tensor, nn
    from torch.nn.functional import gelu, scaled_dot_product_attention

if TYPE_CHECKING:
    from recprune.models.onnx_export import OnnxGraph

MASK = -1  # stands for an item to be filled in


class BERT4Rec(nn.Module):
    """Histories with masks → a sequence embedding at every position."""

    fills_masks: ClassVar = True
    reads_times: ClassVar = False
    looks_items_up: ClassVar = False

    repeats: nn.Linear | None  # φ → the boosts of buckets
    activity: Activity | None  # what that looks up, where it does
    transitions: nn.Linear | None
    successors: SuccessorTable | None  # what the transition head looks up

    def __init__(self, embedding: ItemEmbedding, settings: ModelSettings) -> None:
        super().__init__()
        self.embedding = embedding
        self.repeats = self.activity = self.transitions = self.successors = None
        self.mask_vector = nn.Parameter(torch.randn(settings.width) * 0.02)
        # One more than a history has items, for the mask that is appended.
        self.positions = LearnedPositions(settings.length + 1, settings.width)
        self.dropout = nn.Dropout(settings.dropout)
        self.blocks = nn.ModuleList(BERT4RecBlock(settings) for _ in range(settings.num_blocks))
        self.norm = nn.LayerNorm(settings.width)

    def forward(self, items: Tensor, lengths: Tensor) -> Tensor:
        """Return the states, [batch, length, d], of right-padded histories [batch, length]."""
        padded = items.shape[1]
        real = torch.arange(padded, device=lengths.device) < lengths.unsqueeze(1)
        visible = real[:, None, None, :]  # to every head and every query
        return self._encode(items, self.positions.places(lengths, padded), visible)

    def forward_packed(self, items: Tensor, places: Tensor, segments: Tensor) -> Tensor:
        """Return the states of rows that hold several histories, one after the other.

        Beside the items stand their places, and which history of the row they belong to.
        """
        return self._encode(items, places, same_segment(segments))

    def _encode(self, items: Tensor, places: Tensor, visible: Tensor) -> Tensor:
        vectors = self.embedding.vectors(items.clamp(min=0))
        masked = (items == MASK).unsqueeze(-1)
        vectors = torch.where(masked, self.mask_vector.to(vectors.dtype), vectors)
        states = self.dropout(vectors + self.positions(places))
        for block in self.blocks:
            states = block(states, visible)
        normalised: Tensor = self.norm(states)
        return normalised

    def encode_last(self, vectors: Tensor) -> Tensor:
        """Return the state at a mask appended to unpadded histories of one length, [batch, d]."""
        batch, _, width = vectors.shape
        mask = self.mask_vector.expand(batch, 1, width)
        with_mask = torch.cat([vectors, mask], dim=1)
        states = with_mask + self.positions.last(with_mask.shape[1])
        for block in self.blocks[:-1]:
            states = block(states, None)
        last = cast(BERT4RecBlock, self.blocks[-1])
        normalised: Tensor = self.norm(last.last_state(states))
        return normalised

    @property
    def longest_history(self) -> int:
        """How many items it can look at."""
        return self.positions.length - 1  # the last is that of the mask

    def write_graph(self, graph: OnnxGraph) -> str:
        """Write `encode_last` as ONNX operators; return its result, [batch, 1, d]."""
        # Zeros are appended, and the mask's vector is part of what is added at the last position.
        positions = array_of(self.positions.table)
        positions[-1] += array_of(self.mask_vector)
        appended = graph.add("Pad", VECTORS, graph.integers(0, 0, 0, 0, 1, 0))
        states = graph.add_last_rows(appended, positions)
        for block in self.blocks[:-1]:
            states = cast(BERT4RecBlock, block).write_graph(graph, states, last=False)
        last = cast(BERT4RecBlock, self.blocks[-1])
        return graph.norm(last.write_graph(graph, states, last=True), self.norm)


class BERT4RecBlock(nn.Module):
    """Attention to the whole history, then a position-wise network four times as wide."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        width = settings.width
        self.num_heads = settings.num_heads
        self.dropout_rate = settings.dropout
        self.attention_norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)
        self.network_norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, states: Tensor, visible: Tensor | None) -> Tensor:
        """Return the next states, [batch, length, d]."""
        normalised = self.attention_norm(states)
        return self._attend(states, self.query(normalised), normalised, visible)

    def last_state(self, states: Tensor) -> Tensor:
        """Return the next state at the last position alone, [batch, d]."""
        normalised = self.attention_norm(states)
        query = self.query(normalised[:, -1:])
        return self._attend(states[:, -1:], query, normalised, None).squeeze(1)

    def write_graph(self, graph: OnnxGraph, states: str, *, last: bool) -> str:
        """Write the block; return the next states, of all positions or of the last alone."""
        normalised = graph.norm(states, self.attention_norm)
        queries = graph.last_position(normalised) if last else normalised
        attended = graph.attend(self, queries, normalised, last=last, causal=False)
        before = graph.last_position(states) if last else states
        states = graph.add("Add", before, graph.layer(attended, self.output))
        inside = graph.add("Gelu", graph.layer(graph.norm(states, self.network_norm), self.inner))
        return graph.add("Add", states, graph.layer(inside, self.outer))

    def _attend(
        self, states: Tensor, queries: Tensor, normalised: Tensor, visible: Tensor | None
    ) -> Tensor:
        query, key, value = (
            by_head(projected, self.num_heads)
            for projected in (queries, self.key(normalised), self.value(normalised))
        )  # [batch, heads, length, d / heads]
        rate = self.dropout_rate if self.training else 0.0
        attended = scaled_dot_product_attention(
            query, key, value, attn_mask=visible, dropout_p=rate
        )
        states = states + self.dropout(self.output(attended.transpose(1, 2).flatten(-2)))
        inside = gelu(self.inner(self.network_norm(states)))
        outside: Tensor = self.dropout(self.outer(inside))
        return states + outside
