"""API keys: a file of names, scopes and hashes. The keys themselves are not kept.

A key is 256 random bits, which cannot be guessed at any speed of hashing: plain SHA-256 is enough,
and the slow hashes that passwords need would only slow every request.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from recprune.storage import writing_file
from recprune.types import InputError

Scope: TypeAlias = Literal["ask", "admin"]

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class StoredKey:
    """One key, as the file has it."""

    name: str
    scope: Scope
    sha256: str


class Keys:
    """The keys of a file."""

    def __init__(self, stored: Iterable[StoredKey]) -> None:
        self.stored = list(stored)

    def scope(self, key: str) -> Scope | None:
        """Return what a key allows, or None for a key that is not ours."""
        given = _hash(key)
        found: Scope | None = None
        for stored in self.stored:  # all of them, so that the time taken reveals nothing
            if hmac.compare_digest(stored.sha256, given):
                found = stored.scope
        return found


def read_keys(path: Path) -> Keys:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["keys"]
        keys = [StoredKey(**entry) for entry in entries]
    except FileNotFoundError:
        raise InputError(f"{path}: no such file: `recprune keys add` makes one") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not a file of API keys: {error}") from None
    for key in keys:
        is_whole = isinstance(key.name, str) and key.scope in get_args(Scope)
        if not is_whole or not _SHA256.fullmatch(str(key.sha256)):
            raise InputError(f"{path}: the key {key.name!r} is damaged")
    if not keys:
        raise InputError(f"{path}: has no keys: `recprune keys add` adds one")
    return Keys(keys)


def add_key(path: Path, name: str, scope: Scope) -> str:
    """Add a key to a file, which may be a new one, and return it: it cannot be had again."""
    stored = read_keys(path).stored if path.exists() else []
    if any(key.name == name for key in stored):
        raise InputError(f"{path}: already has a key of the name {name!r}")
    key = secrets.token_urlsafe(32)
    _write(path, [*stored, StoredKey(name, scope, _hash(key))])
    return key


def remove_key(path: Path, name: str) -> None:
    stored = read_keys(path).stored
    kept = [key for key in stored if key.name != name]
    if len(kept) == len(stored):
        raise InputError(f"{path}: has no key of the name {name!r}")
    _write(path, kept)


def _write(path: Path, keys: list[StoredKey]) -> None:
    text = json.dumps({"keys": [asdict(key) for key in keys]}, indent=2, ensure_ascii=False)
    try:
        with writing_file(path) as temporary:
            temporary.chmod(0o600)
            temporary.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {os.strerror(error.errno or 0)}") from None


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
