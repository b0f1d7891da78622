"""The options of every command that assigns sub-item ids, and the assignment."""

from __future__ import annotations

import argparse

from recprune.data.interactions import Interactions
from recprune.preparation.codebook import Codebook, assign_random, assign_svd
from recprune.types import Progress


def add_codebook_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the size of a codebook, and which part of the log it sees."""
    parser.add_argument("--splits", type=int, default=8, metavar="M", help="default %(default)s")
    parser.add_argument(
        "--sub-items", type=int, default=256, metavar="B", help="per split; default %(default)s"
    )
    parser.add_argument(
        "--train-fraction",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="of the interactions, for a temporal hold-out; default %(default)s",
    )


def assign(
    method: str, train: Interactions, parsed: argparse.Namespace, progress: Progress
) -> Codebook:
    """Return the codebook of a training log by the method of that name."""
    sizes = {"num_splits": parsed.splits, "num_sub_items": parsed.sub_items, "seed": parsed.seed}
    if method == "svd":
        return assign_svd(train, progress=progress, **sizes)
    return assign_random(train.num_items, item_ids=train.item_ids, **sizes)
