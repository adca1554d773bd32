"""The terminal during a run and at its end, at 80 and 120 columns, with a terminal and without."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.live import Live

from trimtab.report import LiveView, live, read_run
from trimtab.report.closing import closing_summary
from trimtab.report.plan_panel import plan_panel

MakeRun = Callable[..., Path]
OURS = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
"""Escape sequences that rich itself writes: colours and cursor moves."""


class _Still(Live):
    """Live without its thread, so that the output does not depend on time."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "auto_refresh": False})

    def update(self, renderable: RenderableType, *, refresh: bool = False) -> None:
        super().update(renderable, refresh=True)


def console(width: int = 80, terminal: bool = False) -> Console:
    return Console(
        file=StringIO(),
        width=width,
        force_terminal=terminal,
        color_system="truecolor" if terminal else None,
        highlight=False,
        legacy_windows=False,
        _environ={"TERM": "xterm-256color"},
    )


def text_of(shown: Console) -> str:
    assert isinstance(shown.file, StringIO)
    return shown.file.getvalue()


def is_inert(shown: str) -> bool:
    """Whether a text contains only rich's own escapes, and nothing was parsed as markup."""
    rest = OURS.sub("", shown)
    return not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]", rest)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_plan_and_closing_fit_the_terminal(
    make_run: MakeRun, learnt: list[dict[str, Any]], width: int
) -> None:
    data = read_run(make_run(learnt))
    for renderable in (plan_panel(data.plan, width), closing_summary(data)):
        shown = console(width)
        shown.print(renderable)
        lines = text_of(shown).splitlines()
        assert all(cell_len(line) <= width for line in lines)
        assert "…" not in text_of(shown) or width == 60


def test_a_plan_names_the_kernels_that_are_not_torch_s() -> None:
    def said(choices: dict[str, Any]) -> str:
        shown = console(100)
        shown.print(plan_panel({"choices": choices}, 100))
        return " ".join(text_of(shown).split())

    loss, gates = {"impl": "triton", "reason": "why"}, {"impl": "triton", "reason": "one each"}
    ours = said({"loss": loss, "pointwise": gates, "memory": {"loss_memory": 2**30}})
    assert "loss triton, 1.00 GiB of logits at a time: why" in ours
    assert "pointwise triton: one each" in ours
    assert "loss" not in said({"loss": {**loss, "impl": "chunked"}, "pointwise": {"impl": "reference"}})


