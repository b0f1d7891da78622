"""The actions of `recprune index` that make and change a live index."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from recprune.data.identifiers import MOST_DIGITS, ExternalId
from recprune.live.live_index import LiveIndex
from recprune.recommender.recommender import Recommender
from recprune.storage import read_npy
from recprune.types import InputError, Int64Array, Json

_SHOWN = 5  # external ids of what was removed
_LARGEST = 2**63 - 1  # id, or number of an item

_IDS_HELP = "external ids: an .npy file, or text with one in a line"


def add_live_actions(actions: Any) -> None:
    """Add `live`, `add`, `remove` and `compact` to the actions of a parser."""
    live = actions.add_parser(
        "live", help="make a live index of a recommender's items, to serve it with"
    )
    live.add_argument("recommender", metavar="RECOMMENDER", help="made by recprune export")
    live.add_argument("--out", required=True, metavar="FOLDER", help="folder to write")
    live.add_argument("--threads", type=int, default=1, help="default %(default)s")
    live.set_defaults(action_run=_live)
    add = actions.add_parser("add", help="add items to a live index")
    add.add_argument("index", metavar="FOLDER")
    add.add_argument("codes", metavar="CODES", help=".npy of uint8 or uint16 [n, M]")
    add.add_argument("--item-bias", metavar="FILE", help=".npy of float32 [n]")
    add.add_argument("--item-ids", metavar="FILE", help=_IDS_HELP)
    add.add_argument(
        "--notes", metavar="FILE", help="JSON lines: what is said of each item, or null"
    )
    add.set_defaults(action_run=_add)
    remove = actions.add_parser("remove", help="remove items from a live index")
    remove.add_argument("index", metavar="FOLDER")
    remove.add_argument("ids", nargs="*", metavar="NUMBER", help="numbers of items")
    remove.add_argument(
        "--external", nargs="*", metavar="ID", help="external ids; without any, those of --from"
    )
    remove.add_argument("--from", dest="file", metavar="FILE", help="ids from an .npy or text file")
    remove.set_defaults(action_run=_remove)
    compact = actions.add_parser(
        "compact", help="make a live index one piece again, without what was removed"
    )
    compact.add_argument("index", metavar="FOLDER")
    compact.add_argument(
        "--shards", type=int, metavar="N", help="divide it into so many, to be searched on Ray"
    )
    compact.add_argument("--threads", type=int, default=1, help="default %(default)s")
    compact.set_defaults(action_run=_compact)


def read_ids(path: str, *, integers: bool | None = None) -> list[Any] | Int64Array:
    """Return ids from an array, or from the lines of a text; None: integers only from an array."""
    if path.endswith(".npy"):
        array = read_npy(path)
        if array.ndim != 1 or array.dtype.kind not in "iuU":
            raise InputError(f"{path}: holds {array.dtype}{list(array.shape)}, expected ids [n]")
        if array.dtype.kind == "u" and array.max(initial=0) > _LARGEST:
            raise InputError(f"{path}: holds {array.max()}, expected ids of at most {_LARGEST}")
        return np.array(array, np.int64) if array.dtype.kind in "iu" else array.tolist()
    lines = _read_lines(path)
    return [as_number(line, path) for line in lines] if integers else lines


def _read_lines(path: str) -> list[str]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    # Not by splitlines, for which an id may have other ends of lines in it.
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []


def _read_notes(path: str) -> list[Json | None]:
    """Return what is said of items, from a line each."""
    notes: list[Json | None] = []
    for number, line in enumerate(_read_lines(path), 1):
        try:
            note = json.loads(line)
        except (ValueError, RecursionError):
            raise InputError(f"{path}, line {number}: not JSON: {line!r:.80}") from None
        if note is not None and not isinstance(note, dict):
            raise InputError(f"{path}, line {number}: {line!r:.80} is no object, and not null")
        notes.append(note)
    return notes


def _is_integer(text: str) -> bool:
    digits = text.removeprefix("-")
    return digits.isascii() and digits.isdecimal()


def as_number(text: str, where: str) -> int:
    """Return the integer that a text stands for."""
    if not _is_integer(text) or len(text.removeprefix("-")) > MOST_DIGITS:
        raise InputError(f"{where}: {text!r} is not an integer")
    number = int(text)
    if abs(number) > _LARGEST:
        raise InputError(f"{where}: {text} is beyond {_LARGEST}")
    return number


def _live(parsed: argparse.Namespace) -> None:
    with Recommender.load(parsed.recommender).make_live(parsed.out, threads=parsed.threads) as live:
        _say(live, {})


def _add(parsed: argparse.Namespace) -> None:
    with LiveIndex.open(parsed.index) as live:
        ids = None
        if parsed.item_ids:
            ids = read_ids(parsed.item_ids, integers=live.snapshot().id_kind == "integers")
        bias = read_npy(parsed.item_bias) if parsed.item_bias else None
        notes = _read_notes(parsed.notes) if parsed.notes else None
        numbers = live.add(read_npy(parsed.codes), bias, item_ids=ids, notes=notes)
        live.maintain()
        first = numbers[0] if len(numbers) else live.num_items
        _say(live, {"added": len(numbers), "first_number": int(first)})


def _remove(parsed: argparse.Namespace) -> None:
    with LiveIndex.open(parsed.index) as live:
        external = parsed.external is not None
        if external and parsed.ids:
            raise InputError("give numbers or --external, not both")
        integers = not external or live.snapshot().id_kind == "integers"
        texts = parsed.external if external else parsed.ids
        has_names = live.snapshot().id_kind != "none"
        if not external and has_names and not all(map(_is_integer, texts)):
            raise InputError(f"{' '.join(texts)}: expected numbers; external ids go to --external")
        given: list[ExternalId] = [as_number(text, "ID") if integers else text for text in texts]
        if parsed.file:
            given += list(read_ids(parsed.file, integers=integers))
        if not given:
            raise InputError("nothing to remove: give numbers, --external ids, or --from FILE")
        numbers = live.find(given) if external else np.array(given, np.int64)
        if external and (numbers < 0).any():
            raise InputError(f"{given[int((numbers < 0).argmax())]!r}: no such item is there")
        before = live.snapshot()
        live.remove(numbers)
        names = before.external_ids(numbers[:_SHOWN]) if has_names else []
        shown = ", ".join(map(str, names)) + ", …" * (len(numbers) > _SHOWN)
        _say(live, {"removed": f"{len(numbers)} ({shown})" if shown else len(numbers)})


def _compact(parsed: argparse.Namespace) -> None:
    with LiveIndex.open(parsed.index) as live:
        live.compact(shards=parsed.shards, threads=parsed.threads).result()
        _say(live, {})


def _say(live: LiveIndex, more: Json) -> None:
    described = live.describe()
    shown = more | {
        name: described[name] for name in ("items", "numbers", "shards", "segments", "tail")
    }
    for name, value in shown.items():
        print(f"{name.replace('_', ' '):16} {value}")  # noqa: T201
