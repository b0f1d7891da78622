"""The encoders that there are, by name, and a whole model: one of them over an item embedding."""

from __future__ import annotations

import copy
from typing import TypeAlias, cast

from recprune.models.bert4rec import BERT4Rec
from recprune.models.continued import ContinuedSASRec
from recprune.models.embedding import FullEmbedding, ItemEmbedding, RecJPQEmbedding
from recprune.models.esasrec import ESASRec
from recprune.models.learnt_codes import LearntEmbedding
from recprune.models.repeats import num_buckets
from recprune.models.sasrec import SASRec
from recprune.models.settings import Architecture, ModelSettings
from recprune.models.situations import NUM_SITUATIONS
from recprune.models.timed import TimedSASRec
from recprune.models.transitions import BUCKETS
from recprune.types import CodeArray, needs_extra

with needs_extra("train"):
    from torch import nn

SequenceModel: TypeAlias = SASRec | BERT4Rec

ARCHITECTURES: dict[Architecture, type[SequenceModel]] = {
    "sasrec": SASRec,
    "esasrec": ESASRec,
    "timed": TimedSASRec,
    "continued": ContinuedSASRec,
    "bert4rec": BERT4Rec,
}


def looks_at_times(settings: ModelSettings) -> bool:
    """Return whether a model of these settings depends on when events were."""
    return settings.repeats > 0 or ARCHITECTURES[settings.architecture].reads_times


def build_model(settings: ModelSettings, codes: CodeArray, num_sub_items: int) -> SequenceModel:
    """Return an untrained model of a catalogue with the given codes."""
    embedding: ItemEmbedding
    if settings.embedding == "full":
        embedding = FullEmbedding(len(codes), settings.width)
    else:
        embedding = RecJPQEmbedding(codes, num_sub_items, settings.width)
    return _model_over(embedding, settings)


def build_learning_model(settings: ModelSettings, num_items: int) -> SequenceModel:
    """Return an untrained model that learns the codes of its items."""
    return _model_over(LearntEmbedding(num_items, settings), settings)


def _model_over(embedding: ItemEmbedding, settings: ModelSettings) -> SequenceModel:
    model = ARCHITECTURES[settings.architecture](embedding, settings)
    if settings.repeats:
        model.repeats = _head(settings.width + NUM_SITUATIONS, num_buckets(settings.activity))
    if settings.transitions:
        model.transitions = _head(settings.width, settings.transitions * BUCKETS)
    return model


def _head(width: int, rows: int) -> nn.Linear:
    head = nn.Linear(width, rows)
    nn.init.zeros_(head.weight)  # no boosts, until there is a reason for them
    nn.init.zeros_(head.bias)
    return head


def with_embedding(model: SequenceModel, embedding: ItemEmbedding) -> SequenceModel:
    """Return a model with the encoder of another, shared, and an item embedding of its own."""
    twin = copy.copy(model)
    twin._modules = {**model._modules, "embedding": cast(nn.Module, embedding)}
    return twin
