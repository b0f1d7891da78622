"""Exact decoding against a beam over a graph of items: time, items scored, share of the best found.

Both get the sequence embedding of a user and return the ten items of the highest scores, the sum of
their sub-item scores. Ours is `Index.search`, compiled; the beam (`graph_decoding`) is written in
NumPy, so that beside times, which take turns in one run, stands how many items were scored, and how
many a filter of the exact search looked at before. Beams with fewer neighbours use the nearest of
the same graph. The graph of a large catalogue takes longer than all the rest, and can be kept.

    python -m benchmarks.decoding --prepared PREPARED --model MODEL    # a trained model's
    python -m benchmarks.decoding --workload FOLDER                    # codes.npy, …
    python -m benchmarks.decoding --workload FOLDER --items 100000     # a random part of it
    python -m benchmarks.decoding --workload FOLDER --graph FILE.npy --threads 16

A workload needs NumPy, threadpoolctl and the compiled module alone. `decoding_table` puts records
into docs/models.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.decoding_table import table
from benchmarks.graph_decoding import GraphDecoder, ItemGraph, item_graph, load_graph
from benchmarks.measure import model_of, write_result
from recprune import Index
from recprune.experiments.framework.timing import (
    Answer,
    Search,
    Timed,
    index_search,
    interleaved,
    recall,
)
from recprune.types import CodeArray, Float32Array, InputError, Json, Progress, RecpruneError

_EXACT = "exact"
_SECONDS_BETWEEN_LINES = 10.0  # of progress


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prepared", type=Path, help="with --model: a prepared log")
    parser.add_argument("--model", type=Path, help="trained on it, with embedding=recjpq")
    parser.add_argument("--workload", type=Path, help="or a folder with a trained model's arrays")
    parser.add_argument("--title", default="", help="of the catalogue, for the table")
    parser.add_argument("--items", type=int, default=0, help="of those, at random; default: all")
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("-k", type=int, default=10)
    parser.add_argument("--beams", type=int, nargs="+", default=[10, 50, 100, 500])
    parser.add_argument("--neighbours", type=int, nargs="+", default=[50, 100, 500])
    parser.add_argument("--rounds", type=int, default=10, help="at most; a walk may end before")
    parser.add_argument("--graph", type=Path, help="read it if it is there, else keep it there")
    parser.add_argument("--threads", type=int, default=1, help="that make the graph")
    parser.add_argument("--out", type=Path, default=Path("out/bench-decoding.json"))
    parsed = parser.parse_args(arguments)
    try:
        _check(parsed)
        codes, embeddings, queries = _model(parsed)
    except (RecpruneError, OSError, ValueError) as error:
        parser.error(str(error))
    progress = _showing(time.monotonic())
    graph = _graph(codes, embeddings, parsed, progress)
    index = Index.build(codes, embeddings, threads=parsed.threads)
    decoders = _decoders(codes, embeddings, graph, parsed)
    scored: dict[str, list[int]] = {name: [] for name in decoders}
    searches = {_EXACT: index_search(index, "auto")}
    searches |= {name: _walk(decoders[name], scored[name]) for name in decoders}
    timed = interleaved(searches, queries, parsed.k, seed=0, progress=progress)
    figures = {name: _figures(timed[name], timed[_EXACT]) for name in timed}
    for name, counts in scored.items():
        beam, _, count = name.partition(" ")
        figures[name] |= {"beam": int(beam), "neighbours": int(count)}
        figures[name]["items_scored"] = figures[name]["items_touched"] = float(np.median(counts))
    record: Json = {
        "title": parsed.title,
        "k": parsed.k,
        "rounds": parsed.rounds,
        "index": index.describe(),
        "codes_megabytes": codes.nbytes / 1e6,
        "graph": _graph_figures(graph, parsed.threads),
        "decodings": figures,
    }
    write_result(parsed.out, record)
    record = json.loads(parsed.out.read_text(encoding="utf-8"))
    print("\n".join(table([record], every=True)))


def _showing(begun: float) -> Progress:
    """Return what prints a line on standard error now and then: there may be no terminal."""
    last = begun

    def progress(step: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _SECONDS_BETWEEN_LINES:
            last = now
            print(f"{now - begun:.0f} s: {step}", file=sys.stderr, flush=True)

    return progress


def _check(parsed: argparse.Namespace) -> None:
    if (parsed.model is None) != (parsed.prepared is None):
        raise InputError("--prepared and --model belong together")
    if parsed.model is not None and parsed.workload is not None:
        raise InputError("--workload has a model already: choose it, or --prepared and --model")
    least = {"items": 0, "queries": 1, "k": 1, "beams": parsed.k, "neighbours": 1, "rounds": 0}
    for name, smallest in (least | {"threads": 1}).items():
        values = np.atleast_1d(getattr(parsed, name))
        if values.min() < smallest:
            option = "-k" if name == "k" else f"--{name}"
            expected = "K, which is " if name == "beams" else ""
            raise InputError(f"{option} {values.min()}: expected {expected}{smallest}, or more")


def _model(parsed: argparse.Namespace) -> tuple[CodeArray, Float32Array, Float32Array]:
    """Return codes, sub-item and sequence embeddings."""
    if parsed.model is None:
        found = _part(*model_of(parsed.workload, 1_000_000, parsed.queries), parsed.items)
    else:
        from recprune.experiments.framework.workload import Workload
        from recprune.preparation.prepared import Prepared

        prepared = Prepared.load(parsed.prepared)
        workload = Workload.from_training("log", "model", prepared, parsed.model, parsed.queries)
        arrays = (workload.codes, workload.sub_item_embeddings, workload.sequence_embeddings)
        found = _part(*arrays, parsed.items)
    most = max(*parsed.neighbours, parsed.k)
    if most >= len(found[0]):
        raise InputError(f"-k and --neighbours are up to {most}: there are {len(found[0])} items")
    return found


def _part(
    codes: CodeArray, embeddings: Float32Array, queries: Float32Array, num_items: int
) -> tuple[CodeArray, Float32Array, Float32Array]:
    if 0 < num_items < len(codes):
        codes = codes[np.random.default_rng(0).permutation(len(codes))[:num_items]]
    return codes, embeddings, queries


def _graph(
    codes: CodeArray, embeddings: Float32Array, parsed: argparse.Namespace, progress: Progress
) -> ItemGraph:
    count = max(parsed.neighbours)
    if parsed.graph is not None and parsed.graph.exists():
        return load_graph(parsed.graph, codes, embeddings, count)
    graph = item_graph(codes, embeddings, count, threads=parsed.threads, progress=progress)
    if parsed.graph is not None:
        graph.save(parsed.graph)
    return graph


def _graph_figures(graph: ItemGraph, threads: int) -> Json:
    return {
        "neighbours": graph.neighbours.shape[1],
        "megabytes": graph.neighbours.nbytes / 1e6,
        "seconds": graph.seconds,
        "threads": threads,
    }


def _decoders(
    codes: CodeArray, embeddings: Float32Array, graph: ItemGraph, parsed: argparse.Namespace
) -> dict[str, GraphDecoder]:
    """Return a decoder for every beam and number of neighbours; beams share the neighbours."""
    nearest = {
        count: np.ascontiguousarray(graph.neighbours[:, :count]) for count in parsed.neighbours
    }
    return {
        f"{beam} {count}": GraphDecoder(
            codes, embeddings, nearest[count], beam=beam, rounds=parsed.rounds
        )
        for beam in parsed.beams
        for count in parsed.neighbours
    }


def _walk(decoder: GraphDecoder, scored: list[int]) -> Search:
    """Return a search that also notes how many items it scored."""

    def search(query: Float32Array, k: int) -> Answer:
        ids, scores = decoder.search(query, k)
        scored.append(decoder.items_scored)
        return ids, scores, None

    return search


def _figures(found: Timed, exact: Timed) -> Json:
    ratio = float(np.median(found.microseconds / exact.microseconds))
    return found.summary() | {"ratio": ratio, "recall": recall(found.ids, exact.ids)}


if __name__ == "__main__":
    main()
