"""What is searched: the folder's own index, or one in shards on a Ray cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeAlias

import numpy as np

from recprune.live.snapshot import LiveSnapshot
from recprune.recommender.saving import KIND as RECOMMENDER
from recprune.search.index import KIND as INDEX
from recprune.search.index import Index
from recprune.search.top_k import TopK
from recprune.serve.configuration import ServeSettings
from recprune.shards.answers import ShardedTopK
from recprune.shards.folder import KIND as SHARDED_INDEX
from recprune.shards.folder import ShardLostError
from recprune.shards.live_shards import ShardedSnapshot
from recprune.shards.sharded_index import ShardedIndex
from recprune.storage import MANIFEST, looks_like, read_manifest
from recprune.types import Float32Array, InputError, StorageError
from recprune.vectors.vector_index import KIND as VECTORS

Searched: TypeAlias = Index | ShardedIndex | LiveSnapshot

_TRIED = 4  # sequence embeddings that shards and index have to answer alike
_TRIED_K = 100


def kind_and_version(folder: Path) -> tuple[str, str]:
    """Return what a folder holds, and which version of it."""
    if folder.is_dir() and os.access(folder, os.X_OK) and not (folder / MANIFEST).exists():
        raise StorageError(
            f"{folder}: has no {MANIFEST}: expected a folder made by `recprune export` or "
            f"`recprune index build`{looks_like(folder)}"
        )
    manifest = read_manifest(folder, "recommender or index")
    kind, version = manifest["kind"], str(manifest["sha256"])[:12]
    if kind not in (RECOMMENDER, INDEX, VECTORS, SHARDED_INDEX):
        raise StorageError(f"{folder}: holds a saved {kind}; expected a recommender or an index")
    return kind, version


def sharded_folder(settings: ServeSettings) -> Path | None:
    """Return where the shards to be searched lie; refuse options that do not go with the folder."""
    kind, _ = kind_and_version(settings.folder)
    if settings.fold_in is not None and settings.ray is not None:
        raise InputError("--fold-in: workers of one machine do that; give --fold-in or --ray")
    if kind == VECTORS and settings.ray is not None:
        raise InputError(
            f"--ray: {settings.folder} holds a saved {kind}, which is not searched in shards"
        )
    if settings.live is not None:
        if kind != RECOMMENDER:
            raise InputError(
                f"--live: {settings.folder} holds a saved {kind}, expected a recommender"
            )
        if settings.shards is not None:
            raise InputError(
                "--live: has shards of its own, which --ray searches; give --live or --shards, one "
                "of them"
            )
        if settings.ray is not None:
            return settings.live
    if kind != SHARDED_INDEX:
        if settings.ray is not None and settings.shards is None:
            raise InputError(
                f"--ray: {settings.folder} holds a saved {kind}, which is not in shards: give "
                "--shards SHARDS, made of it by `recprune index shard`"
            )
        return settings.shards
    if settings.ray is None:
        raise InputError(
            f"{settings.folder}: holds a sharded index, which is searched on Ray: give --ray, "
            "with local, auto or the HOST:PORT of a cluster"
        )
    if settings.shards is not None:
        raise InputError(f"--shards: {settings.folder} is a sharded index itself; give one of them")
    return settings.folder


def check_shards(
    shards: ShardedIndex | ShardedSnapshot, index: Index | LiveSnapshot, folder: Path
) -> None:
    """Refuse shards that are not those of the index: what they say, and what they answer."""
    for name in ("num_items", "num_splits", "num_sub_items", "width"):
        ours, theirs = getattr(index, name), getattr(shards, name)
        if ours != theirs:
            what = name.removeprefix("num_").replace("_", "-")
            raise StorageError(
                f"{folder}: the shards are not those of the folder that is served: {what} "
                f"{theirs}, expected {ours}"
            )
    ours, theirs = index.sub_item_embeddings(), shards.sub_item_embeddings()
    if not _same_bits(ours, theirs):
        raise StorageError(
            f"{folder}: the shards are not those of the folder that is served: their sub-item "
            "embeddings differ"
        )
    rng = np.random.default_rng(0)
    queries = rng.standard_normal((_TRIED, index.width)).astype(np.float32)
    found = shards.search(queries, _TRIED_K)
    is_part = isinstance(found, ShardedTopK) and found.missing_share
    if not (_same_parts(found, queries, index) if is_part else _same(found, queries, index)):
        raise StorageError(
            f"{folder}: the shards are not those of the folder that is served: they answer "
            "differently"
        )


async def check_not_lost(index: Searched) -> None:
    """Ask shards again that gave no answer; raise if one of them still gives none."""
    if isinstance(index, ShardedIndex) and index.lost_shards():
        await index.ask_lost_shards()
        for lost in index.lost_shards():
            raise ShardLostError(f"no replica answers for {lost}")


def size_of(index: Searched) -> int:
    """Return the size of an index in bytes, without asking its shards."""
    if isinstance(index, ShardedIndex):
        return index.stored_bytes()
    return int(index.describe()["bytes"])


def _same(found: TopK, queries: Float32Array, index: Index | LiveSnapshot) -> bool:
    expected = index.search(queries, _TRIED_K)
    return np.array_equal(found.ids, expected.ids) and _same_bits(found.scores, expected.scores)


def _same_parts(found: TopK, queries: Float32Array, index: Index | LiveSnapshot) -> bool:
    """Say whether what is there has the right scores, where a shard is missing."""
    rows = zip(queries, found.ids, found.scores, strict=True)
    return all(
        _same_bits(index.score(query, ids[ids >= 0]), scores[ids >= 0])
        for query, ids, scores in rows
    )


def _same_bits(first: Float32Array, second: Float32Array) -> bool:
    return np.array_equal(
        np.ascontiguousarray(first).view(np.uint32), np.ascontiguousarray(second).view(np.uint32)
    )
