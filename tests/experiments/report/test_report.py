"""A report says the same in both shapes and the same bytes every time; charts show their numbers."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from recprune import InputError, StorageError
from recprune.experiments.report import charts
from recprune.experiments.report.chart_style import looks_of
from recprune.experiments.report.charts import Panel
from recprune.experiments.report.document import (
    Block,
    Picture,
    Section,
    Table,
    Text,
    write_html,
    write_markdown,
)

SVG = "{http://www.w3.org/2000/svg}"
KS = [1, 2, 4, 8, 16, 32, 64, 128, 256]
TIMES = [1.0, 1.1, 1.3, 1.7, 2.5, 4.1, 7.3, 13.7, 26.5]
SCORES = np.sort(np.random.default_rng(3).standard_normal((4, 32)), axis=1)[:, ::-1]
EVIL = "<script>alert('x')</script> & \"quoted\""
VOID = {"meta", "link", "br", "hr", "img", "input"}


def draw_lines(name: str = "gSASRec") -> str:
    return charts.lines(
        {name: (KS, TIMES), "SASRec": (KS, [1 + time for time in TIMES])},
        x_label="K (items)",
        y_label="time (ms)",
        log_x=True,
        log_y=True,
        bands={name: ([time / 2 for time in TIMES], [2 * time for time in TIMES])},
        mark={"here": (16, 2.5)},
    )


def draw_panels(stacked: bool = False) -> str:
    first = Panel({"a": (KS, TIMES), "b": (KS, TIMES[::-1])}, "time (ms)")
    second = Panel({"b": (KS, TIMES)}, "items scored (%)", log_y=True)
    return charts.two_panels(first, second, x_label="sub-items per step", stacked=stacked)


def draw_scatter() -> str:
    return charts.scatter(
        {"ours": ([1.0], [150.0]), "peer": ([0.9, 0.5, 0.7], [30.0, 10.0, 20.0])},
        x_label="recall@10",
        y_label="time (µs)",
        log_y=True,
        highlight="ours",
        labels={"peer": ["nprobe 4", "nprobe 1", "nprobe 2"]},
    )


def draw_heat_map() -> str:
    marks = {"top": [(0, 0), (1, 2)], "middle": [(2, 15)], "bottom": [(3, 31)]}
    return charts.heat_map(
        SCORES, marks, x_label="rank", y_label="split", score_label="sub-item score"
    )


def draw_bars() -> str:
    return charts.bars(
        {"Gowalla": {"cells": 0.2, "pqtopk": 12.34}, "Tmall": {"cells": 1234.4}},
        x_label="time (ms)",
    )


CHARTS: dict[str, Callable[[], str]] = {
    "lines": draw_lines,
    "panels": draw_panels,
    "stacked": lambda: draw_panels(stacked=True),
    "scatter": draw_scatter,
    "heat-map": draw_heat_map,
    "bars": draw_bars,
}


def report() -> list[Section]:
    table = Table(
        ("method", "time | ms", EVIL),
        (("`cells`", "**0.2**", "a|b"), ("`pq|topk`", "12.3", EVIL)),
        note=f"median; {EVIL}",
    )
    text = Text(
        f"One **bold `code`** and [the paper](https://doi.org/10.1145/3726302.3729963).\n\n"
        f"- no list, _no emphasis_, [no link](javascript:alert), {EVIL}"
    )
    pictures: list[Block] = [
        Picture(name, draw(), f"{name}: {EVIL}", f"Caption of **{name}**: {EVIL}")
        for name, draw in CHARTS.items()
    ]
    return [
        Section("Time & work", "time", (text, table)),
        Section(EVIL, "pictures", tuple(pictures)),
        Section("Bare", "bare", (Table(("a", "b"), (("x", "1"),)),)),
    ]


class Page(HTMLParser):
    """What a browser would see: elements with attributes, and text outside of them."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.open == [], "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data

    def named(self, tag: str) -> list[dict[str, str]]:
        return [attributes for found, attributes in self.elements if found == tag]


