"""The encoders that there are, by name, and a whole model: one of them over an item embedding."""

from __future__ import annotations

from typing import TypeAlias

from recprune.models.bert4rec import BERT4Rec
from recprune.models.embedding import FullEmbedding, RecJPQEmbedding
from recprune.models.sasrec import SASRec
from recprune.models.settings import Architecture, ModelSettings
from recprune.types import CodeArray

SequenceModel: TypeAlias = SASRec | BERT4Rec

ARCHITECTURES: dict[Architecture, type[SequenceModel]] = {"sasrec": SASRec, "bert4rec": BERT4Rec}


def build_model(settings: ModelSettings, codes: CodeArray, num_sub_items: int) -> SequenceModel:
    """Return an untrained model of a catalogue with the given codes."""
    embedding = (
        RecJPQEmbedding(codes, num_sub_items, settings.width)
        if settings.embedding == "recjpq"
        else FullEmbedding(len(codes), settings.width)
    )
    return ARCHITECTURES[settings.architecture](embedding, settings)
