"""Run the examples of a page of docs/, in order, as a reader would.

Python blocks share their names, shell blocks are run by bash, and all of them work in the current
folder. A shell block of our own commands alone is run in this process, which saves importing torch
for each. A `text` block right after one is what it prints, `…` standing for anything. A block after
the comment `<!-- not run: why -->` is left out, and so is one after `<!-- needs PACKAGE -->` where
that is not installed. Port 8000 is replaced by a free one.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import socket
import subprocess
import sys
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from recprune.cli import main

BLOCK = re.compile(
    r"^(?P<skip><!-- not run: [^\n]+ -->\n+)?(?:^<!-- needs (?P<needs>\w+) -->\n+)?^```(?P<language>python|sh)\n(?P<code>.*?)^```$"
    r"(?:\n+^```text\n(?P<printed>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Example:
    """A block of a page: where it begins, its code and what that prints."""

    line: int
    language: str
    code: str
    printed: str | None
    is_run: bool
    needs: str | None  # a package that the tests do without


def examples(page: Path) -> list[Example]:
    """Return the examples of a page."""
    text = page.read_text(encoding="utf-8")
    return [
        Example(
            text.count("\n", 0, block.start("code")) + 1,
            block["language"],
            block["code"],
            block["printed"],
            block["skip"] is None
            and (block["needs"] is None or find_spec(block["needs"]) is not None),
            block["needs"],
        )
        for block in BLOCK.finditer(text)
    ]


def run(page: Path) -> None:
    """Run all examples of a page; the first that fails, or prints something else, is an error."""
    names: dict[str, object] = {}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    for example in examples(page):
        if not example.is_run:
            continue
        place = f"{page.name}, line {example.line}"
        code = example.code.replace("8000", port)
        if example.language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as shown, warnings.catch_warnings():
                if example.needs is not None:  # of a version that no test has tried
                    warnings.simplefilter("ignore")
                # The line numbers of the page, in what a mistake says.
                exec(compile("\n" * (example.line - 1) + code, page.name, "exec"), names)
            printed = shown.getvalue()
        else:
            printed = _run_commands(code, place)
        if example.printed is not None:
            expected = ".*".join(map(re.escape, example.printed.strip().split("…")))
            assert re.fullmatch(expected, printed.strip(), re.DOTALL), f"{place}: {printed}"


def _run_commands(code: str, place: str) -> str:
    """Run lines of a shell, and return what they print."""
    commands = [shlex.split(line, comments=True) for line in code.replace("\\\n", " ").splitlines()]
    if all(command[0] == "recprune" and not {"&", "|", ">"} & {*command} for command in commands):
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            for command in commands:
                assert main(command[1:]) == 0, f"{place}: {shlex.join(command)}"
        return shown.getvalue()
    # The commands are beside Python, in an environment that need not be active.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path},
    )
    assert done.returncode == 0, f"{place}: {done.stdout}{done.stderr}"
    return done.stdout
