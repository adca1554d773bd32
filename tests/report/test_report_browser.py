"""The page in a real browser: charts are drawn, nothing is asked from outside, hostile text does nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trimtab.report import read_run, write_page

pytestmark = pytest.mark.browser

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no chromium on the PATH")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield opened
        opened.close()


class Visit:
    """A page that was opened, with everything it said and asked for."""

    def __init__(self, browser: Any, run: Path, target: Path, **options: Any) -> None:
        write_page(read_run(run), target)
        self.page = browser.new_context(**options).new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(target.as_uri())
        self.until(
            "document.querySelectorAll('.chart').length === document.querySelectorAll('.js-plotly-plot').length"
        )
        self.page.wait_for_timeout(200)

    def ask(self, script: str) -> Any:
        return self.page.evaluate(script)

    def until(self, condition: str) -> None:
        """Waits for a condition; playwright's own way evaluates a string in the page, which the policy forbids."""
        for _ in range(100):
            if self.ask(condition):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"never came true: {condition}")


def test_charts_are_drawn_and_nothing_is_asked_from_outside(
    browser: Any, make_run: Callable[..., Path], learnt: list[dict[str, Any]], tmp_path: Path
) -> None:
    target = tmp_path / "report.html"
    visit = Visit(
        browser, make_run(learnt), target, color_scheme="light", viewport={"width": 1100, "height": 900}
    )
    assert visit.complaints == []
    assert visit.requests == [target.as_uri()]
    lines = "c => c.querySelectorAll('svg .scatterlayer path.js-line').length"
    drawn = f"[...document.querySelectorAll('.chart')].map({lines})"
    assert visit.ask(drawn) == [4, 1, 1, 1, 1]
    assert visit.ask("document.querySelector('#chart-loss .xtitle').textContent") == "step"
    assert visit.ask("[...document.querySelectorAll('.legendtext')].map(t => t.textContent)") == [
        "training, each step",
        "training, smoothed",
        "held-out: domain",
        "held-out: general",
    ]
    widths = "[...document.querySelectorAll('#memory svg.bar')].map(s => s.querySelectorAll('rect').length)"
    assert visit.ask(widths) == [2, 2, 4, 4, 2]
    assert visit.ask("document.documentElement.scrollWidth <= innerWidth")

    line = "getComputedStyle(document.querySelectorAll('#chart-loss path.js-line')[1]).stroke"
    light = visit.ask(line)
    visit.page.emulate_media(color_scheme="dark")
    visit.until(f"{line} !== {light!r}")
    assert visit.complaints == []


def test_a_phone_shows_it_without_scrolling_sideways(
    browser: Any, make_run: Callable[..., Path], learnt: list[dict[str, Any]], tmp_path: Path
) -> None:
    visit = Visit(browser, make_run(learnt), tmp_path / "report.html", viewport={"width": 400, "height": 800})
    assert visit.ask("document.documentElement.scrollWidth") <= 400


def test_hostile_text_is_inert(browser: Any, hostile_run: Path, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    visit = Visit(browser, hostile_run, target)
    assert visit.complaints == []
    assert visit.requests == [target.as_uri()]
    assert visit.ask("window.hacked") is None
    assert visit.ask("document.querySelectorAll('a, img, iframe, main script, main style').length") == 0
    assert visit.ask("getComputedStyle(document.querySelector('main')).display") == "block"
    assert "<script>window.hacked=1</script>" in visit.ask("document.querySelector('.legend').textContent")
    # The policy is a second wall: even text that did become a script or a handler would not run.
    visit.ask(
        "document.body.insertAdjacentHTML('beforeend', '<img src=\"data:,\" onerror=\"window.hacked=1\">');"
        "document.body.appendChild(Object.assign(document.createElement('script'), {textContent: 'window.hacked=1'}))"
    )
    visit.page.wait_for_timeout(100)
    assert visit.ask("window.hacked") is None
