"""Where the settings of the service come from, and what is said of one that is wrong.

The library reads and merges. Here is what it leaves open: variables that name no setting (it looks
for those that it knows, so that a misspelt one would be as good as none), settings files that are
not there (it goes on without), passwords in files of their own, and a sentence for an error that
names the place: an option, a variable, or a name in a file.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from recprune.types import InputError, Json, needs_extra

with needs_extra("serve"):
    from pydantic import BaseModel, SecretStr
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails
    from pydantic_settings import (
        BaseSettings,
        EnvSettingsSource,
        InitSettingsSource,
        JsonConfigSettingsSource,
        PydanticBaseSettingsSource,
        TomlConfigSettingsSource,
    )

PREFIX = "RECPRUNE_SERVE_"
DELIMITER = "__"  # in a variable, between `limits` and the name of one
NO_SECRET = "give --history-password-file FILE, or set RECPRUNE_SERVE_HISTORY_PASSWORD"  # noqa: S105
_INTERNAL = "scratch"  # is set by the service alone
_SHOWN_BY_TYPE = ("history_url", "history_password")  # may hold a secret
_OPTIONS = {
    "folder": "FOLDER",
    "settings_file": "--settings",
    "history_url": "--history",
    "keys_file": "--keys",
    "names_file": "--names",
    "item_sets": "--item-set",
    "cors_origins": "--cors-origin",
}
_KINDS = {  # what the library's types of errors begin with, and what it expected then
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "a string",
    "path": "a path",
    "tuple": "a list",
    "dict": "a table of names and values",
    "model": "a table of names and values",
}


def option_of(*path: str) -> str:
    """Return the command line's name for a setting, or for a limit."""
    if path[0] == "limits":
        return "--max-" + path[-1].replace("_", "-")
    return _OPTIONS.get(path[0], "--" + path[0].replace("_", "-"))


def variable_of(*path: str) -> str:
    return PREFIX + DELIMITER.join(path).upper()


def sources(
    settings: type[BaseSettings], given: PydanticBaseSettingsSource
) -> tuple[PydanticBaseSettingsSource, ...]:
    """Return all sources: what is given, the environment, the file, each with its password."""
    environment = _Environment(settings)
    found: list[PydanticBaseSettingsSource] = [
        given,
        _PasswordFile(settings, option_of("history_password_file")),
        environment,
        _PasswordFile(settings, variable_of("history_password_file")),
    ]
    for name, values in ((option_of, given), (variable_of, environment)):
        if file := values().get("settings_file"):
            found.append(_settings_file(settings, Path(file), name("settings_file")))
            found.append(_PasswordFile(settings, f"history_password_file in {file}"))
            break
    return tuple(found)


class _Environment(EnvSettingsSource):
    def __call__(self) -> Json:
        known = {variable_of(*path) for path in _paths(self.settings_cls)}
        for name in map(str.upper, os.environ):
            if name.startswith(PREFIX) and name not in known:
                raise InputError(f"{name} is unknown{_nearest(name, known)}")
        values = super().__call__()
        if "history_password" in values:  # the library can be told to log what it has found
            values["history_password"] = SecretStr(values["history_password"])
        return values

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        try:
            return super().decode_complex_value(field_name, field, value)
        except ValueError:
            place = variable_of(field_name)
            raise InputError(f"{place} is {value!r:.80}, expected JSON") from None


