"""`recprune index`: build an index, in one piece, live or in shards; change or look at one."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args

from recprune.commands.folded import folded
from recprune.commands.live_actions import add_live_actions, read_ids
from recprune.commands.vector_options import (
    add_vector_arguments,
    build_from_vectors,
    print_vector_index,
    refuse_vector_options,
)
from recprune.live.generation import is_live
from recprune.live.live_index import LiveIndex
from recprune.preparation.codebook import Codebook
from recprune.search.index import KIND, Index
from recprune.search.index_arrays import Layout
from recprune.shards.folder import (
    ShardInputs,
    is_sharded,
    load_shard,
    read_folder,
    shard_folder,
    write_shards,
)
from recprune.storage import check_target, read_npy, saved_kind
from recprune.types import InputError, Json
from recprune.vectors.vector_index import KIND as VECTORS
from recprune.vectors.vector_index import VectorIndex


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    build = actions.add_parser("build", help="lay out codes and sub-item embeddings")
    build.add_argument(
        "codes",
        nargs="?",
        metavar="CODES",
        help="a saved codebook, or an .npy of uint8 or uint16 [n, M]",
    )
    build.add_argument(
        "embeddings", nargs="?", metavar="EMBEDDINGS", help=".npy of float32 [M, B, d/M]"
    )
    add_vector_arguments(build)
    build.add_argument("--out", required=True, metavar="FOLDER", help="folder to write")
    build.add_argument("--item-bias", metavar="FILE", help=".npy of float32 [n]")
    build.add_argument(
        "--layout",
        choices=get_args(Layout),
        default="auto",
        help="slim leaves out what a scan reads, compact has nothing else; default %(default)s, "
        "which is full",
    )
    build.add_argument("--threads", type=int, default=1, help="default %(default)s")
    build.add_argument(
        "--live", action="store_true", help="as a live index, to which items can be added later"
    )
    build.add_argument(
        "--item-ids",
        metavar="FILE",
        help="external ids of a live index, or of vectors: .npy, or text with one in a line",
    )
    build.set_defaults(action_run=_build)
    add_live_actions(actions)
    shard = actions.add_parser("shard", help="write an index in shards, to be searched on Ray")
    shard.add_argument(
        "codes",
        metavar="CODES|INDEX",
        help="a saved codebook or an .npy of uint8 or uint16 [n, M]; or a saved index, or "
        "recommender",
    )
    shard.add_argument(
        "embeddings",
        nargs="?",
        metavar="EMBEDDINGS",
        help=".npy of float32 [M, B, d/M]; an index has its own",
    )
    shard.add_argument("--shards", type=int, required=True, metavar="N", help="how many")
    shard.add_argument("--out", required=True, metavar="FOLDER", help="folder to write")
    shard.add_argument("--item-bias", metavar="FILE", help=".npy of float32 [n]")
    shard.add_argument(
        "--layout",
        choices=get_args(Layout),
        default="auto",
        help="default %(default)s: that of the index, or full",
    )
    shard.add_argument("--threads", type=int, default=1, help="for a shard; default %(default)s")
    shard.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="build all shards at the same time, on this Ray cluster (or auto, or local)",
    )
    shard.set_defaults(action_run=_shard)
    info = actions.add_parser("info", help="say what a saved index holds and costs")
    info.add_argument("index", metavar="FOLDER")
    info.add_argument(
        "--verify", action="store_true", help="compare every byte with its checksum, of shards too"
    )
    info.set_defaults(action_run=_info)


def run(parsed: argparse.Namespace) -> None:
    parsed.action_run(parsed)


def _build(parsed: argparse.Namespace) -> None:
    if parsed.vectors is not None:
        build_from_vectors(parsed)
        return
    if parsed.codes is None or parsed.embeddings is None:
        raise InputError("an index is built from CODES and EMBEDDINGS, or from --vectors")
    refuse_vector_options(parsed)
    if parsed.item_ids and not parsed.live:
        raise InputError(
            "--item-ids goes with --live or --vectors: other indexes know items by their numbers"
        )
    if not parsed.live:
        check_target(parsed.out, kind=KIND)
    codes = (
        Codebook.load(parsed.codes).codes if Path(parsed.codes).is_dir() else read_npy(parsed.codes)
    )
    embeddings = read_npy(parsed.embeddings)
    bias = read_npy(parsed.item_bias) if parsed.item_bias else None
    if parsed.live:
        live = LiveIndex.create(
            parsed.out,
            codes,
            embeddings,
            item_bias=bias,
            item_ids=read_ids(parsed.item_ids) if parsed.item_ids else None,
            layout=parsed.layout,
            threads=parsed.threads,
        )
        _print_lines(live.describe())
        live.close()
        return
    index = Index.build(
        codes, embeddings, item_bias=bias, layout=parsed.layout, threads=parsed.threads
    )
    index.save(parsed.out)
    _print_lines(index.describe())


def _shard(parsed: argparse.Namespace) -> None:
    if is_live(parsed.codes):
        raise InputError(
            f"{parsed.codes}: a live index, which is divided where it lies: recprune index compact "
            f"{parsed.codes} --shards {parsed.shards}"
        )
    inputs = ShardInputs(parsed.codes, parsed.embeddings, parsed.item_bias)
    if parsed.address is not None:
        from recprune.shards.building import build_shards_on_ray

        build_shards_on_ray(
            inputs,
            parsed.out,
            parsed.shards,
            layout=parsed.layout,
            threads=parsed.threads,
            address=parsed.address,
            progress=_say,
        )
    else:
        codes, embeddings, bias, own_layout = inputs.read()
        layout = own_layout if parsed.layout == "auto" else parsed.layout
        write_shards(
            codes,
            embeddings,
            parsed.out,
            parsed.shards,
            item_bias=bias,
            layout=layout,
            threads=parsed.threads,
            progress=_say,
        )
    _print_lines(read_folder(parsed.out).describe())


def _info(parsed: argparse.Namespace) -> None:
    if is_live(parsed.index):
        with LiveIndex.open(parsed.index, verify=parsed.verify) as live:
            _print_lines(live.describe())
        return
    if is_sharded(parsed.index):
        sharded = read_folder(parsed.index)
        for shard in sharded.shards if parsed.verify else ():
            place = shard_folder(sharded.path, shard.number)
            load_shard(place, shard)
        _print_lines(sharded.describe())
        return
    if saved_kind(parsed.index) == VECTORS:
        print_vector_index(VectorIndex.load(parsed.index, verify=parsed.verify))
        return
    _print_lines(Index.load(parsed.index, verify=parsed.verify).describe())


def _say(step: str) -> None:
    print(step, file=sys.stderr)  # noqa: T201


def _print_lines(values: Json) -> None:
    for name, value in values.items():
        shown = ", ".join(value) if isinstance(value, list) else value
        print(folded(f"{name.replace('_', ' '):16} ", str(shown)))  # noqa: T201
