"""What several tests of the search share."""

from __future__ import annotations

import numpy as np
import pytest

from recprune import (
    Index,
)
from recprune._native import instruction_sets
from recprune.search import reference
from recprune.types import Float32Array
from tests.support.search_cases import Case


@pytest.fixture(params=instruction_sets())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("RECPRUNE_ISA", request.param)
    return str(request.param)


@pytest.fixture(scope="module")
def trained() -> tuple[Index, Float32Array, Case]:
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 256, (20_000, 8)).astype(np.uint8)
    embeddings = rng.standard_normal((8, 256, 16)).astype(np.float32)
    phi = rng.standard_normal((40, 128)).astype(np.float32)
    case = Case(codes, reference.sub_item_scores(phi[0], embeddings), 10, None, None, None)
    return Index.build(codes, embeddings, threads=2), phi, case
