"""`recprune attributes`: what items are like, from a file, for conditions on them."""

from __future__ import annotations

import argparse

from recprune.attributes.attributes import KIND, Attributes
from recprune.commands.console import say, showing_progress
from recprune.data.identifiers import FoundIds, RowNumbers
from recprune.live.generation import is_live
from recprune.live.live_index import LiveIndex
from recprune.live.snapshot_ids import SnapshotIds
from recprune.recommender.recommender import Recommender
from recprune.recommender.saving import KIND as RECOMMENDER
from recprune.search.index import KIND as INDEX
from recprune.search.index import Index
from recprune.storage import check_target, saved_kind
from recprune.types import InputError
from recprune.vectors.vector_index import KIND as VECTORS
from recprune.vectors.vector_index import VectorIndex


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        help="a recommender, or an index, live or not, whose items these are",
    )
    parser.add_argument(
        "items", metavar="FILE", help="Parquet, Arrow, CSV, TSV or JSON lines: a row an item"
    )
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        help="of a recommender: where it is saved with its attributes, default: in its place; of "
        "an index: where the attributes are saved",
    )
    parser.add_argument("--item-column", metavar="NAME", help="which one has the ids")
    parser.add_argument(
        "--columns", metavar="NAME,...", help="which ones to take; default: all others"
    )


def run(parsed: argparse.Namespace) -> None:
    live = is_live(parsed.folder)
    kind = INDEX if live else saved_kind(parsed.folder)
    is_index = kind in (INDEX, VECTORS)
    if is_index and parsed.out is None:
        raise InputError(f"{parsed.folder} is an index: say with --out where its attributes go")
    if parsed.out is not None:
        check_target(parsed.out, kind=KIND if is_index else RECOMMENDER)
    with showing_progress("attributes") as progress:
        progress("reading")
        if is_index:
            attributes = _read(parsed, _live_ids(parsed) if live else _index_ids(parsed, kind))
            progress("saving")
            attributes.save(parsed.out)
        else:
            recommender = Recommender.load(parsed.folder)
            attributes = _read(parsed, recommender.item_ids)
            progress("saving")
            recommender.with_attributes(attributes).save(parsed.out or parsed.folder)
    for name, described in attributes.kinds.items():
        say(f"{name}: {described}")
    if attributes.unknown:
        say(f"{attributes.unknown:,} rows of items that the catalogue does not have: left out")
    say(f"saved {attributes!r} in {parsed.out or parsed.folder}")


def _index_ids(parsed: argparse.Namespace, kind: str | None) -> FoundIds:
    if kind == VECTORS:
        return VectorIndex.load(parsed.folder).item_ids
    return RowNumbers(Index.load(parsed.folder).num_items)


def _live_ids(parsed: argparse.Namespace) -> FoundIds:
    with LiveIndex.open(parsed.folder) as live:
        snapshot = live.snapshot()
    return RowNumbers(snapshot.num_items) if snapshot.id_kind == "none" else SnapshotIds(snapshot)


def _read(parsed: argparse.Namespace, item_ids: FoundIds) -> Attributes:
    columns = None
    if parsed.columns is not None:
        columns = [name.strip() for name in parsed.columns.split(",") if name.strip()]
    return Attributes.read(parsed.items, item_ids, item_column=parsed.item_column, columns=columns)