def test_closing_contains_every_section(
    make_run: MakeRun, learnt: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(learnt)
    monkeypatch.chdir(folder.parent)
    (folder / "report.html").write_text("")
    shown = console(80)
    shown.print(closing_summary(read_run(folder)))
    text = text_of(shown)
    for words in (
        r"▲ better *\n  domain loss +3\.520 +1\.210 +−2\.310  ± 0\.005, 60 documents",
        r"exact answers +0 of 90 +54 of 90 +\+60 points  \+54 −0, p < 0\.001",
        r"▼ worse *\n  general loss +3\.104 +3\.135 +\+0\.031  ± 0\.005, 60 documents",
        r"· no measurable change *\n  probe: grammar +86 of 100 +87 of 100",
        r"at\s+most\s+5%\s+of\s+reports",
        r"Question: Solve 3x \+ 4 = 19 for x\.\nSolution:\n  before  I do not know",
        r"  after   Subtract 4 from both sides: 3x = 15\. *\n          Divide by 3: x = 5\.",
        r"\(only white space\)",
        r"■ activations +0 B +0 B +444\.0 MiB +447\.0 MiB +0 B",
        r"tensor allocations",
        r"steps +300 of 300",
        r"run folder +run\b",
        r"report +run/report\.html",
    ):
        assert re.search(words, text), words


def test_closing_of_older_metrics_claims_no_change(
    make_run: MakeRun, learnt_without_items: list[dict[str, Any]]
) -> None:
    shown = console(80)
    shown.print(closing_summary(read_run(make_run(learnt_without_items))))
    text = text_of(shown)
    assert re.search(r"\? not tested *\n  domain loss +3\.520 +1\.210 +−2\.310 *\n", text)
    assert "no change is claimed" in " ".join(text.split())
    assert not re.search(r"better|worse|no measurable", text)


def test_long_completions_are_truncated_to_four_lines(make_run: MakeRun) -> None:
    records = [
        {
            "kind": "sample",
            "step": s,
            "prompt": "p",
            "completion": "\n".join(f"line {s}.{i}" for i in range(99)),
        }
        for s in (0, 9)
    ]
    shown = console(80)
    shown.print(closing_summary(read_run(make_run(records, plan=None))))
    assert re.findall(r"line \d\.\d+", text_of(shown)) == [f"line {s}.{i}" for s in (0, 9) for i in range(4)]


@pytest.mark.parametrize("records", [[], ["{"], [{"kind": "event", "step": 0, "message": "stopped"}]])
def test_closing_of_a_run_without_results(make_run: MakeRun, records: list[Any]) -> None:
    shown = console()
    shown.print(closing_summary(read_run(make_run(records, plan=None))))
    assert "run folder" in text_of(shown)
    assert ("1 damaged" in text_of(shown)) == (records == ["{"])


def test_a_run_with_nonfinite_losses(make_run: MakeRun, learnt: list[dict[str, Any]]) -> None:
    words = {"loss": "NaN", "grad_norm": "Infinity", "perplexity": "Infinity", "tokens_per_second": "NaN"}
    rows = [{**r, **{k: v for k, v in words.items() if k in r and r["step"]}} for r in learnt]
    data = read_run(make_run(rows))
    shown = console(80)
    shown.print(closing_summary(data))
    assert re.search(r"▼ worse *\n  domain loss +3\.520 +nan +—", text_of(shown))
    for terminal in (False, True):
        shown = console(80, terminal)
        with LiveView(300, shown) as view:
            for row in rows:  # strings, as rundata passes them on
                view.record(row)
        assert "loss nan" in OURS.sub("", text_of(shown))


@pytest.mark.parametrize("terminal", [False, True])
def test_hostile_text_is_inert_in_the_terminal(
    hostile_run: Path, hostile: str, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "Live", _Still)
    data = read_run(hostile_run)
    shown = console(100, terminal)
    with LiveView(40, shown) as view:
        view.plan(data.plan)
        view.message(hostile)
        for text in (
            hostile,
            "\x1b]0;t\x07\u202e[/b]\r",
        ):  # a progress line is truncated, so use a short text too
            for done in (5, 10):
                view.progress(text, done, 10, text)
        for rows in data.records.values():
            for row in rows:
                view.record(row)
    shown.print(closing_summary(data))
    assert is_inert(text_of(shown))
    assert terminal or "\x1b" not in text_of(shown)
    assert "[/b][red]markup[/red]" in OURS.sub("", text_of(shown))


def record(step: int, **other: Any) -> dict[str, Any]:
    facts = {"loss": 2.5, "tokens_per_second": 1234.0, "seconds": float(step), "memory_bytes": 2**30}
    return {"kind": "train", "step": step, **facts, **other}


@pytest.mark.parametrize(("every", "expected"), [(1, 25), (10, 3), (100, 1)])
def test_without_a_terminal_every_logging_step_has_its_line(every: int, expected: int) -> None:
    shown = console(80)
    view = LiveView(25, shown)
    view.logging_steps = every
    for step in range(1, 26):
        view.record(record(step))
    lines = text_of(shown).splitlines()
    steps = [int(re.match(r"step +(\d+)/25", line)[1]) for line in lines]  # type: ignore[index]
    assert len(steps) == expected
    assert steps == [step for step in range(1, 26) if step % every == 0 or step == 25]
    assert "\x1b" not in text_of(shown)
    view.message("word " * 60)
    assert len(text_of(shown).splitlines()) == len(lines) + 1


def test_quiet_prints_messages_and_the_run_folder(make_run: MakeRun, learnt: list[dict[str, Any]]) -> None:
    data = read_run(make_run(learnt))
    shown = console(80)
    with LiveView(300, shown, detail="quiet") as view:
        view.plan(data.plan)
        view.message("the checkpoint of step 6 is damaged")
        view.progress("tokenizing corpus", 5, 10, "bytes")
        for row in learnt:
            view.record(row)
        view.record({"kind": "event", "step": 7, "message": "not finite at step 7"})
    shown.print(closing_summary(data, "quiet"))
    lines = [line for line in text_of(shown).splitlines() if line.strip()]
    assert lines[:2] == ["the checkpoint of step 6 is damaged", "not finite at step 7"]
    assert lines[2].startswith("run folder")
    assert not any("loss" in line or "predicted" in line for line in lines)


def test_the_short_form_has_each_value_once(make_run: MakeRun, learnt: list[dict[str, Any]]) -> None:
    data = read_run(make_run(learnt))
    long, short = console(80), console(80)
    for shown, detail in ((long, "full"), (short, "short")):
        with LiveView(300, shown, detail=detail) as view:  # type: ignore[arg-type]
            view.plan(data.plan)
        shown.print(closing_summary(data, detail))  # type: ignore[arg-type]
    assert "■ weights" in text_of(long)
    assert "■ weights" not in text_of(short)
    assert re.search(r"tensors +\S+ \S+ at the peak: weights", text_of(short))
    assert " predicted, " in text_of(short)
    categories = re.compile(r"^  probe: (?!all\b)", re.MULTILINE)
    listed = [len(categories.findall(text_of(shown))) for shown in (long, short)]
    left_out = int(re.search(r"and (\d+) categories of the probe", text_of(short))[1])  # type: ignore[index]
    assert left_out == listed[0] - listed[1] > 0
    assert len(text_of(short).splitlines()) < len(text_of(long).splitlines()) - 15


def test_without_a_terminal_preparations_print_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    shown = console(80)
    view = LiveView(0, shown)
    for done in range(101):
        view.progress("tokenizing corpus", done * 2**20, 100 * 2**20, "bytes")
        now[0] += 0.2
    view.progress("tokenizing corpus", 100 * 2**20, 100 * 2**20, "bytes")
    lines = text_of(shown).splitlines()
    assert lines[0] == "tokenizing corpus: 0 B of 100.0 MiB"
    assert lines[-1] == "tokenizing corpus: 100.0 MiB"
    assert 4 <= len(lines) <= 6


def receipt(*, predicted: int, measured: int, seconds: float) -> dict[str, Any]:
    return {
        "kind": "receipt",
        "step": 3,
        "device": {"kind": "cpu"},
        "predicted": {"allocated": predicted, "step_seconds": None},
        "measured": {"allocated": measured, "step_seconds": {"median": seconds}, "warm": True},
    }


def test_evaluations_are_printed_with_their_change() -> None:
    shown = console(100)
    view = LiveView(300, shown)
    view.plan({"memory": {"peak": {"weights": 2**20}}, "choices": {"device": "cpu"}})
    for step, loss in ((0, 3.0), (50, 2.5)):
        view.record({"kind": "eval", "step": step, "name": "domain", "loss": loss, "perplexity": 20.0})
    view.record({"kind": "probe", "step": 50, "scores": {"grammar": 0.875}})
    scores, items = {"grammar": 0.875, "plural": 0.5}, {"grammar": 8, "plural": 4}
    view.record({"kind": "probe", "step": 50, "scores": scores, "items": items})
    view.record({"kind": "answers", "step": 50, "exact": 3, "total": 9, "by_topic": {}})
    view.record({"kind": "memory", "step": 1, "when": "peak", "weights": 2**20, "gradients": 2**20})
    view.record(receipt(predicted=2**20, measured=2**21, seconds=0.231))
    view.record({"kind": "event", "step": 7, "message": "a file [of yours] vanished"})
    assert text_of(shown).split("╯\n")[1].splitlines() == [
        "step   0  domain loss 3.0000, perplexity 20.00",
        "step  50  domain loss 2.5000 (−0.500), perplexity 20.00",
        "step  50  probe: grammar 88%",
        "step  50  probe 9 of 12 right",
        "step  50  exact answers 3 of 9",
        "step   3  memory: predicted 1.00 MiB, measured 2.00 MiB (+100.0 %), tensors only",
        "step   3  step time: measured 231 ms, not predicted",
        "a file [of yours] vanished",
    ]


def test_on_a_terminal_progress_is_live_and_the_final_state_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "Live", _Still)
    shown = console(80, terminal=True)
    with LiveView(20, shown) as view:
        view.progress("tokenizing corpus", 5, 10, "bytes")
        assert "tokenizing corpus" in text_of(shown)
        view.progress("tokenizing corpus", 10, 10, "bytes")
        for step in range(1, 21):
            view.record(record(step, loss=3.0 - step / 10))
        view.message("a checkpoint was written")
    text = text_of(shown)
    assert "\x1b[?25l" in text  # the cursor is hidden while something moves …
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # … and comes back
    last = OURS.sub("", text).rstrip().splitlines()[-2:]
    assert re.match(r"training ━+ 20/20  100% done", last[0])
    assert re.match(r"loss 1\.0000  [▁-█]{20}   1\.23 K tokens/s   1\.00 GiB", last[1])
    assert all(len(line) <= 80 for line in last)


