"""SASRec (Kang and McAuley, ICDM 2018): a causal decoder over the history.

The block is the published one: queries are normalised, keys and values are not, and the residual
around attention is the normalised query.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, cast

import numpy as np

from recprune.models.activity import Activity
from recprune.models.attention import (
    LearnedPositions,
    array_of,
    by_head,
    no_later,
    same_segment,
)
from recprune.models.embedding import ItemEmbedding
from recprune.models.graph_names import VECTORS
from recprune.models.settings import ModelSettings
from recprune.models.transitions import SuccessorTable
from recprune.types import Float64Array, needs_extra

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

    @property
    def looks_items_up(self) -> bool:
        """Whether its graph has a use for products of items that were looked up."""
        first = self.blocks[0]
        return len(self.blocks) > 1 and isinstance(first, SASRecBlock) and first.num_heads == 1

    def write_graph(self, graph: OnnxGraph) -> str:
        """Write `encode_last` as ONNX operators; return its result, [batch, 1, d]."""
        positions = array_of(self.positions.table)
        states = graph.add_last_rows(VECTORS, positions)
        *earlier, last = self.blocks
        if not earlier or not isinstance(last, SASRecBlock):
            for block in earlier:
                states = cast(CausalBlock, block).write_graph(graph, states, last=False)
            states = cast(CausalBlock, last).write_graph(graph, states, last=True)
            return graph.norm(states, self.norm)
        before, *between = cast(list[SASRecBlock], earlier)
        parts = before.write_first(graph, states, positions)
        for block in between:
            parts = block.write_parts(graph, before.write_whole(graph, parts))
            before = block
        return graph.norm(last.write_last(graph, before, parts), self.norm)


class BlockParts(NamedTuple):
    """A block but for its last layer: its states are these plus that layer of what is inside."""

    states: str
    inside: str


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
        return self.write_whole(graph, self.write_parts(graph, states, last=last))

    def write_parts(self, graph: OnnxGraph, states: str, *, last: bool = False) -> BlockParts:
        """Write the block but for its last layer."""
        queries = graph.norm(graph.last_position(states) if last else states, self.query_norm)
        # The last position sees everything; to the operator, a single query stands first.
        attended = graph.attend(self, queries, states, last=last, causal=not last)
        return self._write_network(graph, attended, queries)

    def write_whole(self, graph: OnnxGraph, parts: BlockParts) -> str:
        """Write the last layer; return the next states."""
        return graph.add("Add", parts.states, graph.layer(parts.inside, self.outer))

    def write_first(self, graph: OnnxGraph, states: str, rows: Float64Array) -> BlockParts:
        """Write the first block but for its last layer; states are items plus one of some rows.

        Where products of items can be looked up, no layer is multiplied: normalising is a product
        too, but for one number a state (what is subtracted is a mean), and the network's first
        layer is that of a weighted mean of values and of the query, each of them products.
        """
        if not graph.looks_up:
            return self.write_parts(graph, states)
        key, value = array_of(self.key.weight), array_of(self.value.weight)
        against = key.T @ array_of(self.query.weight)  # as in `attend`, with one head
        scale, shift = array_of(self.query_norm.weight), array_of(self.query_norm.bias)
        value_bias = array_of(self.value.bias)
        inner = _centred(array_of(self.inner.weight) * array_of(self.inner_norm.weight))
        queries, query_scale = graph.norm_and_scale(states, self.query_norm)
        scores = graph.look_up("scores", _centred(against * scale), rows)
        scores = graph.add("Mul", scores, query_scale)
        moved = against @ shift + key.T @ array_of(self.query.bias)
        # Beside the values, what the network's first layer makes of them and of the query's shift.
        both = np.concatenate([value, inner @ value])
        biases = np.concatenate([value_bias, inner @ (value_bias + shift)])
        means = graph.add(
            "Attention",
            graph.add("Add", scores, graph.constant(moved)),
            states,
            graph.look_up("values", both, rows, biases),
            q_num_heads=1,
            kv_num_heads=1,
            is_causal=1,
            scale=len(key) ** -0.5,
        )
        attended, inside = graph.cut(means, len(value), len(inner))
        states, inner_scale = graph.norm_and_scale(
            graph.add("Add", attended, queries), self.inner_norm
        )
        own = graph.look_up("inside", _centred(inner * scale), rows)
        inside = graph.add("Add", inside, graph.add("Mul", own, query_scale))
        moved = array_of(self.inner.weight) @ array_of(self.inner_norm.bias)
        moved += array_of(self.inner.bias)
        inside = graph.add("Mul", inside, inner_scale)
        inside = graph.add("Relu", graph.add("Add", inside, graph.constant(moved)))
        return BlockParts(states, inside)

    def write_last(self, graph: OnnxGraph, before: SASRecBlock, parts: BlockParts) -> str:
        """Write the block at the last position alone, after one without its last layer.

        That layer is then needed at the last position, and for a mean over all: of the parts, which
        takes one product less for every position than a mean of states.
        """
        ends = BlockParts(*map(graph.last_position, parts))
        queries = graph.norm(before.write_whole(graph, ends), self.query_norm)
        both = graph.add("Concat", *parts, axis=-1)
        attended = graph.attend(self, queries, both, last=True, causal=False, outer=before.outer)
        return self.write_whole(graph, self._write_network(graph, attended, queries))

    def _write_network(self, graph: OnnxGraph, attended: str, queries: str) -> BlockParts:
        states = graph.norm(graph.add("Add", attended, queries), self.inner_norm)
        return BlockParts(states, graph.add("Relu", graph.layer(states, self.inner)))

    def _after_attention(self, queries: Tensor, attended: Tensor) -> Tensor:
        states: Tensor = self.inner_norm(attended + queries)
        inside = self.dropout(relu(self.inner(states)))
        outside: Tensor = self.dropout(self.outer(inside))
        return states + outside


def _centred(weight: Float64Array) -> Float64Array:
    """Return a weight [out, in] that makes of any input what it made of its deviations."""
    centred: Float64Array = weight - weight.mean(axis=1, keepdims=True)
    return centred
