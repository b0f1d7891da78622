"""`recprune export`: a trained model and its catalogue become one recommender."""

from __future__ import annotations

import argparse

from recprune.commands.console import say, showing_progress
from recprune.preparation.prepared import Prepared
from recprune.recommender import KIND, Recommender
from recprune.storage import check_target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prepared", metavar="PREPARED", help="made by recprune prepare")
    parser.add_argument("model", metavar="MODEL", help="made from it by recprune train")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="folder to write")


def run(parsed: argparse.Namespace) -> None:
    check_target(parsed.out, kind=KIND)
    with showing_progress("exporting") as progress:
        progress("reading")
        recommender = Recommender.from_training(Prepared.load(parsed.prepared), parsed.model)
        progress("saving")
        recommender.save(parsed.out)
    say(f"saved {recommender!r} to {parsed.out}")