def test_an_early_exit_restores_the_terminal() -> None:
    shown = console(80, terminal=True)

    def stops() -> None:
        with LiveView(20, shown) as view:
            view.record(record(3))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stops()
    text = text_of(shown)
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert "3/20" in OURS.sub("", text).splitlines()[-2]


def test_a_dumb_terminal_gets_lines() -> None:
    shown = Console(file=StringIO(), width=80, force_terminal=True, _environ={"TERM": "dumb"})
    with LiveView(20, shown) as view:
        view.record(record(1))
    assert text_of(shown) == "step  1/20  loss 2.5000  1.23 K tokens/s  1.00 GiB  19.0 s left\n"


def test_the_readme_picture_has_no_external_references(
    make_run: MakeRun, learnt: list[dict[str, Any]]
) -> None:
    folder = make_run(learnt)
    out = folder / "demo.svg"
    tool = Path(__file__).parents[2] / "tools" / "demo_picture.py"
    subprocess.run([sys.executable, str(tool), str(folder), str(out)], check=True, capture_output=True)
    picture = out.read_text(encoding="utf-8")
    assert picture.startswith("<svg")
    assert "@font-face" not in picture
    assert "url(http" not in picture
    plain_text = re.sub(r"<[^>]+>", "", picture).replace("&#160;", " ")
    assert "plan of this run" in plain_text
    assert "domain loss" in plain_text


