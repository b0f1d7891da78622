"""The paper's appendix table for trained models: NDCG@10, time to φ, checkpoint size.

Time is that of one history on one thread, by ONNX Runtime and by torch, over the test users as they
are. Beside the size of a checkpoint stands what it would be with a full table of item vectors.

    python -m benchmarks.models PREPARED MODEL [MODEL ...]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from benchmarks.measure import machine
from recprune import Prepared, RankedUsers, Recommender
from recprune.checkpoint import MODEL
from recprune.console import output, print_table, showing_progress
from recprune.encoder import Encoder
from recprune.evaluate import user_values
from recprune.types import Float32Array, Int32Array


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("prepared", type=Path)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--users", type=int, default=2048)
    parser.add_argument("--exclude-seen", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("out/bench-models.json"))
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    prepared = Prepared.load(parsed.prepared)
    order = np.random.default_rng(0).permutation(len(prepared.test))[: parsed.users]
    histories = [prepared.history(prepared.test, int(target)) for target in order]
    targets = prepared.test.items[order]
    rows, figures = [], {}
    for folder in parsed.models:
        with showing_progress(folder.name), TemporaryDirectory() as scratch:
            trained = Recommender.from_training(prepared, folder)
            trained.save(f"{scratch}/recommender")
            served = Recommender.load(f"{scratch}/recommender", encoder="onnx")
            figure = _measure(trained, served, histories, targets, parsed.exclude_seen)
        size = (folder / MODEL).stat().st_size / 1e6
        settings = trained.settings["model"]
        if settings["embedding"] == "recjpq":
            own = trained.index.sub_item_embeddings().nbytes / 1e6
            figure["full_megabytes"] = size - own + 4 * prepared.num_items * settings["width"] / 1e6
        else:
            figure["full_megabytes"] = size
        figure["megabytes"] = size
        figures[folder.name] = figure
        rows.append((
            folder.name, f"{figure['ndcg']:.4f}", f"{figure['onnx_ms']:.2f}",
            f"{figure['onnx_p95_ms']:.2f}", f"{figure['torch_ms']:.2f}", f"{size:,.1f}",
            f"{figure['full_megabytes']:,.0f}", f"{figure['same_top_10']:.2%}",
        ))  # fmt: skip
    print_table(
        f"{len(histories):,} test users, {prepared.num_items:,} items",
        ("model", "NDCG@10", "φ ms", "p95", "torch ms", "MB", "MB if full", "same top 10"),
        rows,
    )
    output.print(f"median history: {np.median([len(h) for h in histories]):.0f} items; "
                 f"{machine()['cpu']}, one thread")  # fmt: skip
    parsed.out.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": machine(), "users": len(histories), "models": figures}
    parsed.out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _measure(
    trained: Recommender,
    served: Recommender,
    histories: list[Int32Array],
    targets: Int32Array,
    exclude_seen: bool,
) -> dict[str, Any]:
    by_torch, torch_ms = _encode(trained.encoder, histories)
    by_onnx, onnx_ms = _encode(served.encoder, histories)
    exclude = histories if exclude_seen else None
    found = served.index.search(by_onnx, 10, exclude=exclude, threads=2).ids
    expected = served.index.search(by_torch, 10, exclude=exclude, threads=2).ids
    ndcg = user_values(RankedUsers.of_targets(found, targets), ["NDCG@10"])["NDCG@10"].mean()
    return {
        "ndcg": float(ndcg),
        "onnx_ms": float(np.median(onnx_ms)),
        "onnx_p95_ms": float(np.percentile(onnx_ms, 95)),
        "torch_ms": float(np.median(torch_ms)),
        "largest_difference": float(np.abs(by_torch - by_onnx).max()),
        "same_top_10": float((found == expected).all(1).mean()),
    }


def _encode(encoder: Encoder, histories: list[Int32Array]) -> tuple[Float32Array, list[float]]:
    """Return the sequence embeddings, and the milliseconds that each took on its own."""
    encoder.encode(histories[:1])
    found, milliseconds = [], []
    for history in histories:
        begun = time.perf_counter()
        found.append(encoder.encode([history])[0])
        milliseconds.append(1000 * (time.perf_counter() - begun))
    return np.array(found), milliseconds


if __name__ == "__main__":
    main()
