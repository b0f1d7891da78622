"""Pages of the site that are made from other files: `make docs` runs this.

Those of the repository's root stand where they are, with links that fit the site; a notebook
becomes a page; the reference has a page for each package, with the names that `recprune` makes
public, and one of all commands.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import recprune
from recprune.cli import COMMANDS

ROOT = Path(__file__).parents[1]
# Files of the root and their pages.
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "CODE_OF_CONDUCT.md": "code_of_conduct.md",
}
# A link in Markdown to a file of this repository: its text, the file, and an anchor.
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)]+)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of the reference where the navigation has a place for them."""
    (reference,) = (part for part in config.nav or () if "Reference" in part)
    first = ["reference/index.md", "reference/commands.md"]
    reference["Reference"] = first + sorted({*reference_pages()} - {*first})
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lead links from a guide to a file of the root to its page."""
    for name, page in PAGES.items():
        markdown = markdown.replace(f"](../../{name}", f"](../{page}")
    return markdown


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from other files."""
    made = {page: (ROOT / name).read_text(encoding="utf-8") for name, page in PAGES.items()}
    made = {page: LINK.sub(_linked, text) for page, text in made.items()}
    for notebook in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        made[f"notebooks/{notebook.stem}.md"] = notebook_page(notebook)
    made |= reference_pages()
    # That of the service's page.
    made["pictures/icon.svg"] = (ROOT / "src/recprune/serve/page/icon.svg").read_text("utf-8")
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def _linked(found: re.Match[str]) -> str:
    """Return the link to a file of the root or of docs/, as a page of the site needs it."""
    text, target, anchor = found.groups()
    page = PAGES.get(target, target.removeprefix("docs/"))
    text = Path(page).stem if text == target else text  # files have other names here
    return f"[{text}]({page}{anchor or ''})"


def notebook_page(path: Path) -> str:
    """Return a notebook as Markdown: its texts, its code, and what the code printed."""
    cells: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    parts = []
    for cell in cells:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else _fenced("python", source))
        for output in cell.get("outputs", ()):
            shown = output.get("text") or output["data"]["text/plain"]
            parts.append(_fenced("text", "".join(shown).rstrip()))
    return "\n\n".join(parts) + "\n"


def _fenced(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


def reference_pages() -> dict[str, str]:
    """Return the pages of the reference."""
    packages: dict[str, list[str]] = {}
    for name, home in recprune._HOMES.items():
        packages.setdefault(home.split(".")[0], []).append(f"recprune.{home}.{name}")
    contents = ["# Reference", "What `import recprune` gives, by package."]
    pages = {"reference/commands.md": _commands_page()}
    for package, paths in packages.items():
        purpose = _purpose(package)
        blocks = [f"# {package}", purpose, *(f"::: {path}" for path in paths)]
        pages[f"reference/{package}.md"] = "\n\n".join(blocks)
        links = [f"- [`{path.split('.')[-1]}`]({package}.md#{path})" for path in paths]
        contents += [f"## [{package}]({package}.md)", purpose, "\n".join(links)]
    pages["reference/index.md"] = "\n\n".join(contents)
    return pages


def _purpose(package: str) -> str:
    """Return the first paragraph of a package's docstring."""
    module = importlib.import_module(f"recprune.{package}")
    return (module.__doc__ or "").split("\n\n")[0].replace("\n", " ")


def _actions(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of what a command can do: `add` of `recprune index add`."""
    # argparse does not say which they are by any other name.
    found = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    return {name: own for one in found for name, own in one.choices.items()}


def _commands_page() -> str:
    """Return what every command says of itself with --help."""
    os.environ["COLUMNS"] = "90"  # argparse asks for the width of the terminal
    blocks = ["# Commands", "`recprune COMMAND --help` says the same."]
    for name, (_, sentence) in COMMANDS.items():
        parser = argparse.ArgumentParser(prog=f"recprune {name}", description=sentence)
        importlib.import_module(f"recprune.commands.{name}").add_arguments(parser)
        blocks += [f"## {name}", _fenced("text", parser.format_help().rstrip())]
        for action, own in _actions(parser).items():
            blocks += [f"### {name} {action}", _fenced("text", own.format_help().rstrip())]
    return "\n\n".join(blocks) + "\n"
