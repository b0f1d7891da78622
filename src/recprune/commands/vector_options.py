"""`recprune index build --vectors`: an index of vectors, and what quantising them costs."""

from __future__ import annotations

import argparse

from recprune.commands.console import print_table, say, showing_progress
from recprune.commands.live_actions import read_ids
from recprune.storage import check_target, read_npy
from recprune.types import InputError
from recprune.vectors.vector_index import KIND, VectorIndex

_OPTIONS = {"queries": None, "splits": None, "recall": None, "without_vectors": False}


def add_vector_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the vectors, and how they are quantised."""
    parser.add_argument(
        "--vectors",
        metavar="FILE",
        help=".npy of floats [n, d], in place of CODES and EMBEDDINGS: they are quantised",
    )
    parser.add_argument(
        "--queries",
        metavar="FILE",
        help="with --vectors: .npy of floats [q, d] such as will be asked, to measure recall by",
    )
    parser.add_argument(
        "--recall",
        type=float,
        metavar="SHARE",
        help="with --vectors: as many bytes a code as that takes, of 8, 16, 32, 64; default 0.9",
    )
    parser.add_argument(
        "--splits", type=int, metavar="M", help="with --vectors: so many bytes a code instead"
    )
    parser.add_argument(
        "--without-vectors",
        action="store_true",
        help="with --vectors: keep codes alone, with which nothing can be ranked anew",
    )


def refuse_vector_options(parsed: argparse.Namespace) -> None:
    """Refuse what goes with vectors where there are none."""
    for name, usual in _OPTIONS.items():
        if getattr(parsed, name) != usual:
            raise InputError(f"--{name.replace('_', '-')} goes with --vectors")


def build_from_vectors(parsed: argparse.Namespace) -> None:
    """Quantise vectors, save the index, and print what that costs."""
    if parsed.codes is not None or parsed.item_bias is not None or parsed.live:
        raise InputError("--vectors goes without CODES, EMBEDDINGS, --item-bias and --live")
    if parsed.splits is not None and parsed.recall is not None:
        raise InputError("--splits or --recall: one decides, or the other")
    check_target(parsed.out, kind=KIND)
    vectors = read_npy(parsed.vectors)
    ids = read_ids(parsed.item_ids) if parsed.item_ids else None
    queries = read_npy(parsed.queries) if parsed.queries else None
    with showing_progress("index of vectors") as progress:
        index = VectorIndex.build(
            vectors,
            ids,
            num_splits=parsed.splits,
            recall=0.9 if parsed.recall is None else parsed.recall,
            queries=queries,
            keep_vectors=not parsed.without_vectors,
            layout=parsed.layout,
            threads=parsed.threads,
            progress=progress,
        )
        progress("saving")
        index.save(parsed.out)
    print_vector_index(index)
    if queries is None:
        say(
            "recall is over items as queries; --queries FILE measures it over such as will be asked"
        )


def print_vector_index(index: VectorIndex) -> None:
    """Print what an index of vectors holds, and the recall that was measured when it was built."""
    print_table(
        repr(index),
        ("splits", "bytes a code", "recall@10 by codes", "best 100 by codes, ranked by vectors"),
        [
            (
                str(recall.num_splits),
                str(recall.bytes_per_item),
                f"{recall.by_codes:.4f}",
                f"{recall.reranked:.4f}",
            )
            for recall in index.recalls
        ],
    )
