"""`recprune batch`: recommendations for every user of a Parquet file, in Parquet."""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from recprune.batch.frozen_catalogue import FrozenCatalogue, is_copy_of, remove_copy
from recprune.batch.in_processes import write_parts_in_processes
from recprune.batch.output import run_batch, unfinished_plan
from recprune.batch.parts import PartReport
from recprune.batch.plan import BatchPlan, BatchSettings, make_plan
from recprune.commands.answer_options import (
    add_filter_arguments,
    add_live_arguments,
    add_names_argument,
    add_seen_arguments,
    check_live,
)
from recprune.commands.console import messages, say
from recprune.live.file_lock import held_alone
from recprune.system import available_cores
from recprune.types import InputError, InterruptedWorkError, Json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    usual = BatchSettings()
    parser.add_argument("recommender", metavar="FOLDER", help="made by recprune export")
    parser.add_argument(
        "--histories",
        required=True,
        metavar="PATH",
        help="a Parquet file, or a folder of them: a row a user, items oldest first",
    )
    parser.add_argument(
        "--out",
        required=True,
        metavar="FOLDER",
        help="for the answers, in parts; a run that was stopped goes on there",
    )
    parser.add_argument("-k", type=int, default=usual.k, help="default %(default)s")
    add_seen_arguments(parser)
    add_filter_arguments(parser)
    add_live_arguments(parser)
    add_names_argument(parser)
    parser.add_argument("--workers", type=int, metavar="N", help="default: one for each CPU")
    parser.add_argument(
        "--address",
        help="of a Ray cluster to do it: host:port, auto, or local to start one here; "
        "default: processes of this machine, without Ray",
    )
    parser.add_argument("--user-column", default=usual.user_column, help="default %(default)s")
    parser.add_argument(
        "--history-column", default=usual.history_column, help="default %(default)s"
    )
    parser.add_argument(
        "--times-column",
        default=usual.times_column,
        help="when items were, in seconds since 1970, where all files have it; default %(default)s",
    )
    parser.add_argument(
        "--rows-per-part",
        type=int,
        default=usual.rows_per_part,
        metavar="N",
        help="users in each file of the output; default %(default)s",
    )


def run(parsed: argparse.Namespace) -> None:
    if parsed.workers is not None and parsed.workers < 1:
        raise InputError(f"--workers is {parsed.workers}, expected 1 or more")
    check_live(parsed)
    if not parsed.live:
        _answer(parsed, None)
        return
    with _frozen(parsed.live, parsed.out, parsed.attributes) as catalogue:
        _answer(parsed, catalogue)


def _answer(parsed: argparse.Namespace, catalogue: FrozenCatalogue | None) -> None:
    plan = make_plan(
        parsed.recommender,
        parsed.histories,
        BatchSettings(
            parsed.k,
            parsed.exclude_seen,
            parsed.user_column,
            parsed.history_column,
            parsed.rows_per_part,
            parsed.where,
            parsed.at_most,
            parsed.times_column,
        ),
        say,
        catalogue=catalogue,
        names=parsed.names,
    )

    def write_parts(plan: BatchPlan, out: str | Path, parts: Sequence[int]) -> Iterator[PartReport]:
        if parsed.address is None:
            workers = parsed.workers or available_cores()
            return write_parts_in_processes(plan, out, parts, workers)
        from recprune.batch.on_ray import write_parts_on_ray

        return write_parts_on_ray(plan, out, parts, parsed.workers, parsed.address, say)

    progress = _PartsBar(plan)
    try:
        with _sigterm_as_ctrl_c(), progress.shown:
            run_batch(plan, parsed.out, write_parts, progress.part, say)
    except KeyboardInterrupt:
        raise InterruptedWorkError(
            f"interrupted with {progress.parts} of {plan.num_parts} parts in {parsed.out}; "
            "the same command goes on"
        ) from None
    say(f"{parsed.out}: {progress.summary()}")


@contextmanager
def _frozen(live: str, out: str, attributes: str | None) -> Iterator[FrozenCatalogue]:
    """Keep a live index beside the output as it was when the run began, until its end.

    A copy that no unfinished run goes on with does not stay, whatever went wrong.
    """
    folder = Path(os.path.realpath(out))
    copy = folder.with_name(f".{folder.name}.catalogue")
    lock = folder.with_name(f"{copy.name}.lock")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Else another run might remove the copy of this one, which has no plan in `out` yet.
    with held_alone(lock, f"{out}: another run is writing to it"):
        try:
            yield FrozenCatalogue.freeze(live, copy, attributes, _planned_catalogue(out))
        finally:
            if not is_copy_of(copy, _planned_catalogue(out)):
                remove_copy(copy)


def _planned_catalogue(out: str) -> Json | None:
    """Return what the unfinished run in a folder says of its catalogue."""
    planned = (unfinished_plan(out) or {}).get("catalogue")
    return planned if isinstance(planned, dict) else None


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Have both requests to stop end in the same way."""
    if threading.current_thread() is not threading.main_thread():  # signals arrive only there
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _PartsBar:
    """A bar on a terminal, and the sums for the last line."""

    def __init__(self, plan: BatchPlan) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self.parts = 0
        self._found = self._made = self._by_popularity = 0  # rows
        self._seconds: dict[str, float] = {}
        self._begun = time.monotonic()
        self.shown = Progress(
            TextColumn("users"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=messages,
            disable=not messages.is_terminal,
        )
        self._task = self.shown.add_task("users", total=plan.num_rows, speed="")

    def part(self, report: PartReport, made: bool) -> None:
        self.parts += 1
        self._by_popularity += report.by_popularity
        if made:
            self._made += report.rows
            for stage, seconds in report.seconds.items():
                self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds
        else:
            self._found += report.rows
        self.shown.update(self._task, advance=report.rows, speed=f"{self._speed():,.0f} users/s")

    def _speed(self) -> float:
        return self._made / (time.monotonic() - self._begun)

    def summary(self) -> str:
        found = f" ({self._found:,} were there already)" if self._found else ""
        line = f"{self._found + self._made:,} users{found}, {self._by_popularity:,} by popularity"
        whole = sum(self._seconds.values())
        if not whole:
            return f"{line}; nothing was left to do"
        shares = (f"{stage} {share / whole:.0%}" for stage, share in self._seconds.items())
        return f"{line}; {self._speed():,.0f} users/s; time in {', '.join(shares)}"
