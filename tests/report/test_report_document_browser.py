"""A document's page in a real browser: rendering, no external requests, hover, zoom, phones, dark mode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sample_documents import everything, hostile_document, memory, odd_charts

from trimtab.report.document import Document, Section, Table
from trimtab.report.document_page import write_document_page

pytestmark = pytest.mark.browser


class Visit:
    """An opened page with its console messages and requests."""

    def __init__(self, browser: Any, target: Path, **options: Any) -> None:
        self.page = browser.new_context(**options).new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(target.as_uri())
        assert self.requests == [target.as_uri()]

    def ask(self, script: str) -> Any:
        return self.page.evaluate(script)

    def paths(self, chart: str) -> list[str]:
        return self.ask(
            f"[...document.querySelectorAll('#chart-{chart} path.band')].map(p => p.getAttribute('d'))"
        )

    def labels(self, chart: str, axis: str) -> list[str]:
        """Returns the labels of an axis of a stack."""
        found = f"document.querySelector('#chart-{chart}').closest('.plot').querySelectorAll('{axis} text')"
        return self.ask(f"[...{found}].map(t => t.textContent)")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_document_page(everything(), path)
    return path


Open = Callable[..., Visit]


@pytest.fixture
def opened(browser: Any, target: Path) -> Open:
    return lambda width=1200, **options: Visit(
        browser, target, viewport={"width": width, "height": 900}, **options
    )


WIDE = """() => [...document.querySelectorAll('body *')].filter((e) => {
  const box = e.getBoundingClientRect();
  const scrolls = e.closest('.scroll, .code') !== null && !e.matches('.scroll, .code');
  const drawn = e.closest('svg') !== null && e.tagName !== 'text' && e.tagName !== 'svg';
  return !scrolls && !drawn && box.width > 0 && (box.right > innerWidth + 0.5 || box.left < -0.5);
}).map((e) => `${e.tagName} ${e.className.baseVal ?? e.className} ${e.textContent.slice(0, 40)}`)"""
"""Everything that reaches beyond the screen, but for what scrolls by itself."""


@pytest.mark.parametrize("width", [390, 1200])
def test_charts_are_drawn_within_the_screen(opened: Open, width: int) -> None:
    visit = opened(width)
    for area in visit.page.locator(".area").all():
        box = area.bounding_box()
        assert box["width"] > 0.5 * width
        assert box["height"] > 150
        for path in area.locator("path.line, path.band").all():
            assert len(path.get_attribute("d")) > 10
    bars = visit.page.locator("svg.bar rect").all()
    assert len(bars) == 8
    assert all(bar.bounding_box()["width"] > 1 for bar in bars)
    assert visit.ask("document.scrollingElement.scrollWidth") <= width
    assert visit.ask(WIDE) == []
    if width == 390:
        scroll = "document.querySelector('.scroll')"
        assert visit.ask(f"{scroll}.scrollWidth > {scroll}.clientWidth"), "the wide table scrolls by itself"
        visit.ask(f"{scroll}.scrollLeft = 200")
        box = visit.page.locator(".scroll td").first.bounding_box()
        assert 0 <= box["x"] < 40, "and its first column stays"
    assert visit.complaints == []


def test_hover_shows_the_values_of_each_kind_of_chart(opened: Open) -> None:
    visit = opened()
    for chart, words in {
        "times-5": ["context length 1,024 tokens", "small", "82.49 ms", "2.7B", "412.5 ms"],
        "losses": ["step", "seed 0", "seed 2", "nats per token"],
        "errors": ["to", "before", "after INT4"],
        "memory": ["forward, layer", "GiB", "feed-forward", "weights", "2.00 GiB"],
    }.items():
        area = visit.page.locator(f"#chart-{chart}")
        box = area.bounding_box()
        area.hover(position={"x": 0.43 * box["width"], "y": 120})
        tip = area.locator(".tip")
        assert tip.is_visible()
        for word in words:
            assert word in tip.inner_text(), chart
        assert visit.ask(WIDE) == []
    visit.page.mouse.move(2, 2)
    assert visit.page.locator(".tip:visible").count() == 0
    assert visit.complaints == []


def test_a_missing_value_is_labelled(opened: Open) -> None:
    visit = opened()
    area = visit.page.locator("#chart-times-5")
    area.focus()
    area.press("End")
    shown = " ".join(area.locator(".tip").inner_text().split())
    assert shown.startswith("context length 16,384 tokens small 1,181 ms medium no value")


def test_dragging_zooms_and_a_double_click_resets(opened: Open) -> None:
    visit = opened()
    area = visit.page.locator("#chart-memory")
    area.scroll_into_view_if_needed()
    before, axis = visit.paths("memory"), visit.labels("memory", ".x-axis:not(.phases)")
    assert axis[:3] == ["0", "20", "40"]
    assert visit.labels("memory", ".phases") == ["forward", "backward"], "the third has no room"
    box = area.bounding_box()
    middle = box["y"] + box["height"] / 2
    visit.page.mouse.move(box["x"] + 0.9 * box["width"], middle)
    visit.page.mouse.down()
    visit.page.mouse.move(box["x"] + 0.95 * box["width"], middle, steps=3)
    assert area.locator(".selection").is_visible()
    visit.page.mouse.move(box["x"] + box["width"] + 50, middle, steps=3)
    visit.page.mouse.up()
    assert not area.locator(".selection").is_visible()
    ticks = [float(tick) for tick in visit.labels("memory", ".x-axis:not(.phases)")]
    assert 133 <= ticks[0] < ticks[-1] <= 148
    assert sorted(visit.labels("memory", ".phases")) == ["backward", "optimizer step"]
    assert visit.paths("memory") != before
    assert len(visit.paths("memory")) == 6
    area.dblclick(position={"x": 300, "y": 100})
    assert visit.labels("memory", ".x-axis:not(.phases)")[0] == "0"
    assert sorted(visit.labels("memory", ".phases")) == ["backward", "forward"]
    area.click(position={"x": 300, "y": 100})
    assert visit.labels("memory", ".x-axis:not(.phases)")[0] == "0", "a click is no zoom"
    assert visit.complaints == []


def test_keys_zoom_at_the_selected_moment(opened: Open) -> None:
    visit = opened()
    area = visit.page.locator("#chart-memory")
    area.focus()
    tip = area.locator(".tip")
    assert tip.inner_text().startswith("backward, layer 11, event 203: 16.9 GiB"), "it begins at the peak"
    for _ in range(6):
        area.press("+")
    ticks = [float(tick) for tick in visit.labels("memory", ".x-axis:not(.phases)")]
    assert 73 < ticks[0] < 75.11 < ticks[-1] < 78
    assert tip.inner_text().startswith("backward, layer 11, event 203: 16.9 GiB")
    area.press("ArrowRight")
    assert "event 204" in tip.inner_text()
    area.press("Home")
    assert "event 0" in tip.inner_text(), "the view follows"
    assert float(visit.labels("memory", ".x-axis:not(.phases)")[0]) < 3
    area.press("-")
    area.press("Escape")
    assert visit.labels("memory", ".x-axis:not(.phases)")[:2] == ["0", "20"]
    assert tip.is_visible()
    area.press("Escape")
    assert not tip.is_visible()
    assert visit.complaints == []


def test_buttons_and_the_wheel_zoom(opened: Open) -> None:
    visit = opened()
    area = visit.page.locator("#chart-memory")
    area.scroll_into_view_if_needed()
    figure = visit.page.locator("figure:has(#chart-memory)")
    wider, everything_again = figure.get_by_label("zoom out"), figure.get_by_label("show all")
    assert wider.is_disabled()
    figure.get_by_label("zoom in").click()
    assert not wider.is_disabled()
    zoomed = visit.labels("memory", ".x-axis:not(.phases)")
    assert zoomed[0] != "0"
    everything_again.click()
    assert visit.labels("memory", ".x-axis:not(.phases)")[0] == "0"

    place = visit.ask("scrollY")
    area.hover()
    visit.page.mouse.wheel(0, 120)
    visit.page.wait_for_timeout(150)
    assert visit.ask("scrollY") > place, "a chart that was not chosen lets the page scroll"
    area.focus()
    area.hover()
    for _ in range(4):
        visit.page.mouse.wheel(0, -120)
    visit.page.wait_for_timeout(150)
    assert visit.labels("memory", ".x-axis:not(.phases)")[0] != "0"
    assert visit.complaints == []


def test_two_fingers_zoom_on_a_phone(opened: Open) -> None:
    visit = opened(390, has_touch=True)
    area = visit.page.locator("#chart-memory")
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    tools = visit.page.context.new_cdp_session(visit.page)

    def touch(kind: str, *shares: float) -> None:
        points = [
            {"x": box["x"] + s * box["width"], "y": box["y"] + 60, "id": i} for i, s in enumerate(shares)
        ]
        tools.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    touch("touchStart", 0.45)
    touch("touchStart", 0.45, 0.55)
    for spread in (0.1, 0.2, 0.3, 0.4):
        touch("touchMove", 0.5 - spread, 0.5 + spread)
    touch("touchEnd")
    ticks = [float(tick) for tick in visit.labels("memory", ".x-axis:not(.phases)")]
    assert 60 < ticks[0] < ticks[-1] < 90
    area.tap(position={"x": 100, "y": 60})
    assert area.locator(".tip").is_visible()
    visit.page.locator("h1").tap()
    assert not area.locator(".tip").is_visible()
    assert visit.complaints == []


def test_dark_mode_has_other_colours(opened: Open) -> None:
    visit = opened(color_scheme="light")
    asked = """() => ['#chart-times-5 path.line', '#chart-memory path.band', 'svg.bar rect', 'body'].map((s) => {
      const style = getComputedStyle(document.querySelector(s));
      return [style.stroke, style.fill, style.backgroundColor, style.color].join();
    })"""
    light = visit.ask(asked)
    visit.page.emulate_media(color_scheme="dark")
    visit.page.wait_for_timeout(100)
    assert all(one != other for one, other in zip(light, visit.ask(asked), strict=True))
    lines = "[...document.querySelectorAll('#chart-times-20 path.line')].map(p => getComputedStyle(p))"
    tones = f"{lines}.map(s => [s.stroke, s.strokeDasharray].join())"
    assert len(set(visit.ask(tones))) == 20, "twenty series look different"


def test_charts_and_values_are_visible_without_scripts(opened: Open) -> None:
    visit = opened(java_script_enabled=False)
    for path in visit.page.locator("path.line, path.band").all():
        assert path.bounding_box()["width"] > 10
    assert visit.page.locator(".zoom").count() == 0
    details = visit.page.locator("details").first
    details.locator("summary").click()
    assert "1,181" in details.inner_text()


def test_unusual_charts_and_hostile_text_are_harmless(browser: Any, tmp_path: Path, hostile: str) -> None:
    path = tmp_path / "report.html"
    write_document_page(hostile_document(hostile), path)
    visit = Visit(browser, path, viewport={"width": 390, "height": 800})
    for name in ("a", "c", "d"):
        area = visit.page.locator(f"#chart-{name}")
        area.focus()
        assert "<script>window.hacked=1</script>" in area.locator(".tip").inner_text()
        assert visit.ask("document.scrollingElement.scrollWidth") <= 390
    assert visit.ask("window.hacked") is None
    assert visit.ask("document.querySelectorAll('a, img, iframe, main script, main style').length") == 0
    assert visit.complaints == []

    write_document_page(Document("odd", (), (Section("odd", tuple(odd_charts())),), "x"), path)
    visit = Visit(browser, path, viewport={"width": 390, "height": 800})
    for area in visit.page.locator(".area").all():
        area.focus()
        area.press("+")
        area.press("End")
        assert area.locator(".tip").inner_text()
    assert visit.ask("document.scrollingElement.scrollWidth") <= 390
    assert visit.complaints == []


def test_a_timeline_of_twenty_thousand_moments_is_zoomable(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_document_page(Document("long", (), (Section("memory", (memory(20_000),)),), "x"), path)
    visit = Visit(browser, path, viewport={"width": 1200, "height": 900})
    area = visit.page.locator("#chart-memory")
    area.focus()
    tip = area.locator(".tip")
    assert tip.inner_text().startswith("backward, layer 19, event 10003: 17.0 GiB")
    for _ in range(12):
        area.press("+")
    assert tip.inner_text().startswith("backward, layer 19, event 10003: 17.0 GiB")
    area.press("ArrowLeft")
    assert "event 10002" in tip.inner_text()
    assert max(map(len, visit.paths("memory"))) < 20_000
    assert visit.complaints == []


def test_headings_of_columns_are_not_broken_inside_a_word_on_a_phone(browser: Any, tmp_path: Path) -> None:
    head = (
        "model",
        "family",
        "vocabulary",
        "d_model",
        "d_ff",
        "layers",
        "heads",
        "key/value heads",
        "head tied",
    )
    table = Table("", head, (("small", "llama", "10,000", "768", "3,072", "12", "12", "12", "no"),) * 2)
    target = tmp_path / "page.html"
    write_document_page(Document("A", (), (Section("Models", (table,)),), "trimtab bench sizes"), target)
    visit = Visit(browser, target, viewport={"width": 390, "height": 800})
    lines = visit.ask(
        "[...document.querySelectorAll('th')].map(cell => { const range = document.createRange(); "
        "range.selectNodeContents(cell); return new Set([...range.getClientRects()].map(r => r.top)).size; })"
    )
    assert [count <= len(name.split()) for count, name in zip(lines, head, strict=True)] == [True] * len(head)
    assert visit.ask("document.documentElement.scrollWidth") == 390
