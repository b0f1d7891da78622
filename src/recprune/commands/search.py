"""`recprune search`: the exact top K from a saved index, or from a live one."""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import Any, TypeAlias

import numpy as np

from recprune.attributes.attributes import Attributes
from recprune.attributes.diversity import Limit, search_at_most
from recprune.commands.answer_options import add_filter_arguments, check_k, parse_boosts
from recprune.commands.folded import folded
from recprune.data.identifiers import ExternalId, RowNumbers, coerce_ids
from recprune.live.generation import is_live
from recprune.live.live_index import LiveIndex
from recprune.live.snapshot import LiveSnapshot
from recprune.search.checks import checked_k
from recprune.search.index import Index
from recprune.search.methods import METHODS, find_method
from recprune.search.top_k import TopK
from recprune.storage import read_npy, saved_kind
from recprune.types import InputError, Json
from recprune.vectors.vector_index import KIND as VECTORS
from recprune.vectors.vector_index import VectorIndex

_Searched: TypeAlias = Index | LiveSnapshot | VectorIndex  # that can be searched
_MOST_DIGITS = 18  # of an item number: what an int64 surely holds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("index", metavar="FOLDER")
    parser.add_argument("queries", metavar="QUERIES", help=".npy of float32 [queries, d]")
    parser.add_argument("-k", type=int, default=10, help="default %(default)s")
    parser.add_argument(
        "--boosts",
        type=parse_boosts,
        metavar="ITEM=NUMBER,...",
        help="added to the scores of these items, for every query: their numbers, or of vectors "
        "the external ids",
    )
    parser.add_argument(
        "--attributes",
        metavar="ATTRIBUTES",
        help="of the items, made by recprune attributes; for --where and --at-most",
    )
    add_filter_arguments(parser)
    parser.add_argument(
        "--method", default="auto", metavar="NAME", help=f"one of {', '.join(METHODS)}"
    )
    parser.add_argument(
        "--rerank",
        type=int,
        default=0,
        metavar="N",
        help="of an index of vectors: rank the best N by codes by the vectors themselves",
    )
    parser.add_argument("--threads", type=int, default=1, help="default %(default)s")
    parser.add_argument("--json", action="store_true", help="one JSON object a query, in lines")


def run(parsed: argparse.Namespace) -> None:
    check_k(parsed.k)
    index = _open(parsed.index)
    queries = np.atleast_2d(read_npy(parsed.queries))
    if parsed.rerank and not isinstance(index, VectorIndex):
        raise InputError(f"--rerank: {parsed.index} is no index of vectors")
    boosts = [_boosts(parsed.boosts, index)] * len(queries) if parsed.boosts else None
    attributes = _attributes(parsed, index)
    allow = limit = None
    if attributes is not None and parsed.where is not None:
        allow = attributes.where(parsed.where).words
    if attributes is not None and parsed.at_most is not None:
        limit = Limit(attributes.limited(*parsed.at_most), parsed.at_most[1])
    method = find_method(parsed.method)
    k = checked_k(parsed.k, index.num_items)
    if isinstance(index, VectorIndex):
        if limit is not None:
            raise InputError("--at-most is not for an index of vectors")
        top = index.search(
            queries,
            k,
            rerank=parsed.rerank,
            method=method,
            allow=allow,
            boosts=boosts,
            threads=parsed.threads,
        )
    else:
        top = search_at_most(
            index,
            queries,
            k,
            limit,
            method=lambda: method,
            allow=allow,
            boosts=boosts,
            threads=parsed.threads,
        )
    microseconds = top.stats.nanoseconds / 1000
    names = _external_ids(index, top)
    for query in range(len(queries)):
        ids, scores = top.ids[query].tolist(), top.scores[query].tolist()
        answer: Json = {
            "ids": ids,
            "scores": [score if math.isfinite(score) else None for score in scores],
            "method": top.stats.method[query],
            "exact": bool(top.stats.exact[query]),
            "microseconds": round(float(microseconds[query]), 1),
        }
        if names is not None:
            answer["external_ids"] = names[query]
        if parsed.json:
            print(json.dumps(answer))  # noqa: T201
        else:
            shown = ids if names is None else names[query]
            found = "  ".join(
                f"{name}:{score:.4f}"
                for item, name, score in zip(ids, shown, scores, strict=True)
                if item >= 0
            )
            if sys.stdout.isatty():
                begin = f"{query:<4} {answer['method']:11} {microseconds[query]:6.0f} µs  "
                print(folded(begin, found))  # noqa: T201
            else:  # a line for each, as other programs read them
                time = f"{microseconds[query]:.0f} µs"
                print(f"{query}\t{answer['method']}\t{time}\t{found}")  # noqa: T201


def _external_ids(index: _Searched, top: TopK) -> list[list[ExternalId | None]] | None:
    """Return what the items of an answer are called, None for padding; or None, if by numbers."""
    if isinstance(index, VectorIndex) and not isinstance(index.item_ids, RowNumbers):
        padding = [None] * top.ids.shape[1]
        return [[*row, *padding[len(row) :]] for row in index.external_ids(top)]
    if isinstance(index, LiveSnapshot) and index.id_kind != "none":
        return [index.external_ids(row) for row in top.ids]
    return None


def _open(folder: str) -> _Searched:
    if not is_live(folder):
        if saved_kind(folder) == VECTORS:
            return VectorIndex.load(folder)
        return Index.load(folder)
    with LiveIndex.open(folder) as live:
        return live.snapshot()


def _attributes(parsed: argparse.Namespace, index: _Searched) -> Attributes | None:
    if parsed.attributes is None:
        if parsed.where is not None or parsed.at_most is not None:
            raise InputError("--where and --at-most are about attributes: give --attributes too")
        return None
    attributes = Attributes.load(parsed.attributes)
    if attributes.num_items != index.num_items:
        raise InputError(
            f"{parsed.attributes}: attributes of {attributes.num_items} items, expected those of "
            f"the {index.num_items} of {parsed.index}"
        )
    return attributes


def _boosts(given: tuple[list[str], list[float]], index: _Searched) -> Any:
    """Return the items that are boosted, by their numbers, and by how much."""
    items, values = given
    if isinstance(index, VectorIndex) and not isinstance(index.item_ids, RowNumbers):
        found = index.item_ids.find_all(coerce_ids(index.item_ids, items))
        if (found < 0).any():
            raise InputError(f"--boosts: {items[int((found < 0).argmax())]!r} is no item of it")
        return found, values
    for item in items:
        if not (item.isascii() and item.isdecimal() and len(item) <= _MOST_DIGITS):
            raise InputError(f"--boosts: {item!r} is not an item number")
    return [int(item) for item in items], values
