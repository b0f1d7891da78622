"""Lines that fit the terminal, in commands that do without rich."""

from __future__ import annotations

import shutil
import textwrap

_LEAST = 40  # columns: in fewer, what is folded would be longer than the screen is high


def folded(begin: str, text: str) -> str:
    """Return a line, folded between words so that each line after the first begins below `text`.

    The width is that of the terminal, or what the variable COLUMNS says; without either, 80.
    """
    width = max(_LEAST, shutil.get_terminal_size().columns)
    filled = textwrap.fill(
        text,
        width,
        initial_indent=begin,
        subsequent_indent=" " * len(begin),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return filled or begin.rstrip()
