"""`recprune serve`: a saved recommender as an HTTP service."""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from urllib.parse import urlsplit

from recprune.serve.configuration import Limits, ServeSettings
from recprune.serve.processes.server import serve
from recprune.system import available_cores
from recprune.types import InputError

_ASKING = 4  # searches at a time for every core, where shards do the work
_PASSWORD = "RECPRUNE_HISTORY_PASSWORD"  # noqa: S105 # the name of a variable
_LIMITS = {
    "body_bytes": "bytes of a request",
    "history": "items of a history; as many are kept of a user",
    "k": "items of an answer",
    "batch": "questions of a request",
    "batch_items": "items of all answers to a request: k times its questions",
    "item_ids": "ids in exclude, in allow and in boosts",
    "method_bytes": "bytes that each of the methods default and recjpqprune, and boosts of a "
    "compact index, may make a worker grow by",
    "running": "searches at a time in a worker; default: this worker's share of the cores, "
    "with --ray four times that",
    "waiting": "requests that may wait for them; others are answered with 503",
    "connections": "connections of a worker",
    "client_seconds": "seconds for a client to send its request, or to take the answer",
    "silent_seconds": "seconds without a sign of life until a worker is replaced",
    "reload_seconds": "seconds for a worker to load the folder",
    "shard_seconds": "seconds without a word until a shard is lost",
    "idle_shard_seconds": "seconds that shards stay when no service has them open any more",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        type=Path,
        help="made by recprune export, or by recprune index build or shard for /search alone",
    )
    parser.add_argument("--host", default="127.0.0.1", help="default %(default)s")
    parser.add_argument("--port", type=int, default=8000, help="default %(default)s; 0 is any")
    parser.add_argument("--workers", type=int, default=1, help="processes; default %(default)s")
    parser.add_argument(
        "--history",
        metavar="URL",
        help="where users' histories are kept: sqlite:///FILE (the default, beside FOLDER), or "
        "redis://HOST:PORT/DATABASE",
    )
    parser.add_argument(
        "--history-password-file",
        metavar="FILE",
        type=Path,
        help=f"a file with the password of Redis; or give it in the variable {_PASSWORD}",
    )
    parser.add_argument(
        "--keys",
        metavar="FILE",
        type=Path,
        help="API keys, made by recprune keys; needed where others can reach the service",
    )
    parser.add_argument(
        "--names", metavar="FILE", type=Path, help="CSV or Parquet with item_id and name"
    )
    parser.add_argument(
        "--item-set",
        metavar="NAME=FILE",
        action="append",
        default=[],
        help="a named set for allow: a file with an id a line; may be repeated",
    )
    parser.add_argument(
        "--cors-origin",
        metavar="ORIGIN",
        action="append",
        default=[],
        help="a web site whose pages may ask; may be repeated",
    )
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="search shards on this Ray cluster: HOST:PORT, auto, or local to start one here",
    )
    parser.add_argument(
        "--shards",
        metavar="SHARDS",
        type=Path,
        help="the index of FOLDER in shards, made by recprune index shard; needs --ray",
    )
    parser.add_argument(
        "--replicas", type=int, default=1, help="of every shard; default %(default)s"
    )
    parser.add_argument(
        "--allow-partial",
        action="store_true",
        help="answer without the shards that are lost, marked as not exact, instead of with 503",
    )
    parser.add_argument("--no-access-log", action="store_true", help="log no requests")
    for name, what in _LIMITS.items():
        default = getattr(Limits(), name)
        shown = what if "default" in what else f"{what}; default {default}"
        parser.add_argument(
            f"--max-{name.replace('_', '-')}",
            dest=f"max_{name}",
            metavar="N",
            type=type(default),
            help=shown,
        )


def run(parsed: argparse.Namespace) -> None:
    given = {name: getattr(parsed, f"max_{name}") for name in _LIMITS}
    share = max(1, available_cores() // max(1, parsed.workers))
    if parsed.ray is not None:
        share *= _ASKING  # they wait for shards, most of the time
    limits = dataclasses.replace(
        Limits(running=share), **{name: value for name, value in given.items() if value is not None}
    )
    serve(
        ServeSettings(
            folder=parsed.folder,
            host=parsed.host,
            port=parsed.port,
            workers=parsed.workers,
            history_url=parsed.history,
            history_password=_history_password(parsed.history, parsed.history_password_file),
            keys_file=parsed.keys,
            names_file=parsed.names,
            item_sets=dict(_item_set(text) for text in parsed.item_set),
            cors_origins=tuple(parsed.cors_origin),
            access_log=not parsed.no_access_log,
            ray=parsed.ray,
            shards=parsed.shards,
            replicas=parsed.replicas,
            allow_partial=parsed.allow_partial,
            limits=limits,
        )
    )


def _history_password(url: str | None, file: Path | None) -> str | None:
    """Return the password from a file or the environment: a command line is for all to see."""
    if url is not None and _has_secret(url):
        raise InputError(
            "--history has a password in it, which everybody on this machine can see in the list "
            f"of processes: give --history-password-file FILE, or set {_PASSWORD}"
        )
    if file is None:
        return os.environ.get(_PASSWORD)
    try:
        password = file.read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text in UTF-8"
        raise InputError(f"--history-password-file: {file} cannot be read: {reason}") from None
    if not password:
        raise InputError(f"--history-password-file: {file} is empty, expected a password")
    return password


def _has_secret(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.password is not None or "password" in parts.query.casefold()
    except ValueError:
        return "@" in url  # the histories will say what is wrong with it


def _item_set(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise InputError(f"--item-set is {text!r}, expected NAME=FILE")
    return name, Path(path)