class _PasswordFile(PydanticBaseSettingsSource):
    """The password from the file that the places so far have named, unless they have it itself."""

    def __init__(self, settings: type[BaseSettings], place: str) -> None:
        super().__init__(settings)
        self._place = place

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        raise NotImplementedError  # what the library calls is below

    def __call__(self) -> Json:
        file = self.current_state.get("history_password_file")
        if "history_password" in self.current_state or not isinstance(file, str | Path):
            return {}
        try:
            password = Path(file).read_text(encoding="utf-8").removesuffix("\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a text in UTF-8"
            raise InputError(f"{self._place}: {file} cannot be read: {reason}") from None
        if not password:
            raise InputError(f"{self._place}: {file} is empty, expected a password")
        return {"history_password": SecretStr(password)}


def _settings_file(
    settings: type[BaseSettings], file: Path, place: str
) -> PydanticBaseSettingsSource:
    source: InitSettingsSource
    form = file.suffix[1:].upper()
    try:
        if form not in ("TOML", "JSON"):
            raise InputError(f"{place}: {file} expected a name that ends with .toml or .json")
        if not (file.stat() and file.is_file()):  # which the library would take for an empty one
            raise InputError(f"{place}: {file} cannot be read: it is not a plain file")
        if form == "TOML":
            source = TomlConfigSettingsSource(settings, file)
        else:
            source = JsonConfigSettingsSource(settings, file)
    except OSError as error:
        raise InputError(f"{place}: {file} cannot be read: {error.strerror}") from None
    except InputError:
        raise
    except TypeError:
        raise InputError(f"{place}: {file} is not {form} with names and values") from None
    except ValueError as error:
        raise InputError(f"{place}: {file} is not {form}: {error}") from None
    names = source()
    if "history_password" in names:
        raise InputError(f"history_password in {file} is no place for a secret: {NO_SECRET}")
    for name in ("settings_file", _INTERNAL):
        if name in names:
            raise InputError(f"{name} in {file} is unknown")
    return source


# What is wrong -----------------------------------------------------------------------------------


def complaint(settings: type[BaseSettings], given: Json, error: ErrorDetails) -> str:
    """Say which setting is wrong and where it stands, what was given and what was expected."""
    nested = error["loc"][0] == "limits"
    path = tuple(map(str, error["loc"][: 2 if nested else 1]))
    place, value, kind = _place(given, path), error["input"], error["type"]
    if kind == "missing":
        where = f"in {variable_of(*path)} or as {'.'.join(path)} in a settings file"
        return f"{option_of(*path)} is missing, expected on the command line, {where}"
    if kind == "extra_forbidden":
        name = ".".join(path)
        return f"{place} is unknown{_nearest(name, map('.'.join, _paths(settings)))}"
    if kind == "value_error":
        reason = error["ctx"]["error"]
        return (
            f"{place} {reason}"
            if path[0] in _SHOWN_BY_TYPE
            else f"{place} is {value!r:.80}, {reason}"
        )
    shown = f"of type {type(value).__name__}" if path[0] in _SHOWN_BY_TYPE else f"{value!r:.80}"
    within = _range(_field(settings, path))
    expected = _KINDS.get(kind.partition("_")[0])
    if kind.startswith(("greater", "less")):
        shown, expected = f"{value}", within
    elif expected is None:
        expected = error["msg"].removeprefix("Input should be ")
    elif within:
        expected += f", {within}"
    return f"{place} is {shown}, expected {expected}"


def _place(given: Json, path: tuple[str, ...]) -> str:
    """Return how the setting is called in the first place that has it."""
    name = ".".join(path)
    if _has(given, path):
        return option_of(*path)
    variables = {name.upper() for name, value in os.environ.items() if value}
    if variable_of(*path) in variables:
        return variable_of(*path)
    if variable_of(path[0]) in variables:
        return f"{name} in {variable_of(path[0])}"
    file = given.get("settings_file") or os.environ.get(variable_of("settings_file"))
    return f"{name} in {file}" if file else name


def _has(values: Any, path: tuple[str, ...]) -> bool:
    for name in path:
        if not isinstance(values, Mapping) or name not in values:
            return False
        values = values[name]
    return True


def _paths(settings: type[BaseModel]) -> list[tuple[str, ...]]:
    """Return all settings that can be given, those of nested models too."""
    paths: list[tuple[str, ...]] = []
    for name, field in settings.model_fields.items():
        if name == _INTERNAL:
            continue
        paths.append((name,))
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            paths += [(name, *path) for path in _paths(field.annotation)]
    return paths


def _field(settings: type[BaseModel], path: tuple[str, ...]) -> FieldInfo:
    field = settings.model_fields[path[0]]
    if len(path) > 1 and isinstance(field.annotation, type):
        return _field(field.annotation, path[1:])
    return field


def _range(field: FieldInfo) -> str:
    bounds = {
        name: getattr(bound, name)
        for bound in field.metadata
        for name in ("ge", "gt", "le")
        if hasattr(bound, name)
    }
    if "gt" in bounds:
        return f"more than {bounds['gt']}"
    if "le" in bounds:
        return f"{bounds['ge']} to {bounds['le']}"
    return f"{bounds['ge']} or more" if bounds else ""


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {close[0]}?" if close else ""
