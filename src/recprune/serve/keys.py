"""API keys: a file of names, scopes, rates and hashes. The keys themselves are not kept.

A key is 256 random bits, which cannot be guessed at any speed of hashing: plain SHA-256 is enough,
and the slow hashes that passwords need would only slow every request.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import math
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from recprune.serve.logs import log_problem
from recprune.storage import writing_file
from recprune.system import open_folder
from recprune.types import InputError

Scope: TypeAlias = Literal["ask", "events", "items", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class StoredKey:
    """One key, as the file has it."""

    name: str
    scopes: tuple[Scope, ...]
    sha256: str
    rate: float | None = None  # requests a second; None: any number

    def allows(self, scope: Scope) -> bool:
        """Whether it is good for something; one of scope admin is good for everything."""
        return scope in self.scopes or "admin" in self.scopes


class Keys:
    """The keys of a file."""

    def __init__(self, stored: Iterable[StoredKey]) -> None:
        self.stored = list(stored)

    def find(self, key: str) -> StoredKey | None:
        """Return what is known of a key, or None for one that is not ours."""
        given = _hash(key)
        found: StoredKey | None = None
        for stored in self.stored:  # all of them, so that the time taken reveals nothing
            if hmac.compare_digest(stored.sha256, given):
                found = stored
        return found


class KeyFile:
    """The keys of a file as it is now: one that is taken away is refused from then on.

    Looking whether the file is another one takes microseconds, so that every request does, and
    keys need neither a reload nor a folder that can be loaded.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._state = self._look()
        self._keys = read_keys(path)

    def current(self) -> Keys:
        """Return the keys, read again if the file was changed. A damaged one changes nothing."""
        state = self._look()
        if state != self._state:
            self._state = state
            try:
                self._keys = Keys(_read(self._path))
            except InputError as error:
                log_problem("keys unreadable", {"reason": str(error)})
        return self._keys

    def _look(self) -> tuple[int, ...]:
        try:
            found = self._path.stat()
        except OSError as error:
            return (error.errno or 0,)
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def read_keys(path: Path) -> Keys:
    """Return the keys of a file that has some."""
    stored = _read(path)
    if not stored:
        raise InputError(f"{path}: has no keys: `recprune keys add` adds one")
    return Keys(stored)


def add_key(path: Path, name: str, *scopes: Scope, rate: float | None = None) -> str:
    """Add a key to a file, which may be a new one, and return it: it cannot be had again."""
    key = secrets.token_urlsafe(32)
    added = _checked({"name": name, "scopes": scopes, "sha256": _hash(key), "rate": rate})
    with _changing(path):
        stored = _read(path) if path.exists() else []
        if any(one.name == name for one in stored):
            raise InputError(f"{path}: already has a key of the name {name!r}")
        _write(path, [*stored, added])
    return key


def remove_key(path: Path, name: str) -> None:
    with _changing(path):
        stored = _read(path)
        kept = [key for key in stored if key.name != name]
        if len(kept) == len(stored):
            raise InputError(f"{path}: has no key of the name {name!r}")
        _write(path, kept)


@contextmanager
def _changing(path: Path) -> Iterator[None]:
    """Let one process at a time read a file and write it anew.

    The lock is that of its folder: the file itself is replaced, and a lock goes with what is gone.
    """
    try:
        folder = open_folder(path.parent)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _read(path: Path) -> list[StoredKey]:
    try:
        return [_checked(entry) for entry in json.loads(path.read_text(encoding="utf-8"))["keys"]]
    except FileNotFoundError:
        raise InputError(f"{path}: no such file: `recprune keys add` makes one") from None
    except (OSError, ValueError, KeyError, TypeError, InputError) as error:
        raise InputError(f"{path}: not a file of API keys: {error}") from None


def _checked(entry: dict[str, Any]) -> StoredKey:
    """Return the key of an entry; those of older files have one scope each."""
    known = dict(entry)
    if "scope" in known:
        known["scopes"] = [known.pop("scope")]
    key = StoredKey(**known)
    is_whole = isinstance(key.name, str) and isinstance(key.scopes, list | tuple)
    is_whole = is_whole and bool(key.scopes) and all(scope in SCOPES for scope in key.scopes)
    if not is_whole or not _SHA256.fullmatch(str(key.sha256)):
        raise InputError(f"the key {key.name!r} is damaged")
    rate = key.rate
    is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
    if rate is not None and not (is_number and 0 < rate < math.inf):
        raise InputError(f"the rate of {key.name!r} is {rate!r}, expected requests a second")
    return StoredKey(key.name, tuple(key.scopes), key.sha256, rate)


def _write(path: Path, keys: list[StoredKey]) -> None:
    text = json.dumps({"keys": [asdict(key) for key in keys]}, indent=2, ensure_ascii=False)
    with writing_file(path) as temporary:
        temporary.chmod(0o600)
        temporary.write_text(text + "\n", encoding="utf-8")


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
