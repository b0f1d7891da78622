"""The site: it is built without a warning, no link is broken, and what its pages say to type works."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest

from tests.support import notebooks
from tests.support.pages import examples, run

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / "docs" / f"{name}.md" for name in ("tour", "concepts", "faq")),
    *sorted((ROOT / "docs" / "guides").glob("*.md")),
]
NOTEBOOKS = sorted(notebooks.FOLDER.glob("*.ipynb"))


class Page(HTMLParser):
    """What an HTML page refers to, what it loads, and the anchors that it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors = {""}
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") in {"stylesheet", "icon", "preload", "preconnect"}:
            self.loads.append(given["href"])
        elif "src" in given:
            self.loads.append(given["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir"]
    built = subprocess.run([*command, out], check=False, capture_output=True, text=True, cwd=ROOT)
    assert built.returncode == 0, built.stderr
    return out


def broken(site: Path, pages: dict[Path, Page]) -> Iterator[str]:
    """Yield every link within the site that leads nowhere."""
    for path, page in pages.items():
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            known = pages.get(target)
            if (
                not target.is_file()
                or not target.is_relative_to(site)
                or (known is not None and unquote(parts.fragment) not in known.anchors)
            ):
                yield f"{path.relative_to(site)}: {link}"


def test_every_link_within_the_site_leads_somewhere(site: Path) -> None:
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > 30
    assert list(broken(site.resolve(), pages)) == []
    # The same code finds what is broken.
    some = site / "broken.html"
    some.write_text('<a href="nowhere.html">x</a><a href="tour.html#nowhere">y</a>')
    pages[some.resolve()] = Page(some)
    assert len(list(broken(site.resolve(), pages))) == 2
    some.unlink()


def test_a_page_loads_nothing_from_elsewhere(site: Path) -> None:
    for path in site.rglob("*.html"):
        for address in Page(path).loads:
            assert not urlsplit(address).netloc, f"{path.name}: {address}"
    for path in site.rglob("*.css"):
        text = path.read_text(encoding="utf-8")
        assert "url(http" not in text, path.name
        assert "@import" not in text, path.name


def test_all_pages_have_examples_that_are_run() -> None:
    assert len(PAGES) >= 11
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        fences = text.count("\n```python\n") + text.count("\n```sh\n")
        assert len(examples(page)) == fences, f"{page.name}: a block is not understood"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_says_to_type_works(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(page)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    kept = nbformat.read(path, as_version=4)
    nbformat.validate(kept)
    ran = notebooks.run(path, tmp_path)
    # Of the same form as the one that is kept; figures may differ from machine to machine.
    assert [cell.source for cell in ran.cells] == [cell.source for cell in kept.cells]
    for cell in ran.cells:
        assert all(output.get("name") == "stdout" for output in cell.get("outputs", ())), cell