@pytest.fixture(scope="module")
def sections() -> list[Section]:
    return report()


@pytest.fixture
def page(sections: list[Section], tmp_path: Path) -> Page:
    write_html(f"Results {EVIL}", sections, tmp_path / "results.html")
    return Page(tmp_path / "results.html")


def markdown_of(sections: list[Section], folder: Path) -> str:
    write_markdown(
        "Results", sections, folder / "docs" / "results.md", folder / "docs" / "pictures"
    )
    return (folder / "docs" / "results.md").read_text(encoding="utf-8")


def digest_of(folder: Path) -> str:
    """Write the whole report anew and return a checksum of all its files."""
    sections = report()
    markdown_of(sections, folder)
    write_html("Results", sections, folder / "results.html")
    checksum = hashlib.sha256()
    for path in sorted(folder.rglob("*.*")):
        checksum.update(path.name.encode() + path.read_bytes())
    return checksum.hexdigest()


def test_the_same_report_has_the_same_bytes_in_every_process(tmp_path: Path) -> None:
    here = digest_of(tmp_path / "here")
    assert digest_of(tmp_path / "again") == here
    assert len(list((tmp_path / "here" / "docs" / "pictures").iterdir())) == len(CHARTS)
    code = (
        "import sys; from pathlib import Path; from tests.experiments.report.test_report import digest_of; "
        "print(digest_of(Path(sys.argv[1])))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "elsewhere")],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
        env={"PYTHONHASHSEED": "7", "HOME": str(tmp_path), "TZ": "UTC+7"},
    )
    assert result.stdout.strip() == here


def test_html_shows_every_text_as_text(page: Page) -> None:
    assert page.named("script") == []
    # Title and heading; contents and heading of a section; cells, note, paragraph; captions.
    assert page.text.count(EVIL) == 2 + 2 + 4 + len(CHARTS)
    assert "- no list, _no emphasis_, [no link](javascript:alert)" in page.text
    assert not any(name.startswith("on") for _, attrs in page.elements for name in attrs)


def test_html_needs_nothing_from_elsewhere(page: Page, tmp_path: Path) -> None:
    places = {attrs["id"] for _, attrs in page.elements if "id" in attrs}
    outside = set()
    for tag, attrs in page.elements:
        assert "src" not in attrs
        address = attrs.get("href", attrs.get("xlink:href", "#page--main"))
        if address.startswith("#"):
            assert address[1:] in places, "what is referred to is there"
        elif not address.startswith("data:"):
            outside.add((tag, address))
    assert outside == {("a", "https://doi.org/10.1145/3726302.3729963")}
    assert not re.search(r"@import|url\((?!#)", (tmp_path / "results.html").read_text())


def test_html_pictures_are_inline_with_ids_of_their_own(page: Page) -> None:
    assert len(page.named("svg")) == len(CHARTS)
    assert [svg["aria-label"] for svg in page.named("svg")] == [f"{n}: {EVIL}" for n in CHARTS]
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    clips = [attrs["clip-path"] for _, attrs in page.elements if "clip-path" in attrs]
    assert clips
    assert {clip.removeprefix("url(#").removesuffix(")") for clip in clips} <= set(ids)


def test_html_is_made_of_meaningful_elements(page: Page) -> None:
    tags = [tag for tag, _ in page.elements]
    for tag, count in {"header": 1, "nav": 1, "main": 1, "h1": 1, "section": 3, "table": 2}.items():
        assert tags.count(tag) == count
    assert tags.count("caption") == tags.count("table")
    assert tags.count("figcaption") == tags.count("figure") == len(CHARTS)
    assert {attrs["scope"] for attrs in page.named("th")} == {"col", "row"}
    assert ("strong", {}) in page.elements
    assert ("code", {}) in page.elements


def test_html_colours_can_be_read_on_both_grounds(tmp_path: Path) -> None:
    write_html("Empty", [], tmp_path / "empty.html")
    style = (tmp_path / "empty.html").read_text(encoding="utf-8")
    schemes = re.findall(r":root \{([^}]*)\}", style)
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--(\w+): (#\w{6})", scheme))
        for ink in ("ink", "muted", "link"):
            for ground in ("ground", "stripe"):
                assert contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground)


