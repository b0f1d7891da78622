"""The table of what folding in brings is that of the record."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.fold_in import table

DOCS = Path(__file__).parents[3] / "docs"


def test_the_table_is_made_from_the_record() -> None:
    record = json.loads((DOCS / "measured" / "fold-in.json").read_text(encoding="utf-8"))
    document = (DOCS / "catalogue.md").read_text(encoding="utf-8")
    _, _, rest = document.partition("<!-- fold-in -->\n")
    shown, _, _ = rest.partition("<!-- end -->")
    assert shown.splitlines() == table(record)
    assert len(record["quality"]) > 5
