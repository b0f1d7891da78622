"""The report of the experiments: building blocks, and its two shapes, Markdown and one HTML file.

Both say the same words. In paragraphs, cells, notes and captions `**bold**`, `` `code` `` and
`[text](url)` mean what they mean in Markdown; anything else, and any title, means itself: no text
can become a tag, a heading or a script. The same sections give the same bytes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TypeAlias
from urllib.parse import quote
from xml.etree import ElementTree

from recprune.storage import writing_file
from recprune.types import InputError, StorageError

_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")  # no double hyphen: those are for ids inside pictures
_INLINE = re.compile(
    r"`(?P<code>[^`]+)`|\*\*(?P<bold>.+?)\*\*"
    # Web addresses, places in this report and files beside it; never another scheme.
    r"|\[(?P<text>[^\[\]]+)\]\((?P<url>https?://[^\s()<>\"]+|[#\w.][^\s()<>\":]*)\)"
)
_MARKUP = re.compile(r"[\\`*\[\]~$]|(?<!\w)_|_(?!\w)|<(?=[A-Za-z/!?])|&(?=#?\w+;)")
_BLOCK_MARKUP = re.compile(r"^(\d+(?=[.)]\s)|)([#>+\-.)])")


@dataclass(frozen=True)
class Table:
    """Cells of text, the first column to the left and the others to the right; a note below."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows, start=1):
            if len(row) != len(self.header):
                raise InputError(
                    f"table {self.header}: row {number} has {len(row)} cells, "
                    f"expected {len(self.header)}"
                )


@dataclass(frozen=True)
class Text:
    """Paragraphs, with an empty line between two."""

    markdown: str


@dataclass(frozen=True)
class Picture:
    """A picture: file stem, SVG text, alternative text, and a caption."""

    name: str
    svg: str
    alt: str
    caption: str


Block: TypeAlias = Table | Text | Picture


@dataclass(frozen=True)
class Section:
    """A part of the report; links reach it by its anchor."""

    title: str
    anchor: str
    blocks: tuple[Block, ...]


def write_markdown(title: str, sections: Sequence[Section], path: Path, pictures: Path) -> None:
    """Write the report as Markdown, and its pictures into a folder.

    The files of the pictures begin with the report's own name and a hyphen (which a picture's name
    may have or lack); files that do, but are no part of this report, are removed.
    """
    _check(sections)
    prefix = f"{path.stem}-"
    files = {
        picture.name: pictures / f"{prefix}{picture.name.removeprefix(prefix)}.svg"
        for picture in _pictures(sections)
    }
    if len(set(files.values())) < len(files):
        raise InputError(f"two pictures differ by {prefix!r} only: they would be one file")
    folder = quote(Path(os.path.relpath(pictures, path.parent)).as_posix())
    parts = [f"# {_plain_markdown(title)}"]
    parts.append(
        "\n".join(f"- [{_plain_markdown(part.title)}](#{part.anchor})" for part in sections)
    )
    for section in sections:
        # A heading's own anchor is made of its words, and changes with them.
        parts.append(f'<a id="{section.anchor}"></a>\n\n## {_plain_markdown(section.title)}')
        for block in section.blocks:
            if isinstance(block, Table):
                parts += _markdown_table(block)
            elif isinstance(block, Text):
                parts += [_guard_block(_markdown(text)) for text in _paragraphs(block.markdown)]
            else:
                address = f"{folder}/{quote(files[block.name].name)}"
                parts.append(f"![{_plain_markdown(block.alt)}]({address})")
                parts += _italic(block.caption)
    for picture in _pictures(sections):
        _write(files[picture.name], picture.svg)
    _write(path, "\n\n".join(parts) + "\n")
    for old in sorted(pictures.glob(f"{prefix}*.svg")):
        if old not in files.values():
            old.unlink()


def write_html(title: str, sections: Sequence[Section], path: Path) -> None:
    """Write the report as one HTML file that holds all it needs, and runs no script."""
    _check(sections)
    contents = "\n".join(
        f'<li><a href="#{section.anchor}">{_plain_html(section.title)}</a></li>'
        for section in sections
    )
    body = "\n".join(_html_section(section) for section in sections)
    page = _PAGE.format(title=_plain_html(title), style=_STYLE, contents=contents, body=body)
    _write(path, page)


def _check(sections: Sequence[Section]) -> None:
    """Refuse names that could not be part of an address, and those that are there twice."""
    for what, names in (
        ("anchor", [section.anchor for section in sections]),
        ("picture", [picture.name for picture in _pictures(sections)]),
    ):
        for at, name in enumerate(names):
            if not _NAME.fullmatch(name):
                raise InputError(f"{what} {name!r}: expected words of a-z and 0-9, with hyphens")
            if name in names[:at]:
                raise InputError(f"{what} {name!r} is there twice")


