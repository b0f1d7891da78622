"""eSASRec: SASRec with the layer of LiGR, gated residuals around attention and SwiGLU.

LiGR (Borisyuk et al., 2025) normalises before each part of a layer and lets a sigmoid of the same
input decide, number by number, how much of the part is added; SwiGLU (Shazeer, 2020) is a network
whose inner values are multiplied by others. The combination is that of eSASRec (RecSys 2025), which
also has a loss: sampled softmax with the logQ correction. Projections after attention are left out,
as in SASRec. A block has three matrices more than SASRec's, so how wide the network is inside
decides what encoding costs: the setting `inner_share`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recprune.models.attention import by_head
from recprune.models.sasrec import SASRec
from recprune.models.settings import ModelSettings
from recprune.types import needs_extra

with needs_extra("train"):
    import torch
    from torch import Tensor, nn
    from torch.nn.functional import scaled_dot_product_attention, silu


if TYPE_CHECKING:
    from recprune.models.onnx_export import OnnxGraph


class ESASRec(SASRec):
    """Histories → a sequence embedding after every item."""

    def _block(self, settings: ModelSettings) -> nn.Module:
        return ESASRecBlock(settings)


class ESASRecBlock(nn.Module):
    """Gated attention to what came before, then a gated SwiGLU network."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        width = settings.width
        self.num_heads = settings.num_heads
        self.dropout_rate = settings.dropout
        self.attention_norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.attention_gate = nn.Linear(width, width)
        self.network_norm = nn.LayerNorm(width)
        inner_width = settings.inner_width
        self.inner = nn.Linear(width, inner_width)
        self.inner_factor = nn.Linear(width, inner_width)
        self.outer = nn.Linear(inner_width, width)
        self.network_gate = nn.Linear(width, width)
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, states: Tensor, visible: Tensor | None) -> Tensor:
        """Return the next states, [batch, length, d]; None means that all before is visible."""
        normalised = self.attention_norm(states)
        query, key, value = (
            by_head(projected, self.num_heads)
            for projected in (self.query(normalised), self.key(normalised), self.value(normalised))
        )  # [batch, heads, length, d / heads]
        rate = self.dropout_rate if self.training else 0.0
        attended = scaled_dot_product_attention(
            query, key, value, attn_mask=visible, dropout_p=rate, is_causal=visible is None
        )
        return self._after_attention(states, normalised, attended.transpose(1, 2).flatten(-2))

    def last_state(self, states: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the next state at the last position; a bias is added to attention scores."""
        normalised = self.attention_norm(states)
        query = by_head(self.query(normalised[:, -1:]), self.num_heads)
        key, value = (
            by_head(projected, self.num_heads)
            for projected in (self.key(normalised), self.value(normalised))
        )
        attended = scaled_dot_product_attention(query, key, value, attn_mask=bias)
        attended = attended.transpose(1, 2).flatten(-2)
        return self._after_attention(states[:, -1:], normalised[:, -1:], attended).squeeze(1)

    def write_graph(
        self, graph: OnnxGraph, states: str, *, last: bool, bias: str | None = None
    ) -> str:
        normalised = graph.norm(states, self.attention_norm)
        queries = graph.last_position(normalised) if last else normalised
        attended = graph.attend(self, queries, normalised, last=last, causal=not last, bias=bias)
        before = graph.last_position(states) if last else states
        return self._write_after_attention(graph, before, queries, attended)

    def _write_after_attention(
        self, graph: OnnxGraph, before: str, queries: str, attended: str
    ) -> str:
        states = graph.add("Add", before, graph.gated(attended, queries, self.attention_gate))
        normalised = graph.norm(states, self.network_norm)
        inside = graph.layer(normalised, self.inner)
        inside = graph.add("Mul", inside, graph.add("Sigmoid", inside))
        inside = graph.add("Mul", inside, graph.layer(normalised, self.inner_factor))
        outside = graph.layer(inside, self.outer)
        return graph.add("Add", states, graph.gated(outside, normalised, self.network_gate))

    def _after_attention(self, states: Tensor, normalised: Tensor, attended: Tensor) -> Tensor:
        gate = torch.sigmoid(self.attention_gate(normalised))
        states = states + gate * self.dropout(attended)
        normalised = self.network_norm(states)
        inside = self.dropout(silu(self.inner(normalised)) * self.inner_factor(normalised))
        gate = torch.sigmoid(self.network_gate(normalised))
        outside: Tensor = gate * self.dropout(self.outer(inside))
        return states + outside
