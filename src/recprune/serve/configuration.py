"""The settings and limits of the service, checked before anything starts."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias
from urllib.parse import urlsplit

from recprune.serve.setting_sources import DELIMITER, NO_SECRET, PREFIX, complaint, sources
from recprune.types import InputError, Json, needs_extra

with needs_extra("serve"):
    from pydantic import (
        AfterValidator,
        BaseModel,
        BeforeValidator,
        ConfigDict,
        Field,
        SecretStr,
        ValidationError,
        ValidationInfo,
        field_validator,
    )
    from pydantic_settings import (
        BaseSettings,
        PydanticBaseSettingsSource,
        SettingsConfigDict,
        SettingsError,
    )

_ORIGIN = re.compile(r"https?://[^/\s*@?#]+")  # as a browser sends it


# What limits can be at most: a body is read on the event loop, on which all clients of a worker
# wait, so that the schema of every list ends somewhere. A list of so many takes milliseconds.
CEILINGS = {"history": 100_000, "batch": 1024, "item_ids": 100_000}
EVENTS_PER_QUESTION = 16  # how many events are allowed for each question of a batch
METHOD_BYTES = 64 << 20  # that each method may make a worker grow by, see `affordable`


def _not_a_flag(value: Any) -> Any:
    if isinstance(value, bool):  # which the library would count as 0 or 1
        raise ValueError("expected a number")
    return value


def _web_site(origin: str) -> str:
    if not _ORIGIN.fullmatch(origin):
        raise ValueError(
            "expected one web site, such as https://shop.example: pages of everybody else may not "
            "ask"
        )
    return origin


_Whole: TypeAlias = Annotated[int, BeforeValidator(_not_a_flag)]
_Seconds: TypeAlias = Annotated[
    float, BeforeValidator(_not_a_flag), Field(gt=0, allow_inf_nan=False)
]
_Origin: TypeAlias = Annotated[str, AfterValidator(_web_site)]


class Limits(BaseModel):
    """What one request may ask for, and how many may ask at once; described as in the help."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    body_bytes: _Whole = Field(default=1 << 20, ge=1, description="bytes of a request")
    history: _Whole = Field(
        default=1000,
        ge=1,
        le=CEILINGS["history"],
        description="items of a history; as many are kept of a user",
    )
    state_bytes: _Whole = Field(
        default=1 << 26,
        ge=0,
        description="bytes of a worker's memory for states of users that can be continued",
    )
    stored_states: _Whole = Field(
        default=10_000, ge=0, description="users whose states are kept beside the histories"
    )
    k: _Whole = Field(default=1000, ge=1, description="items of an answer")
    rerank: _Whole = Field(
        default=1000, ge=1, description="candidates of an answer that are ranked by their vectors"
    )
    # Histories, sequence embeddings or, times EVENTS_PER_QUESTION, events.
    batch: _Whole = Field(
        default=64, ge=1, le=CEILINGS["batch"], description="questions of a request"
    )
    batch_items: _Whole = Field(
        default=16_384,
        ge=1,
        description="items of all answers to a request: k, or rerank, times its questions",
    )
    item_ids: _Whole = Field(
        default=10_000,
        ge=1,
        le=CEILINGS["item_ids"],
        description="ids in exclude, in allow and in boosts",
    )
    method_bytes: _Whole = Field(
        default=METHOD_BYTES,
        ge=1,
        description="bytes that each of the methods default and recjpqprune, and boosts of a "
        "compact index, may make a worker grow by",
    )
    running: _Whole = Field(
        default=1,
        ge=1,
        description="searches at a time in a worker; default: this worker's share of the cores, "
        "with --ray four times that",
    )
    waiting: _Whole = Field(
        default=8,
        ge=0,
        description="requests that may wait for them; others are answered with 503",
    )
    connections: _Whole = Field(default=1024, ge=1, description="connections of a worker")
    client_seconds: _Seconds = Field(
        default=10.0,
        description="seconds for a client to send its request, or to take the answer",
    )
    silent_seconds: _Seconds = Field(
        default=10.0,
        description="seconds without a sign of life until a worker is replaced",
    )
    reload_seconds: _Seconds = Field(
        default=300.0, description="seconds for a worker to load the folder"
    )
    shard_seconds: _Seconds = Field(
        default=10.0, description="seconds without a word until a shard is lost"
    )

    @property
    def events(self) -> int:
        """How many events one request may bring."""
        return EVENTS_PER_QUESTION * self.batch


