"""The options of every command that trains, for the settings of a model and of its training.

Needs no package that prints tables: `recprune train` runs where there are only torch, safetensors
and NumPy.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recprune.models.settings import PRESETS, Settings
from recprune.types import InputError


def add_budget_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-minutes",
        type=float,
        default=float("inf"),
        metavar="N",
        help="begin no epoch after this",
    )


def add_settings_arguments(parser: argparse.ArgumentParser, *, default: str) -> None:
    """Add a preset, a file and single values; `default` says what there is without a preset."""
    parser.add_argument(
        "--preset", metavar="NAME", help=f"one of {', '.join(PRESETS)}; default {default}"
    )
    parser.add_argument(
        "--settings", metavar="FILE", help="JSON with the parts model and training, over the preset"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="one setting, over all else; may be repeated",
    )


def with_given(settings: Settings, parsed: argparse.Namespace) -> Settings:
    """Return these settings with those replaced that a file or single values give."""
    return settings.with_parts(_parts(parsed)).with_values(_values(parsed))


def given_names(parsed: argparse.Namespace) -> set[str]:
    """Return which settings a file or single values give."""
    return {name for part in _parts(parsed).values() for name in part} | set_names(parsed)


def set_names(parsed: argparse.Namespace) -> set[str]:
    """Return which settings single values give."""
    return set(_values(parsed))


def read_json(path: str) -> Any:
    """Read a JSON file that was given by name."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path}: not readable as JSON: {error}") from None


def _parts(parsed: argparse.Namespace) -> Mapping[str, Mapping[str, Any]]:
    if not parsed.settings:
        return {}
    given = read_json(parsed.settings)
    if not isinstance(given, dict) or not all(isinstance(part, dict) for part in given.values()):
        raise InputError(f"{parsed.settings}: expected an object with model and training")
    return given


def _values(parsed: argparse.Namespace) -> dict[str, Any]:
    return single_values(parsed.set)


def single_values(texts: Sequence[str]) -> dict[str, Any]:
    """Return what is given as NAME=VALUE; a value that is not JSON is a word."""
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"--set {text}: expected NAME=VALUE")
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    return values
