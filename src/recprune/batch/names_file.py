"""A file of what items are called, as it was when a batch was planned."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from recprune.data.identifiers import ExternalId, FoundIds
from recprune.data.titles import names_by_id, reading
from recprune.types import InputError


@dataclass(frozen=True)
class NamesFile:
    """Where the names are, and what tells the file from another one."""

    path: str
    sha256: str

    @classmethod
    def at(cls, path: str | Path) -> NamesFile:
        return cls(os.path.realpath(path), _sha256(Path(path)))

    def read(self, item_ids: FoundIds) -> dict[ExternalId, str]:
        """Return the names by ids in the type of the catalogue's."""
        names = names_by_id(item_ids, Path(self.path))
        if _sha256(Path(self.path)) != self.sha256:
            raise InputError(f"{self.path}: was changed after the plan was made")
        return names


def _sha256(path: Path) -> str:
    with reading(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
