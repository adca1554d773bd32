"""The HTML of a document's page: complete, escaped, small enough, and valid for any values."""

from __future__ import annotations

import base64
import hashlib
import itertools
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_documents import everything, hostile_document, memory, odd_charts, times
from test_report_page import Elements

from trimtab.facts.errors import ResourceError
from trimtab.report.axes import Axis, axis_of, format_number, format_value, unit_of
from trimtab.report.document import Band, Document, LineChart, Section, Series, StackChart, Table, Text
from trimtab.report.document_page import render_document, write_document_page
from trimtab.report.draw_lines import draw_lines, spread_ticks
from trimtab.report.draw_stack import draw_stack, read_stack, thin_moments
from trimtab.report.roles import ROLES, named_roles, series_role, tones
from trimtab.report.tables import MAX_COLUMNS, MAX_ROWS, chart_table, numeric_columns


def document(*blocks: object) -> Document:
    return Document("A title", ("a machine",), (Section("One", blocks),), "trimtab bench step")  # type: ignore[arg-type]


def test_the_page_contains_the_whole_document() -> None:
    made = everything()
    html = render_document(made)
    page = Elements(html)
    text = " ".join(" ".join(page.words).split())
    assert made.title in text
    assert "NVIDIA H200, torch 2.11.0 · commit 0123456789 · 2026-11-18" in text
    for section in made.sections:
        assert text.count(section.title) >= 2, "in the list of sections and above its own"
    for cell in (
        "78.3 ± 1.0",
        "out of memory",
        "not supported",
        "sm90_xmma_gemm",
        "110.0 ms (40 %)",
        "sign exponent mantissa",
    ):
        assert cell in text
    assert "trimtab bench step" in text
    assert "://" not in html
    areas = [attributes["id"] for tag, attributes in page.tags if attributes.get("class") == "area"]
    assert areas == ["chart-times-5", "chart-times-20", "chart-losses", "chart-memory", "chart-errors"]
    assert html.count('<path class="band ') == 6
    links = [attributes["href"] for tag, attributes in page.tags if tag == "a"]
    ids = {attributes.get("id") for _, attributes in page.tags}
    assert links == [f"#section-{i}" for i in range(1, 7)]
    assert {link[1:] for link in links} <= ids
    assert all("style" not in attributes for _, attributes in page.tags), (
        "the policy forbids style attributes"
    )


def test_numbers_are_right_aligned_and_text_left_aligned() -> None:
    html = render_document(everything())
    assert '<th scope="col" class="n">forward, ms</th>' in html
    assert '<th scope="col" class="short">mode</th>' in html
    assert '<td class="n cell-no">out of memory</td>' in html
    assert '<td class="n cell-none">not supported</td>' in html
    rows = (
        ("a", "1.5 GiB", "x", "–"),
        ("b", "out of memory", "3 heads of 64 each, and a long sentence", "–"),
    )
    assert numeric_columns(Table("", ("", "b", "c", "d"), rows)) == [False, True, False, True]
    assert numeric_columns(Table("", ("a", "b"), ())) == [False, False]
    assert numeric_columns(Table("", (), ())) == []


def test_the_policy_contains_every_script_and_style() -> None:
    page = Elements(render_document(everything()))
    (policy,) = (a["content"] for t, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    for kind, texts in (("script-src", page.scripts), ("style-src", page.styles)):
        hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        assert re.search(rf"{kind} ([^;]*);", str(policy))[1] == " ".join(f"'sha256-{h}'" for h in hashes)  # type: ignore[index]
        assert len(texts) == 1


def test_hostile_text_is_escaped(hostile: str) -> None:
    page = Elements(render_document(hostile_document(hostile)))
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"img", "a", "iframe"}
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert [tag for tag, _ in page.tags].count("style") == 1
    assert "</script>" not in page.scripts[0]
    assert "\x1b" not in "".join(page.words)
    assert "\u202e" not in "".join(page.words) + page.scripts[0]


def test_an_empty_document() -> None:
    html = render_document(Document("", (), (), ""))
    assert "This report contains no measurements." in html
    assert "<script>" not in html
    assert "<section" in render_document(Document("t", (), (Section("empty", ()),), "c"))


