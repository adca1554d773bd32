"""The plan's page: its contents, and in a real browser rendering, hover and no external requests."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from trimtab.plan import list_effects
from trimtab.plan.detail import detailed_dict
from trimtab.report.plan_page import render_plan, write_plan_page, write_table_page
from trimtab.report.plan_panel import verdict
from trimtab.report.plan_tables import table_notes
from trimtab.report.timeline import draw_timeline
from trimtab.run.target import read_target


@pytest.fixture(scope="module")
def plan() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    target = read_target("Qwen/Qwen3-0.6B", ["max_steps=100"], gpu="rtx4090")
    effects = [effect.to_dict() for effect in list_effects(target.plan)]
    return detailed_dict(target.plan, timeline=True), effects


def test_the_page_contains_the_plan(plan: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    plain, effects = plan
    text = render_plan(plain, effects)
    assert verdict(plain) in text
    for section in ("timeline", "phases", "activations", "time", "what-if", "how"):
        assert f'<section id="{section}">' in text
    for row in plain["phases"]["phases"]:
        assert row["phase"] in text
    assert "optim: adamw_8bit" in text
    assert "://" not in text


def test_bands_add_up_to_the_peak(plan: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    plain, _ = plan
    memory = plain["memory"]
    drawn = draw_timeline(plain["timeline"], memory["outside"], memory["available"])
    assert drawn is not None
    bands = [list(itertools.accumulate(band["values"])) for band in drawn.figure["bands"]]
    assert all(value >= 0 for band in bands for value in band)
    totals = [sum(column) for column in zip(*bands, strict=True)]
    assert totals == [int(point["total"]) + memory["outside"] for point in plain["timeline"]]
    assert drawn.figure["peak"] == totals.index(max(totals))
    assert len(drawn.figure["title"]) == len(plain["timeline"])
    assert draw_timeline([], 0, None) is None


def test_hostile_names_are_escaped(plan: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    plain, effects = plan
    model = {**plain["model"], "name": "<script>alert(1)</script>"}
    text = render_plan({**plain, "model": model}, effects)
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text


def test_the_pages_of_plans_and_tables_are_written(
    plan: tuple[dict[str, Any], list[dict[str, Any]]], tmp_path: Path
) -> None:
    write_plan_page(*plan, tmp_path / "plan.html")
    assert (tmp_path / "plan.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    common = {"model": "a", "method": "lora", "available": 2**33}
    cells = [
        {**common, "gpu": "small", "fits": False, "needed": 2**34, "tokens_per_second": None},
        {**common, "gpu": "large", "fits": True, "needed": 2**34, "tokens_per_second": 1234.0},
        {**common, "gpu": "odd", "fits": False, "needed": None, "tokens_per_second": None, "problem": "<no>"},
    ]
    write_table_page(cells, tmp_path / "table.html")
    text = (tmp_path / "table.html").read_text(encoding="utf-8")
    assert "✗ 16.0 GiB" in text
    assert "1.23 K tokens/s" in text
    assert text.count("&lt;no&gt;") == 1, "a note under the table, whose cells stay narrow"
    assert 'cell-none">–</span>' in text


def test_tables_name_models_whose_times_are_not_validated(tmp_path: Path) -> None:
    cell = {"method": "lora", "available": 2**33, "fits": True, "needed": 2**32, "tokens_per_second": 1.0}
    cells = [
        {**cell, "model": "dense", "gpu": "one", "validated": True},
        {**cell, "model": "experts", "gpu": "one", "validated": False},
        {**cell, "model": "untimed", "gpu": "one", "validated": False, "tokens_per_second": None},
    ]
    note = "trimtab cannot train experts yet: tokens/s are not validated."
    assert table_notes(cells) == [note]
    write_table_page(cells, tmp_path / "table.html")
    assert note in (tmp_path / "table.html").read_text(encoding="utf-8")


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1280])
def test_a_wide_table_stays_on_the_page(browser: Any, tmp_path: Path, width: int) -> None:
    common = {"model": "organization/a-model-with-a-name", "method": "lora", "available": 2**33}
    problem = {"fits": False, "needed": None, "tokens_per_second": None, "problem": "a long sentence " * 20}
    cell = {"fits": True, "needed": 2**34, "tokens_per_second": 1234.0}
    cells = [{**common, **(cell if i else problem), "gpu": f"gpu-{i}-80gb"} for i in range(20)]
    write_table_page(cells, tmp_path / "table.html")
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto((tmp_path / "table.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scripted", [True, False])
def test_the_page_in_a_browser(
    browser: Any,
    plan: tuple[dict[str, Any], list[dict[str, Any]]],
    tmp_path: Path,
    width: int,
    scripted: bool,
) -> None:
    target = tmp_path / "plan.html"
    write_plan_page(*plan, target)
    page = browser.new_context(
        viewport={"width": width, "height": 900}, java_script_enabled=scripted
    ).new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(target.as_uri())
    assert asked == [target.as_uri()]
    assert page.locator(".stack-plot path.band").count() >= 8, "the stack is there without a script"
    area = page.locator("#chart-timeline")
    box = area.bounding_box()
    assert box["width"] > 200
    if scripted:
        area.hover(position={"x": box["width"] / 4, "y": box["height"] / 2})
        tip = page.locator("#chart-timeline .tip")
        assert re.match(r"forward through (the first layer|layer \d+): [\d.]+ GiB", tip.inner_text())
        assert "weights" in tip.inner_text()
        area.press("End")
        assert tip.inner_text().startswith("the optimizer step: ")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert said == []
