from __future__ import annotations

import signal
from pathlib import Path

import pytest
from hypothesis import settings

from recprune import Interactions, SyntheticSettings, interactions_from_columns, synthetic_log

# One profile everywhere: a failure seen by one machine is seen by all.
settings.register_profile("recprune", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("recprune")

# A shell that runs us in the background ignores Ctrl-C for us, and so for what our tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SHARED = Path(__file__).parents[2] / "shared"


@pytest.fixture(scope="session")
def gitlog() -> Path:
    """A real log with 930,528 items, where this machine has it."""
    path = SHARED / "data" / "gitlog.parquet"
    if not path.exists():
        pytest.skip("needs a large log in ../shared, which the project does not ship")
    return path


@pytest.fixture(scope="session")
def small_log() -> Interactions:
    """A synthetic log with all its properties, small enough for every test."""
    drawn = synthetic_log(
        SyntheticSettings(400, 900, 12_000, seed=7, items_per_cluster=30, days=100)
    )
    return interactions_from_columns(drawn.users, drawn.items, drawn.times)


def log_of(*rows: tuple[int | str, int | str, int]) -> Interactions:
    """Build a log from (user, item, seconds) rows, without removing anybody."""
    users, items, times = zip(*rows, strict=True)
    return interactions_from_columns(
        list(users), list(items), list(times), time_format="seconds", min_interactions=1
    )
