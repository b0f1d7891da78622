"""An encoder whose attention can be continued: a further item costs one position, not a history.

The layer is eSASRec's, with three differences, so that what a position has contributed never
changes:

- *Relative positions.* Attention scores get a number that depends on how many items lie between,
  learnt for every block and head. An item that is no longer the newest has moved by itself.
- *Bands.* In every block a position sees itself and so many before it, its reach. The reaches of
  all blocks add up to `length` − 1: then the last state depends on the last `length` items and on
  no others, whether these are encoded at once or one by one. (With a window that slides, all
  states would change when its oldest item drops out.)
- *Narrow keys and values.* All heads share them (multi-query attention: Shazeer, 2019), and they
  are `kept_width` numbers each: what has to be kept of a position. Only the values of the first
  block are as wide as items: they are functions of these, and need not be kept. So what people
  had can be copied into φ in full.

`continuation.py` continues it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from recprune.models.attention import (
    LearnedPositions,
    array_of,
    by_head,
    no_later,
    same_segment,
)
from recprune.models.embedding import ItemEmbedding
from recprune.models.esasrec import ESASRecBlock
from recprune.models.graph_names import VECTORS
from recprune.models.sasrec import SASRec
from recprune.models.settings import ModelSettings
from recprune.types import Float64Array, needs_extra

with needs_extra("train"):
    import torch
    from torch import Tensor, nn
    from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from recprune.models.onnx_export import OnnxGraph


class ContinuedSASRec(SASRec):
    """Histories → a sequence embedding after every item."""

    def __init__(self, embedding: ItemEmbedding, settings: ModelSettings) -> None:
        super().__init__(embedding, settings)
        self.num_heads = settings.num_heads
        self.reaches = settings.reaches
        # Seen from a query, which has the last place: a number for each head of each block.
        numbers = settings.num_blocks * settings.num_heads
        self.positions = LearnedPositions(settings.length, numbers)
        self.blocks = nn.ModuleList(
            ContinuedBlock(settings, first=place == 0) for place in range(settings.num_blocks)
        )

    def forward(
        self,
        items: Tensor,
        lengths: Tensor,  # noqa: ARG002 - padding stands behind all that looks at anything
    ) -> Tensor:
        """Return the states, [batch, length, d], of right-padded histories [batch, length]."""
        return self._encode_banded(items, no_later(items))

    def forward_packed(
        self,
        items: Tensor,
        places: Tensor,  # noqa: ARG002 - relative ones are enough
        segments: Tensor,
    ) -> Tensor:
        """Return the states of rows that hold several histories, one after the other."""
        return self._encode_banded(items, same_segment(segments) & no_later(items))

    def _encode_banded(self, items: Tensor, visible: Tensor) -> Tensor:
        states = vectors = self.dropout(self.embedding.vectors(items))
        biases = self._biases(items.shape[1])
        for block, bias in zip(self._banded_blocks(), biases, strict=True):
            states = block.next_states(states, vectors, bias.masked_fill(~visible, -torch.inf))
        normalised: Tensor = self.norm(states)
        return normalised

    def encode_last(self, vectors: Tensor) -> Tensor:
        """Return only the last states, [batch, d], of unpadded histories of one length."""
        states = vectors
        biases = self._biases(vectors.shape[1])
        biases[-1] = biases[-1][:, :, -1:]
        for block, bias in zip(self._banded_blocks(), biases, strict=True):
            states = block.next_states(states, vectors, bias)
        normalised: Tensor = self.norm(states.squeeze(1))
        return normalised

    def _banded_blocks(self) -> list[ContinuedBlock]:
        return cast(list[ContinuedBlock], list(self.blocks))

    def _biases(self, count: int) -> list[Tensor]:
        """Return what is added to the scores of every block, [1, heads, count, count]."""
        steps = torch.arange(count, device=self.positions.table.device)
        ago = steps.unsqueeze(1) - steps
        table = self.positions(self.positions.length - 1 - ago.clamp(0, self.positions.length - 1))
        # Whole numbers of a head lie together: GPUs read them several at once.
        by_block = table.permute(2, 0, 1).contiguous().split(self.num_heads)
        return [
            bias.masked_fill((ago < 0) | (ago > reach), -torch.inf).unsqueeze(0)
            for bias, reach in zip(by_block, self.reaches, strict=True)
        ]

    def write_graph(self, graph: OnnxGraph) -> str:
        """Write `encode_last`; return its result, [batch, 1, d]."""
        states = VECTORS
        with torch.no_grad():
            biases = [array_of(bias) for bias in self._biases(self.longest_history)]
        *earlier, last = self._banded_blocks()
        for block, bias in zip(earlier, biases, strict=False):
            # How far apart positions are decides: any corner of the whole is that of its size.
            seen = graph.corner(bias, states)
            states = block.write_banded(graph, states, seen, last=False)
        seen = graph.last_columns(biases[-1][:, :, -1:], states)
        return graph.norm(last.write_banded(graph, states, seen, last=True), self.norm)


class ContinuedBlock(ESASRecBlock):
    """eSASRec's layer, with attention to some of what came before by narrow keys and values."""

    def __init__(self, settings: ModelSettings, *, first: bool) -> None:
        super().__init__(settings)
        width, kept = settings.width, settings.kept_width
        self.query = nn.Linear(width, settings.num_heads * kept)
        self.key = nn.Linear(width, kept)
        # Of the items themselves: each head has its part of the numbers.
        self.value = nn.Linear(width, width)
        self.narrow = None if first else nn.Linear(width, kept)  # shared by heads, and then spread
        self.spread = None if first else nn.Linear(settings.num_heads * kept, width)

    def next_states(self, states: Tensor, vectors: Tensor, bias: Tensor) -> Tensor:
        """Return the next states, given those of the items and what is added to scores.

        As many as there are queries in the bias, [..., queries, positions]: the last ones.
        """
        heads, first = self.num_heads, states.shape[1] - bias.shape[-2]
        normalised = self.attention_norm(states)
        queries = normalised[:, first:]
        query = by_head(self.query(queries), heads)  # [batch, heads, queries, kept]
        key = self.key(normalised).unsqueeze(1).expand(-1, heads, -1, -1)
        value = by_head(self.value(vectors), heads)
        if self.narrow is not None:
            narrow = self.narrow(normalised).unsqueeze(1).expand(-1, heads, -1, -1)
            value = torch.cat([value, narrow], dim=-1)
        rate = self.dropout_rate if self.training else 0.0
        found = scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=rate)
        found = found.transpose(1, 2)  # [batch, queries, heads, numbers]
        of_items = states.shape[2] // heads
        attended = found[..., :of_items].flatten(-2)
        if self.spread is not None:
            attended = attended + self.spread(found[..., of_items:].flatten(-2))
        return self._after_attention(states[:, first:], queries, attended)

    def write_banded(self, graph: OnnxGraph, states: str, bias: str, *, last: bool) -> str:
        """Write the block; return the next states, of all positions or of the last alone."""
        normalised = graph.norm(states, self.attention_norm)
        queries = graph.last_position(normalised) if last else normalised
        heads = self.num_heads
        # What a key's bias adds to all scores of a query is lost in the softmax.
        key, query = array_of(self.key.weight), graph.layer(queries, self.query)
        options = {"q_num_heads": heads, "scale": len(key) ** -0.5}
        if self.narrow is None:  # a value for each head needs a key for each
            keys = graph.linear(normalised, np.tile(key, (heads, 1)))
            values = graph.layer(VECTORS, self.value)
            attended = graph.add(
                "Attention", query, keys, values, bias, kv_num_heads=heads, **options
            )
        else:  # a mean of values is the value of a mean
            keys = graph.linear(normalised, key)
            both = graph.add("Concat", VECTORS, normalised, axis=-1)
            means = graph.add("Attention", query, keys, both, bias, kv_num_heads=1, **options)
            attended = graph.linear(means, *self._of_means())
        before = graph.last_position(states) if last else states
        return self._write_after_attention(graph, before, queries, attended)

    def _of_means(self) -> tuple[Float64Array, Float64Array]:
        """Return the layer over means of items and of states, of one head after the other."""
        assert self.narrow is not None  # noqa: S101 # not asked of the first block
        assert self.spread is not None  # noqa: S101
        value, spread = array_of(self.value.weight), array_of(self.spread.weight)
        width, kept = len(value), self.narrow.out_features
        narrow, parts = array_of(self.narrow.weight), []
        for head in range(self.num_heads):
            own = np.arange(width) // (width // self.num_heads) == head
            of_states = spread[:, head * kept : (head + 1) * kept] @ narrow
            parts.append(np.concatenate([np.where(own[:, None], value, 0.0), of_states], axis=1))
        biases = np.tile(array_of(self.narrow.bias), self.num_heads)
        bias = array_of(self.value.bias) + array_of(self.spread.bias) + spread @ biases
        return np.concatenate(parts, axis=1), bias
