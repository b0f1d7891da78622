"""The settings and limits of the service, checked before anything starts."""

from __future__ import annotations

import ipaddress
import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from recprune.types import InputError

_ORIGIN = re.compile(r"https?://[^/\s*@?#]+")  # as a browser sends it


# What limits can be at most: a body is read on the event loop, on which all clients of a worker
# wait, so that the schema of every list ends somewhere. A list of so many takes milliseconds.
CEILINGS = {"history": 100_000, "batch": 1024, "item_ids": 100_000}
EVENTS_PER_QUESTION = 16  # how many events are allowed for each question of a batch


@dataclass(frozen=True)
class Limits:
    """What one request may ask for, and how many may ask at once."""

    body_bytes: int = 1 << 20
    history: int = 1000  # items of one history; also how many the store keeps of a user
    k: int = 1000
    batch: int = 64  # histories, sequence embeddings or, times EVENTS_PER_QUESTION, events
    batch_items: int = 16_384  # of all answers to one request: k times the batch
    item_ids: int = 10_000  # in `exclude` and in `allow`
    method_bytes: int = 64 << 20  # that each method may make a worker grow by, see `affordable`
    running: int = 1  # searches at a time, in each worker
    waiting: int = 8  # requests that may wait for them, in each worker; further ones get 503
    connections: int = 1024  # of each worker
    client_seconds: float = 10.0  # for a client to send its request, or to take its answer
    silent_seconds: float = 10.0  # without a sign of life, until a worker is replaced
    reload_seconds: float = 300.0  # for a worker to load the folder
    shard_seconds: float = 10.0  # without a word, until a shard is lost
    idle_shard_seconds: float = 60.0  # that shards stay after the last process has closed them

    def __post_init__(self) -> None:
        for name in Limits.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InputError(f"limit {name} is {value!r}, expected a number")
            least = 0 if name == "waiting" else 1
            if name.endswith("_seconds"):
                if not 0 < value < math.inf:
                    raise InputError(f"limit {name} is {value!r}, expected more than 0")
            elif value < least:
                raise InputError(f"limit {name} is {value!r}, expected {least} or more")
            elif value > CEILINGS.get(name, value):
                raise InputError(f"limit {name} is {value!r}, expected {CEILINGS[name]} or less")

    @property
    def events(self) -> int:
        """How many events one request may bring."""
        return EVENTS_PER_QUESTION * self.batch


@dataclass(frozen=True)
class ServeSettings:
    """Everything that `recprune serve` has an option for."""

    folder: Path  # a saved recommender, or a saved index, which may be in shards
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    history_url: str | None = None  # None: SQLite, one file beside the recommender
    history_password: str | None = field(default=None, repr=False)
    keys_file: Path | None = None
    names_file: Path | None = None
    item_sets: dict[str, Path] = field(default_factory=dict)
    cors_origins: tuple[str, ...] = ()
    access_log: bool = True
    ray: str | None = None  # where shards are searched: auto, local or host:port
    shards: Path | None = (
        None  # None: the folder is a sharded index itself, or nothing is in shards
    )
    replicas: int = 1  # of every shard
    allow_partial: bool = False  # answer without the shards that are lost, and say so
    limits: Limits = Limits()
    scratch: Path | None = None  # a folder that all workers share, of the service's own making

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise InputError(f"port is {self.port}, expected 0 (any) to 65535")
        if not 1 <= self.workers <= 256:
            raise InputError(f"workers is {self.workers}, expected 1 to 256")
        if not self.is_loopback and self.keys_file is None:
            raise InputError(
                f"host is {self.host}, which others can reach: give --keys FILE, made by "
                "`recprune keys add`, or serve on 127.0.0.1"
            )
        if self.ray is None and self.shards is not None:
            raise InputError(
                "--shards: shards are searched on Ray: give --ray too, with local, auto or the "
                "HOST:PORT of a cluster"
            )
        if self.ray is None and (self.replicas != 1 or self.allow_partial):
            raise InputError("--replicas and --allow-partial are for shards: give --ray too")
        if not 1 <= self.replicas <= 100:
            raise InputError(f"replicas is {self.replicas}, expected 1 to 100")
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise InputError(
                    f"--cors-origin is {origin!r}, expected one web site, such as "
                    "https://shop.example: pages of everybody else may not ask"
                )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the service."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def histories(self) -> str:
        """Where the histories of users are kept, as a URL."""
        if self.history_url is not None:
            return self.history_url
        folder = Path(os.path.realpath(self.folder))
        return f"sqlite:///{folder.with_name(folder.name + '-histories.db')}"


@dataclass(frozen=True)
class WorkerJob:
    """What a worker process is given by its supervisor."""

    settings: ServeSettings
    reload_number: int  # of the latest good reload
    reloads: dict[str, int]  # how many there were, by outcome
