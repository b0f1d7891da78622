"""`recprune keys`: API keys of the service."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from recprune.serve.keys import SCOPES, add_key, read_keys, remove_key


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add = actions.add_parser("add", help="make a key and print it, this once")
    add.add_argument("name", metavar="NAME", help="whose key it is")
    add.add_argument(
        "--scope",
        action="append",
        choices=SCOPES,
        help="what it is good for: ask (the default), events to post them for any user, items to "
        "add and remove them, admin for everything, reloads included; may be repeated",
    )
    add.add_argument(
        "--rate",
        metavar="N",
        type=float,
        help="requests a second, and as many at once; others are answered with 429",
    )
    add.set_defaults(action_run=_add)
    remove = actions.add_parser("remove", help="take a key away, from a running service too")
    remove.add_argument("name", metavar="NAME")
    remove.set_defaults(action_run=_remove)
    shown = actions.add_parser("list", help="show the scopes, rates and names")
    shown.set_defaults(action_run=_list)
    for action in (add, remove, shown):
        action.add_argument("--file", required=True, type=Path, help="of keys, hashed")


def run(parsed: argparse.Namespace) -> None:
    parsed.action_run(parsed)


def _add(parsed: argparse.Namespace) -> None:
    key = add_key(parsed.file, parsed.name, *(parsed.scope or ["ask"]), rate=parsed.rate)
    print("Keep it safe; it is stored only as a hash:", file=sys.stderr)  # noqa: T201
    print(key)  # noqa: T201


def _remove(parsed: argparse.Namespace) -> None:
    remove_key(parsed.file, parsed.name)


def _list(parsed: argparse.Namespace) -> None:
    for key in read_keys(parsed.file).stored:
        rate = "-" if key.rate is None else f"{key.rate:g}/s"
        print(f"{','.join(key.scopes):16} {rate:>8} {key.name}")  # noqa: T201
