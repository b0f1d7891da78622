"""`recprune recommend`: the next items for a history, or for a file of histories."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from recprune.attributes.attributes import Attributes
from recprune.commands.answer_options import (
    add_filter_arguments,
    add_live_arguments,
    add_names_argument,
    add_seen_arguments,
    check_k,
    check_live,
    parse_boosts,
)
from recprune.commands.log_options import add_reading_arguments, check_log_options, read_log
from recprune.data.identifiers import ExternalId, coerce_ids
from recprune.data.titles import names_of
from recprune.live.live_index import LiveIndex
from recprune.live.snapshot import LiveSnapshot
from recprune.live.snapshot_ids import ids_at
from recprune.recommender.recommender import Recommendations, Recommender
from recprune.search.methods import METHODS
from recprune.types import InputError, Json

_BATCH = 1024  # histories of a file that are answered together


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recommender", metavar="FOLDER", help="made by recprune export")
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument(
        "--history",
        metavar="ID,ID,...",
        help="oldest first; may be empty; ids with commas in quotes, or a JSON list: '[\"a,b\"]'",
    )
    given.add_argument(
        "--histories",
        metavar="FILE",
        help='a history a line: ids with commas between, a JSON list, or {"history": [...]}; - is '
        "standard input",
    )
    given.add_argument("--user", metavar="ID", help="whose history a --log has")
    parser.add_argument(
        "--log",
        metavar="LOG",
        help="with --user: what `recprune prepare` reads, by the same options; times are known",
    )
    add_reading_arguments(parser, min_interactions=1)
    add_names_argument(parser)
    parser.add_argument(
        "--times", metavar="S,S,...", help="when the items of --history were, seconds since 1970"
    )
    parser.add_argument(
        "--time", type=float, metavar="S", help="when this is asked for; default: the last of them"
    )
    parser.add_argument("-k", type=int, default=10, help="default %(default)s")
    add_seen_arguments(parser)
    add_filter_arguments(parser)
    add_live_arguments(parser)
    parser.add_argument(
        "--boosts",
        type=parse_boosts,
        metavar="ID=NUMBER,...",
        help="added to the scores of these items",
    )
    parser.add_argument(
        "--method", default="auto", metavar="NAME", help=f"one of {', '.join(METHODS)}"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a history, in lines")
    parser.add_argument("--threads", type=int, default=1, help="default %(default)s")


def run(parsed: argparse.Namespace) -> None:
    check_k(parsed.k)
    if parsed.times is not None and parsed.history is None:
        raise InputError("--times are those of --history")
    if (parsed.user is None) != (parsed.log is None):
        raise InputError("--user and --log go together: whose history, and where it is")
    check_log_options(parsed, "--log LOG, with --user")
    check_live(parsed)
    recommender = Recommender.load(parsed.recommender, threads=parsed.threads)
    if parsed.live is None:
        _recommend(recommender, None, parsed)
        return
    with LiveIndex.open(parsed.live) as live:
        recommender = recommender.with_live(live)
        if parsed.attributes is not None:
            recommender = recommender.with_attributes(Attributes.load(parsed.attributes))
        _recommend(recommender, live.snapshot(), parsed)


def _recommend(
    recommender: Recommender, snapshot: LiveSnapshot | None, parsed: argparse.Namespace
) -> None:
    """Answer what was asked: of a catalogue that changes, as it is at one moment."""
    if parsed.names is not None:  # once, however many histories there are
        ids = ids_at(recommender.item_ids, snapshot)
        parsed.names = names_of(ids, Path(parsed.names))
    if parsed.user is not None:
        history, parsed.times = _history_in_log(parsed)
        _answer(recommender, snapshot, [coerce_ids(recommender.item_ids, history)], parsed, None)
        return
    if parsed.history is not None:
        try:
            history = coerce_ids(recommender.item_ids, _parse(parsed.history.strip()))
        except InputError as error:
            raise InputError(f"--history: {error}") from None
        if parsed.times is not None:
            parsed.times = _numbers(parsed.times)
        _answer(recommender, snapshot, [history], parsed, None)
        return
    batch: list[list[ExternalId]] = []
    line = 0
    try:
        for line, history in enumerate(_read(recommender, parsed.histories), 1):
            batch.append(history)
            if len(batch) == _BATCH:
                ready, batch = batch, []
                _answer(recommender, snapshot, ready, parsed, line + 1 - _BATCH)
    finally:  # a bad line does not cost the good ones before it their answers
        if batch:
            _answer(recommender, snapshot, batch, parsed, line + 1 - len(batch))


def _answer(
    recommender: Recommender,
    snapshot: LiveSnapshot | None,
    histories: list[list[ExternalId]],
    parsed: argparse.Namespace,
    first_line: int | None,
) -> None:
    """Print the answers to some histories, which begin at a line of a file, or to just one."""

    items, values = parsed.boosts or ([], [])
    boosts = dict(zip(coerce_ids(recommender.item_ids, items), values, strict=True))
    most = len(recommender.item_ids) if snapshot is None else max(1, snapshot.num_present)

    def recommend() -> Recommendations:
        return recommender.recommend(
            histories,
            min(parsed.k, most),  # more would only be padding
            exclude_seen=parsed.exclude_seen,
            where=parsed.where,
            at_most=parsed.at_most,
            boosts=boosts,
            times=None if parsed.times is None else [parsed.times],
            now=parsed.time,
            method=parsed.method,
            threads=parsed.threads,
            index=snapshot,
        )

    found = recommend()
    if parsed.where is not None and len(histories) and not any(found.items):
        _say("--where is true of no item that may be recommended")
    names: dict[ExternalId, str] | None = parsed.names
    for place in range(len(histories)):
        items, unknown = found.items[place], found.unknown[place]
        scores = [float(score) for score in found.scores[place, : len(items)]]
        if parsed.json:
            answer: Json = {
                "items": items,
                "scores": scores,
                "by_popularity": bool(found.by_popularity[place]),
                "unknown": unknown,
            }
            if names is not None:
                answer["names"] = [names.get(item) for item in items]
            print(json.dumps(answer, ensure_ascii=False, default=str))  # noqa: T201
            continue
        where = "" if first_line is None else f"line {first_line + place}: "
        if unknown:
            _say(f"{where}not in the catalogue, left out: {', '.join(map(str, unknown))}")
        if found.by_popularity[place]:
            _say(f"{where}nothing to go by: these are the most popular items")
        if first_line is None:
            if parsed.exclude_seen is None and not recommender.repeats:
                _say("items of the history are left out: --include-seen lets them come again")
            for item, score in zip(items, scores, strict=True):
                name = f"  {names[item]}" if names is not None and item in names else ""
                print(f"{score:10.4f}  {item}{name}")  # noqa: T201
        else:
            csv.writer(sys.stdout, lineterminator="\n").writerow(items)
    if first_line is None and not parsed.json:
        # Once more: the first request of a process waits for the disk.
        _draw_timeline(recommend().milliseconds)


def _history_in_log(parsed: argparse.Namespace) -> tuple[list[ExternalId], list[float]]:
    """Return what a user of a log had, oldest first, and when, in seconds since 1970."""
    log = read_log(parsed)
    (found,) = log.user_ids.find_all(coerce_ids(log.user_ids, [parsed.user]))
    if found < 0:
        raise InputError(f"{parsed.log}: has no user {parsed.user!r}")
    first, end = log.offsets[found : found + 2]
    times = (log.times[first:end] / 1e6).tolist()
    return [*log.item_ids.take(log.items[first:end])], times


def _numbers(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",") if word.strip()]
    except ValueError as error:
        raise InputError(f"--times: {error}") from None


def _draw_timeline(milliseconds: dict[str, float]) -> None:
    """Show where the time of one request went."""
    whole = sum(milliseconds.values())
    before = 0.0
    for name, spent in milliseconds.items():
        start, end = (round(48 * at / whole) for at in (before, before + spent))
        bar = " " * start + "█" * max(1, end - start)
        _say(f"{name:>16} {bar:<49} {spent:7.3f} ms")
        before += spent


def _read(recommender: Recommender, path: str) -> Iterator[list[ExternalId]]:
    if path == "-":
        yield from _histories(recommender, sys.stdin, "standard input")
        return
    try:
        with Path(path).open(encoding="utf-8-sig") as file:
            yield from _histories(recommender, file, path)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a folder, expected a file of histories") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a text in UTF-8: {error}") from None


def _histories(
    recommender: Recommender, lines: Iterable[str], source: str
) -> Iterator[list[ExternalId]]:
    for number, line in enumerate(lines, 1):
        try:
            yield coerce_ids(recommender.item_ids, _parse(line.strip()))
        except InputError as error:
            raise InputError(f"{source}, line {number}: {error}") from None


def _parse(line: str) -> list[Any]:
    if not line.startswith(("[", "{")):
        return _words(line)
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"not readable as JSON: {error}") from None
    history = value.get("history") if isinstance(value, dict) else value
    if not isinstance(history, list):
        raise InputError("expected a list of item ids, or an object with a history")
    return history


def _words(text: str) -> list[Any]:
    """Return what stands between commas that are not in quotes, blanks around it taken off."""
    try:
        words = next(csv.reader([text], skipinitialspace=True, strict=True), [])
    except csv.Error as error:
        raise InputError(f"not readable as ids with commas between: {error}") from None
    return [word.strip() for word in words if word.strip()]


def _say(message: str) -> None:
    print(message, file=sys.stderr)  # noqa: T201
