"""All chance of a training: one stream for each purpose, seeded anew for every epoch or step.

Nothing is carried from step to step, so a run that was interrupted and resumed takes exactly the
steps that it would have taken anyway.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from recprune.types import random_generator


class Stream(IntEnum):
    """What is drawn. The number is part of every seed: with another, every training changes."""

    EPOCH_ORDER = 1  # the users of an epoch, in the order in which they are shown
    WINDOWS = 2  # which part of a history is shown, and which of its items are masked
    STEP = 3  # negatives and dropout
    VALIDATION_USERS = 4
    CODES = 5  # where k-means begins, and where unused sub-items are put


def stream_generator(seed: int, stream: Stream, *numbers: int) -> np.random.Generator:
    """Return NumPy's generator of a stream, for the epoch and step that the numbers tell."""
    return random_generator(seed, stream, *numbers)


def torch_seed(seed: int, stream: Stream, *numbers: int) -> int:
    """Return the same for torch: 63 bits to seed a generator with."""
    sequence = np.random.SeedSequence([seed, stream, *numbers])
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))
