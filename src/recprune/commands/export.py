"""`recprune export`: a trained model and its catalogue become one recommender."""

from __future__ import annotations

import argparse

import numpy as np

from recprune.commands.console import say, showing_progress
from recprune.preparation.prepared import Prepared
from recprune.recommender.recommender import Recommender
from recprune.recommender.saving import KIND, saved_attributes
from recprune.storage import check_target, saved_kind
from recprune.types import StorageError


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
        recommender, kept = _with_attributes_of(parsed.out, recommender)
        progress("saving")
        recommender.save(parsed.out)
    if kept is not None:
        say(kept)
    say(f"saved {recommender!r} to {parsed.out}")


def _with_attributes_of(folder: str, new: Recommender) -> tuple[Recommender, str | None]:
    """Return a recommender with the attributes of the one whose place it takes, if it has any.

    And what is to be said of them.
    """
    if saved_kind(folder) != KIND:
        return new, None
    gone = f"gone: `recprune attributes {folder} FILE` adds them again"
    try:
        saved = saved_attributes(folder)
    except StorageError as error:
        return new, f"{error}: if the recommender of before had attributes, they are {gone}"
    if saved is None:
        return new, None
    item_ids, attributes = saved
    names = ", ".join(attributes.columns)
    found = item_ids.find_all(new.item_ids.take(range(len(new.item_ids)))) >= 0
    if not found.any():
        return new, f"no item is the same as before, so that the attributes {names} are {gone}"
    said = f"kept the attributes {names}"
    if not found.all():
        said += (
            f" of {np.count_nonzero(found):,} items; {np.count_nonzero(~found):,} are new and have "
            f"none: `recprune attributes {folder} FILE` adds them"
        )
    return new.with_attributes(attributes.carried_over(item_ids, new.item_ids)), said
