"""The explorer page in a real browser, from a real server, over a real catalogue.

Screenshots go to the folder that RECPRUNE_SCREENSHOTS names, if it names one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import polars as pl
import pytest
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Page,
    Request,
    expect,
    sync_playwright,
)

from examples.grocery import data_folder, product_names
from recprune import Attributes, VectorIndex, interactions_from_columns
from recprune.data.identifiers import IntegerIds
from recprune.recommender.recommender import Recommender
from recprune.serve.keys import add_key
from tests.support.serving import PATIENCE_S, Service, items_of, serving, wait_until

BANANAS, YOGURT, NEWSPAPER = 1082185, 872729, 1068651


@pytest.fixture(scope="module")
def grocery(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some households' purchases, a little trained on, with the names of the products."""
    folder = tmp_path_factory.mktemp("page")
    log = pl.read_parquet(data_folder() / "transactions.parquet")
    households = log["household_id"].unique().sort().head(150)
    log = log.filter(pl.col("household_id").is_in(households.implode()))
    often = log.group_by("product_id").len().filter(pl.col("len") > 2)["product_id"]
    log = log.filter(pl.col("product_id").is_in(often.implode()))
    bought = interactions_from_columns(
        log["household_id"], log["product_id"], log["transaction_timestamp"]
    )
    Recommender.fit(
        bought, "gsasrec", width=32, length=30, num_blocks=1, num_heads=1, num_negatives=16, batch_size=64,
        max_epochs=2, learning_rate=0.005, device="cpu",
    ).save(folder / "recommender")  # fmt: skip
    names = product_names(pl.read_parquet(data_folder() / "products.parquet"))
    table = pl.DataFrame({"item_id": list(map(int, map(str, names))), "name": list(names.values())})
    table.write_parquet(folder / "names.parquet")
    return folder


@pytest.fixture(scope="module")
def server(grocery: Path) -> Iterator[Service]:
    histories = f"sqlite:///{grocery}/histories.db"
    names = grocery / "names.parquet"
    with serving(grocery / "recommender", "--names", names, "--history", histories) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs Chromium: apt install chromium")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield launched
        launched.close()


Open = Callable[..., Page]


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Open the page; complain at the end of whatever a good page does not do."""
    contexts: list[BrowserContext] = []
    complaints: list[str] = []

    def heard(message: ConsoleMessage) -> None:
        # An answer that is no good has the browser's own words, and the page's to people.
        known = message.text.startswith("Failed to load resource")
        if message.type in ("error", "warning") and not known:
            complaints.append(message.text)

    def asked(request: Request, url: str) -> None:
        if not request.url.startswith((url, "data:")):
            complaints.append(f"asked for {request.url}")

    def opened(
        server: Service, path: str = "/", *, width: int = 1180, scheme: Any = "light"
    ) -> Page:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, base_url=server.url
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(1000 * PATIENCE_S)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", heard)
        page.on("request", lambda request: asked(request, server.url))
        page.goto(path)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


def pick(page: Page, text: str) -> None:
    """Type a name or an id and choose the first suggestion."""
    box = page.get_by_role("combobox", name="Items they had")
    box.fill(text)
    page.get_by_role("listbox").get_by_role("option").first.click()
    expect(box).to_have_value("")


def recommend(page: Page) -> None:
    page.get_by_role("button", name="Recommend").click()
    expect(page.locator("#answer")).to_be_visible()
    expect(page.get_by_role("button", name="Recommend")).to_be_visible()  # no longer searching


def table(page: Page, name: str) -> list[list[str]]:
    """Return the texts of a table's body."""
    rows: list[list[str]] = page.locator(f"#{name} tbody tr").evaluate_all(
        "rows => rows.map(row => [...row.cells].map(cell => cell.textContent.trim()))"
    )
    return rows


def number(text: str) -> float:
    return float(text.replace(",", "").replace("−", "-"))