def _pictures(sections: Sequence[Section]) -> Iterator[Picture]:
    for section in sections:
        yield from (block for block in section.blocks if isinstance(block, Picture))


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with writing_file(path) as temporary:
            temporary.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror or error}") from None


def _paragraphs(text: str) -> list[str]:
    """Return paragraphs, each as one line: where a line was broken means nothing."""
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()]


def _spans(text: str, plain: Callable[[str], str], marked: Callable[[str, str, str], str]) -> str:
    """Render text: `plain` what means itself, `marked` a span's kind, content and address."""
    done, out = 0, []
    for match in _INLINE.finditer(text):
        out.append(plain(text[done : match.start()]))
        kind = str(match.lastgroup)
        if kind == "code":
            out.append(marked("code", match["code"], ""))
        elif kind == "bold":
            out.append(marked("bold", _spans(match["bold"], plain, marked), ""))
        else:
            out.append(marked("link", _spans(match["text"], plain, marked), match["url"]))
        done = match.end()
    return "".join(out) + plain(text[done:])


# Markdown


def _plain_markdown(text: str) -> str:
    return _MARKUP.sub(r"\\\g<0>", " ".join(text.split()))


def _markdown(text: str) -> str:
    def plain(part: str) -> str:
        return _MARKUP.sub(r"\\\g<0>", part)

    def marked(kind: str, content: str, url: str) -> str:
        if kind == "code":
            return f"`{content}`"
        return f"**{content}**" if kind == "bold" else f"[{content}]({url})"

    return _spans(" ".join(text.split()), plain, marked)


def _guard_block(line: str) -> str:
    """Keep a paragraph from being a list, a heading or a quotation by its first character."""
    return _BLOCK_MARKUP.sub(r"\1\\\2", line)


def _italic(text: str) -> list[str]:
    return [f"*{_markdown(part)}*" for part in _paragraphs(text)]


def _markdown_table(table: Table) -> list[str]:
    cells = [
        [_markdown(cell).replace("|", "\\|") for cell in row] for row in (table.header, *table.rows)
    ]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]

    def line(row: Sequence[str]) -> str:
        first, *others = zip(row, widths, strict=True)
        padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        return f"| {' | '.join(padded)} |"

    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    return ["\n".join(map(line, (cells[0], rule, *cells[1:]))), *_italic(table.note)]


# HTML


def _plain_html(text: str) -> str:
    return escape(" ".join(text.split()))


def _html(text: str) -> str:
    def marked(kind: str, content: str, url: str) -> str:
        if kind == "code":
            return f"<code>{escape(content)}</code>"
        if kind == "bold":
            return f"<strong>{content}</strong>"
        return f'<a href="{escape(url)}">{content}</a>'

    return _spans(" ".join(text.split()), escape, marked)


def _html_section(section: Section) -> str:
    parts = [f'<section id="{section.anchor}">', f"<h2>{_plain_html(section.title)}</h2>"]
    for block in section.blocks:
        if isinstance(block, Table):
            parts.append(_html_table(block, section.title))
        elif isinstance(block, Text):
            parts += [f"<p>{_html(text)}</p>" for text in _paragraphs(block.markdown)]
        else:
            parts.append(_html_picture(block))
    return "\n".join((*parts, "</section>"))