def test_no_torch_is_needed() -> None:
    modules = "trimtab.report.live, trimtab.report.page, trimtab.report.closing"
    code = f"import sys; import {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


EXAMPLE: dict[str, Any] = {
    "kind": "example",
    "source": "a",
    "origin": "a\x1b[31m.jsonl:1",
    "tokens": 30,
    "trained": 9,
    "cut": False,
    "runs": [("user: [/b] \x1b[2J", False), ("an [red]answer\u202e", True), ("\n\n", False)],
}


@pytest.mark.parametrize("terminal", [True, False])
def test_an_example_shows_trained_tokens_and_is_inert(terminal: bool) -> None:
    shown = console(terminal=terminal)
    LiveView(console=shown).record(EXAMPLE)
    text = text_of(shown)
    assert is_inert(text)
    plain_text = OURS.sub("", text)
    assert "user: [/b] \\x1b[2J" in plain_text
    assert "9 of 30 tokens" in plain_text
    if terminal:
        assert "\x1b[1;32man [red]answer\\u202e\x1b[0m" in text  # green
        assert "⟦" not in text
    else:
        assert "\x1b" not in text
        assert "⟦an [red]answer\\u202e⟧" in text


def test_a_long_example_is_shortened_but_shows_its_answer() -> None:
    shown = console()
    runs = [("q" * 100_000, False), ("a" * 100_000, True)] * 50
    LiveView(console=shown).record({**EXAMPLE, "runs": runs, "cut": True})
    text = text_of(shown)
    assert len(text) < 6000
    assert "⟦aaa" in text
    assert text.rstrip().endswith("(truncated here: max_seq_length)")
