"""SASRec (Kang and McAuley, ICDM 2018): a causal decoder over the history.

The block is the published one: queries are normalised, keys and values are not, and the residual
around attention is the normalised query.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol, cast

from recprune.models.activity import Activity
from recprune.models.attention import LearnedPositions, by_head, no_later, same_segment
from recprune.models.embedding import ItemEmbedding
from recprune.models.settings import ModelSettings
from recprune.models.transitions import SuccessorTable
from recprune.types import needs_extra

with needs_extra("train"):
    from torch import Tensor, nn
    from torch.nn.functional import relu, scaled_dot_product_attention


if TYPE_CHECKING:
    from recprune.models.onnx_export import OnnxGraph


class CausalBlock(Protocol):
    """A block in which no position sees a later one."""

    def last_state(self, states: Tensor) -> Tensor:
        """Return the next state at the last position alone, [batch, d]."""
        ...

    def write_graph(self, graph: OnnxGraph, states: str, *, last: bool) -> str:
        """Write the block; return the next states, of all positions or of the last alone."""
        ...


class SASRec(nn.Module):
    """Histories → a sequence embedding after every item."""

    fills_masks: ClassVar = False
    reads_times: ClassVar = False

    repeats: nn.Linear | None  # φ → the boosts of buckets
    activity: Activity | None  # what that looks up, where it does
    transitions: nn.Linear | None
    successors: SuccessorTable | None  # what the transition head looks up

    def __init__(self, embedding: ItemEmbedding, settings: ModelSettings) -> None:
        super().__init__()
        self.embedding = embedding
        self.repeats = self.activity = self.transitions = self.successors = None
        self.positions = LearnedPositions(settings.length, settings.width)
        self.dropout = nn.Dropout(settings.dropout)
        self.blocks = nn.ModuleList(self._block(settings) for _ in range(settings.num_blocks))
        self.norm = nn.LayerNorm(settings.width)

    def _block(self, settings: ModelSettings) -> nn.Module:
        return SASRecBlock(settings)

    def forward(self, items: Tensor, lengths: Tensor) -> Tensor:
        """Return the states, [batch, length, d], of right-padded histories [batch, length].

        No position sees a later one, so none sees the padding.
        """
        return self._encode(items, self.positions.places(lengths, items.shape[1]), None)

    def forward_packed(self, items: Tensor, places: Tensor, segments: Tensor) -> Tensor:
        """Return the states of rows that hold several histories, one after the other.

        Beside the items stand their places, and which history of the row they belong to.
        """
        return self._encode(items, places, same_segment(segments) & no_later(items))

    def _encode(self, items: Tensor, places: Tensor, visible: Tensor | None) -> Tensor:
        states = self.dropout(self.embedding.vectors(items) + self.positions(places))
        for block in self.blocks:
            states = block(states, visible)
        normalised: Tensor = self.norm(states)
        return normalised

    def encode_last(self, vectors: Tensor) -> Tensor:
        """Return only the last states, [batch, d], of unpadded histories of one length.

        Half the work and less: the last block is needed at one position only.
        """
        states = vectors + self.positions.last(vectors.shape[1])
        for block in self.blocks[:-1]:
            states = block(states, None)
        last = cast(CausalBlock, self.blocks[-1])
        normalised: Tensor = self.norm(last.last_state(states))
        return normalised

    @property
    def longest_history(self) -> int:
        """How many items it can look at."""
        return self.positions.length

    def write_graph(self, graph: OnnxGraph, vectors: str) -> str:
        """Write `encode_last` as ONNX operators; return its result, [batch, 1, d]."""
        states = graph.add_last_rows(vectors, self.positions.table)
        for block in self.blocks[:-1]:
            states = cast(CausalBlock, block).write_graph(graph, states, last=False)
        last = cast(CausalBlock, self.blocks[-1])
        return graph.norm(last.write_graph(graph, states, last=True), self.norm)


class SASRecBlock(nn.Module):
    """Attention to what came before, then a position-wise network as wide as the model."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        width = settings.width
        self.num_heads = settings.num_heads
        self.dropout_rate = settings.dropout
        self.query_norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.inner_norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)
        self.outer = nn.Linear(width, width)
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, states: Tensor, visible: Tensor | None) -> Tensor:
        """Return the next states, [batch, length, d]; None means that all before is visible."""
        queries = self.query_norm(states)
        query, key, value = (
            by_head(projected, self.num_heads)
            for projected in (self.query(queries), self.key(states), self.value(states))
        )  # [batch, heads, length, d / heads]
        rate = self.dropout_rate if self.training else 0.0
        attended = scaled_dot_product_attention(
            query, key, value, attn_mask=visible, dropout_p=rate, is_causal=visible is None
        )
        return self._after_attention(queries, attended.transpose(1, 2).flatten(-2))

    def last_state(self, states: Tensor) -> Tensor:
        """Return the next state at the last position, [batch, d], without projecting the others.

        q · (W_k x + b_k) = (W_kᵀ q) · x + a constant that softmax ignores, and a weighted mean of
        W_v x + b_v is W_v (the weighted mean of x) + b_v.
        """
        batch, _, width = states.shape
        size = width // self.num_heads
        queries = self.query_norm(states[:, -1])
        query = self.query(queries).view(batch, self.num_heads, size).transpose(0, 1)
        key_weights = self.key.weight.view(self.num_heads, size, width)
        value_weights = self.value.weight.view(self.num_heads, size, width)
        against = query.matmul(key_weights).transpose(0, 1)  # [batch, heads, d]
        weights = (against.matmul(states.transpose(1, 2)) * size**-0.5).softmax(-1)
        means = weights.matmul(states).transpose(0, 1)  # [heads, batch, d]
        attended = means.matmul(value_weights.transpose(1, 2)).transpose(0, 1)
        return self._after_attention(queries, attended.flatten(1) + self.value.bias)

    def write_graph(self, graph: OnnxGraph, states: str, *, last: bool) -> str:
        """Write the block; return the next states, of all positions or of the last alone."""
        queries = graph.norm(graph.last_position(states) if last else states, self.query_norm)
        # The last position sees everything; to the operator, a single query stands first.
        attended = graph.attend(self, queries, states, last=last, causal=not last)
        states = graph.norm(graph.add("Add", attended, queries), self.inner_norm)
        inside = graph.add("Relu", graph.layer(states, self.inner))
        return graph.add("Add", states, graph.layer(inside, self.outer))

    def _after_attention(self, queries: Tensor, attended: Tensor) -> Tensor:
        states: Tensor = self.inner_norm(attended + queries)
        inside = self.dropout(relu(self.inner(states)))
        outside: Tensor = self.dropout(self.outer(inside))
        return states + outside
