"""Small models of every kind: the log that they learn from, and their settings."""

from __future__ import annotations

from typing import Any

import numpy as np

from recprune import Interactions, interactions_from_columns

LENGTH = 10
SMALL: dict[str, Any] = {
    "width": 32, "length": LENGTH, "num_blocks": 1, "num_heads": 1, "num_negatives": 8,
    "batch_size": 20, "max_epochs": 2, "learning_rate": 0.01,
}  # fmt: skip

# Name: kind of ids, splits, sub-items, settings. Few sub-items make items with equal scores.
MODELS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "sasrec": ("strings", 8, 16, {}),
    "bert4rec": ("integers", 2, 6, {"architecture": "bert4rec", "num_heads": 2}),
    "full table": ("strings", 2, 4, {"embedding": "full", "width": 16}),
    "timed": ("integers", 4, 8, {"architecture": "timed", "num_blocks": 2, "num_heads": 2}),
    "continued": (
        "strings",
        4,
        8,
        {
            "architecture": "continued",
            "num_blocks": 2,
            "num_heads": 2,
            "kept_width": 4,
            "repeats": 12,
            "own_scores": 0.25,
            "activity": True,
            "transitions": 2,
        },
    ),
    "repeats": (
        "strings",
        2,
        4,
        {
            "architecture": "esasrec",
            "codes": "learnt",
            "num_splits": 4,
            "num_sub_items": 16,
            "full_epochs": 1,
            "repeats": 12,
            "own_scores": 0.25,
            "activity": True,
            "transitions": 2,
        },
    ),
}


def walks(num_users: int, num_items: int, ids: str, seed: int = 0) -> Interactions:
    """Everybody walks round a cycle of items, and jumps now and then."""
    rng = np.random.default_rng(seed)
    names: list[Any] = (
        ["a", "b", "n", "p", *(f"tea é{item}" for item in range(4, num_items))]
        if ids == "strings"
        else [7 * item - 100 for item in range(num_items)]
    )
    users, items, times = [], [], []
    for user in range(num_users):
        place = int(rng.integers(num_items))
        for step in range(int(rng.integers(20, 30))):
            place = int(rng.integers(num_items)) if rng.random() < 0.2 else place + 1
            users.append(f"user {user}")
            items.append(names[place % num_items])
            times.append(1_500_000_000 + 1000 * step + user)
    return interactions_from_columns(users, items, times, time_format="seconds")
