"""`recprune codebook`: sub-item ids for the items of a log."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from recprune.commands.codebook_options import add_codebook_arguments, assign
from recprune.commands.console import say, showing_progress
from recprune.commands.log_options import add_log_arguments, add_seed_argument, read_log
from recprune.commands.tables import print_codebook, print_holdout
from recprune.data.interactions import Interactions
from recprune.data.statistics import iso_time
from recprune.preparation.codebook import KIND, check_size
from recprune.preparation.holdout import Holdout, leave_one_out, temporal_holdout
from recprune.storage import check_target
from recprune.types import Json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_log_arguments(parser)
    parser.add_argument("--out", required=True, metavar="FOLDER", help="folder to write")
    parser.add_argument(
        "--method",
        choices=("svd", "random"),
        default="svd",
        help="svd: items liked by the same users share sub-item ids; default %(default)s",
    )
    parser.add_argument(
        "--holdout",
        choices=("temporal", "leave-one-out", "none"),
        default="temporal",
        help="what the codebook may not see; default %(default)s",
    )
    add_codebook_arguments(parser)
    add_seed_argument(parser)


def run(parsed: argparse.Namespace) -> None:
    check_target(parsed.out, kind=KIND)
    check_size(parsed.splits, parsed.sub_items)
    log = read_log(parsed)
    if parsed.method == "random":
        parsed.holdout = "none"  # chance needs no training
    train, training = _training_log(log, parsed)
    with showing_progress("codebook") as progress:
        codebook = assign(parsed.method, train, parsed, progress)
        codebook = dataclasses.replace(
            codebook, settings=codebook.settings | {"training": training}
        )
        progress("saving")
        codebook.save(parsed.out)
    print_codebook(codebook)
    say(f"saved to {parsed.out}")


def _training_log(log: Interactions, parsed: argparse.Namespace) -> tuple[Interactions, Json]:
    """Return what the codebook may see, and how that was chosen."""
    training: Json = {
        "log": Path(parsed.log).name,
        "min_interactions": parsed.min_interactions,
        "holdout": parsed.holdout,
    }
    if parsed.holdout == "none":
        return log, training
    held_out: Holdout
    if parsed.holdout == "temporal":
        held_out = temporal_holdout(log, train_fraction=parsed.train_fraction, seed=parsed.seed)
        training |= {
            "train_fraction": parsed.train_fraction,
            "cut_time": iso_time(held_out.cut_time or 0),
        }
    else:
        held_out = leave_one_out(log, seed=parsed.seed)
    print_holdout(held_out)
    return held_out.train, training
