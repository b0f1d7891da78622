"""Scaling out on paper: the document's tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.scale_plan import search_times, slowest_of, with_tables

ROOT = Path(__file__).parents[1]


def test_the_tables_are_those_of_what_was_measured() -> None:
    text = (ROOT / "docs" / "scale-out.md").read_text(encoding="utf-8")
    assert with_tables(text) == text
    hundred_million, billion = (search_times(size)[0] for size in (10**8, 10**9))
    assert (
        f"100 million items takes {hundred_million:.1f} ms, over one billion {billion:.1f} ms"
        in text
    )


def test_the_slowest_of_several_is_slower() -> None:
    assert slowest_of(1, 2.0, 0.0, 0.99) == pytest.approx(2.0)
    assert slowest_of(1, 2.0, 0.5, 0.5) == pytest.approx(2.0)
    # Of two, the median is where each is with a chance of √½: z = 0.5450.
    assert slowest_of(2, 1.0, 1.0, 0.5) == pytest.approx(1.7244, abs=1e-3)
    medians = [search_times(size)[0] for size in (10**6, 3 * 10**7, 10**9)]
    assert medians == sorted(medians)
