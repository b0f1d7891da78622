"""What the commands print: tables on standard output, progress and complaints on standard error."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from recprune.types import Progress, needs_extra

with needs_extra("data"):
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would exit with 1; the command line knows better


output = _Console(highlight=False, emoji=False)
messages = _Console(stderr=True, highlight=False, emoji=False)


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> None:
    """Print a table: the first column to the left, the others, being numbers, to the right."""
    table = Table(title=Text(title), title_justify="left", title_style="bold")
    for place, name in enumerate(header):
        # Folded, not cut: names may differ in their last letters.
        table.add_column(name, justify="right" if place else "left", overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    output.print(table)


def say(message: str) -> None:
    """Print a line on standard error, as it is."""
    messages.print(message, markup=False, soft_wrap=True)


@contextmanager
def showing_progress(task: str) -> Iterator[Progress]:
    """Show on a terminal what is going on and for how long; elsewhere stay silent."""
    begun = time.monotonic()
    with messages.status(task) as status:

        def progress(step: str) -> None:
            status.update(Text(f"{task}: {step} ({time.monotonic() - begun:.0f} s)"))

        yield progress
