"""The boosts that a model gives by itself: to what was there before, and to what often follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recprune.models.activity import Activity
from recprune.models.repeats import ItemScores, RepeatBoosts, num_buckets
from recprune.models.settings import ModelSettings
from recprune.models.situations import NUM_SITUATIONS
from recprune.models.transitions import BUCKETS, SuccessorTable, TransitionBoosts
from recprune.types import Boosts, Float32Array, Int32Array, StorageError, Timeline


class LearntBoosts(NamedTuple):
    """Of each user; None where the model has no such head."""

    repeats: list[Boosts] | None
    transitions: list[Boosts] | None

    def total(self) -> list[Boosts] | None:
        """Return the boosts that the search is given."""
        if self.repeats is None or self.transitions is None:
            return self.repeats if self.repeats is not None else self.transitions
        pairs = zip(self.repeats, self.transitions, strict=True)
        return [both for pair in pairs if (both := add_boosts(*pair)) is not None]


class BoostHeads:
    """The heads of a model as they are served: NumPy alone."""

    def __init__(
        self,
        weights: Mapping[str, NDArray[Any]],
        settings: ModelSettings,
        successors: SuccessorTable | None,
        item_scores: ItemScores,
        activity: Activity | None = None,
    ) -> None:
        """Take the heads out of a model's arrays, and the tables that they look up."""
        self.repeats: RepeatBoosts | None = None
        self.transitions: TransitionBoosts | None = None
        try:
            if settings.repeats:
                if settings.knows_activity and activity is None:
                    raise StorageError("a repeat head without the activity that it looks up")
                self.repeats = RepeatBoosts(
                    weights["repeats.weight"],
                    weights["repeats.bias"],
                    settings.repeats,
                    settings.own_scores,
                    item_scores,
                    activity,
                )
            if settings.transitions:
                if successors is None:
                    raise StorageError("a transition head without its table of successors")
                self.transitions = TransitionBoosts(
                    weights["transitions.weight"],
                    weights["transitions.bias"],
                    settings.transitions,
                    successors,
                )
        except KeyError as error:
            raise StorageError(f"the recommender has no {error.args[0]}") from None

    def __call__(
        self,
        sequence_embeddings: Float32Array,
        histories: Sequence[Int32Array],
        timelines: Sequence[Timeline | None] | None = None,
        *,
        repeats: bool = True,
        item_scores: ItemScores | None = None,
    ) -> LearntBoosts:
        """Return what is added to scores, for histories none of which is empty.

        Without `repeats`, nothing for what was there before. `item_scores` counts in place of that
        of the items trained with, where codes have changed since.
        """
        own, following = self.repeats if repeats else None, self.transitions
        return LearntBoosts(
            None if own is None else own(sequence_embeddings, histories, timelines, item_scores),
            None if following is None else following(sequence_embeddings, histories),
        )


def check_heads(weights: Mapping[str, NDArray[Any]], settings: ModelSettings) -> None:
    """Refuse heads that do not fit the model, or are not numbers: a file may say anything.

    Not for a model in training: one that has diverged is told by its loss.
    """
    heads = {
        "repeats": (num_buckets(settings.activity), settings.width + NUM_SITUATIONS),
        "transitions": (settings.transitions * BUCKETS, settings.width),
    }
    for head, (rows, width) in heads.items():
        shapes = {"weight": (rows, width), "bias": (rows,)}
        for part, shape in shapes.items():
            name = f"{head}.{part}"
            if getattr(settings, head) and name in weights:
                _check_numbers(weights[name], name, shape)


def _check_numbers(array: NDArray[Any], name: str, shape: tuple[int, ...]) -> None:
    if array.dtype != np.float32 or array.shape != shape:
        given = f"{array.dtype}{list(array.shape)}"
        raise StorageError(f"{name} is {given}, expected float32{list(shape)}")
    if not np.isfinite(array).all():
        place = tuple(int(axis) for axis in np.argwhere(~np.isfinite(array))[0])
        raise StorageError(f"{name} has {array[place]} at {list(place)}, expected numbers")


def add_boosts(first: Boosts | None, second: Boosts | None) -> Boosts | None:
    """Return the boosts of one query that come from two places; where both have one, their sum."""
    if first is None or second is None:
        return second if first is None else first
    items, places = np.unique(np.concatenate([first[0], second[0]]), return_inverse=True)
    values = np.zeros(len(items), np.float32)
    values[places[: len(first[0])]] = first[1]
    values[places[len(first[0]) :]] += second[1]
    return items, values
