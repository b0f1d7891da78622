"""What a wheel must do where NumPy is all there is: `make wheel` and cibuildwheel run this.

Imports nothing of the tests, as it runs in an environment without them.
"""

from __future__ import annotations

import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path

import numpy as np

import recprune
from recprune.search import reference


def main() -> None:
    """Search a small random index by every method, and hold the answers against the reference."""
    installed = {found.name.lower() for found in distributions()}
    assert installed <= {"numpy", "recprune", "pip", "setuptools", "wheel"}, installed

    random = np.random.default_rng(1)
    codes = random.integers(0, 64, (30_000, 8)).astype(np.uint8)
    embeddings = random.standard_normal((8, 64, 4), dtype=np.float32)
    queries = random.standard_normal((4, 32), dtype=np.float32)
    with tempfile.TemporaryDirectory() as folder:
        recprune.Index.build(codes, embeddings).save(Path(folder) / "index")
        index = recprune.Index.load(Path(folder) / "index")
        for method in recprune.METHODS:
            top = index.search(queries, k=10, method=method, threads=2)
            for row, query in enumerate(queries):
                scores = reference.sub_item_scores(query, embeddings)
                items, best = reference.exhaustive(scores, codes, 10)
                assert top.ids[row].tolist() == items.tolist(), method
                assert top.scores[row].tobytes() == best.tobytes(), method
            assert top.stats.exact.all(), method
    where = f"Python {sys.version.split()[0]}, {recprune.instruction_set()}"
    sys.stdout.write(f"{where}: {', '.join(recprune.METHODS)} return what the reference does\n")


if __name__ == "__main__":
    main()
