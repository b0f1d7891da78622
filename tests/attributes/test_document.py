"""docs/filters.md has the figures of its record."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "filters.md").read_text(encoding="utf-8")
RECORD = json.loads((ROOT / "docs" / "measured" / "filters.json").read_text(encoding="utf-8"))


def numbers_of(row: str) -> list[float]:
    """Return the numbers in the cells of a row but the first."""
    (line,) = (line for line in TEXT.splitlines() if line.startswith(f"| {row}"))
    cells = line.split("|")[2:-1]
    return [float(re.sub("[^0-9.]", "", cell)) for cell in cells]


def test_conditions_are_made_as_fast_as_was_measured() -> None:
    rows = re.findall(r"^\| `(.*?)`.*? \| ([\d,]+) \| (\d+) µs \|$", TEXT, re.MULTILINE)
    assert len(rows) == len(RECORD["conditions"]) == 6
    for (shown, a_second, again), at in zip(rows, RECORD["conditions"].values(), strict=True):
        rounded = float(f"{at['a_second']:.2g}")
        assert float(a_second.replace(",", "")) == rounded, shown
        assert abs(float(again) - at["kept_us"]) <= max(1, 0.01 * at["kept_us"]), shown


def test_searches_take_as_long_as_was_measured() -> None:
    shares = (1e-5, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.3, 1.0)
    chosen = {
        round(one["share"], 9): one
        for one in RECORD["searches"]
        if one["k"] == 10 and one["mask"] == "random"
    }
    found = [chosen[share] for share in shares]
    assert numbers_of("`auto`, µs") == [round(one["p50_us"]["auto"]) for one in found]
    assert numbers_of("÷ the best of the others") == [round(one["ratio"], 2) for one in found]
    worst = max(one["ratio"] for one in RECORD["searches"])
    said = f"at most {worst:.2f} times as long as the best of `cells`, `scan` and `pqtopk` in all "
    assert f"{said}{len(RECORD['searches'])} cases" in " ".join(TEXT.split())


def test_limits_take_as_long_as_was_measured() -> None:
    ten, _, hundred, _ = RECORD["limits"]
    for at in (ten, hundred):
        limited, plain = (round(at["p50_us"][name]) for name in ("limited", "plain"))
        assert re.search(rf"\b{limited}\b.*\b{plain}\b", " ".join(TEXT.split()))
