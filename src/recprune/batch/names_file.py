"""A file of what items are called, as it was when a batch was planned."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from recprune.data.identifiers import ExternalId, FoundIds
from recprune.data.titles import names_of, reading
from recprune.storage import sha256_of
from recprune.types import InputError


@dataclass(frozen=True)
class NamesFile:
    """Where the names are, and what tells the file from another one."""

    path: str
    sha256: str

    @classmethod
    def at(cls, path: str | Path) -> NamesFile:
        found = Path(os.path.realpath(path))
        if found.exists() and not found.is_file():
            raise InputError(f"{path}: is no plain file, and every worker reads the names")
        with reading(Path(path)):
            return cls(str(found), sha256_of(found))

    def read(self, item_ids: FoundIds) -> dict[ExternalId, str]:
        """Return the names of items of this catalogue."""
        names = names_of(item_ids, Path(self.path))
        with reading(Path(self.path)):
            if sha256_of(Path(self.path)) != self.sha256:
                raise InputError(f"{self.path}: was changed after the plan was made")
        return names
