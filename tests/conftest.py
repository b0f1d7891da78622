from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from recprune import Interactions, SyntheticSettings, interactions_from_columns, synthetic_log
from tests.support.small_models import MODELS

if TYPE_CHECKING:
    from tests.support.trainings import Trained

# One profile everywhere: a failure seen by one machine is seen by all.
settings.register_profile("recprune", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("recprune")

# A shell that runs us in the background ignores Ctrl-C for us, and so for what our tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Processes that run tests side by side are told a width, which consoles keep, whatever a test says.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where several processes run the tests, a file is one's alone, and so are all clusters of Ray."""
    for item in items:
        module = item.getparent(pytest.Module)
        on_ray = module is not None and hasattr(module.obj, "running_cluster")  # it imports that
        group = "clusters" if on_ray else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))


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


@pytest.fixture(scope="session")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    """A model of every kind, trained once for all tests."""
    from tests.support.trainings import train_models  # which needs torch, as few tests do

    return train_models(tmp_path_factory.mktemp)


@pytest.fixture(params=MODELS)
def trained(request: pytest.FixtureRequest, trainings: dict[str, Trained]) -> Trained:
    return trainings[request.param]


@pytest.fixture
def sasrec(trainings: dict[str, Trained]) -> Trained:
    return trainings["sasrec"]


def log_of(*rows: tuple[int | str, int | str, int]) -> Interactions:
    """Build a log from (user, item, seconds) rows, without removing anybody."""
    users, items, times = zip(*rows, strict=True)
    return interactions_from_columns(
        list(users), list(items), list(times), time_format="seconds", min_interactions=1
    )