@pytest.mark.parametrize("chart", odd_charts(), ids=lambda chart: chart.id)
def test_unusual_charts_are_drawn_or_reported_as_empty(chart: LineChart) -> None:
    html = render_document(document(chart))
    drawn = "No values." not in html
    assert drawn == (f'id="chart-{chart.id}"' in html or '<div class="named">' in html)
    empty = ("no-", "all-", "only-zeros", "zero-counts")
    assert drawn != chart.id.startswith(empty)
    assert not re.search(r'd="[^"]*(nan|inf)', html)
    for path in re.findall(r' d="([^"]*)"', html):
        assert all(-3000 <= float(n) <= 5000 for n in re.findall(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?", path)), (
            path
        )


def test_ids_must_be_valid_and_unique() -> None:
    for bad in (("a/b",), ("a", "a"), ("..",), ("",)):
        charts = [LineChart(name, "t", "x", "y", ()) for name in bad]
        with pytest.raises(AssertionError):
            render_document(document(*charts))


def test_gaps_break_lines_and_isolated_points_get_dots() -> None:
    points = ((1.0, 1.0), (2.0, None), (3.0, 2.0), (4.0, 3.0))
    drawn = draw_lines(LineChart("a", "A", "x", "y", (Series("s", points),)))
    assert drawn is not None
    assert re.findall("[ML]", drawn.strokes[0].path) == ["M", "M", "L"]
    assert drawn.strokes[0].dots.count("M") == 3
    assert drawn.figure["lines"][0]["text"] == ["1", "no value", "2", "3"]
    many = tuple((float(i), None if i == 100 or i == 102 else float(i % 7)) for i in range(200))
    drawn = draw_lines(LineChart("a", "A", "x", "y", (Series("s", many),)))
    assert drawn is not None
    assert drawn.strokes[0].dots.count("M") == 1, "the point between two gaps"


def test_logarithmic_ticks_are_at_data_values() -> None:
    drawn = draw_lines(times())
    assert drawn is not None
    assert [tick.label for tick in drawn.x_ticks] == [
        "128",
        "256",
        "512",
        "1,024",
        "2,048",
        "4,096",
        "8,192",
        "16,384",
    ]
    assert any(tick.wide for tick in drawn.x_ticks)
    assert [tick.label for tick in drawn.y_ticks] == ["50", "100", "200", "500", "1,000"]
    assert drawn.figure["titles"][3] == "context length 1,024 tokens"
    assert all(stroke.last == "" for stroke in drawn.strokes), "series that end at different places"


def test_more_series_than_colours_are_distinguishable() -> None:
    roles = [series_role(i) for i in range(24)]
    assert len(set(roles)) == 24
    assert roles[8] == "s0 dash1"
    drawn = draw_lines(times(20))
    assert drawn is not None
    assert len({stroke.role for stroke in drawn.strokes}) == 20
    assert named_roles(["weights", "other", "x", "other", "residual stream"]) == [
        "weights",
        "other",
        "s0",
        "s1",
        "residual",
    ]
    assert set(ROLES) <= set(tones())
    assert all(re.fullmatch("#[0-9a-f]{6}", tone) for tone in tones().values())


def test_a_thinned_stack_keeps_its_peak_and_its_steps() -> None:
    chart = memory(20_000)
    stack = read_stack(chart)
    assert stack is not None
    kept = thin_moments(stack, 1000, [phase.start for phase in chart.phases])
    assert 250 < len(kept) <= 1100
    assert stack.peak in kept
    assert {stack.x.index(phase.start) for phase in chart.phases if phase.start in stack.x} <= set(kept)
    assert max(stack.tops[i] for i in kept) == max(stack.tops)
    assert min(stack.tops[i] for i in kept) == min(stack.tops)
    for values in stack.values:
        assert max(values[i] for i in kept) == max(values)


def test_a_long_moment_between_bursts_keeps_its_height() -> None:
    """A burst of short moments, then a long one: the long moment is drawn with its own value."""
    x = tuple([i / 1000 for i in range(999)] + [1.0 + i / 1000 for i in range(1000)])
    values = (*(float(i % 50) for i in range(998)), 7.0, *(float(i % 50) for i in range(1000)))
    chart = StackChart("a", "A", "x", "ms", x, 1000.0, (Band("b", "weights", values),))
    stack = read_stack(chart)
    assert stack is not None
    kept = thin_moments(stack, 200)
    assert 998 in kept, "the long one"
    assert kept[-1] == len(x) - 1


def test_the_script_gets_exact_bytes() -> None:
    chart = memory(3000)
    drawn = draw_stack(chart, most=700)
    stack = read_stack(chart)
    assert drawn is not None
    assert stack is not None
    figure = drawn.figure
    bands = [list(itertools.accumulate(band["values"])) for band in figure["bands"]]
    totals = [sum(column) for column in zip(*bands, strict=True)]
    assert len(totals) == len(figure["x"]) == len(figure["title"]) < 900
    assert max(totals) == totals[figure["peak"]] == max(stack.tops)
    titles = [figure["titles"][i] for i in itertools.accumulate(figure["title"])]
    assert titles[figure["peak"]] == chart.titles[stack.peak]
    places = [figure["start"] + figure["dx"] * step for step in itertools.accumulate(figure["x"])]
    assert math.isclose(places[figure["peak"]], stack.x[stack.peak], rel_tol=1e-5)
    assert "peak 17.0 GiB, at backward, layer 31, event 1503" in drawn.label


@pytest.mark.parametrize("charts", [1, 3])
def test_a_page_of_long_timelines_stays_small(charts: int) -> None:
    made = document(*(memory(20_000, f"memory-{i}") for i in range(charts)))
    html = render_document(made)
    assert 300_000 < len(html.encode()) < 3_000_000
    assert html.count("peak 17.0 GiB, at backward, layer 19, event 10003") >= charts


def test_a_limit_far_above_is_not_drawn() -> None:
    chart = StackChart("a", "A", "x", "bytes", (0.0,), 1.0, (Band("b", "weights", (2**30,)),), limit=2**40)
    drawn = draw_stack(chart)
    assert drawn is not None
    assert drawn.limit is None
    assert drawn.figure["limit"] is None
    near = draw_stack(memory())
    assert near is not None
    assert near.limit is not None
    assert near.limit_label == "limit 20.0 GiB"


@given(
    st.lists(st.one_of(st.none(), st.floats()), max_size=20),
    st.booleans(),
    st.sampled_from(["", "bytes", "ms"]),
)
def test_every_axis_places_its_values_and_ticks(values: list[float | None], log: bool, unit: str) -> None:
    axis = axis_of(values, log=log, unit=unit)
    for value in values:
        if value is not None and axis.draws(value):
            assert -1e-6 <= axis.share(value) <= 1 + 1e-6
    found = axis.ticks(6)
    assert len(found) <= 7
    assert found == sorted(found)
    for tick in found:
        assert -1e-6 <= axis.share(tick) <= 1 + 1e-6
        assert axis.tick_label(tick)


def test_formatted_values() -> None:
    assert Axis(0, 3 * 2**30, unit="bytes").tick_label(2**31) == "2 GiB"
    assert [Axis(0, 2**21, unit="bytes").tick_label(v) for v in (0, 2**20)] == ["0", "1 MiB"]
    assert Axis(1, 2**40, log=True, unit="bytes").tick_label(2**10) == "1 KiB"
    assert format_value(math.nan) == "no value"
    assert format_number(-1e-7) == "−1e-7"
    assert unit_of("time per step, ms") == "ms"
    assert unit_of("") == ""
    assert [t.label for t in spread_ticks([])] == []


def test_charts_as_tables_have_limits() -> None:
    wide = chart_table(times(20))
    assert wide is not None
    assert (len(wide.rows), len(wide.head)) == (20, 9), "more series than places: series are rows"
    tall = chart_table(
        LineChart("a", "A", "x", "y", (Series("s", tuple((float(i), 1.0) for i in range(500))),))
    )
    assert tall is not None
    assert len(tall.rows) == MAX_ROWS
    assert tall.note == "24 of 500 points."
    many = tuple(Series(f"s{i}", tuple((float(j), 1.0) for j in range(100))) for i in range(40))
    both = chart_table(LineChart("a", "A", "x", "y", many))
    assert both is not None
    assert len(both.head) <= MAX_COLUMNS + 1
    stack = chart_table(memory())
    assert stack is not None
    assert stack.rows[-1] == ("total", "16.9 GiB", "16.9 GiB")
    assert [chart_table(chart) is None for chart in odd_charts()[:3]] == [True, True, False]


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="give another path with --out"):
        write_document_page(document(Text("a")), tmp_path / "missing" / "report.html")
    write_document_page(document(Text("a `b` c` d")), tmp_path / "report.html")
    assert "a <code>b</code> c` d" in (tmp_path / "report.html").read_text(encoding="utf-8")