def test_chart_colours_can_be_told_from_both_grounds() -> None:
    series = {f"s{at}": ([1, 2], [at, at + 1]) for at in range(8)}
    svg = charts.lines(series, x_label="x", y_label="y")
    rules = dict(re.findall(r'\[style\*="stroke: (#\w{6})"\] \{stroke: (#\w{6})', svg))
    drawn = re.findall(r"stroke: (#\w{6}); stroke-width: 1.8", svg)
    assert len(set(drawn)) == 8
    for light in drawn:
        assert contrast(light, "#ffffff") >= 3
        assert contrast(rules[light], "#15181d") >= 3
    words = set(re.findall(r"<text style=\"[^\"]*fill: (#\w{6})", svg))
    fills = dict(re.findall(r'\[style\*="fill: (#\w{6})"\] \{fill: (#\w{6})', svg))
    for light in words:
        assert contrast(light, "#ffffff") >= 4.5
        assert contrast(fills[light], "#15181d") >= 4.5


def contrast(one: str, other: str) -> float:
    """The contrast ratio of the Web Content Accessibility Guidelines."""

    def luminance(colour: str) -> float:
        parts = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_markdown_tables_are_well_formed(sections: list[Section], tmp_path: Path) -> None:
    lines = markdown_of(sections, tmp_path).splitlines()
    tables = [
        [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines[at : at + height]]
        for at, height in ((lines.index(row), 4) for row in lines if row.startswith("| method"))
    ]
    assert len(tables) == 1
    header, rule, *rows = [[cell.strip() for cell in row] for row in tables[0]]
    assert header[:2] == ["method", r"time \| ms"]
    assert rule[0].startswith(":-")
    assert not rule[0].endswith(":")
    assert all(re.fullmatch("-+:", cell) for cell in rule[1:])
    assert {len(row) for row in (header, rule, *rows)} == {3}
    assert rows[0] == ["`cells`", "**0.2**", r"a\|b"]
    assert rows[1][0] == r"`pq\|topk`"


def test_markdown_leaves_no_markup_but_its_own(sections: list[Section], tmp_path: Path) -> None:
    text = markdown_of(sections, tmp_path)
    assert not re.search(r"(?<!\\)</?script", text)
    assert r"\- no list, \_no emphasis\_, \[no link\](javascript:alert)" in text
    assert "**bold `code`** and [the paper](https://doi.org/10.1145/3726302.3729963)." in text
    assert set(re.findall(r"^#+ ", text, re.MULTILINE)) == {"# ", "## "}


def test_markdown_contents_and_pictures_lead_somewhere(
    sections: list[Section], tmp_path: Path
) -> None:
    text = markdown_of(sections, tmp_path)
    assert re.findall(r"^- \[.*\]\(#(.*)\)$", text, re.MULTILINE) == ["time", "pictures", "bare"]
    assert re.findall(r'<a id="(.*)"></a>', text) == ["time", "pictures", "bare"]
    addresses = re.findall(r"^!\[.*\]\((.*)\)$\n\n^\*Caption", text, re.MULTILINE)
    assert addresses == [f"pictures/results-{name}.svg" for name in CHARTS]
    for address in addresses:
        assert (tmp_path / "docs" / address).exists()


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("1. not a list", r"1\. not a list"),
        ("0.17 is a number", "0.17 is a number"),
        ("# not a heading", r"\# not a heading"),
        ("x < 5, &lt; and snake_case", r"x < 5, \&lt; and snake_case"),
        ("a\nbroken line", "a broken line"),
        ("costs $5 and $6", r"costs \$5 and \$6"),
        ("`a*b` stays, a*b* does not", r"`a*b` stays, a\*b\* does not"),
    ],
)
def test_paragraphs_mean_what_they_say(given: str, written: str, tmp_path: Path) -> None:
    text = markdown_of([Section("A", "a", (Text(given),))], tmp_path)
    assert text.endswith(f"## A\n\n{written}\n")


