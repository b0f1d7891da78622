"""Building the shards of an index on a Ray cluster, all at the same time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from recprune.cluster import connected, largest_node, say_if_busy
from recprune.search.checks import checked_threads
from recprune.search.index_arrays import Layout
from recprune.shards.folder import (
    Shard,
    ShardInputs,
    check_inputs,
    claim_folder,
    finish_folder,
    shard_ranges,
    write_shard,
)
from recprune.types import InputError, Progress, RecpruneError, StorageError, no_progress


def build_shards_on_ray(
    inputs: ShardInputs,
    folder: str | Path,
    num_shards: int,
    *,
    layout: Layout = "auto",
    threads: int = 1,
    address: str | None = None,
    progress: Progress = no_progress,
) -> None:
    """Write an index in shards, each as a task of a cluster that reads its own range only.

    Every node must find the inputs and the folder under the same paths.
    """
    codes, embeddings, bias, own_layout = inputs.read()
    layout = own_layout if layout == "auto" else layout
    check_inputs(codes, embeddings, bias, layout)
    checked_threads(threads)
    ranges = shard_ranges(len(codes), num_shards)
    target = os.path.realpath(folder)
    with connected(address or "local"):
        import ray

        if threads > (largest := largest_node()):  # Ray would wait for such a node for ever
            raise InputError(
                f"threads is {threads}, but the largest node of the cluster has {largest} CPUs"
            )
        claim_folder(folder)
        say_if_busy(progress)
        build: Any = ray.remote(num_cpus=threads)(_write_shard)
        waiting = [
            build.remote(inputs, target, number, *items, layout, threads)
            for number, items in enumerate(ranges)
        ]
        shards: list[Shard] = []
        try:
            while waiting:
                done, waiting = ray.wait(waiting)
                for written in ray.get(done):
                    if isinstance(written, RecpruneError):
                        raise written
                    shards.append(written)
                progress(f"{len(shards)} of {num_shards} shards")
        except ray.exceptions.RayError as error:
            first = str(error).strip().splitlines()[0]
            raise RecpruneError(f"{target}: building on the cluster failed: {first}") from None
    finish_folder(folder, sorted(shards, key=lambda shard: shard.number), embeddings)


def _write_shard(
    inputs: ShardInputs,
    folder: str,
    number: int,
    first: int,
    num_items: int,
    layout: Layout,
    threads: int,
) -> Shard | RecpruneError:
    try:
        arrays = inputs.read()[:3]
        return write_shard(folder, number, first, num_items, arrays, layout, threads)
    except RecpruneError as error:
        # As data: raised, Ray would wrap it in a traceback of its own.
        kind = InputError if isinstance(error, InputError) else StorageError
        return kind(str(error))
