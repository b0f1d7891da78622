"""A model that knows a walk: after each item of a cycle comes the next one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from recprune import Interactions, Recommender, interactions_from_columns
from tests.support.small_models import walks

NUM_ITEMS = 90


@dataclass
class Walkers:
    """A recommender of a cycle of items, and logs of people who leave it for something new."""

    recommender: Recommender
    cycle: list[str]

    def walk(self, place: int, length: int = 5) -> list[str]:
        """Return a history that ends at a place."""
        return [self.cycle[at % NUM_ITEMS] for at in range(place - length + 1, place + 1)]

    def log(self, leaving: dict[str, int], takers: int) -> Interactions:
        """Return a log of people who walk, and of some who take new items after a place each."""
        rng = np.random.default_rng(5)
        histories = [self.walk(int(rng.integers(NUM_ITEMS)), 8) for _ in range(40)]
        histories += [
            [*self.walk(place), item] for item, place in leaving.items() for _ in range(takers)
        ]
        users, items, times = [], [], []
        for user, history in enumerate(histories):
            for step, item in enumerate(history):
                users.append(f"user {user}")
                items.append(item)
                times.append(1_500_000_000 + 1000 * step + user)
        return interactions_from_columns(
            users, items, times, time_format="seconds", min_interactions=1
        )

    def write(self, path: Path, leaving: dict[str, int], takers: int) -> Path:
        """Write such a log as CSV."""
        log = self.log(leaving, takers)
        names = [*log.item_ids.take(log.items.tolist())]
        users = np.repeat(np.arange(log.num_users), log.lengths).tolist()
        lines = [
            f"{log.user_ids[user]},{name},{time // 1_000_000}"
            for user, name, time in zip(users, names, log.times, strict=True)
        ]
        lines.insert(0, "user_id,item_id,timestamp")
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path


@pytest.fixture(scope="session")
def walkers() -> Walkers:
    log = walks(300, NUM_ITEMS, "strings")
    recommender = Recommender.fit(
        log,
        "gsasrec",
        num_splits=4,
        num_sub_items=16,
        train_fraction=1.0,
        max_epochs=20,
        width=32,
        length=10,
        num_blocks=1,
        num_negatives=16,
        batch_size=50,
        learning_rate=0.01,
        device="cpu",
    )
    return Walkers(recommender, ["a", "b", "n", "p", *(f"tea é{at}" for at in range(4, NUM_ITEMS))])


@pytest.fixture(scope="session")
def saved(walkers: Walkers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("walkers") / "recommender"
    walkers.recommender.save(folder)
    return folder