def take_screenshot(page: Page, name: str, *, full_page: bool = True) -> None:
    folder = os.environ.get("RECPRUNE_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=Path(folder) / f"explorer-{name}.png", full_page=full_page)


@pytest.fixture(scope="module")
def filtered(grocery: Path) -> Iterator[Service]:
    """The same, with attributes: department and brand, prices that are not there, and lists."""
    recommender = Recommender.load(grocery / "recommender")
    products = pl.read_parquet(data_folder() / "products.parquet").select(
        pl.col("product_id").alias("item_id"),
        "department",
        "brand",
        pl.concat_list(pl.col("product_category").fill_null("none")).alias("categories"),
    )
    recommender.with_attributes(Attributes.from_table(products, recommender.item_ids)).save(
        grocery / "filtered"
    )
    histories = f"sqlite:///{grocery}/filtered.db"
    names = grocery / "names.parquet"
    with serving(grocery / "filtered", "--names", names, "--history", histories) as running:
        yield running


# What one sees ------------------------------------------------------------------------------------


def test_what_is_shown_is_what_the_service_says(server: Service, open_page: Open) -> None:
    page = open_page(server)
    expect(page.locator("#catalogue")).to_have_text(re.compile(r"^[\d,]+ items, searched exactly"))
    for text in (str(BANANAS), "yogurt", str(NEWSPAPER)):
        pick(page, text)
    chosen = page.get_by_role("list", name="Items they had").get_by_role("listitem")
    expect(chosen).to_have_count(3)
    expect(chosen.nth(0)).to_contain_text("Bananas")
    expect(chosen.nth(1)).to_contain_text("Yogurt")
    with page.expect_request("**/recommend") as asked:
        recommend(page)
    question = json.loads(asked.value.post_data or "")
    assert question["history"][::2] == [BANANAS, NEWSPAPER]
    answer = server.recommend(**question)
    explained = answer["explanation"]

    best = table(page, "best")
    assert len(best) == 10
    for row, item in zip(best, answer["items"], strict=True):
        assert (
            row[1] == f"{item['name']} {item['item']}" if item["name"] else f"item {item['item']}"
        )
        assert number(row[2]) == pytest.approx(item["score"], abs=0.001)
    expect(page.locator("#best-words")).to_contain_text("exactly what scoring every item would")

    # The bars, and the table that says the same.
    bars = page.locator("#best svg").first.locator("rect")
    expect(bars).to_have_count(8)
    widths = [float(bar.get_attribute("width") or "nan") for bar in bars.all()]
    contributions = explained["top"][0]["contributions"]
    longest = max(range(8), key=lambda split: abs(contributions[split]))
    assert widths.index(max(widths)) == longest
    for row, item in zip(table(page, "contributions"), explained["top"], strict=True):
        assert [number(cell) for cell in row[1:]] == pytest.approx(
            [*item["contributions"], item["score"]], abs=0.001
        )

    # A boost is a part of the score: a bar and a column of its own.
    last = answer["items"][-1]["item"]
    page.get_by_label("Boosts").fill(f" {last} = 50 ")
    with page.expect_request("**/recommend") as asked:
        recommend(page)
    question = json.loads(asked.value.post_data or "")
    assert question["boosts"] == [{"item": str(last), "boost": 50}]
    expect(page.locator("#best svg").first.locator("rect")).to_have_count(9)
    expect(page.locator("#best svg").nth(1).locator("rect")).to_have_count(8)
    parts = [number(cell) for cell in table(page, "contributions")[0][1:]]
    assert parts[-2] == 50
    assert sum(parts[:-1]) == pytest.approx(parts[-1], abs=0.005)
    page.get_by_label("Boosts").fill("nothing")
    page.get_by_role("button", name="Recommend").click()
    expect(page.locator("#problem")).to_contain_text("Give boosts as id=number")
    page.get_by_label("Boosts").fill("")
    recommend(page)

    # The heat map.
    rows = page.locator(".heat-strip")
    expect(rows).to_have_count(8)
    expect(rows.first.locator(".mark")).to_have_count(3)
    for split, ranks in enumerate(
        zip(*(explained[item]["sub_item_ranks"] for item in ("middle", "bottom")), strict=True)
    ):
        places = (
            rows.nth(split).locator(".mark").evaluate_all("marks => marks.map(m => m.style.left)")
        )
        for place, rank in zip(places[1:], ranks, strict=True):
            assert float(place.rstrip("%")) == pytest.approx(100 * (rank + 0.5) / 256, abs=0.01)
    colours = rows.first.locator("canvas").evaluate(
        "c => [...c.getContext('2d').getImageData(0, 0, c.width, 1).data]"
    )
    assert len(colours) == 4 * 256
    brightness = [sum(colours[at : at + 3]) for at in range(0, 4 * 256, 4)]
    assert brightness == sorted(brightness), "the best is the darkest"
    assert brightness[0] < brightness[-1]
    runs = {run["method"]: run for run in explained["methods"]}
    # The answer's own method goes by no sub-item id: the one that is traced is shown.
    assert runs[answer["method"]]["visited"] is None
    traced = explained["trace"]["method"]
    expect(page.get_by_role("combobox", name="Visited by")).to_have_value(traced)
    expect(page.locator("#heat-words")).to_contain_text("Colours go by a score’s rank")
    visited = explained["trace"]["points"][-1]["visited"]
    for split, count in enumerate(visited):
        width = page.locator(".heat-visited > div").nth(split).evaluate("bar => bar.style.width")
        assert float(width.rstrip("%")) == pytest.approx(100 * count / 256, abs=0.01)
    splits = table(page, "heat-table")
    assert [row[3] for row in splits] == [f"{count} of 256" for count in visited]
    assert [number(row[4]) for row in splits] == [
        rank + 1 for rank in explained["top"][0]["sub_item_ranks"]
    ]

    # The trace.
    trace = explained["trace"]
    expect(page.locator("#trace-words")).to_contain_text(f"stopped after {trace['steps']} steps")
    unseen = explained["num_items"] - trace["items_seen"]
    expect(page.locator("#trace-words")).to_contain_text(
        f"{unseen:,} of {explained['num_items']:,} items"
    )
    steps = table(page, "trace-table")
    assert [number(row[0]) for row in steps] == [point["step"] for point in trace["points"]]
    assert [number(row[2]) for row in steps] == pytest.approx(
        [point["upper_bound"] for point in trace["points"]], abs=0.001
    )
    drawn = page.locator("#trace path.bound").get_attribute("d") or ""
    heights = [float(place.split(",")[1]) for place in drawn[1:].split("L")]
    assert len(heights) == len(trace["points"])
    assert heights == sorted(heights), "the upper bound only falls"

    # The methods.
    methods = {row[0]: row for row in table(page, "methods")}
    assert len(methods) == 6
    for run in explained["methods"]:
        row = next(row for name, row in methods.items() if name.startswith(run["method"]))
        assert row[-1] == "✓ identical"
        assert number(row[3]) == run["items_scored"]
        assert re.fullmatch(r"[\d.]+ (µs|ms)", row[1])
        assert run["ran"] in row[0], "what ran, where it is not what was asked for"
    expect(page.locator("#methods-words")).to_contain_text("All 6 methods return the same items")
    take_screenshot(page, "light")


def test_the_step_moves_through_the_search(server: Service, open_page: Open) -> None:
    page = open_page(server)
    pick(page, str(BANANAS))
    recommend(page)
    points = server.recommend(history=[BANANAS], explain=True)["explanation"]["trace"]["points"]
    slider = page.get_by_role("slider", name="After step")

    def visited() -> float:
        widths = page.locator(".heat-visited > div").evaluate_all(
            "bars => bars.map(b => b.style.width)"
        )
        return sum(float(width.rstrip("%")) for width in widths) * 2.56

    slider.press("Home")
    expect(page.locator("#step-now")).to_have_text("0")
    expect(page.get_by_role("combobox", name="Visited by")).to_have_value("recjpqprune")
    assert visited() == 0
    slider.press("ArrowRight")
    assert visited() == pytest.approx(points[1]["step"], abs=0.1)
    slider.press("End")
    assert visited() == pytest.approx(sum(points[-1]["visited"]), abs=0.1)
    slider.press("Home")
    slider.press("ArrowRight")
    expect(page.locator("#step-words")).to_contain_text(
        f"{points[1]['items_scored']:,} items scored"
    )
    page.get_by_role("combobox", name="Visited by").select_option("scan")
    expect(page.locator("#visit-words")).to_contain_text("scan visited")
    page.get_by_role("button", name="Play").click()
    expect(page.locator("#step-now")).to_have_text(f"{points[-1]['step']:,}")
    expect(page.get_by_role("button", name="Play")).to_be_visible()
    expect(page.get_by_role("combobox", name="Visited by")).to_have_value("recjpqprune")


def test_a_condition_and_what_is_wrong_with_it(filtered: Service, open_page: Open) -> None:
    page = open_page(filtered)
    pick(page, str(BANANAS))
    expect(page.locator("#columns")).to_have_text(
        "There are department (text), brand (text), categories (list of text)."
    )
    where = page.get_by_label("Only items where")
    where.fill("department = 'PRODUCE' and brand <> 'Private'")
    with page.expect_request("**/recommend") as asked:
        recommend(page)
    question = json.loads(asked.value.post_data or "")
    assert question["where"] == "department = 'PRODUCE' and brand <> 'Private'"
    assert question["at_most"] is None
    answer = filtered.recommend(**question)
    shown = [row[1].split()[-1] for row in table(page, "best")]
    assert shown == [str(item) for item in items_of(answer)]
    assert 0 < len(shown) <= 10
    take_screenshot(page, "filtered")

    # What is wrong stands under the field, with the cursor where it begins; nothing is lost.
    where.fill("brand = 'Privaté' and dept = 'PRODUCE'")
    page.get_by_role("button", name="Recommend").click()
    wrong = page.locator("#where-problem")
    expect(wrong).to_contain_text("At character 23: no column is called 'dept'")
    expect(where).to_be_focused()
    expect(where).to_have_attribute("aria-invalid", "true")
    assert where.evaluate("field => field.selectionStart") == 22
    expect(page.locator("#problem")).to_be_hidden()
    expect(page.locator("#answer")).to_be_hidden()
    take_screenshot(page, "wrong-condition")
    where.fill("'BREAD' in categories")
    recommend(page)
    expect(wrong).to_be_hidden()
    expect(where).not_to_have_attribute("aria-invalid", "true")

    where.fill("")
    page.get_by_label("At most").fill("1")
    page.get_by_label("of the same").select_option("department")
    with page.expect_request("**/recommend") as asked:
        recommend(page)
    question = json.loads(asked.value.post_data or "")
    assert question["where"] is None
    assert question["at_most"] == {"column": "department", "count": 1}
    answer = filtered.recommend(**question)
    shown = [row[1].split()[-1] for row in table(page, "best")]
    assert shown == [str(item) for item in items_of(answer)]
    assert table(page, "contributions")  # of these items, and no others
    for row, item in zip(table(page, "contributions"), answer["items"], strict=True):
        assert number(row[-1]) == pytest.approx(item["score"], abs=0.001)
    page.get_by_label("At most").fill("0")
    page.get_by_role("button", name="Recommend").click()
    expect(page.locator("#problem")).to_contain_text("At most how many?")


def test_without_attributes_there_is_no_field_for_them(server: Service, open_page: Open) -> None:
    page = open_page(server)
    expect(page.locator("#catalogue")).to_have_text(re.compile("searched exactly"))
    expect(page.locator("#by-attributes")).to_be_hidden()


def test_a_catalogue_that_changes_is_shown_without_its_inside(
    grocery: Path, tmp_path: Path, open_page: Open
) -> None:
    Recommender.load(grocery / "recommender").make_live(tmp_path / "live").close()
    histories = f"sqlite:///{tmp_path}/histories.db"
    options = ("--live", tmp_path / "live", "--history", histories)
    with serving(grocery / "recommender", *options) as service:
        assert service.client.delete(f"/items/{NEWSPAPER}").status_code == 200
        page = open_page(service)
        items = service.client.get("/readyz").json()["items"]
        expect(page.locator("#catalogue")).to_have_text(f"{items:,} items, searched exactly.")
        pick(page, str(BANANAS))
        recommend(page)
        expect(page.locator("#answer")).not_to_have_class(re.compile("explained"))
        found = service.recommend(history=[BANANAS], k=10)
        assert len(table(page, "best")) == len(found["items"])


def test_with_the_keyboard_alone(server: Service, open_page: Open) -> None:
    page = open_page(server)
    keys = page.keyboard

    def focused() -> str:
        return str(page.evaluate("document.activeElement.id || document.activeElement.value"))

    keys.press("Tab")
    expect(page.get_by_role("link", name="Skip to the answer")).to_be_focused()
    keys.press("Tab")
    assert focused() == "items"
    keys.press("Tab")
    assert focused() == "item-search"
    keys.type("banana")
    box = page.get_by_role("combobox", name="Items they had")
    expect(box).to_have_attribute("aria-expanded", "true")
    expect(page.locator("#status")).to_have_text(re.compile("suggestion"))
    keys.press("ArrowDown")
    keys.press("ArrowDown")
    keys.press("ArrowUp")
    expect(page.get_by_role("option").first).to_have_attribute("aria-selected", "true")
    expect(box).to_have_attribute("aria-activedescendant", "suggestion-0")
    keys.press("Enter")
    expect(page.locator("#history li")).to_have_count(1)
    keys.type("yogurt")
    expect(box).to_have_attribute("aria-expanded", "true")
    keys.press("Escape")
    expect(box).to_have_attribute("aria-expanded", "false")
    expect(box).to_have_value("yogurt")
    for _ in "yogurt":
        keys.press("Backspace")
    keys.type(f"{NEWSPAPER}, {YOGURT}")
    keys.press("Tab")
    assert focused() == "boosts"
    keys.press("Tab")  # to the number of items
    assert focused() == "k"
    keys.press("ArrowDown")
    keys.press("Tab")
    keys.press("Space")  # what they had may come again
    keys.press("Tab")
    keys.press("Enter")
    expect(page.locator("#status")).to_have_text(re.compile(r"^9 items found\. The best: "))
    expect(page.locator("#history li")).to_have_count(3)
    assert len(table(page, "best")) == 9
    assert focused() == "ask"
    keys.press("Tab")  # into the table, which may be scrolled
    keys.press("Tab")
    keys.press("Enter")
    expect(page.locator("#contributions")).to_be_visible()


def barriers(page: Page) -> list[Any]:
    """Return what axe, the usual checker, finds in the way of people: rules and elements."""
    script = files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
    page.evaluate(script)
    found: list[Any] = page.evaluate(
        """axe.run().then(report => report.violations
             .map(rule => [rule.help, rule.nodes.map(node => node.target.join(' '))]))"""
    )
    return found


def contrast(page: Page, selector: str) -> float:
    """Return the contrast between an element's text and what is behind it, as WCAG has it."""
    value: float = page.locator(selector).first.evaluate(
        """element => {
          const parse = text => text.match(/[\\d.]+/g).map(Number);
          const shine = ([r, g, b]) => [r, g, b].map(v => v / 255)
            .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
            .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
          let behind = element, ground;
          do { ground = parse(getComputedStyle(behind).backgroundColor); behind = behind.parentElement; }
          while (ground.length === 4 && ground[3] === 0 && behind);
          const [a, b] = [shine(parse(getComputedStyle(element).color)), shine(ground)];
          return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        }"""
    )
    return value


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_can_read_it(server: Service, open_page: Open, scheme: str) -> None:
    page = open_page(server, scheme=scheme)
    assert barriers(page) == []
    pick(page, str(BANANAS))
    pick(page, "yogurt")
    recommend(page)
    for summary in page.locator("summary").all():
        summary.click()
    assert barriers(page) == []
    for selector in ("h1", "#catalogue", ".lead", "#best td", "th", ".same", "#ask", "small.id"):
        assert contrast(page, selector) >= 4.5, selector
    for figure in page.locator("figure").all():  # what cannot be seen can be read
        expect(figure.locator("xpath=following-sibling::details//table//td").first).to_be_visible()
    for summary in page.locator("summary").all():
        summary.click()
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 150) == (scheme == "dark")
    if scheme == "dark":
        take_screenshot(page, "dark")


