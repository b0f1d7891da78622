"""The last stop of the guided tour: the exact top 10 of two million items, by every method."""

from __future__ import annotations

import numpy as np

import recprune
from recprune.commands.console import output, print_table, showing_progress

NUM_ITEMS = 2_000_000
WIDTH = 64
QUERIES = 20


def main() -> None:
    """Search a synthetic catalogue by every method and compare."""
    output.rule(f"10. The exact top 10 of {NUM_ITEMS:,} items")
    rng = np.random.default_rng(0)
    with showing_progress("index") as progress:
        progress("drawing codes and vectors")
        codes = recprune.assign_random(NUM_ITEMS).codes
        embeddings = rng.standard_normal((8, 256, WIDTH // 8)).astype(np.float32)
        users = rng.standard_normal((QUERIES, WIDTH)).astype(np.float32)
        users *= np.abs(users)  # peaked, like the scores of a trained model
        progress("laying it out")
        index = recprune.Index.build(codes, embeddings, threads=2)
    rows = []
    expected = None
    for method in recprune.METHODS:
        with showing_progress(method):
            index.search(users[:1], 10, method=method)  # what is built on first use
            answers = [index.search(user, 10, method=method) for user in users]
        ids = np.array([top.ids for top in answers])
        expected = ids if expected is None else expected
        times = [int(top.stats.nanoseconds[0]) / 1e6 for top in answers]
        scored = np.median([int(top.stats.items_scored[0]) for top in answers])
        same = "✓" if np.array_equal(ids, expected) else "NO"
        rows.append((method, f"{np.median(times):.2f}", f"{scored:,.0f}", same))
    print_table(
        f"Median of {QUERIES} users, one thread, {recprune.instruction_set()}",
        ("method", "milliseconds", "items scored", "same result"),
        rows,
    )

    output.rule("11. Look inside")
    output.print(
        "A page that shows the pruning at work, for the groceries above:\n"
        "  .venv/bin/recprune serve out/grocery-model/recommender "
        "--names out/grocery-model/names.csv\n"
        "then open http://127.0.0.1:8000/",
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
