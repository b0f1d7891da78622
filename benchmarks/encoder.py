"""History → sequence embedding on one thread: the whole padded model, its last state, and ONNX.

Models and ways take turns in short blocks, in an order that changes from block to block: what slows the
machine down slows all, and each finds the caches as a service that runs only it would. Times are those
of whole calls from Python, looking up the items' vectors included, in processor time of the one thread,
so that waiting for a core that others use does not count.

    python -m benchmarks.encoder                  # histories of 10, 74 and 200 items
    python -m benchmarks.encoder --lengths 200 --blocks 100
    python -m benchmarks.encoder --models sasrec,timed --width 64
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
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
from recprune.models.timelines import event_times
from recprune.types import Float32Array, Int32Array, Timeline

Encode = Callable[[Int32Array, Timeline], Float32Array]
_PER_BLOCK = 5
_MODELS = {
    "sasrec": PRESETS["gsasrec"].model,
    "esasrec": PRESETS["esasrec"].model,
    "esasrec-wide": replace(PRESETS["esasrec"].model, inner_share=1.0),
    "timed": PRESETS["timed"].model,
    "bert4rec": PRESETS["gbert4rec"].model,
}
_WAYS = ("torch, padded", "torch, last state", "onnx")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default=",".join(_MODELS), help="compared with the first")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--lengths", default="10,74,200", help="of histories, in items")
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--blocks", type=int, default=30, help=f"of {_PER_BLOCK} calls of each way")
    parser.add_argument("--out", type=Path, default=Path("out/bench-encoder.json"))
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    rows, figures = [], []
    names = parsed.models.split(",")
    ways = {name: _ways(name, parsed.width, parsed.items, rng) for name in names}
    for length in map(int, parsed.lengths.split(",")):
        history = rng.integers(0, parsed.items, length).astype(np.int32)
        times = np.cumsum(rng.integers(0, 100_000, length))
        timeline = Timeline(times, int(times[-1]) + 3600)
        seconds = _measure(ways, history, timeline, parsed.blocks, rng)
        first = float(np.median(seconds[names[0]]["onnx"])) * 1e3
        for name in names:
            p50 = {way: float(np.median(seconds[name][way])) * 1e3 for way in _WAYS}
            p99 = {way: float(np.percentile(seconds[name][way], 99)) * 1e3 for way in _WAYS}
            ratio, to_first = p50["torch, padded"] / p50["onnx"], p50["onnx"] / first
            figures.append(
                {
                    "model": name,
                    "width": parsed.width,
                    "length": length,
                    "p50_ms": p50,
                    "p99_ms": p99,
                    "ratio": ratio,
                    "onnx_to_first": to_first,
                }
            )
            shown = [f"{p50[way]:.2f}" for way in _WAYS]
            ratios = [f"{ratio:.1f}×", f"{to_first:.2f}×"]
            rows.append((name, str(length), *shown, f"{p99['onnx']:.2f}", *ratios))
    print_table(
        f"milliseconds for one history on one thread, median; width {parsed.width}",
        ("model", "items", *_WAYS, "onnx p99", "padded ÷ onnx", f"onnx ÷ {names[0]}"),
        rows,
    )
    output.print(f"{machine()['cpu']}; torch {torch.__version__}")
    write_result(parsed.out, {"encoders": figures})


def _ways(name: str, width: int, num_items: int, rng: np.random.Generator) -> dict[str, Encode]:
    """Return the ways to encode one history with a random model."""
    settings = replace(_MODELS[name], width=width)
    codes = rng.integers(0, 256, (num_items, 8), np.uint8)
    torch.manual_seed(0)
    model = build_model(settings, codes, 256).eval()
    assert isinstance(model.embedding, RecJPQEmbedding)
    vectors = ItemVectors.from_codes(codes, model.embedding.sub_item_embeddings.detach().numpy())
    plain = TorchEncoder(model, settings.length)
    exported = export_encoder(model)
    fast = OnnxEncoder(exported.onnx, vectors, settings.length, tables=exported.tables)

    def padded(history: Int32Array, timeline: Timeline) -> Float32Array:
        """Run the model as it is trained: every position, padding among them."""
        items = torch.zeros((1, model.positions.length), dtype=torch.int64)
        # BERT4Rec's last position is the mask's.
        count = len(history) + model.positions.length - settings.length
        items[0, : len(history)] = torch.from_numpy(history)
        items[0, len(history) : count] = -1
        times = [event_times([timeline], items.shape[1])] if model.reads_times else []
        with torch.inference_mode():
            states: torch.Tensor = model(
                items, torch.tensor([count]), *map(torch.from_numpy, times)
            )
        return states[:, count - 1].numpy()

    encoders = (
        padded,
        lambda history, timeline: plain.encode([history], [timeline]),
        lambda history, timeline: fast.encode([history], [timeline]),
    )
    return dict(zip(_WAYS, encoders, strict=True))


def _measure(
    ways: dict[str, dict[str, Encode]],
    history: Int32Array,
    timeline: Timeline,
    blocks: int,
    rng: np.random.Generator,
) -> dict[str, dict[str, list[float]]]:
    """Return seconds by model and way."""
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in ways}
    for name, own in ways.items():
        expected = own["torch, padded"](history, timeline)
        for way, encode in own.items():
            seconds[name][way] = []
            difference = float(np.abs(encode(history, timeline) - expected).max())
            if not difference < 1e-4:
                raise SystemExit(f"{name}: {way} disagrees by {difference}: this is a bug")
    turns = [(name, way) for name in ways for way in _WAYS]
    for _ in range(blocks):
        for name, way in rng.permutation(turns).tolist():
            encode = ways[name][way]
            encode(history, timeline)  # not timed: the caches are as the others left them
            for _ in range(_PER_BLOCK):
                begun = time.thread_time()
                encode(history, timeline)
                seconds[name][way].append(time.thread_time() - begun)
    return seconds


if __name__ == "__main__":
    main()