def test_old_pictures_are_removed_and_those_of_others_stay(tmp_path: Path) -> None:
    pictures = tmp_path / "docs" / "pictures"
    bars = Picture("bars", draw_bars(), "bars", "")
    old = Picture("results-old", draw_bars(), "old", "")
    markdown_of([Section("A", "a", (bars, old))], tmp_path)
    (pictures / "cells.svg").write_text("of another document")
    (pictures / "results-notes.txt").write_text("not a picture")
    assert (pictures / "results-old.svg").read_text(encoding="utf-8") == old.svg
    markdown_of([Section("A", "a", (bars,))], tmp_path)
    left = sorted(path.name for path in pictures.iterdir())
    assert left == ["cells.svg", "results-bars.svg", "results-notes.txt"]


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ((Picture("a b", "<svg/>", "", ""),), "picture 'a b'"),
        ((Picture("../a", "<svg/>", "", ""),), "picture '../a'"),
        ((Picture("a", "<svg/>", "", ""), Picture("a", "<svg/>", "", "")), "'a' is there twice"),
        ((Picture("a", "<svg>", "", ""),), "picture 'a' is not SVG"),
        ((Picture("a", "<svg><script/></svg>", "", ""),), "<script> that is not safe"),
        ((Picture("a", "<svg onload='x'/>", "", ""),), "<svg> that is not safe"),
        ((Picture("a", "<svg><use href='https://x.org/'/></svg>", "", ""),), "not safe"),
    ],
)
def test_unusable_pictures_are_refused(
    blocks: tuple[Block, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        write_html("Results", [Section("A", "a", blocks)], tmp_path / "results.html")
    assert list(tmp_path.iterdir()) == []


def test_unusable_sections_tables_and_places_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="row 2 has 1 cells, expected 2"):
        Table(("a", "b"), (("1", "2"), ("3",)))
    with pytest.raises(InputError, match="anchor 'x' is there twice"):
        write_html("R", [Section("A", "x", ()), Section("B", "x", ())], tmp_path / "r.html")
    both = tuple(Picture(name, "<svg/>", "", "") for name in ("a", "results-a"))
    with pytest.raises(InputError, match="one file"):
        markdown_of([Section("A", "a", both)], tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="r.html: cannot be written"):
        write_html("R", [], tmp_path / "file" / "r.html")


@pytest.mark.parametrize("name", CHARTS)
def test_charts_are_xml_with_a_dark_style_and_no_ground(name: str) -> None:
    svg = CHARTS[name]()
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    style = root.findtext(f".//{SVG}style") or ""
    assert "(prefers-color-scheme: dark)" in style
    inks = re.findall(r"(?:fill|stroke): (#\w{6})", svg[svg.index("</style>") :])
    switched = set(re.findall(r'style\*="\w+: (#\w{6})', style))
    fixed = {"#ffffff", "#000000", "#ffb000", "#ff8fc8"}  # marks, on a map that stays as it is
    assert set(inks) - switched <= (fixed if name == "heat-map" else set())
    ground = root.find(f".//{SVG}g[@id='patch_1']/{SVG}path")
    assert ground is None or "fill: none" in ground.get("style", "")


def words_of(svg: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def paths_of(svg: str, style: str) -> list[list[tuple[float, float]]]:
    """The corners of all drawn paths whose style contains some text."""
    return [
        [(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", path.get("d", ""))]
        for path in ElementTree.fromstring(svg).iter(f"{SVG}path")
        if style in path.get("style", "")
    ]


def test_lines_run_through_their_numbers() -> None:
    svg = draw_lines()
    first, second = paths_of(svg, "stroke-width: 1.8")
    for corners, ys in ((first, TIMES), (second, [1 + time for time in TIMES])):
        assert len(corners) == len(KS)
        # SVG counts downwards, and both scales are logarithmic: places are linear in logarithms.
        for places, values, sign in ((0, KS, 1), (1, ys, -1)):
            drawn = np.array([corner[places] for corner in corners])
            slope, start = np.polyfit(np.log(values), drawn, 1)
            assert sign * slope > 0
            np.testing.assert_allclose(drawn, start + slope * np.log(values), atol=1e-3)
    words = words_of(svg)
    assert [word for word in words if word.isdigit()][: len(KS)] == [str(k) for k in KS]
    assert {"K (items)", "time (ms)", "here", "gSASRec", "SASRec"} <= set(words)


def test_names_stand_at_line_ends_where_they_fit_and_in_a_legend_elsewhere() -> None:
    def has_legend(count: int, gap: float) -> bool:
        series = {f"line {at}": ([1, 2], [0, 100 + gap * at]) for at in range(count)}
        svg = charts.lines(series, x_label="x", y_label="y")
        assert [word for word in words_of(svg) if word.startswith("line")].count("line 0") == 1
        return 'id="legend_1"' in svg

    assert not has_legend(3, 20)
    assert not has_legend(3, 0.01)  # moved apart
    assert has_legend(12, 0.01)
    svg = charts.lines({"a": ([1, 2], [1, 2]), "b": ([1, 3], [1, 2])}, x_label="x", y_label="y")
    assert 'id="legend_1"' in svg, "lines that end at different x have no common place for names"


def test_ticks_are_plain_numbers() -> None:
    series = {"a": (np.geomspace(0.01, 1e6, 40), np.linspace(-0.3, 0.3, 40))}
    words = words_of(charts.lines(series, x_label="x", y_label="y", log_x=True))
    assert {"0.1", "10", "1,000", "100,000"} <= set(words)
    assert {"−0.2", "0", "0.2"} <= set(words)


def test_ticks_are_never_the_digits_of_a_clock() -> None:
    xs = [0.02273149948, 0.3172817, 4.02811]
    words = words_of(charts.lines({"a": (xs, [1, 2, 3])}, x_label="x", y_label="y", log_x=True))
    assert {"0.1", "1"} <= set(words)
    assert all(len(word) <= 5 for word in words)


def test_no_two_names_share_colour_and_marker() -> None:
    looks = looks_of([f"{at}" for at in range(64)]).values()
    assert len({(look["color"], look["marker"]) for look in looks}) == 64
    first, *_, again = list(looks)[:9]
    assert first["color"] == again["color"] == first["markerfacecolor"]
    assert again["markerfacecolor"] == "none"


def test_lines_from_elsewhere_are_apart() -> None:
    here, there = ([1, 2], [1, 2]), [([4, 8], [3, 4]), ([16], [9])]
    svg = charts.lines({"a": here}, elsewhere={"a": there}, x_label="x", y_label="y", log_x=True)
    assert [len(line) for line in paths_of(svg, "stroke-width: 1.8")] == [2]
    dotted = paths_of(svg, "stroke-width: 1.4")
    assert [len(line) for line in dotted] == [2, 1]
    hollow = re.findall(r'<use [^>]*style="fill-opacity: 0; stroke: #0072b2"', svg)
    assert len(hollow) == 3, "one for each point from elsewhere"
    words = words_of(svg)
    assert {"1", "2", "4", "8", "16"} <= set(words)
    assert 'id="legend_1"' in svg, "names at the ends would be between the lines"


def test_points_can_be_joined_in_the_order_given() -> None:
    svg = charts.lines({"a": ([1, 3, 2], [1, 2, 3])}, x_label="x", y_label="y", in_order=True)
    ((first, second, third),) = paths_of(svg, "stroke-width: 1.8")
    assert first[0] < third[0] < second[0]


def test_labels_of_points_do_not_cover_each_other() -> None:
    """Eight points in one place, nearly: every label has a height, or a side, of its own."""
    names = [f"label {at}" for at in range(8)]
    ys = [1 + 0.01 * at for at in range(8)]
    svg = charts.scatter(
        {"a": ([1.0] * 8, ys), "b": ([0, 2], [0, 2])},
        x_label="x",
        y_label="y",
        labels={"a": names},
        apart=["a"],
    )
    found = re.findall(r'<text style="([^"]*)" x="(\S+)" y="(\S+)"[^>]*>label \d<', svg)
    assert len(found) == 8
    width = 30.0  # of a label, at least
    places = [
        (float(x) - (width if "text-anchor: end" in style else 0.0), float(y))
        for style, x, y in found
    ]
    for at, (x, y) in enumerate(places):
        for other_x, other_y in places[:at]:
            assert abs(x - other_x) >= width or abs(y - other_y) > 6.9


def test_a_label_away_from_its_point_has_a_line_to_it() -> None:
    def leaders(ys: list[float]) -> int:
        svg = charts.scatter(
            {"a": ([1.0] * len(ys), ys), "b": ([0, 2], [0, 2])},
            x_label="x",
            y_label="y",
            labels={"a": [f"label {at}" for at in range(len(ys))]},
            apart=["a"],
        )
        return len(paths_of(svg, "stroke-width: 0.6"))

    assert leaders([0.3, 1.0, 1.7]) == 0, "each stands beside its own"
    assert leaders([1 + 0.01 * at for at in range(8)]) >= 4


def test_words_can_stand_in_place_of_ticks() -> None:
    svg = charts.scatter(
        {"a": ([0, 1], [0, 1])}, x_label="x", y_label="y", x_ticks={0.0: "none", 1.0: "all"}
    )
    assert {"none", "all"} <= set(words_of(svg))


def test_a_series_looks_the_same_in_both_panels() -> None:
    for stacked in (False, True):
        lines = paths_of(draw_panels(stacked), "stroke-width: 1.8")
        assert len(lines) == 3
        assert len(paths_of(draw_panels(stacked), "#d55e00; stroke-width: 1.8")) == 2


def test_points_are_joined_in_the_order_of_x() -> None:
    svg = draw_scatter()
    (joined,) = paths_of(svg, "#d55e00; stroke-width: 0.9")
    assert [x for x, _ in joined] == sorted(x for x, _ in joined)
    assert len(joined) == 3
    words = words_of(svg)
    assert {"nprobe 1", "nprobe 2", "nprobe 4", "ours", "peer"} <= set(words)
    bold = re.findall(r"font-weight: 700[^>]*>([^<]*)<", svg)
    assert bold == ["ours"]
    alone = charts.scatter({"a": ([1, 2], [1, 2])}, x_label="x", y_label="y", joined=False)
    assert paths_of(alone, "stroke-width: 0.9") == []


def test_heat_map_holds_the_scores_and_marks_items_with_shapes() -> None:
    svg = draw_heat_map()
    root = ElementTree.fromstring(svg)
    assert len(list(root.iter(f"{SVG}image"))) == 2, "the map, and its colour bar"
    assert {"top", "middle", "bottom", "rank", "split", "sub-item score"} <= set(words_of(svg))
    shapes = {
        (use.get("{http://www.w3.org/1999/xlink}href"), use.get("style"))
        for use in root.iter(f"{SVG}use")
        if re.search("fill: #(ffffff|ffb000|ff8fc8)", use.get("style", ""))
    }
    assert len({style for _, style in shapes}) == 3
    assert draw_heat_map() == svg


def test_bars_are_as_long_as_their_values() -> None:
    svg = draw_bars()
    looks = looks_of(["cells", "pqtopk"])
    widths = [
        max(x for x, _ in corners) - min(x for x, _ in corners)
        for colour in (look["color"] for look in looks.values())
        for corners in paths_of(svg, f"fill: {colour}")
    ]
    np.testing.assert_allclose(
        np.array(widths) / widths[1], np.array([0.2, 1234.4, 12.34]) / 1234.4, atol=1e-5
    )
    assert {"0.2 cells", "12.3 pqtopk", "1,234 cells", "Gowalla", "Tmall"} <= set(words_of(svg))


def test_dollars_and_brackets_are_words() -> None:
    words = words_of(draw_lines("<b>$x$ & co"))
    assert "<b>$x$ & co" in words


NAN, INF = float("nan"), float("inf")


def lines_of(xs: list[float], ys: list[float], log_y: bool = False) -> str:
    return charts.lines(
        {"fine": ([1], [1]), "odd": (xs, ys)}, x_label="x", y_label="y", log_y=log_y
    )


def map_of(scores: list[list[float]], marks: dict[str, list[tuple[int, int]]]) -> str:
    return charts.heat_map(np.array(scores), marks, x_label="x", y_label="y", score_label="s")


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: lines_of([1, 2], [1, NAN]), "series 'odd' holds nan at 1"),
        (lambda: lines_of([INF, 2], [1, 1]), "series 'odd' holds inf at 0"),
        (lambda: lines_of([], []), "series 'odd'"),
        (lambda: lines_of([1, 2], [1]), "series 'odd': 2 x for 1 y"),
        (lambda: lines_of([2, 1], [1, 1]), "series 'odd': its x do not rise"),
        (
            lambda: lines_of([1, 2], [1, 0], log_y=True),
            "'odd' holds 0.0 at 1, expected a number above 0",
        ),
        (lambda: charts.lines({}, x_label="x", y_label="y"), "no series"),
        (
            lambda: charts.lines(
                {"a": ([1], [1])}, x_label="x", y_label="y", bands={"b": ([1], [1])}
            ),
            "bands: there is no series 'b'",
        ),
        (
            lambda: charts.lines(
                {"a": ([1], [1])}, x_label="x", y_label="y", bands={"a": ([1, 2], [1])}
            ),
            "band of 'a'",
        ),
        (
            lambda: charts.lines({"a": ([1], [1])}, x_label="x", y_label="y", mark={"m": (1, NAN)}),
            "'mark m' holds nan",
        ),
        (
            lambda: charts.scatter({"a": ([1], [1])}, x_label="x", y_label="y", highlight="b"),
            "highlight: there is no series 'b'",
        ),
        (
            lambda: charts.scatter({"a": ([1], [1])}, x_label="x", y_label="y", labels={"a": []}),
            "labels of 'a': 0 for 1 points",
        ),
        (lambda: charts.scatter({"a": ([], [])}, x_label="x", y_label="y"), "series 'a'"),
        (
            lambda: charts.scatter({"a": ([1], [1])}, x_label="x", y_label="y", apart=["b"]),
            "apart: there is no series 'b'",
        ),
        (lambda: map_of([[2, 1], [1, 2]], {}), "split 1: not sorted"),
        (lambda: map_of([[2, NAN]], {}), "split 0' holds nan"),
        (lambda: map_of([], {}), "scores: shape (0,)"),
        (lambda: map_of([[2, 1]], {"item": [(0, 2)]}), "marks of 'item': (0, 2) is outside"),
        (lambda: map_of([[2, 1]], {"item": []}), "marks of 'item' are empty"),
        (lambda: charts.bars({}, x_label="x"), "no series"),
        (lambda: charts.bars({"g": {}}, x_label="x"), "series 'g' is empty"),
        (lambda: charts.bars({"g": {"a": INF}}, x_label="x"), "series 'a of g' holds inf"),
        (lambda: charts.bars({"g": {"a": -1}}, x_label="x"), "series 'a of g' holds -1"),
        (
            lambda: charts.bars({"g": {"a": 0}}, x_label="x", log_x=True),
            "series 'a of g' holds 0.0",
        ),
    ],
)
def test_charts_refuse_what_they_cannot_draw(draw: Callable[[], str], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        draw()


def test_a_method_looks_the_same_in_every_chart() -> None:
    alone = looks_of(["recjpqprune", "auto"])
    among_others = looks_of(["FAISS", "auto", "scan", "torch", "recjpqprune"])
    assert all(alone[name] == among_others[name] for name in alone)
    assert len({look["color"] for look in among_others.values()}) == 5
