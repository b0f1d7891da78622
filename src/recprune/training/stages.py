"""The stages of a training that learns codes.

Full vectors first, until they are worth cutting or stop getting better; then codes that change at
every step; in the end codes that stay, so that the sub-item embeddings themselves are trained, as
in RecJPQ, by gradients that are exact. A model whose codes are given has the last stage alone.
"""

from __future__ import annotations

import math
from typing import Literal

from recprune.models.settings import Settings
from recprune.training.checkpoint import State

Stage = Literal["full", "learning", "last"]

_NEXT: dict[Stage, Stage] = {"full": "learning", "learning": "last"}
# Full vectors that got no better for so many epochs learn the log by heart.
_FULL_PATIENCE = 3


def first_stage(settings: Settings) -> Stage:
    return "full" if settings.model.learns_codes else "last"


def stage_is_over(state: State, settings: Settings) -> bool:
    """Return whether the stage had all its epochs, or does not get better any more."""
    training = settings.training
    longest, patience = {
        "full": (training.full_epochs, min(_FULL_PATIENCE, training.patience)),
        "learning": (training.code_epochs, training.patience),
        "last": (math.inf, training.patience),
    }[state.stage]
    epochs = state.epoch - state.stage_began
    return epochs >= longest or state.epochs_without_best >= patience


def training_is_over(state: State, settings: Settings) -> bool:
    """Return whether no epoch is left to be run, in whatever stage."""
    ends_here = state.stage == "last" and stage_is_over(state, settings)
    return ends_here or state.epoch >= settings.training.max_epochs


def begin_next_stage(state: State) -> None:
    state.stage = _NEXT[state.stage]
    state.stage_began, state.epochs_without_best, state.stage_best = state.epoch, 0, -1.0
