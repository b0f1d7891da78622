"""An encoder that knows when things happened, and when the recommendation is asked for.

SASRec with two additions. Every item of the history comes with how long it was the newest: until
the next event, and for the last item until now. And in the last block, attention knows how old
each event is when the prediction is made, and how many events ago it was: both have a number that
is added to the event's attention score. As in HSTU (Zhai et al., ICML 2024), the prediction after
an event is made at the time of the next one, ages fall into buckets by their logarithm, and items
have no positions beside these numbers. A last bucket says that times are not known.

In the blocks before, ages would be those of all pairs of events, which takes time where a history
is encoded, while in the last one those of a single query are enough. For the same reason only the
last block, of which one position is needed then, has the gates of eSASRec.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

from recprune.models.attention import LearnedPositions, array_of, no_later, same_segment
from recprune.models.embedding import ItemEmbedding
from recprune.models.esasrec import ESASRecBlock
from recprune.models.graph_names import VECTORS
from recprune.models.sasrec import SASRec, SASRecBlock
from recprune.models.settings import ModelSettings
from recprune.models.timelines import AGE_BOUNDS, AGE_BUCKETS, UNKNOWN_AGE, UNKNOWN_TIME
from recprune.types import needs_extra

with needs_extra("train"):
    import torch
    from torch import Tensor, nn

if TYPE_CHECKING:
    from recprune.models.onnx_export import OnnxGraph


class TimedSASRec(SASRec):
    """Histories and their times → a sequence embedding after every item.

    Times are [2, batch, length], in seconds: of the events, and of the predictions after them.
    """

    reads_times: ClassVar = True

    _bounds: Tensor

    def __init__(self, embedding: ItemEmbedding, settings: ModelSettings) -> None:
        super().__init__(embedding, settings)
        self.blocks[-1] = ESASRecBlock(settings)
        # Seen from a query, which has the last place: a number for each head.
        self.positions = LearnedPositions(settings.length, settings.num_heads)
        self.gaps = nn.Parameter(torch.randn(AGE_BUCKETS, settings.width) * 0.02)
        self.ages = nn.Parameter(torch.zeros(settings.num_heads, UNKNOWN_AGE))
        # On the model's device, so that nothing has to be sent there; not saved.
        self.register_buffer("_bounds", torch.from_numpy(AGE_BOUNDS.copy()), persistent=False)

    def forward(
        self,
        items: Tensor,
        lengths: Tensor,  # noqa: ARG002 - padding stands behind all that looks at anything
        times: Tensor | None = None,
    ) -> Tensor:
        """Return the states, [batch, length, d], of right-padded histories [batch, length].

        No position sees a later one, so none sees the padding.
        """
        return self._encode_timed(items, no_later(items), times)

    def forward_packed(
        self,
        items: Tensor,
        places: Tensor,  # noqa: ARG002 - relative ones are enough
        segments: Tensor,
        times: Tensor | None = None,
    ) -> Tensor:
        """Return the states of rows that hold several histories, one after the other."""
        return self._encode_timed(items, same_segment(segments) & no_later(items), times)

    def _encode_timed(self, items: Tensor, visible: Tensor, times: Tensor | None) -> Tensor:
        happened, asked = _known(times, items)
        states = self.dropout(self.embedding.vectors(items) + self._gaps(happened, asked))
        for block in self.blocks[:-1]:
            states = block(states, visible)
        buckets = bucketized_ages(asked.unsqueeze(2), happened.unsqueeze(1), self._bounds)
        steps = torch.arange(items.shape[1], device=items.device)
        ago = (steps.unsqueeze(1) - steps).clamp(min=0)  # what is later is hidden
        bias = self._age_bias(buckets) + self.positions(self.positions.length - 1 - ago).permute(
            2, 0, 1
        )
        states = self.blocks[-1](states, bias.masked_fill(~visible, -torch.inf))
        normalised: Tensor = self.norm(states)
        return normalised

    def encode_last(self, vectors: Tensor, times: Tensor | None = None) -> Tensor:
        """Return only the last states, [batch, d], of unpadded histories of one length."""
        happened, asked = _known(times, vectors[..., 0])
        states = vectors + self._gaps(happened, asked)
        for block in self.blocks[:-1]:
            states = block(states, None)
        buckets = bucketized_ages(asked[:, -1:], happened, self._bounds).unsqueeze(1)
        bias = self._age_bias(buckets) + self.positions.last(vectors.shape[1]).T.unsqueeze(1)
        last = cast(ESASRecBlock, self.blocks[-1])
        normalised: Tensor = self.norm(last.last_state(states, bias))
        return normalised

    def _gaps(self, happened: Tensor, asked: Tensor) -> Tensor:
        buckets = bucketized_ages(asked, happened, self._bounds)
        return nn.functional.embedding(buckets, self.gaps)  # [batch, length, d]

    def _age_table(self) -> Tensor:
        """Return a number for every bucket: none for ages that are not known, [heads, buckets]."""
        return nn.functional.pad(self.ages, (0, 1))

    def _age_bias(self, buckets: Tensor) -> Tensor:
        """Return the numbers of ages, given their buckets: [batch, heads, queries, events].

        Gathered from a copy for each query, as the gradients of so many additions to the same few
        numbers would have to wait for each other.
        """
        batch, queries, events = buckets.shape
        heads = len(self.ages)
        tables = self._age_table().unsqueeze(1).expand(batch, heads, queries, AGE_BUCKETS)
        return tables.gather(3, buckets.unsqueeze(1).expand(batch, heads, queries, events))

    def write_graph(self, graph: OnnxGraph) -> str:
        """Write `encode_last`; beside the items, it is given the buckets of gaps and ages."""
        gaps = array_of(self.gaps)
        states = graph.add("Add", VECTORS, graph.rows(gaps, graph.buckets("gaps")))
        for place, block in enumerate(cast(list[SASRecBlock], list(self.blocks[:-1]))):
            first = place == 0
            parts = (
                block.write_first(graph, states, gaps)
                if first
                else block.write_parts(graph, states)
            )
            states = block.write_whole(graph, parts)
        last = cast(ESASRecBlock, self.blocks[-1])
        ages = graph.rows(array_of(self._age_table().T), graph.buckets("ages"))
        numbers = graph.add_last_rows(ages, array_of(self.positions.table))
        by_head = graph.add("Transpose", numbers, perm=[0, 2, 1])
        bias = graph.add("Unsqueeze", by_head, graph.integers(2))  # of one query
        return graph.norm(last.write_graph(graph, states, last=True, bias=bias), self.norm)


def bucketized_ages(asked: Tensor, happened: Tensor, bounds: Tensor) -> Tensor:
    """Return the buckets of ages, with AGE_BOUNDS given; none is known where `asked` is not."""
    buckets = torch.bucketize(asked - happened, bounds, right=True)
    return torch.where(asked == UNKNOWN_TIME, UNKNOWN_AGE, buckets)


def _known(times: Tensor | None, items: Tensor) -> Tensor:
    if times is not None:
        return times
    return torch.full((2, *items.shape), UNKNOWN_TIME, device=items.device)
