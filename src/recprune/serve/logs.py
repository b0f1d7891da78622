"""Structured logs, one JSON object a line, without personal data.

No user, item, address or path of a request is ever logged: a route is logged by its template. Of
an exception, its type and the places in the code are logged, not its message, which may quote what
a client sent.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from pathlib import Path

from recprune.types import Json

_LOGGER = logging.getLogger("recprune.serve")


class JsonFormatter(logging.Formatter):
    """One line of JSON for each record."""

    def format(self, record: logging.LogRecord) -> str:
        entry: Json = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": record.process,
            "event": record.getMessage(),
        }
        entry |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            frames = traceback.extract_tb(error.__traceback__)
            entry["error"] = type(error).__name__
            entry["at"] = [f"{Path(at.filename).name}:{at.lineno} {at.name}" for at in frames]
        return json.dumps(entry, ensure_ascii=False)


def configure_logs() -> None:
    """Log to standard error, for all loggers."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.root.handlers = [handler]
    logging.root.setLevel(logging.WARNING)
    _LOGGER.setLevel(logging.INFO)


def log(event: str, fields: Json) -> None:
    _LOGGER.info(event, extra={"fields": fields})


def log_problem(event: str, fields: Json, error: BaseException | None = None) -> None:
    """Log something that an operator should look at."""
    _LOGGER.error(event, exc_info=error, extra={"fields": fields})
