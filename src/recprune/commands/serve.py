"""`recprune serve`: a saved recommender as an HTTP service."""

from __future__ import annotations

import argparse
from pathlib import Path

from recprune.serve.configuration import Limits, ServeSettings, read_settings
from recprune.serve.processes.server import serve
from recprune.serve.setting_sources import NO_SECRET, PREFIX, option_of
from recprune.system import available_cores
from recprune.types import InputError

_ASKING = 4  # searches at a time for every core, where shards do the work
_SETTINGS = {
    "settings_file": ("FILE", "TOML or JSON with settings; what is given here, or in variables "
                      f"{PREFIX}…, counts before it"),
    "host": ("HOST", "default 127.0.0.1"),
    "port": ("PORT", "default 8000; 0 is any"),
    "workers": ("WORKERS", "processes; default 1"),
    "history_url": ("URL", "where users' histories are kept: sqlite:///FILE (the default, beside "
                    "FOLDER), redis://HOST:PORT/DATABASE or redis+cluster://HOST:PORT"),
    "history_password_file": ("FILE", "a file with the password of Redis; or give it in the "
                              f"variable {PREFIX}HISTORY_PASSWORD"),
    "keys_file": ("FILE", "API keys, made by recprune keys; needed where others can reach the "
                  "service"),
    "names_file": ("FILE", "CSV or Parquet with item_id and name"),
    "attributes": ("ATTRIBUTES", "of the items, made by recprune attributes of an index; a "
                   "recommender has its own"),
    "live": ("LIVE", "a live index made from FOLDER by recprune index live: items come and go "
             "while it is served; with --ray, it is searched in the shards that recprune index "
             "compact divides it into"),
    "fold_in": ("USERS", "add items that the model does not know, when so many users have taken "
                "them; needs --live"),
    "ray": ("ADDRESS", "search shards on this Ray cluster: HOST:PORT, auto, or local to start one "
            "here"),
    "shards": ("SHARDS", "the index of FOLDER in shards, made by recprune index shard; needs "
               "--ray"),
    "replicas": ("REPLICAS", "of every shard; default 1"),
}  # fmt: skip
_LISTS = {
    "item_sets": ("NAME=FILE", "a named set for allow: a file with an id a line; may be repeated"),
    "cors_origins": ("ORIGIN", "a web site whose pages may ask; may be repeated"),
}
_FLAGS = {
    "allow_partial": "answer without the shards that are lost, marked as not exact, instead of "
    "with 503",
    "access_log": "log requests, which is the default",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.argument_default = argparse.SUPPRESS  # so that what is not given is not there
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        nargs="?",
        help="made by recprune export, or by recprune index build or shard for /search alone",
    )
    for name, (metavar, what) in _SETTINGS.items():
        parser.add_argument(option_of(name), dest=name, metavar=metavar, help=what)
    for name, (metavar, what) in _LISTS.items():
        parser.add_argument(option_of(name), dest=name, metavar=metavar, action="append", help=what)
    for name, what in _FLAGS.items():
        parser.add_argument(
            option_of(name), dest=name, action=argparse.BooleanOptionalAction, help=what
        )
    # Known, so that it is not taken for the beginning of --history-password-file, and refused.
    parser.add_argument("--history-password", help=argparse.SUPPRESS)
    for name, field in Limits.model_fields.items():
        what = str(field.description)
        shown = what if "default" in what else f"{what}; default {field.default}"
        parser.add_argument(
            option_of("limits", name), dest=f"limits.{name}", metavar="N", help=shown
        )


def run(parsed: argparse.Namespace) -> None:
    serve(settings_of(parsed))


def settings_of(parsed: argparse.Namespace) -> ServeSettings:
    """Return the settings that the command line, variables and a file make together."""
    given = vars(parsed)
    if "history_password" in given:
        raise InputError(
            "--history-password is refused, as everybody on this machine can see it in the list "
            f"of processes: {NO_SECRET}"
        )
    values = {name: given[name] for name in ServeSettings.model_fields if name in given}
    limits = {
        name: given[f"limits.{name}"] for name in Limits.model_fields if f"limits.{name}" in given
    }
    if limits:
        values["limits"] = limits
    if "item_sets" in values:
        values["item_sets"] = dict(_item_set(text) for text in values["item_sets"])
    return _with_running(read_settings(values))


def _with_running(settings: ServeSettings) -> ServeSettings:
    """Let each worker run as many searches as are its share of the cores, if no number is given."""
    if "running" in settings.limits.model_fields_set:
        return settings
    share = max(1, available_cores() // settings.workers)
    if settings.ray is not None:
        share *= _ASKING  # they wait for shards, most of the time
    limits = settings.limits.model_copy(update={"running": share})
    return settings.model_copy(update={"limits": limits})


def _item_set(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise InputError(f"--item-set is {text!r}, expected NAME=FILE")
    return name, Path(path)
