"""Pictures of charts: valid files, identical for equal charts, and none without matplotlib."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from sample_documents import errors, everything, hostile_document, kernels, memory, odd_charts, times

from trimtab.report import pictures
from trimtab.report.document import LineChart
from trimtab.report.pictures import draw_picture, write_pictures

pytest.importorskip("matplotlib")


def test_each_chart_becomes_a_file(tmp_path: Path) -> None:
    found = write_pictures(everything(), tmp_path / "deep" / "pictures")
    assert [path.name for path in found] == [
        "times-5.png",
        "times-20.png",
        "losses.png",
        "kernels.png",
        "memory.png",
        "errors.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in found)
    assert all(path.stat().st_size < 250_000 for path in found)
    assert sorted(path.name for path in (tmp_path / "deep" / "pictures").iterdir()) == sorted(
        p.name for p in found
    )


@pytest.mark.parametrize("chart", [times(3), kernels(), memory(50), errors()], ids=lambda chart: chart.id)
def test_an_svg_is_the_same_for_the_same_chart(chart: LineChart) -> None:
    first = draw_picture(chart, "svg")
    assert first is not None
    assert first == draw_picture(chart, "svg")
    tree = ElementTree.fromstring(first)
    assert tree.tag.endswith("svg")
    assert len([e for e in tree.iter() if e.tag.endswith("path")]) > 10


@pytest.mark.parametrize("chart", odd_charts(), ids=lambda chart: chart.id)
def test_unusual_charts_are_drawn_or_omitted(chart: LineChart) -> None:
    empty = ("no-", "all-", "only-zeros", "zero-counts")
    assert (draw_picture(chart, "svg") is None) == chart.id.startswith(empty)


def test_hostile_text_is_drawn_as_text(
    hostile: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    found = write_pictures(hostile_document(f"$\\frac{{1}}$ _x {hostile}"), tmp_path, ("svg",))
    assert len(found) == 4
    for path in found:
        tags = {e.tag.rpartition("}")[2] for e in ElementTree.fromstring(path.read_bytes()).iter()}
        assert not tags & {"script", "a", "image"}
    assert not recwarn.list


def test_without_matplotlib_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "can_draw", lambda: False)
    assert write_pictures(everything(), tmp_path / "pictures") == []
    assert not (tmp_path / "pictures").exists()


def test_importing_the_writers_imports_no_matplotlib() -> None:
    code = (
        "import sys, trimtab.report.pictures, trimtab.lab.reporting, trimtab.cli.studying\n"
        "trimtab.report.pictures.can_draw()\n"
        "assert not {'matplotlib', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
