"""The settings of the service: three places, one order, and a line for whatever is wrong."""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, TomlConfigSettingsSource

from recprune.cli import main
from recprune.commands.serve import add_arguments, settings_of
from recprune.serve.configuration import CEILINGS, Limits, ServeSettings, read_settings
from recprune.types import InputError
from tests.support.serving import CLI, save_index, serving

PREFIX = "RECPRUNE_SERVE_"


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def refusal(words: Sequence[str | Path], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line that the command says instead of serving."""
    assert main(["serve", *map(str, words)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("recprune serve: ")
    return line.removeprefix("recprune serve: ")


# Where settings come from ------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["toml", "json"])
def test_the_command_line_counts_before_the_environment_and_that_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    texts = {
        "toml": 'folder = "f"\nport = 1\nworkers = 1\nreplicas = 1\n[limits]\nk = 1\nbatch = 1\nhistory = 1\n',
        "json": json.dumps(
            {"folder": "f", "port": 1, "workers": 1, "limits": {"k": 1, "batch": 1, "history": 1}}
        ),
    }
    file = written(tmp_path / f"settings.{form}", texts[form])
    for name, value in {
        "PORT": "2",
        "WORKERS": "2",
        "LIMITS__K": "2",
        "LIMITS__BATCH": "2",
    }.items():
        monkeypatch.setenv(PREFIX + name, value)
    given = {"settings_file": file, "port": "3", "limits": {"k": "3"}}
    settings = read_settings(given)
    assert (settings.port, settings.workers, settings.folder) == (3, 2, Path("f"))
    limits = settings.limits
    assert (limits.k, limits.batch, limits.history, limits.waiting) == (3, 2, 1, 8)


def test_every_setting_can_be_in_a_file_and_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: dict[str, Any] = {
        "folder": "f", "host": "::1", "port": 5, "workers": 3, "history_url": "redis://h",
        "keys_file": "k", "names_file": "n", "item_sets": {"Toys": "t"}, "attributes": "a", "live": "l",
        "fold_in": 4,
        "ray": "auto",
        "cors_origins": ["https://a.example", "https://b.example"], "access_log": False,
        "shards": "s", "replicas": 2, "allow_partial": True,
        "limits": dict.fromkeys(Limits.model_fields, 7),
    }  # fmt: skip
    rest = {"history_password", "history_password_file", "settings_file", "scratch"}
    assert set(whole) | rest == set(ServeSettings.model_fields), "nothing is forgotten here"
    file = written(tmp_path / "settings.json", json.dumps(whole))
    from_file = read_settings({"settings_file": file})
    for name, value in whole.items():
        if name != "limits":
            text = value if isinstance(value, str) else json.dumps(value)
            monkeypatch.setenv(PREFIX + name.upper(), text)
    for name, value in whole["limits"].items():
        monkeypatch.setenv(f"{PREFIX}LIMITS__{name.upper()}", str(value))
    from_environment = read_settings({})
    assert from_file.model_copy(update={"settings_file": None}) == from_environment
    assert from_file.item_sets == {"Toys": Path("t")}
    assert from_file.cors_origins == ("https://a.example", "https://b.example")
    assert set(from_file.limits.model_dump().values()) == {7}
    assert not from_file.access_log


def test_the_file_itself_may_be_named_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "RECPRUNE_SERVE_SETTINGS_FILE", str(written(tmp_path / "a.toml", "port = 9"))
    )
    assert read_settings({"folder": "f"}).port == 9
    other = written(tmp_path / "b.toml", "port = 10")
    assert read_settings({"folder": "f", "settings_file": other}).port == 10


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PORT", "KEYS_FILE", "HISTORY_PASSWORD", "SETTINGS_FILE", "LIMITS__K"):
        monkeypatch.setenv(PREFIX + name, "")
    assert read_settings({"folder": "f"}) == ServeSettings(folder=Path("f"))


def test_item_sets_of_all_places_are_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path / "s.toml", '[item_sets]\na = "file"\nb = "file"\nc = "file"\n')
    monkeypatch.setenv(PREFIX + "ITEM_SETS", '{"a": "variable", "b": "variable"}')
    settings = read_settings({"folder": "f", "settings_file": file, "item_sets": {"a": "word"}})
    assert settings.item_sets == {"a": Path("word"), "b": Path("variable"), "c": Path("file")}


def test_a_service_is_set_up_by_all_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_index(tmp_path / "index", 50)
    file = written(tmp_path / "s.toml", "workers = 2\nport = 1\n[limits]\nk = 3\nbatch = 1\n")
    monkeypatch.setenv(PREFIX + "LIMITS__BATCH", "2")
    with serving(tmp_path / "index", "--settings", file) as service:  # with --port 0
        assert len(service.workers) == 2
        question = {"sequence_embedding": [0.0] * 32, "k": 3}
        assert service.post("/search", question).status_code == 200
        assert "3" in service.post("/search", question | {"k": 4}).json()["error"]["message"]
        for count, status in ((2, 200), (3, 422)):
            batch = {"batch": [[0.0] * 32] * count, "k": 1}
            assert service.post("/search", batch).status_code == status


def test_the_folder_may_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal([], capsys) == (
        "FOLDER is missing, expected on the command line, in RECPRUNE_SERVE_FOLDER or as folder "
        "in a settings file"
    )
    monkeypatch.setenv(PREFIX + "FOLDER", str(tmp_path / "nowhere"))
    assert str(tmp_path / "nowhere") in refusal(["--port", "0"], capsys)


@pytest.mark.parametrize(
    ("words", "variables", "running"),
    [
        ([], {}, "share"),
        ([], {"WORKERS": "256"}, 1),
        (["--workers", "256"], {"RAY": "auto"}, 4),
        (["--workers", "256"], {"LIMITS__RUNNING": "3", "RAY": "auto"}, 3),
        (["--max-running", "2"], {"LIMITS__RUNNING": "3"}, 2),
    ],
)
def test_searches_at_a_time_are_a_share_of_the_cores_unless_they_are_given(
    monkeypatch: pytest.MonkeyPatch, words: list[str], variables: dict[str, str], running: Any
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(PREFIX + name, value)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    cores = len(os.sched_getaffinity(0))
    found = settings_of(parser.parse_args(["f", *words])).limits.running
    assert found == (cores if running == "share" else running)


def test_flags_can_be_taken_back_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(PREFIX + "ALLOW_PARTIAL", "yes")
    assert "are for shards: give --ray too" in refusal(["f", "--port", "0"], capsys)
    assert "f: " in refusal(["f", "--port", "0", "--no-allow-partial"], capsys)


# What is wrong, and where ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "variables", "text", "message"),
    [
        (["--port", "x"], {}, "", "--port is 'x', expected a whole number, 0 to 65535"),
        (["--port", "65536"], {}, "", "--port is 65536, expected 0 to 65535"),
        ([], {"PORT": "-1"}, "", "RECPRUNE_SERVE_PORT is -1, expected 0 to 65535"),
        ([], {}, "port = 65536", "port in {file} is 65536, expected 0 to 65535"),
        ([], {"PORT": "-1"}, "port = -2", "RECPRUNE_SERVE_PORT is -1, expected 0 to 65535"),
        (["--workers", "257"], {}, "", "--workers is 257, expected 1 to 256"),
        (["--max-k", "0"], {}, "", "--max-k is 0, expected 1 or more"),
        (["--max-waiting", "-1"], {}, "", "--max-waiting is -1, expected 0 or more"),
        (["--max-client-seconds", "0"], {}, "", "--max-client-seconds is 0, expected more than 0"),
        (["--max-client-seconds", "inf"], {}, "", "--max-client-seconds is 'inf', expected a finite number, more than 0"),
        ([], {"LIMITS__BATCH": "1025"}, "", "RECPRUNE_SERVE_LIMITS__BATCH is 1025, expected 1 to 1024"),
        ([], {"LIMITS": '{"batch": 1025}'}, "", "limits.batch in RECPRUNE_SERVE_LIMITS is 1025, expected 1 to 1024"),
        ([], {}, "[limits]\nbatch = 1025", "limits.batch in {file} is 1025, expected 1 to 1024"),
        ([], {}, "[limits]\nreload_seconds = nan", "limits.reload_seconds in {file} is nan, expected more than 0"),
        ([], {}, "[limits]\nhistory = true", "limits.history in {file} is True, expected a number"),
        ([], {}, "workers = true", "workers in {file} is True, expected a number"),
        ([], {}, "limits = 5", "limits in {file} is 5, expected a table of names and values"),
        ([], {}, "host = 5", "host in {file} is 5, expected a string"),
        ([], {}, "keys_file = 5", "keys_file in {file} is 5, expected a path"),
        ([], {}, "history_url = 5", "history_url in {file} is of type int, expected a string"),
        ([], {"ACCESS_LOG": "maybe"}, "", "RECPRUNE_SERVE_ACCESS_LOG is 'maybe', expected true or false"),
        ([], {"CORS_ORIGINS": "https://a"}, "", "RECPRUNE_SERVE_CORS_ORIGINS is 'https://a', expected JSON"),
        ([], {}, 'cors_origins = ["*"]', "cors_origins in {file} is '*', expected one web site"),
        ([], {"HOST": "0.0.0.0"}, "", "RECPRUNE_SERVE_HOST is '0.0.0.0', which others can reach: give --keys FILE"),
        ([], {"SHARDS": "s"}, "", "RECPRUNE_SERVE_SHARDS is 's', which is searched on Ray: give --ray too"),
        (["--item-set", "toys"], {}, "", "--item-set is 'toys', expected NAME=FILE"),
        # Unknown names, wherever they are.
        ([], {"PROT": "1"}, "", "RECPRUNE_SERVE_PROT is unknown; did you mean RECPRUNE_SERVE_PORT?"),
        ([], {"LIMITS__KK": "1"}, "", "RECPRUNE_SERVE_LIMITS__KK is unknown; did you mean RECPRUNE_SERVE_LIMITS__K?"),
        ([], {"ITEM_SETS__TOYS": "f"}, "", "RECPRUNE_SERVE_ITEM_SETS__TOYS is unknown; did you mean RECPRUNE_SERVE_ITEM_SETS?"),
        ([], {"SCRATCH": "f"}, "", "RECPRUNE_SERVE_SCRATCH is unknown"),
        ([], {}, "prot = 1", "prot in {file} is unknown; did you mean port?"),
        ([], {}, "[limits]\nbath = 1", "limits.bath in {file} is unknown; did you mean limits.batch?"),
        ([], {}, 'scratch = "f"', "scratch in {file} is unknown"),
        ([], {}, 'settings_file = "f"', "settings_file in {file} is unknown"),
        ([], {}, "port: 1", "--settings: {file} is not TOML: "),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_named_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    words: list[str], variables: dict[str, str], text: str, message: str,
) -> None:  # fmt: skip
    file = written(tmp_path / "settings.toml", text)
    for name, value in variables.items():
        monkeypatch.setenv(PREFIX + name, value)
    line = refusal(["f", "--settings", file, *words], capsys)
    assert line.startswith(message.format(file=file))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("s.toml", None, "cannot be read: No such file or directory"),
        ("s.json", "{", "is not JSON: "),
        ("s.json", "[1]", "is not JSON with names and values"),
        ("s.yaml", "port: 1", "expected a name that ends with .toml or .json"),
    ],
)
def test_a_file_that_is_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    name: str, text: str | None, message: str,
) -> None:  # fmt: skip
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    assert refusal(["f", "--settings", file], capsys).startswith(f"--settings: {file} {message}")
    monkeypatch.setenv(PREFIX + "SETTINGS_FILE", str(file))
    assert refusal(["f"], capsys).startswith(f"RECPRUNE_SERVE_SETTINGS_FILE: {file} {message}")


class Plain(BaseSettings):
    """Settings as the library reads them by itself."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid")
    port: int = 8000


