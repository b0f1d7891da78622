"""`recprune export`: a trained model and its catalogue become one recommender."""

from __future__ import annotations

import argparse

from recprune.commands.console import say, showing_progress
from recprune.preparation.prepared import Prepared
from recprune.recommender.recommender import Recommender
from recprune.recommender.saving import KIND
from recprune.storage import check_target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prepared", metavar="PREPARED", help="made by recprune prepare")
    parser.add_argument("model", metavar="MODEL", help="made from it by recprune train")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="folder to write")
    parser.add_argument(
        "--encoder-precision",
        choices=("float32", "int8"),
        default="float32",
        help="of the encoder's weights: int8 is faster, and moves recommendations a little; "
        "default %(default)s",
    )


def run(parsed: argparse.Namespace) -> None:
    check_target(parsed.out, kind=KIND)
    with showing_progress("exporting") as progress:
        progress("reading")
        recommender = Recommender.from_training(
            Prepared.load(parsed.prepared),
            parsed.model,
            encoder_precision=parsed.encoder_precision,
        )
        progress("saving")
        recommender.save(parsed.out)
    say(f"saved {recommender!r} to {parsed.out}")
