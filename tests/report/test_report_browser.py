"""The page in a real browser: charts are drawn, there are no external requests, hostile text is inert."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trimtab.report import read_run, write_page

pytestmark = pytest.mark.browser


class Visit:
    """An opened page with its console messages and requests."""

    def __init__(self, browser: Any, run: Path, target: Path, **options: Any) -> None:
        write_page(read_run(run), target)
        self.page = browser.new_context(**options).new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(target.as_uri())

    def ask(self, script: str) -> Any:
        return self.page.evaluate(script)

    def until(self, condition: str) -> None:
        """Waits for a condition; playwright's wait evaluates a string in the page, which the policy forbids."""
        for _ in range(100):
            if self.ask(condition):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"never came true: {condition}")


def test_charts_are_drawn_without_external_requests(
    browser: Any, make_run: Callable[..., Path], learnt: list[dict[str, Any]], tmp_path: Path
) -> None:
    target = tmp_path / "report.html"
    visit = Visit(
        browser, make_run(learnt), target, color_scheme="light", viewport={"width": 1100, "height": 900}
    )
    assert visit.complaints == []
    assert visit.requests == [target.as_uri()]
    lines = "c => c.querySelectorAll('path.line').length"
    assert visit.ask(f"[...document.querySelectorAll('.area')].map({lines})") == [4, 1, 1, 1, 1]
    assert visit.ask("[...document.querySelectorAll('.legend li')].map(t => t.textContent)") == [
        "training, each step 1.16",
        "training, smoothed 1.121",
        "held-out: domain 1.21",
        "held-out: general 3.135",
    ]
    widths = "[...document.querySelectorAll('#memory svg.bar')].map(s => s.querySelectorAll('rect').length)"
    assert visit.ask(widths) == [2, 2, 4, 4, 2]

    line = "getComputedStyle(document.querySelector('#chart-loss path.line.train')).stroke"
    light = visit.ask(line)
    assert light.startswith("rgb")
    visit.page.emulate_media(color_scheme="dark")
    visit.until(f"{line} !== {light!r}")
    assert visit.complaints == []


BEYOND = """() => {
  const inside = (e) => e.closest('svg') === null || e.tagName === 'svg' || e.tagName === 'text';
  const wide = [...document.querySelectorAll('body *')].filter((e) => {
    const box = e.getBoundingClientRect();
    return inside(e) && box.width > 0 && (box.right > innerWidth + 0.5 || box.left < -0.5);
  });
  const cut = [...document.querySelectorAll('td, th')].filter((e) => {
    const box = e.getBoundingClientRect(), card = e.closest('.card').getBoundingClientRect();
    return box.width > 0 && (box.right > card.right + 0.5 || e.scrollWidth > e.clientWidth + 1);
  });
  const name = (e) => `${e.tagName} ${e.className.baseVal ?? e.className} ${e.textContent.slice(0, 40)}`;
  return [...wide, ...cut].map(name);
}"""
"""Everything that reaches beyond the screen, and every cell of a table that is cut."""


@pytest.mark.parametrize("width", [390, 768, 1280, 1920])
def test_every_screen_shows_the_whole_page(
    browser: Any, make_run: Callable[..., Path], learnt: list[dict[str, Any]], tmp_path: Path, width: int
) -> None:
    visit = Visit(
        browser, make_run(learnt), tmp_path / "report.html", viewport={"width": width, "height": 800}
    )
    assert visit.ask("document.scrollingElement.scrollWidth") <= width
    assert visit.ask(BEYOND) == []
    # The cards of a row have equal height.
    heights = "[...document.querySelectorAll('.verdict > .card')].map(c => c.getBoundingClientRect().height)"
    gained, lost = visit.ask(heights)
    assert gained == lost or width == 390

    area = visit.page.locator("#chart-loss")
    area.hover(position={"x": 5, "y": 50})
    assert visit.ask("document.querySelector('#chart-loss .tip').checkVisibility({visibilityProperty: true})")
    assert "step" in area.locator(".tip").inner_text()
    assert visit.ask(BEYOND) == []
    box = area.bounding_box()
    area.hover(position={"x": box["width"] - 2, "y": 50})
    told = " ".join(area.locator(".tip").inner_text().split())
    assert re.match(
        r"step (29\d|300) training, each step 1\.\d+ training, smoothed 1\.\d+ held-out: domain ", told
    )
    assert told.endswith(" 3.135")
    assert visit.ask(BEYOND) == []


def test_keys_and_touch_show_values(
    browser: Any, make_run: Callable[..., Path], learnt: list[dict[str, Any]], tmp_path: Path
) -> None:
    size = {"width": 390, "height": 800}
    visit = Visit(browser, make_run(learnt), tmp_path / "report.html", viewport=size, has_touch=True)
    area = visit.page.locator("#chart-lr")
    tip = area.locator(".tip")
    assert not tip.is_visible()
    area.focus()
    assert tip.inner_text().split() == ["step", "300", "Learning", "rate", "0"]
    for key, step in (
        ("ArrowLeft", "299"),
        ("Shift+ArrowLeft", "284"),
        ("Home", "1"),
        ("ArrowLeft", "1"),
        ("End", "300"),
    ):
        visit.page.keyboard.press(key)
        assert tip.inner_text().split()[1] == step, key
    visit.page.keyboard.press("Escape")
    assert not tip.is_visible()

    area = visit.page.locator("#chart-loss")
    area.tap(position={"x": 10, "y": 40})
    assert area.locator(".tip").is_visible()
    visit.page.locator("h1").tap()
    assert not area.locator(".tip").is_visible()


def test_charts_are_visible_without_scripts_and_in_print(
    browser: Any, make_run: Callable[..., Path], learnt: list[dict[str, Any]], tmp_path: Path
) -> None:
    run, target = make_run(learnt), tmp_path / "report.html"
    write_page(read_run(run), target)
    page = browser.new_context(java_script_enabled=False).new_page()
    page.goto(target.as_uri())
    for chart in page.locator("#curves .area path.line").all():
        box = chart.bounding_box()
        assert box["width"] > 100
        assert box["height"] > 2
    assert len(page.pdf(format="A4")) > 20_000


def test_hostile_text_is_inert(browser: Any, hostile_run: Path, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    visit = Visit(browser, hostile_run, target)
    assert visit.complaints == []
    assert visit.requests == [target.as_uri()]
    assert visit.ask("window.hacked") is None
    assert visit.ask("document.querySelectorAll('a, img, iframe, main script, main style').length") == 0
    assert visit.ask("getComputedStyle(document.querySelector('main')).display") == "block"
    assert "<script>window.hacked=1</script>" in visit.ask("document.querySelector('.legend').textContent")
    # The policy is a second barrier: even text that became a script or a handler would not run.
    visit.ask(
        "document.body.insertAdjacentHTML('beforeend', '<img src=\"data:,\" onerror=\"window.hacked=1\">');"
        "document.body.appendChild(Object.assign(document.createElement('script'), {textContent: 'window.hacked=1'}))"
    )
    visit.page.wait_for_timeout(100)
    assert visit.ask("window.hacked") is None