def test_what_the_library_leaves_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this fails, something in `setting_sources` or `configuration` can go."""
    monkeypatch.setenv(PREFIX + "PROT", "1")
    assert Plain().port == 8000, "a variable of an unknown name is passed over"
    assert Plain.model_validate({"port": True}).port == 1, "a flag is a number"
    missing = TomlConfigSettingsSource(Plain, tmp_path / "missing.toml")
    assert missing() == {}, "a file that is not there is an empty one"
    monkeypatch.setenv(PREFIX + "PORT", "x")
    with pytest.raises(ValidationError) as refusal:
        Plain()
    assert PREFIX not in str(refusal.value), "an error does not say where the value came from"


def test_settings_are_frozen_and_ceilings_hold() -> None:
    settings = ServeSettings(folder=Path("f"))
    with pytest.raises(ValidationError, match="frozen"):
        settings.port = 1
    with pytest.raises(ValidationError, match="frozen"):
        settings.limits.k = 1
    for name, most in CEILINGS.items():
        Limits.model_validate({name: most})
        with pytest.raises(
            InputError, match=f"{name.replace('_', '-')} is {most + 1}, expected 1 to {most}"
        ):
            read_settings({"folder": "f", "limits": {name: most + 1}})


# Secrets -----------------------------------------------------------------------------------------


def test_a_password_is_shown_nowhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYDANTIC_SETTINGS_DEBUG", "1")  # the library then logs what it has found
    caplog.set_level(logging.DEBUG)
    file = written(tmp_path / "password", "hush\n")
    for name, value in {
        PREFIX + "HISTORY_PASSWORD": "hush",
        PREFIX + "HISTORY_PASSWORD_FILE": str(file),
    }.items():
        with monkeypatch.context() as context:
            context.setenv(name, value)
            settings = read_settings({"folder": "f"})
        assert settings.history_password is not None
        assert settings.history_password.get_secret_value() == "hush"
        shown = f"{settings} {settings!r} {settings.model_dump()} {settings.model_dump_json()}"
        assert "hush" not in shown
    assert "Resolving settings" in caplog.text
    assert "hush" not in caplog.text


@pytest.mark.parametrize(
    ("words", "variables", "text", "password"),
    [
        ({"history_password_file": "one"}, {PREFIX + "HISTORY_PASSWORD": "hush"}, "two", "in one"),
        ({}, {PREFIX + "HISTORY_PASSWORD": "hush", PREFIX + "HISTORY_PASSWORD_FILE": "one"}, "two", "hush"),
        ({}, {PREFIX + "HISTORY_PASSWORD_FILE": "one"}, "two", "in one"),
        ({}, {PREFIX + "HISTORY_PASSWORD": "hush"}, "missing", "hush"),
        ({}, {}, "two", "in two"),
    ],
)  # fmt: skip
def test_passwords_keep_the_order_of_the_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    words: dict[str, str], variables: dict[str, str], text: str, password: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        written(tmp_path / name, f"in {name}\n")
    file = written(tmp_path / "s.toml", f'history_password_file = "{text}"')
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    given = {"folder": "f", "settings_file": file} | words
    settings = read_settings(given)
    assert settings.history_password == SecretStr(password)


@pytest.mark.parametrize(
    ("words", "variables", "text"),
    [
        (["--history-password", "hush"], {}, ""),
        (["--history-password=hush"], {}, ""),
        (["--history", "redis://:hush@h"], {}, ""),
        ([], {"HISTORY_URL": "redis://:hush@h"}, ""),
        ([], {}, 'history_url = "redis://:hush@h"'),
        ([], {}, 'history_password = "hush"'),
    ],
)
def test_a_secret_in_the_wrong_place_is_refused_and_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    words: list[str], variables: dict[str, str], text: str,
) -> None:  # fmt: skip
    file = written(tmp_path / "settings.toml", text)
    for name, value in variables.items():
        monkeypatch.setenv(PREFIX + name, value)
    line = refusal(["f", "--settings", file, *words], capsys)
    assert "hush" not in line
    assert "--history-password-file" in line
    assert "RECPRUNE_SERVE_HISTORY_PASSWORD" in line


def test_a_password_file_is_named_by_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = written(tmp_path / "empty", "\n")
    monkeypatch.setenv(PREFIX + "HISTORY_PASSWORD_FILE", str(empty))
    line = refusal(["f"], capsys)
    assert line == f"{PREFIX}HISTORY_PASSWORD_FILE: {empty} is empty, expected a password"


# What the command line promises ------------------------------------------------------------------


def test_help_has_every_option_with_its_default() -> None:
    done = subprocess.run([*CLI, "serve", "--help"], capture_output=True, text=True, check=True)
    said = " ".join(done.stdout.split())
    for words in (
        "--settings FILE", "--host HOST", "default 127.0.0.1", "--history URL", "--no-access-log",
        "--max-shard-seconds N", "default 10.0", "--item-set NAME=FILE", "default 8000",
    ):  # fmt: skip
        assert words in said
    assert "SUPPRESS" not in said
    assert "--history-password " not in said, "it is refused, not offered"
