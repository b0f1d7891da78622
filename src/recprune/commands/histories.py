"""`recprune histories`: the histories of a log, for `recprune batch` or into a service's store."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recprune.batch.plan import BatchSettings
from recprune.commands.console import say, showing_progress
from recprune.commands.log_options import add_log_arguments, read_log
from recprune.data.identifiers import ExternalId, IntegerIds
from recprune.data.interactions import Interactions
from recprune.serve.histories.histories import Event, open_histories
from recprune.storage import writing_file
from recprune.types import InputError, Progress, StorageError

_KEPT = 1000  # of a user, as many as a service keeps by default
_USERS = 16_384  # of which a row group is made
_EVENTS = 4096  # that are kept with one write
_PASSWORD = "RECPRUNE_SERVE_HISTORY_PASSWORD"  # the service's own variable  # noqa: S105


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_log_arguments(parser)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument(
        "--out", metavar="FILE", help="Parquet, a row a user, as `recprune batch` reads it"
    )
    target.add_argument(
        "--into",
        metavar="URL",
        help="a service's histories: sqlite:///FILE or redis://HOST:PORT/DATABASE, whose password "
        f"is read from the variable {_PASSWORD}",
    )
    parser.add_argument(
        "--most",
        type=int,
        default=_KEPT,
        metavar="N",
        help="of a user the newest so many of the log; default %(default)s",
    )


def run(parsed: argparse.Namespace) -> None:
    if parsed.most < 1:
        raise InputError(f"--most is {parsed.most}, expected at least 1")
    if parsed.out is not None and os.path.realpath(parsed.out) == os.path.realpath(parsed.log):
        raise InputError(f"{parsed.out}: is the log itself, which would be gone")
    log = read_log(parsed)
    with showing_progress("histories") as progress:
        if parsed.out is not None:
            write_histories(log, parsed.out, parsed.most, progress)
            done = f"wrote the histories of {log.num_users:,} users to {parsed.out}"
        else:
            kept = _keep(log, parsed.into, parsed.most, progress)
            done = f"{kept:,} events of {log.num_users:,} users are new in the histories"
    older = np.maximum(0, log.lengths - parsed.most)
    if older.any():
        say(
            f"left out {older.sum():,} events of {np.count_nonzero(older):,} users who have more "
            f"than the newest {parsed.most:,}: --most"
        )
    say(done)


def write_histories(log: Interactions, out: str, most: int, progress: Progress) -> None:
    """Write a row for each user: id, items oldest first, and when they were, in seconds."""
    names = BatchSettings()
    users, items = (
        pa.int64() if isinstance(ids, IntegerIds) else pa.string()
        for ids in (log.user_ids, log.item_ids)
    )
    schema = pa.schema(
        {
            names.user_column: users,
            names.history_column: pa.list_(items),
            names.times_column: pa.list_(pa.float64()),
        }
    )
    try:
        with writing_file(out) as temporary, pq.ParquetWriter(temporary, schema) as writer:
            for first in range(0, log.num_users, _USERS):
                progress(f"{first:,} of {log.num_users:,} users")
                chosen = range(first, min(first + _USERS, log.num_users))
                rows = [_newest(log, user, most) for user in chosen]
                columns = [
                    pa.array(log.user_ids.take(chosen), users),
                    pa.array([history for history, _ in rows], schema.field(1).type),
                    pa.array([times for _, times in rows], schema.field(2).type),
                ]
                writer.write_batch(pa.record_batch(columns, schema=schema))
    except pa.ArrowException as error:
        raise StorageError(f"{out}: cannot be written: {error}") from None


def _newest(log: Interactions, user: int, most: int) -> tuple[Sequence[ExternalId], list[float]]:
    end = int(log.offsets[user + 1])
    first = max(int(log.offsets[user]), end - most)
    return log.item_ids.take(log.items[first:end]), (log.times[first:end] / 1e6).tolist()


def _keep(log: Interactions, url: str, most: int, progress: Progress) -> int:
    """Append what a log has to a service's histories; what is there already is not kept twice."""
    from recprune.serve.configuration import CEILINGS

    # By the bound with which a store is opened it is cut, and that of its service is not known
    # here: with the greatest that there may be, an import removes nothing.
    histories = open_histories(url, CEILINGS["history"], os.environ.get(_PASSWORD))
    try:
        histories.ready()
        new, events = 0, list[Event]()
        for user in range(log.num_users):
            events += _events(log, user, most)
            if len(events) >= _EVENTS or user == log.num_users - 1:
                new += histories.append(events)
                events = []
                progress(f"{user + 1:,} of {log.num_users:,} users")
        return new
    finally:
        histories.close()


def _events(log: Interactions, user: int, most: int) -> Iterator[Event]:
    name = str(log.user_ids[user])
    before: Counter[tuple[ExternalId, float]] = Counter()
    for item, time in zip(*_newest(log, user, most), strict=True):
        again = before[item, time]  # the same item at the same time is another event
        before[item, time] += 1
        yield Event(name, str(item), time, key=f"log:{time!r}:{again}:{item}")
