"""`recprune recode`: a prepared log with the codes of a model that was trained on it."""

from __future__ import annotations

import argparse

from recprune.commands.console import say, showing_progress
from recprune.commands.log_options import add_seed_argument
from recprune.commands.tables import print_codebook
from recprune.preparation.codebook import check_size
from recprune.preparation.prepared import KIND, Prepared
from recprune.storage import check_target
from recprune.training.recoding import model_codebook, with_codebook


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prepared", metavar="PREPARED", help="made by recprune prepare")
    parser.add_argument("model", metavar="MODEL", help="made from it by recprune train")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="folder to write")
    parser.add_argument(
        "--splits", type=int, metavar="M", help="that a full table is cut into; default 16"
    )
    parser.add_argument("--sub-items", type=int, metavar="B", help="of each; default 256")
    add_seed_argument(parser)


def run(parsed: argparse.Namespace) -> None:
    check_target(parsed.out, kind=KIND)
    check_size(
        1 if parsed.splits is None else parsed.splits,
        1 if parsed.sub_items is None else parsed.sub_items,
    )
    prepared = Prepared.load(parsed.prepared)
    with showing_progress("recoding") as progress:
        codebook = model_codebook(
            prepared,
            parsed.model,
            num_splits=parsed.splits,
            num_sub_items=parsed.sub_items,
            seed=parsed.seed,
            progress=progress,
        )
        progress("saving")
        with_codebook(prepared, codebook).save(parsed.out)
    print_codebook(codebook)
    say(f"saved to {parsed.out}; next: recprune train {parsed.out} --out MODEL")
