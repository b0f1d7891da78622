"""`recprune items`: items that a recommender does not know yet."""

from __future__ import annotations

import argparse
from pathlib import Path

from recprune.commands.console import print_table, say, showing_progress
from recprune.commands.log_options import (
    add_optional_log_arguments,
    add_seed_argument,
    check_log_options,
    read_log,
)
from recprune.data.identifiers import ExternalId
from recprune.live.given_changes import KnownItemError
from recprune.live.live_index import LiveIndex
from recprune.recommender.newcomers.fold_in import DEFAULT_EVENTS, FoldedItems, fold_in
from recprune.recommender.recommender import Recommender
from recprune.storage import writing_file
from recprune.types import InputError, needs_extra

with needs_extra("data"):
    import pyarrow as pa
    import pyarrow.parquet as pq


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    fold = actions.add_parser(
        "fold-in",
        help="give items codes that came after the training",
        description="Give codes to the items that a recommender does not know: by who took them "
        "first, in a log, by content, or by both. Write the codes, or put the items into a live "
        "index, all of them in one change.",
    )
    fold.add_argument("recommender", metavar="RECOMMENDER", help="made by recprune export")
    add_optional_log_arguments(fold)
    fold.set_defaults(action_run=_fold_in)
    fold.add_argument(
        "--content",
        metavar="FILE",
        help="what new and old items are: CSV, TSV, Parquet or JSON lines with ids and texts or "
        "vectors, or .npz with the arrays ids and vectors",
    )
    fold.add_argument("--content-item", metavar="NAME", help="its column of ids; default: detected")
    fold.add_argument(
        "--events",
        type=int,
        default=DEFAULT_EVENTS,
        metavar="N",
        help="of each item, the first ones, that are looked at; default %(default)s",
    )
    target = fold.add_mutually_exclusive_group(required=True)
    target.add_argument(
        "--live", metavar="FOLDER", help="a live index, made by recprune index live: to put them in"
    )
    target.add_argument(
        "--out", metavar="FILE", help="Parquet to write: item_id, code, events, by_content"
    )
    fold.add_argument(
        "--replace",
        action="store_true",
        help="with --live: items that it has already get other codes too",
    )
    fold.add_argument("--threads", type=int, default=1, help="default %(default)s")
    add_seed_argument(fold)


def run(parsed: argparse.Namespace) -> None:
    parsed.action_run(parsed)


def _fold_in(parsed: argparse.Namespace) -> None:
    if parsed.replace and parsed.live is None:
        raise InputError("--replace goes with --live")
    if parsed.log is None and parsed.content is None:
        raise InputError("nothing to go by: give a LOG, or --content FILE, or both")
    if parsed.content is None and parsed.content_item is not None:
        raise InputError("--content-item goes with --content")
    check_log_options(parsed, "a LOG")
    if parsed.out is not None:
        _check_out(Path(parsed.out))
    recommender = Recommender.load(parsed.recommender, threads=parsed.threads)
    if parsed.live is None:
        _write(Path(parsed.out), _folded(recommender, parsed), recommender)
        return
    with LiveIndex.open(parsed.live) as live:
        recommender.with_live(live)  # which refuses one of another model
        _put(live, _folded(recommender, parsed), replace=parsed.replace)


def _folded(recommender: Recommender, parsed: argparse.Namespace) -> FoldedItems:
    log = None if parsed.log is None else read_log(parsed)
    with showing_progress("folding in") as progress:
        folded = fold_in(
            recommender,
            log,
            content=parsed.content,
            content_item=parsed.content_item,
            events=parsed.events,
            seed=parsed.seed,
            progress=progress,
        )
    took = folded.events > 0
    rows = [
        ("by events and content", int((took & folded.by_content).sum())),
        ("by events", int((took & ~folded.by_content).sum())),
        ("by content", int((~took & folded.by_content).sum())),
        ("nothing to go by", len(folded.left_out)),
    ]
    print_table(
        "Items that the recommender does not know",
        ("", "items"),
        [(name, f"{count:,}") for name, count in rows],
    )
    return folded


def _put(live: LiveIndex, folded: FoldedItems, *, replace: bool) -> None:
    there = live.find(folded.item_ids) >= 0
    kept = [place for place, known in enumerate(there.tolist()) if replace or not known]
    names: list[ExternalId] = [folded.item_ids[place] for place in kept]
    if names:
        try:
            live.put(names, folded.codes[kept], replace=replace)
        except KnownItemError as error:
            raise InputError(
                f"{live.folder}: {error.external_id!r} came while codes were looked for; nothing "
                "was put: try again"
            ) from None
        live.maintain()
    replaced = int(there.sum()) if replace else 0
    say(
        f"{live.folder}: {len(names) - replaced:,} items added, {replaced:,} replaced, "
        f"{len(folded) - len(names):,} left as they were; it has {live.num_present:,}"
    )


def _check_out(target: Path) -> None:
    if target.suffix.lower() not in (".parquet", ".pq"):
        raise InputError(f"{target}: a Parquet file is written, so its name must end in .parquet")
    if target.is_dir():
        raise InputError(f"{target}: is a folder, expected the name of a file to write")
    if not target.parent.is_dir():
        raise InputError(f"{target}: the folder {target.parent} does not exist")


def _write(target: Path, folded: FoldedItems, recommender: Recommender) -> None:
    kind = pa.string() if recommender.item_ids.are_strings else pa.int64()
    code = pa.list_(pa.from_numpy_dtype(folded.codes.dtype))
    table = pa.table(
        {
            "item_id": pa.array(folded.item_ids, kind),
            "code": pa.array([*folded.codes], code),
            "events": pa.array(folded.events),
            "by_content": pa.array(folded.by_content),
        }
    )
    with writing_file(target) as temporary:
        pq.write_table(table, temporary, compression="zstd")
    say(f"wrote {len(folded):,} codes to {target}")
