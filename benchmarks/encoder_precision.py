"""What weights of 8 bits in the encoder do to recommendations: NDCG, sequence embeddings, top items.

    python -m benchmarks.encoder_precision PREPARED MODEL

PREPARED and MODEL are what `recprune prepare` and `recprune train` made. Both recommenders are saved and
opened as a service would, and ranked for all test users, by exact search of the whole catalogue.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

import numpy as np

from benchmarks.measure import write_result
from recprune import Prepared, Recommender
from recprune.commands.console import output, print_table
from recprune.evaluation.comparison import compare
from recprune.evaluation.metrics import RankedUsers, user_values
from recprune.models.onnx_export import EncoderPrecision
from recprune.types import Float32Array, Json

_K = 10
_USERS_AT_ONCE = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("prepared", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, default=Path("out/bench-encoder-precision.json"))
    parsed = parser.parse_args()
    prepared = Prepared.load(parsed.prepared)
    test = prepared.test
    histories = [prepared.history(test, user) for user in range(len(test))]
    timelines = [prepared.timeline(test, user) for user in range(len(test))]
    metrics = [f"NDCG@{_K}", f"Recall@{_K}"]
    embeddings: dict[str, Float32Array] = {}
    ranked: dict[str, RankedUsers] = {}
    figures: dict[str, Json] = {}
    for precision in get_args(EncoderPrecision):
        with TemporaryDirectory() as scratch:
            made = Recommender.from_training(prepared, parsed.model, encoder_precision=precision)
            made.save(Path(scratch) / "recommender")
            served = Recommender.load(Path(scratch) / "recommender", encoder="onnx")
            parts = range(0, len(test), _USERS_AT_ONCE)
            ids = [
                served.rank(
                    histories[first : first + _USERS_AT_ONCE],
                    _K,
                    timelines=timelines[first : first + _USERS_AT_ONCE],
                ).ids
                for first in parts
            ]
            embeddings[precision] = served.encoder.encode(histories, timelines)
            size = len(served.export().onnx)
        ranked[precision] = RankedUsers.of_targets(np.concatenate(ids), test.items)
        means = {
            name: float(values.mean())
            for name, values in user_values(ranked[precision], metrics).items()
        }
        figures[precision] = {**means, "graph_bytes": size}
    before, after = embeddings["float32"], embeddings["int8"]
    moved = np.linalg.norm(after - before, axis=1) / np.linalg.norm(before, axis=1)
    same = (ranked["float32"].ids == ranked["int8"].ids).all(axis=1).mean()
    difference = compare(ranked["int8"], ranked["float32"], metrics[0]).difference
    rows = [
        (name, *(f"{found[metric]:.4f}" for metric in metrics), f"{found['graph_bytes'] / 1e6:.1f}")
        for name, found in figures.items()
    ]
    print_table(f"{len(test):,} test users", ("weights", *metrics, "MB of graph"), rows)
    output.print(
        f"{metrics[0]}, int8 − float32: {difference.mean:+.5f} "
        f"[{difference.low:+.5f}, {difference.high:+.5f}]; φ moved by {100 * moved.mean():.2f} % "
        f"of its length, at most {100 * moved.max():.2f} %; the same {_K} items in the same order "
        f"for {100 * same:.1f} % of users",
        markup=False,
    )
    write_result(
        parsed.out,
        {
            "precisions": figures,
            "difference": [difference.mean, difference.low, difference.high],
            "moved": [float(moved.mean()), float(moved.max())],
            "same": float(same),
        },
    )


if __name__ == "__main__":
    main()