class ServeSettings(BaseSettings):
    """Everything that `recprune serve` has an option for.

    What is not given here comes from variables, then from a settings file: see `setting_sources`.
    A field's check knows the fields before it.
    """

    model_config = SettingsConfigDict(
        frozen=True,  # unknown names are refused without being asked to
        hide_input_in_errors=True,  # it may be a secret
        env_prefix=PREFIX,
        env_nested_delimiter=DELIMITER,
        env_ignore_empty=True,
    )

    folder: Path  # a saved recommender, or an index, which may be in shards, or of vectors
    settings_file: Path | None = None
    keys_file: Path | None = None
    host: str = "127.0.0.1"
    port: _Whole = Field(default=8000, ge=0, le=65535)
    workers: _Whole = Field(default=1, ge=1, le=256)
    history_url: str | None = None  # None: SQLite, one file beside the recommender
    history_password: SecretStr | None = None
    history_password_file: Path | None = None
    names_file: Path | None = None
    item_sets: dict[str, Path] = {}
    attributes: Path | None = None  # of the items; None: those of the recommender, if it has any
    live: Path | None = None  # a live index made from the recommender: items come and go
    # Users until an item that the model does not know gets a code; None: it gets none.
    fold_in: _Whole | None = Field(default=None, ge=1, le=10_000)
    cors_origins: tuple[_Origin, ...] = ()
    access_log: bool = True
    ray: str | None = None  # where shards are searched: auto, local or host:port
    shards: Path | None = (
        None  # None: the folder is a sharded index itself, or nothing is in shards
    )
    replicas: _Whole = Field(default=1, ge=1, le=100)  # of every shard
    allow_partial: bool = False  # answer without the shards that are lost, and say so
    limits: Limits = Limits()
    scratch: Path | None = None  # a folder that all workers share, of the service's own making

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003 # ours refuses unknown names
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return sources(settings_cls, init_settings)

    @field_validator("host")
    @classmethod
    def _check_host(cls, host: str, before: ValidationInfo) -> str:
        if not _is_loopback(host) and before.data.get("keys_file") is None:
            raise ValueError(
                "which others can reach: give --keys FILE, made by `recprune keys add`, or serve "
                "on 127.0.0.1"
            )
        return host

    @field_validator("history_url")
    @classmethod
    def _check_history_url(cls, url: str | None) -> str | None:
        if url is not None and _has_secret(url):
            raise ValueError(
                "has a password in it, which everybody can see in a list of processes or of "
                f"settings: {NO_SECRET}"
            )
        return url

    @field_validator("fold_in")
    @classmethod
    def _check_fold_in(cls, users: int | None, before: ValidationInfo) -> int | None:
        if users is not None and before.data.get("live") is None:
            raise ValueError("which puts items into a live index: give --live LIVE too")
        return users

    @field_validator("shards")
    @classmethod
    def _check_shards(cls, shards: Path | None, before: ValidationInfo) -> Path | None:
        if shards is not None and before.data.get("ray") is None:
            raise ValueError(
                "which is searched on Ray: give --ray too, with local, auto or the HOST:PORT of a "
                "cluster"
            )
        return shards

    @field_validator("replicas", "allow_partial")
    @classmethod
    def _check_parts(cls, value: int, before: ValidationInfo) -> int:
        if value != cls.model_fields[str(before.field_name)].default and not before.data.get("ray"):
            raise ValueError("but --replicas and --allow-partial are for shards: give --ray too")
        return value

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the service."""
        return _is_loopback(self.host)

    @property
    def histories(self) -> str:
        """Where the histories of users are kept, as a URL."""
        if self.history_url is not None:
            return self.history_url
        folder = Path(os.path.realpath(self.folder))
        return f"sqlite:///{folder.with_name(folder.name + '-histories.db')}"


def read_settings(given: Json) -> ServeSettings:
    """Return the settings: those given on the command line, then variables, then the file."""
    try:
        return ServeSettings(**given)
    except SettingsError as error:
        raise error.__cause__ or error from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InputError(complaint(ServeSettings, given, first)) from None


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _has_secret(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.password is not None or "password" in parts.query.casefold()
    except ValueError:
        return "@" in url  # the histories will say what is wrong with it


@dataclass(frozen=True)
class WorkerJob:
    """What a worker process is given by its supervisor."""

    settings: ServeSettings
    reload_number: int  # of the latest good reload
    reloads: dict[str, int]  # how many there were, by outcome
    place: int = 0  # among the workers: that of another one before, if it has ended
