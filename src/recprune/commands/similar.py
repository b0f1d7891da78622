"""`recprune similar`: the items most like some items."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from recprune.attributes.attributes import Attributes
from recprune.commands.answer_options import (
    add_live_arguments,
    add_names_argument,
    add_where_argument,
    check_k,
    check_live,
)
from recprune.data.identifiers import ExternalId, coerce_ids
from recprune.data.titles import names_of
from recprune.live.live_index import LiveIndex
from recprune.live.snapshot import LiveSnapshot
from recprune.live.snapshot_ids import ids_at
from recprune.recommender.recommender import Recommender
from recprune.recommender.similar import SimilarItems
from recprune.types import Json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recommender", metavar="FOLDER", help="made by recprune export")
    parser.add_argument("items", metavar="ITEM", nargs="+", help="external id; each has an answer")
    add_names_argument(parser)
    parser.add_argument("-k", type=int, default=10, help="default %(default)s")
    add_where_argument(parser)
    add_live_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object an item, in lines")
    parser.add_argument("--threads", type=int, default=1, help="default %(default)s")


def run(parsed: argparse.Namespace) -> None:
    check_k(parsed.k)
    check_live(parsed)
    recommender = Recommender.load(parsed.recommender)
    if parsed.live is None:
        _answer(recommender, None, parsed)
        return
    with LiveIndex.open(parsed.live) as live:
        recommender = recommender.with_live(live)
        if parsed.attributes is not None:
            recommender = recommender.with_attributes(Attributes.load(parsed.attributes))
        _answer(recommender, live.snapshot(), parsed)


def _answer(
    recommender: Recommender, snapshot: LiveSnapshot | None, parsed: argparse.Namespace
) -> None:
    ids = ids_at(recommender.item_ids, snapshot)
    names = {} if parsed.names is None else names_of(ids, Path(parsed.names))
    most = len(recommender.item_ids) if snapshot is None else max(1, snapshot.num_present)
    found = recommender.similar(
        coerce_ids(recommender.item_ids, parsed.items),
        min(parsed.k, most),  # more would only be padding
        where=parsed.where,
        threads=parsed.threads,
        index=snapshot,
    )
    for item in found.untrained:
        message = "no training interaction had it: its vector is what content, or chance, gave it"
        print(f"{item}: {message}", file=sys.stderr)  # noqa: T201
    if parsed.json:
        _print_json(found, None if parsed.names is None else names)
    else:
        _print_lines(found, names)


def _print_json(found: SimilarItems, names: dict[ExternalId, str] | None) -> None:
    for asked, items, scores in zip(found.asked, found.items, found.scores, strict=True):
        answer: Json = {
            "item": asked,
            "items": items,
            "scores": [float(score) for score in scores[: len(items)]],
        }
        if names is not None:
            answer["names"] = [names.get(item) for item in items]
        print(json.dumps(answer, ensure_ascii=False, default=str))  # noqa: T201


def _print_lines(found: SimilarItems, names: dict[ExternalId, str]) -> None:
    """Print a line for each item; of several answers, what each is like before it."""

    def shown(item: ExternalId) -> str:
        return f"{item}  {names[item]}" if item in names else str(item)

    for asked, items, scores in zip(found.asked, found.items, found.scores, strict=True):
        if len(found.asked) > 1:
            print(f"like {shown(asked)}")  # noqa: T201
        for item, score in zip(items, scores.tolist(), strict=False):  # padded
            print(f"{score:10.4f}  {shown(item)}")  # noqa: T201
