"""`recprune prepare`: hold-out and codebook of a log, ready to train on anywhere."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from recprune.commands.codebook_options import add_codebook_arguments, assign
from recprune.commands.console import say, showing_progress
from recprune.commands.log_options import add_log_arguments, add_seed_argument, read_log
from recprune.commands.tables import print_codebook, print_holdout
from recprune.data.content import Content, read_content
from recprune.data.interactions import Interactions
from recprune.data.statistics import iso_time
from recprune.preparation.codebook import check_size
from recprune.preparation.cold_items import find_cold_items
from recprune.preparation.holdout import (
    DEFAULT_VALIDATION_USERS,
    Validation,
    leave_one_out,
    no_holdout,
    temporal_holdout,
)
from recprune.preparation.prepared import KIND, prepare
from recprune.storage import check_target
from recprune.types import MAX_SUB_ITEMS, InputError, Json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_log_arguments(parser)
    parser.add_argument("--out", required=True, metavar="FOLDER", help="folder to write")
    parser.add_argument(
        "--holdout",
        choices=("temporal", "leave-one-out", "none"),
        default="temporal",
        help="the paper's global cut in time, every user's last item, or nothing: all of the log "
        "then trains, without validation and test users; default %(default)s",
    )
    parser.add_argument(
        "--min-history",
        type=int,
        default=1,
        metavar="N",
        help="drop users with fewer interactions before the cut; default %(default)s",
    )
    parser.add_argument(
        "--validation-users",
        type=int,
        default=DEFAULT_VALIDATION_USERS,
        metavar="N",
        help="users whose last training item is for early stopping; default %(default)s",
    )
    parser.add_argument(
        "--validation",
        choices=get_args(Validation),
        default="last",
        help="their target: the last item before the cut; the first of the last items at one time; "
        "or, as the test asks, the first item after a cut, an earlier one; default %(default)s",
    )
    parser.add_argument(
        "--assignment",
        choices=("svd", "random"),
        default="svd",
        help="of sub-item ids; default %(default)s",
    )
    parser.add_argument(
        "--content",
        metavar="FILE",
        help="what items are: CSV, TSV, Parquet or JSON lines with ids and texts or vectors, or "
        ".npz with the arrays ids and vectors; places items that have no training interaction",
    )
    parser.add_argument("--content-item", metavar="NAME", help="column of ids; default: detected")
    parser.add_argument(
        "--content-text",
        action="append",
        default=[],
        metavar="NAME",
        help="column of texts, also several times; default: all of them",
    )
    parser.add_argument(
        "--content-vector", metavar="NAME", help="column of vectors; default: detected"
    )
    add_codebook_arguments(parser)
    add_seed_argument(parser)


def run(parsed: argparse.Namespace) -> None:
    check_target(parsed.out, kind=KIND)
    check_size(parsed.splits, parsed.sub_items)
    if parsed.validation != "last" and parsed.holdout != "temporal":
        raise InputError(
            f"--validation {parsed.validation} goes with --holdout temporal: "
            f"{parsed.holdout} has no cut in time"
        )
    if not parsed.content and (parsed.content_item or parsed.content_text or parsed.content_vector):
        raise InputError("--content-item, --content-text and --content-vector go with --content")
    log = read_log(parsed)
    content = _read_content(log, parsed)
    settings: Json = {
        "log": Path(parsed.log).name,
        "min_interactions": parsed.min_interactions,
        "holdout": parsed.holdout,
        "seed": parsed.seed,
    }
    if parsed.holdout == "temporal":
        holdout = temporal_holdout(
            log,
            train_fraction=parsed.train_fraction,
            validation_users=parsed.validation_users,
            validation=parsed.validation,
            min_history=parsed.min_history,
            seed=parsed.seed,
        )
        settings |= {
            "train_fraction": parsed.train_fraction,
            "min_history": parsed.min_history,
            "validation": parsed.validation,
            "cut_time": iso_time(holdout.cut_time or 0),
        }
    elif parsed.holdout == "none":
        holdout = no_holdout(log)
    else:
        holdout = leave_one_out(log, validation_users=parsed.validation_users, seed=parsed.seed)
    print_holdout(holdout)
    with showing_progress("preparing") as progress:
        codebook = assign(parsed.assignment, holdout.train, parsed, progress)
        cold = None
        if content is not None:
            cold = find_cold_items(content, holdout.train, progress=progress)
            settings |= {"content": Path(parsed.content).name}
        progress("saving")
        prepare(holdout, codebook, settings, cold).save(parsed.out)
    print_codebook(codebook)
    if cold is not None:
        say(f"{len(cold):,} of them get their place from content")
    say(_form_of_items(holdout.log.num_items))
    options = ""
    if parsed.holdout == "none":
        options = " --epochs-of EARLIER --settings EARLIER/settings.json"
    say(f"saved to {parsed.out}; next: recprune train {parsed.out} --out MODEL{options}")


def _read_content(log: Interactions, parsed: argparse.Namespace) -> Content | None:
    """Read what items are, and say how much of it concerns this log."""
    if not parsed.content:
        return None
    with showing_progress("content") as progress:
        progress(f"reading {Path(parsed.content).name}")
        content = read_content(
            parsed.content,
            log.item_ids,
            item_column=parsed.content_item,
            text_columns=parsed.content_text,
            vector_column=parsed.content_vector,
        )
    say(
        f"{parsed.content}: describes {len(content.items):,} of {log.num_items:,} items; "
        f"{content.unknown:,} others are not in the log"
    )
    return content


def _form_of_items(num_items: int) -> str:
    """Say what training makes of so many items, unless a preset has these codes."""
    if num_items > MAX_SUB_ITEMS:
        return f"over {MAX_SUB_ITEMS:,} items: the default preset learns codes of its own"
    return (
        f"{num_items:,} items are few enough for a full table: the default preset trains one, "
        "learns codes from it, and keeps what validates better"
    )