def test_colours_follow_the_scheme_at_once(server: Service, open_page: Open) -> None:
    page = open_page(server)
    pick(page, str(BANANAS))
    recommend(page)
    first_pixel = (
        "[...document.querySelector('#heat canvas').getContext('2d').getImageData(0, 0, 1, 1).data]"
    )
    light = page.evaluate(first_pixel)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"{first_pixel}[0] > 200")
    assert light[0] < 50


@pytest.mark.parametrize("letter_spacing", ["normal", "0.12em"], ids=["own font", "a wider font"])
def test_it_fits_a_telephone(server: Service, open_page: Open, letter_spacing: str) -> None:
    page = open_page(server, width=390)
    page.evaluate("spacing => { document.body.style.letterSpacing = spacing; }", letter_spacing)
    for text in (str(BANANAS), "yogurt", str(NEWSPAPER)):
        pick(page, text)
    recommend(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.locator("#best").evaluate(
        "table => table.scrollWidth <= table.parentElement.clientWidth"
    )
    assert page.locator("#methods").evaluate("t => t.scrollWidth <= t.parentElement.clientWidth")
    take_screenshot(page, "narrow")


# Users, and what goes wrong -----------------------------------------------------------------------


def test_a_user_and_nobody(server: Service, open_page: Open) -> None:
    event = {"user": "anna", "item": BANANAS, "timestamp": 1, "key": "1"}
    server.post("/events", {"events": [event]}).raise_for_status()
    page = open_page(server)
    page.get_by_role("radio", name="a user of this service").check()
    page.get_by_role("textbox", name="User id").fill("anna")
    recommend(page)
    expected = server.recommend(history=[BANANAS])["items"]
    assert [row[1].split()[-1] for row in table(page, "best")] == [
        str(item["item"]) for item in expected
    ]
    expect(page.locator("#remark")).to_be_hidden()
    page.get_by_role("textbox", name="User id").fill("nobody at all")
    recommend(page)
    expect(page.locator("#remark")).to_contain_text("Nothing is known of nobody at all")
    expect(page.locator("#remark")).to_contain_text("the most popular items")
    expect(page.locator("#heat")).to_be_hidden()
    assert len(table(page, "best")) == 10
    page.get_by_role("textbox", name="User id").fill("")
    page.get_by_role("button", name="Recommend").click()
    expect(page.get_by_role("alert")).to_contain_text("Which user?")


def test_what_the_catalogue_does_not_have(server: Service, open_page: Open) -> None:
    page = open_page(server)
    page.get_by_role("button", name="Recommend").click()
    expect(page.get_by_role("alert")).to_contain_text("Pick one item at least")
    expect(page.get_by_role("combobox", name="Items they had")).to_be_focused()
    page.get_by_role("combobox", name="Items they had").fill(f"{BANANAS}, <b>no</b>, -5")
    page.get_by_role("button", name="Recommend").click()
    expect(page.get_by_role("alert")).to_have_text(
        "Unknown items. The catalogue has no item with the id <b>no</b>, -5."
    )
    expect(page.locator("#history li")).to_have_count(1)
    expect(page.locator("#answer")).to_be_hidden()
    page.get_by_role("combobox", name="Items they had").fill("")
    page.get_by_role("spinbutton", name="Show").fill("1000000")
    page.get_by_role("button", name="Recommend").click()
    expect(page.get_by_role("alert")).to_contain_text("from 1 to 100")
    page.get_by_role("spinbutton", name="Show").fill("100")
    recommend(page)
    expect(page.get_by_role("alert")).to_be_hidden()
    assert len(table(page, "best")) == 100
    page.get_by_role("button", name="Remove Bananas").click()
    expect(page.locator("#history li")).to_have_count(0)
    # A user's history may hold what the catalogue has lost since.
    events = [
        {"user": "bert", "item": item, "timestamp": 1, "key": str(item)}
        for item in (BANANAS, "gone")
    ]
    server.post("/events", {"events": events}).raise_for_status()
    page.get_by_role("radio", name="a user of this service").check()
    page.get_by_role("textbox", name="User id").fill("bert")
    recommend(page)
    expect(page.locator("#remark")).to_have_text("Not in the catalogue: gone. The rest was used.")
    event = {"user": "carl", "item": "gone", "timestamp": 1, "key": "1"}
    server.post("/events", {"events": [event]}).raise_for_status()
    page.get_by_role("textbox", name="User id").fill("carl")
    recommend(page)
    expect(page.locator("#remark")).to_have_text(
        "Not in the catalogue: gone. That is the whole history, so these are the most popular "
        "items. Nothing was searched."
    )


def test_keys_crowds_and_silence(grocery: Path, tmp_path: Path, open_page: Open) -> None:
    key = add_key(tmp_path / "keys.json", "page", "ask")
    histories = ("--history", f"sqlite:///{tmp_path}/histories.db")
    keys = ("--keys", tmp_path / "keys.json")
    one_at_a_time = ("--max-running", "1", "--max-waiting", "0")
    with serving(grocery / "recommender", *histories, *keys, *one_at_a_time) as server:
        page = open_page(server)
        alert = page.get_by_role("alert")
        button = page.locator("#ask")
        page.get_by_role("combobox", name="Items they had").fill(str(BANANAS))
        button.click()
        expect(alert).to_contain_text("asks for a key")
        page.get_by_role("textbox", name="API key").fill(key)
        recommend(page)
        expect(alert).to_be_hidden()

        with crowd(server, key):

            def is_turned_away() -> bool:
                button.click()
                expect(button).to_have_text("Recommend")
                return alert.is_visible()

            wait_until(is_turned_away, "the service is busy")
            expect(alert).to_contain_text("The service is busy")
        recommend(page)
        expect(alert).to_be_hidden()

        # A service that hears and says nothing, for a minute by the page's clock.
        page.clock.install()
        for worker in server.workers:
            os.kill(worker, signal.SIGSTOP)
        button.click()
        expect(button).to_have_text("Searching…")
        page.clock.fast_forward(61_000)
        expect(alert).to_contain_text("This took too long")
        for worker in server.workers:
            os.kill(worker, signal.SIGCONT)
        server.stop()
        button.click()
        expect(alert).to_contain_text("cannot be reached")


@contextmanager
def crowd(server: Service, key: str) -> Iterator[None]:
    """Ask for explanations all the time, from three threads."""
    enough = threading.Event()

    def ask() -> None:
        question = {"history": [BANANAS], "explain": True}
        with httpx.Client(headers={"Authorization": f"Bearer {key}"}) as client:
            while not enough.is_set():
                client.post(f"{server.url}/recommend", json=question, timeout=PATIENCE_S)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        enough.set()
        for thread in threads:
            thread.join()


def test_an_index_without_an_encoder(grocery: Path, tmp_path: Path, open_page: Open) -> None:
    Recommender.load(grocery / "recommender").index.save(tmp_path / "index")
    histories = f"sqlite:///{tmp_path}/histories.db"
    with serving(tmp_path / "index", "--history", histories) as server:
        page = open_page(server)
        expect(page.get_by_role("alert")).to_contain_text("An index without an encoder")
        expect(page.locator("#catalogue")).to_have_text(re.compile("searched exactly\\.$"))


def test_an_index_of_vectors(tmp_path: Path, open_page: Open) -> None:
    vectors = np.random.default_rng(0).standard_normal((300, 6))
    names = [f"tea {number}" for number in range(300)]
    VectorIndex.build(vectors, names, num_splits=2).save(tmp_path / "index")
    histories = f"sqlite:///{tmp_path}/histories.db"
    with serving(tmp_path / "index", "--history", histories) as server:
        page = open_page(server)
        expect(page.get_by_role("alert")).to_contain_text("An index without an encoder")
        expect(page.locator("#catalogue")).to_have_text(
            "300 items, searched exactly by their codes."
        )
        pick(page, "tea 7")
        page.get_by_role("button", name="Recommend").click()
        expect(page.get_by_role("alert")).to_contain_text("has an index only, without an encoder")
        docs = open_page(server, "/docs")
        section = docs.locator("#POST-search")
        expect(section).to_contain_text("rank so many of the best by their codes")
        expect(docs.locator("#shape-Answer")).to_contain_text("reranked")


def test_ids_with_more_digits_than_a_number_keeps(
    grocery: Path, tmp_path: Path, open_page: Open
) -> None:
    recommender = Recommender.load(grocery / "recommender")
    assert isinstance(recommender.item_ids, IntegerIds)
    recommender.item_ids = IntegerIds(recommender.item_ids.numbers + 2**60 + 1)
    recommender.save(tmp_path / "recommender")
    histories = f"sqlite:///{tmp_path}/histories.db"
    with serving(tmp_path / "recommender", "--history", histories) as server:
        page = open_page(server)
        pick(page, str(BANANAS + 2**60 + 1))
        recommend(page)
        expect(page.locator("#remark")).to_be_hidden()
        expected = server.recommend(history=[BANANAS + 2**60 + 1])["items"]
        assert [row[1] for row in table(page, "best")] == [
            f"item {item['item']}" for item in expected
        ]


# The routes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1180, "dark")])
def test_all_routes_are_described_without_anything_from_elsewhere(
    server: Service, open_page: Open, width: int, scheme: str
) -> None:
    page = open_page(server, "/docs", width=width, scheme=scheme)
    described = server.client.get("/openapi.json").json()
    routes = [
        f"{verb.upper()}{path}" for path, verbs in described["paths"].items() for verb in verbs
    ]
    expect(page.locator(".route h2")).to_have_text(routes)
    shapes = described["components"]["schemas"]
    expect(page.locator(".shape h3")).to_have_text(sorted(shapes))
    for name, shape in shapes.items():
        fields = page.locator(f"#shape-{name} tbody th code")
        expect(fields).to_have_text(list(shape["properties"]))
    k = page.locator("#POST-recommend .fields tr", has=page.get_by_text("k", exact=True))
    expect(k).to_contain_text("at least 1, default 10")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    take_screenshot(page, f"routes-{scheme}-{width}", full_page=False)


def test_a_route_is_tried(server: Service, open_page: Open) -> None:
    page = open_page(server, "/docs#GET-items")
    form = page.locator("#POST-recommend .try")
    form.locator("summary").click()
    asked = {"history": [BANANAS, YOGURT], "k": 3}
    form.get_by_label("Body").fill(json.dumps(asked))
    form.get_by_role("button", name="Send").click()
    expect(form.get_by_role("status")).to_contain_text("200 OK")
    answer = json.loads(form.get_by_role("status").inner_text().removeprefix("200 OK\n"))
    assert answer["answers"][0]["items"] == server.recommend(**asked)["items"]
    form = page.locator("#GET-items-item .try")
    form.locator("summary").click()
    form.get_by_label("item").fill("no such/item")
    form.get_by_role("button", name="Send").click()
    expect(form.get_by_role("status")).to_contain_text("404")
    expect(form.get_by_role("status")).to_contain_text("no such item in the catalogue")


def test_routes_of_a_service_with_keys_are_tried_with_one(
    grocery: Path, tmp_path: Path, open_page: Open
) -> None:
    key = add_key(tmp_path / "keys.json", "page", "ask")
    with serving(grocery / "recommender", "--keys", tmp_path / "keys.json") as running:
        page = open_page(running, "/docs")
        form = page.locator("#POST-recommend .try")
        form.locator("summary").click()
        form.get_by_role("button", name="Send").click()
        expect(form.get_by_role("status")).to_contain_text("401")
        page.get_by_label("API key").fill(key)
        form.get_by_role("button", name="Send").click()
        expect(form.get_by_role("status")).to_contain_text("200 OK")
