"""History → sequence embedding on one thread: the whole padded model, its last state, and ONNX.

The ways take turns in short blocks, in an order that changes from block to block: what slows the
machine down slows all, and each finds the caches as a service that runs only it would. Times are those
of whole calls from Python, looking up the items' vectors included.

    python -m benchmarks.encoder                  # histories of 10, 74 and 200 items
    python -m benchmarks.encoder --lengths 200 --blocks 100
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.measure import write_result
from recprune.commands.console import output, print_table
from recprune.experiments.framework.machine import machine
from recprune.models.architectures import build_model
from recprune.models.embedding import RecJPQEmbedding
from recprune.models.inference import ItemVectors, OnnxEncoder, TorchEncoder
from recprune.models.onnx_export import export_encoder
from recprune.models.settings import PRESETS
from recprune.types import Float32Array, Int32Array

Encode = Callable[[Int32Array], Float32Array]
_PER_BLOCK = 5
_MODELS = {"sasrec": PRESETS["gsasrec"].model, "bert4rec": PRESETS["gbert4rec"].model}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default=",".join(_MODELS))
    parser.add_argument("--lengths", default="10,74,200", help="of histories, in items")
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--blocks", type=int, default=30, help=f"of {_PER_BLOCK} calls of each way")
    parser.add_argument("--out", type=Path, default=Path("out/bench-encoder.json"))
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    rows, figures = [], []
    for name in parsed.models.split(","):
        ways = _ways(name, parsed.items, rng)
        for length in map(int, parsed.lengths.split(",")):
            history = rng.integers(0, parsed.items, length).astype(np.int32)
            seconds = _measure(ways, history, parsed.blocks, rng)
            p50 = {way: float(np.median(times)) * 1e3 for way, times in seconds.items()}
            p99 = {way: float(np.percentile(times, 99)) * 1e3 for way, times in seconds.items()}
            ratio = p50["torch, padded"] / p50["onnx"]
            figures.append(
                {"model": name, "length": length, "p50_ms": p50, "p99_ms": p99, "ratio": ratio}
            )
            shown = [f"{p50[way]:.2f}" for way in ways]
            rows.append((name, str(length), *shown, f"{p99['onnx']:.2f}", f"{ratio:.1f}×"))
    print_table(
        "milliseconds for one history on one thread, median",
        ("model", "items", *ways, "onnx p99", "padded ÷ onnx"),
        rows,
    )
    output.print(f"{machine()['cpu']}; torch {torch.__version__}")
    write_result(parsed.out, {"encoders": figures})


def _ways(name: str, num_items: int, rng: np.random.Generator) -> dict[str, Encode]:
    """Return the ways to encode one history with a random model."""
    settings = _MODELS[name]
    codes = rng.integers(0, 256, (num_items, 8), np.uint8)
    torch.manual_seed(0)
    model = build_model(settings, codes, 256).eval()
    assert isinstance(model.embedding, RecJPQEmbedding)
    vectors = ItemVectors.from_codes(codes, model.embedding.sub_item_embeddings.detach().numpy())
    plain = TorchEncoder(model, settings.length)
    fast = OnnxEncoder(export_encoder(model), vectors, settings.length)

    def padded(history: Int32Array) -> Float32Array:
        """Run the model as it is trained: every position, padding among them."""
        items = torch.zeros((1, model.positions.length), dtype=torch.int64)
        # BERT4Rec's last position is the mask's.
        count = len(history) + model.positions.length - settings.length
        items[0, : len(history)] = torch.from_numpy(history)
        items[0, len(history) : count] = -1
        with torch.inference_mode():
            states: torch.Tensor = model(items, torch.tensor([count]))
        return states[:, count - 1].numpy()

    return {
        "torch, padded": padded,
        "torch, last state": lambda history: plain.encode([history]),
        "onnx": lambda history: fast.encode([history]),
    }


def _measure(
    ways: dict[str, Encode], history: Int32Array, blocks: int, rng: np.random.Generator
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    expected = ways["torch, padded"](history)
    for way, encode in ways.items():
        difference = float(np.abs(encode(history) - expected).max())
        if not difference < 1e-4:
            raise SystemExit(f"{way} disagrees by {difference}: this is a bug")
    for _ in range(blocks):
        for way in rng.permutation(list(ways)).tolist():
            ways[way](history)  # not timed: the caches are as the others left them
            for _ in range(_PER_BLOCK):
                begun = time.perf_counter()
                ways[way](history)
                seconds[way].append(time.perf_counter() - begun)
    return seconds


if __name__ == "__main__":
    main()
