"""Figures of one part of an experiment, as a JSON file that says where they come from."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from recprune.storage import json_checksum, writing_file
from recprune.types import Json, StorageError

_FORMAT = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Record:
    """What one part of an experiment found."""

    experiment: str  # rq1
    part: str  # gitlog-gsasrecjpq
    settings: Json  # what was asked for; a part is run again if that changes
    machine: Json
    figures: Json

    @property
    def file_name(self) -> str:
        return f"{self.experiment}.{self.part}.json"

    @property
    def hardware(self) -> str:
        """The size of the machine, in words."""
        cores, memory = self.machine["cores"], self.machine["memory_gigabytes"]
        return f"{cores} cores and {memory:,.0f} GB"


def save_record(folder: Path, record: Record) -> None:
    """Write a record under its name, in place of an older one."""
    if not _NAME.fullmatch(record.experiment) or not _NAME.fullmatch(record.part):
        raise StorageError(f"{record.file_name}: not a name for a record")
    content: Json = {"format": _FORMAT, **asdict(record)}
    # Through JSON once: the checksum is that of what a reader will see.
    content = json.loads(json.dumps(content, allow_nan=False))
    content["sha256"] = json_checksum(content)
    folder.mkdir(parents=True, exist_ok=True)
    with writing_file(folder / record.file_name) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def load_record(path: Path) -> Record:
    """Read a record; one that was cut short or changed by hand is refused."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise StorageError(f"{path}: not a whole record, remove it: {error}") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise StorageError(f"{path}: not a record of format {_FORMAT}")
    if content.pop("sha256", None) != json_checksum(content):
        raise StorageError(
            f"{path}: was changed after it was measured: remove it, and it is measured again"
        )
    del content["format"]
    record = Record(**content)
    if record.file_name != path.name:
        raise StorageError(f"{path}: holds the record {record.file_name}")
    return record


def load_records(folder: Path) -> list[Record]:
    """Read every record of a folder, in the order of their names."""
    return [load_record(path) for path in sorted(folder.glob("*.json"))]


def by_log(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Return the records of each log, in their order."""
    logs: dict[str, list[Record]] = {}
    for record in records:
        logs.setdefault(record.figures["log"], []).append(record)
    return logs


def records_of(records: Sequence[Record], experiment: str) -> list[Record]:
    return [record for record in records if record.experiment == experiment]