def _html_table(table: Table, section_title: str) -> str:
    # Without a note, the caption is for screen readers alone.
    caption = (
        f"<caption>{_html(table.note)}</caption>"
        if table.note
        else f'<caption class="unseen">{_plain_html(section_title)}</caption>'
    )
    head = "".join(f'<th scope="col">{_html(cell)}</th>' for cell in table.header)
    rows = [
        f'<tr><th scope="row">{_html(row[0])}</th>'
        + "".join(f"<td>{_html(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in table.rows
    ]
    return "\n".join(
        (
            '<div class="scroll" role="group" aria-label="Table" tabindex="0"><table>',
            caption,
            f"<thead><tr>{head}</tr></thead>",
            "<tbody>",
            *rows,
            "</tbody></table></div>",
        )
    )


def _html_picture(picture: Picture) -> str:
    caption = f"\n<figcaption>{_html(picture.caption)}</figcaption>" if picture.caption else ""
    return (
        f'<figure><div class="scroll" role="group" aria-label="Picture" tabindex="0">\n'
        f"{_inline_svg(picture)}</div>{caption}</figure>"
    )


def _inline_svg(picture: Picture) -> str:
    """Return the picture as part of a page: its ids are its own, nothing comes from elsewhere."""
    try:
        root = ElementTree.fromstring(picture.svg)  # noqa: S314 - our own charts
    except ElementTree.ParseError as error:
        raise InputError(f"picture {picture.name!r} is not SVG: {error}") from None
    prefix = f"{picture.name}--"
    for element in root.iter():
        element.tag = _local(element.tag)
        attributes = {_local(name): value for name, value in element.items()}
        if "id" in attributes:
            attributes["id"] = prefix + attributes["id"]
        address = attributes.get("href", "#")
        if address.startswith("#") and "href" in attributes:
            attributes["href"] = f"#{prefix}{address[1:]}"
        if (
            element.tag in ("script", "foreignObject")
            or not address.startswith(("#", "data:image/png;"))
            or any(name.startswith("on") for name in attributes)
        ):
            raise InputError(f"picture {picture.name!r} holds a <{element.tag}> that is not safe")
        element.attrib.clear()
        for name, value in attributes.items():
            element.set(name, value.replace("url(#", f"url(#{prefix}"))
    root.set("role", "img")
    root.set("aria-label", " ".join(picture.alt.split()))
    return ElementTree.tostring(root, encoding="unicode")


def _local(name: str) -> str:
    """Return a name without its namespace: inside HTML, SVG needs none."""
    return name.rpartition("}")[2]


_STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1f2328; --muted: #57606a;
  --line: #d0d7de; --stripe: #f6f8fa; --link: #0550ae; }
@media screen and (prefers-color-scheme: dark) {
  :root { --ground: #15181d; --ink: #e6e8ea; --muted: #a4abb3; --line: #3a414a;
    --stripe: #1c2026; --link: #79b8ff; } }
* { box-sizing: border-box; }
html { scroll-behavior: smooth; scroll-padding-top: 1rem; }
@media (prefers-reduced-motion: reduce) { html { scroll-behavior: auto; } }
body { margin: 0 auto; padding: 1.5rem; max-width: 74rem; background: var(--ground);
  color: var(--ink); font: 1rem/1.6 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { margin: 0.5rem 0 1.5rem; font-size: 2rem; line-height: 1.2; text-wrap: balance; }
h2 { margin: 0 0 1rem; font-size: 1.4rem; line-height: 1.3; }
section { margin-bottom: 3rem; }
p { max-width: 44rem; overflow-wrap: anywhere; }
a { color: var(--link); }
a:focus-visible, .scroll:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
code { padding: 0.1em 0.3em; border-radius: 4px; background: var(--stripe);
  font: 0.9em ui-monospace, "Cascadia Mono", Menlo, Consolas, monospace; }
nav { margin-bottom: 2rem; font-size: 0.95rem; }
nav ol { margin: 0; padding: 0; list-style: none; }
nav a { display: block; padding: 0.25rem 0; text-decoration: none; }
nav a:hover { text-decoration: underline; }
.scroll { overflow-x: auto; }
table { margin: 1rem 0; border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { caption-side: bottom; padding-top: 0.5rem; text-align: left; }
caption, figcaption { color: var(--muted); font-size: 0.9rem; }
th, td { padding: 0.35rem 0.8rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
th:first-child { text-align: left; }
thead th { border-bottom-width: 2px; vertical-align: bottom; white-space: normal; }
tbody th { font-weight: 400; }
tbody tr:nth-child(even) { background: var(--stripe); }
figure { margin: 1.5rem 0; }
figcaption { max-width: 44rem; margin-top: 0.5rem; }
svg { display: block; max-width: 100%; min-width: 30rem; height: auto; }
.unseen, .skip:not(:focus) { position: absolute; width: 1px; height: 1px; overflow: hidden;
  clip-path: inset(50%); white-space: nowrap; }
@media screen and (min-width: 64rem) {
  .page { display: grid; grid-template-columns: 14rem minmax(0, 1fr); gap: 3rem; }
  nav { position: sticky; top: 1.5rem; align-self: start; max-height: calc(100vh - 3rem);
    overflow-y: auto; } }
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; }
  nav, .skip { display: none; }
  .scroll { overflow: visible; }
  svg { min-width: 0; }
  figure, tr, h2 { break-inside: avoid; }
  h2 { break-after: avoid; } }
"""

_PAGE = """<!DOCTYPE html>
<html lang="en-GB">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<a class="skip" href="#page--main">Skip to the report</a>
<header><h1>{title}</h1></header>
<div class="page">
<nav aria-label="Contents"><ol>
{contents}
</ol></nav>
<main id="page--main">
{body}
</main>
</div>
</body>
</html>
"""
