"""The HTML report: complete, escaped, and written atomically."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.facts.errors import ResourceError
from trimtab.report import read_run, write_page
from trimtab.report.attention_kinds import attention_kinds
from trimtab.report.html import script_json
from trimtab.report.page import render

MakeRun = Callable[..., Path]


class Elements(HTMLParser):
    """Elements and words of a page, with the contents of scripts and styles separately."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag if tag in ("script", "style") else ""
        if tag in ("script", "style"):
            (self.scripts if tag == "script" else self.styles).append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside == "style":
            self.styles[-1] += data
        else:
            self.words.append(data)


def test_the_page_of_a_complete_run(make_run: MakeRun, learnt: list[dict[str, Any]]) -> None:
    page = Elements(render(read_run(make_run(learnt))))
    text = " ".join(" ".join(page.words).split())
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    sections = [
        "verdict",
        "curves",
        "completions",
        "answers",
        "probe",
        "memory",
        "how",
        "recipe",
        "environment",
    ]
    assert [i for i in ids if not str(i).startswith("chart-")] == sections
    for words in (
        "Improved domain loss 3.520 → 1.210 ± 0.005, 60 documents −2.310",
        "Regressed general loss 3.104 → 3.135 ± 0.005, 60 documents +0.031",
        "No measurable change probe: grammar 86 of 100 → 87 of 100",
        "Holm's correction for 7 comparisons",
        "training, smoothed",
        "before, predicted",
        "tensor allocations",
        "Add the tens: 30 + 20 = 50.",
        "24 of 30",
        "sdpa_flash",
        "FlexAttention has no backward on a CPU",
        "only white space",
        "model: starter",
        "2.13.0",
    ):
        assert words in text, words


def test_the_policy_names_exactly_the_scripts_of_the_page(
    make_run: MakeRun, learnt: list[dict[str, Any]]
) -> None:
    page = Elements(render(read_run(make_run(learnt))))
    policy = next(a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in page.scripts]
    assert len(hashes) == 1
    styles = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in page.styles]
    assert re.findall(r"'sha256-([^']+)'", str(policy)) == hashes + styles
    assert "unsafe-inline" not in str(policy)
    assert str(policy).startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in str(policy)
    assert "http" not in str(policy)


def test_the_page_is_small_and_its_charts_need_no_script(
    make_run: MakeRun, learnt: list[dict[str, Any]]
) -> None:
    text = render(read_run(make_run(learnt)))
    assert len(text.encode()) < 100_000
    lines = re.findall(r'<path class="line (\w+)" d="([^"]+)"', text)
    assert [role for role, _ in lines] == ["faint", "train", "eval0", "eval1", *["single"] * 4]
    assert all(path.startswith("M") and "L" in path for _, path in lines)


def test_long_runs_do_not_produce_long_pages(make_run: MakeRun) -> None:
    rows = [
        {
            "kind": "train",
            "step": step,
            "loss": 3 + math.sin(step),
            "lr": 1e-4 / step,
            "grad_norm": 1 + math.sin(step),
            "tokens": step,
            "tokens_per_second": 1000 + step % 7,
            "seconds": step,
            "memory_bytes": 1,
        }
        for step in range(1, 20_001)
    ]
    assert len(render(read_run(make_run(rows))).encode()) < 200_000


def test_a_page_of_older_metrics_claims_no_change(
    make_run: MakeRun, learnt_without_items: list[dict[str, Any]]
) -> None:
    page = Elements(render(read_run(make_run(learnt_without_items))))
    text = " ".join(" ".join(page.words).split())
    assert "Improved Nothing was tested. Regressed Nothing was tested." in text
    assert "Measured, not tested domain loss 3.520 → 1.210" in text
    assert "Not tested, so no change is claimed: metrics.jsonl contains no results by item" in text
    assert "better" not in text
    assert "worse" not in text


def test_hostile_text_is_escaped(hostile_run: Path, make_run: MakeRun, learnt: list[dict[str, Any]]) -> None:
    page = Elements(render(read_run(hostile_run)))
    assert not {tag for tag, _ in page.tags} & {"a", "img", "link", "iframe", "red"}
    assert [tag for tag, _ in page.tags].count("style") == 1
    assert len(page.scripts) == 1
    for _, attributes in page.tags:
        assert not any(name.startswith("on") or name in ("href", "src", "style") for name in attributes)
    text = "".join(page.words)
    assert text.count("{{ 7 * 7 }}") > 15
    assert "49" not in re.findall(r"markup.{0,120}?include", text)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u202e\u2066]", text)
    figures = page.scripts[0].split("const figures = ")[1].split("\n")[0]
    assert "hacked" in figures
    assert "<" not in figures


@pytest.mark.parametrize("records", [[], ["{"], ['{"kind": "event", "step": 3, "message": "stopped"}']])
def test_pages_of_runs_without_results(make_run: MakeRun, records: list[Any]) -> None:
    page = Elements(render(read_run(make_run(records, plan=None, recipe=None))))
    text = " ".join(" ".join(page.words).split())
    assert "Nothing was trained yet." in text
    assert page.scripts == []
    assert ("1 damaged line in metrics.jsonl was ignored" in text) == (records == ["{"])
    assert ("Step 3: stopped" in text) == ("stopped" in str(records))


def test_the_page_of_a_run_evaluated_only_before_training(
    make_run: MakeRun, learnt: list[dict[str, Any]]
) -> None:
    page = Elements(render(read_run(make_run([r for r in learnt if not r["step"]]))))
    text = " ".join(" ".join(page.words).split())
    assert "Nothing was trained yet." in text
    assert "Question: What is 34 + 25?" in text
    assert "after" not in {a.get("class") for _, a in page.tags}
    assert "step 0 arithmetic 0 of 30" in text


def test_nonfinite_numbers(make_run: MakeRun, learnt: list[dict[str, Any]]) -> None:
    rows = [{**r, "loss": "NaN"} if "loss" in r and r["step"] else r for r in learnt]
    page = Elements(render(read_run(make_run(rows))))
    assert "NaN" not in page.scripts[0]
    assert "3.520 → nan" in "".join(page.words)


JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.text(max_size=20),
        st.sampled_from(["</script>", "<!--", "\u2028"]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
)


@given(JSON)
def test_json_in_a_script_is_equivalent_and_does_not_end_the_script(value: Any) -> None:
    import json

    text = script_json(value)
    assert json.loads(text) == value
    assert not set("<>&\u2028\u2029") & set(text)


def test_notices_are_neutral_and_only_failures_are_warnings(make_run: MakeRun) -> None:
    messages = (
        "more steps: 6 became 12",
        "stopped early at step 3 of 30: no better loss",
        "not finite at step 7: x",
    )
    page = render(read_run(make_run([{"kind": "event", "step": 3, "message": text} for text in messages])))
    assert [f'<p class="notice">Step 3: {text}</p>' in page for text in messages] == [True, True, False]
    assert page.count('class="warn"') == 1
    assert '<p class="warn">Step 3: not finite at step 7: x</p>' in page


def test_a_page_is_replaced_atomically(
    make_run: MakeRun, learnt: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(learnt[:20])
    data = read_run(folder)
    target = folder / "report.html"
    target.write_text("older")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.replace", full)
        with pytest.raises(ResourceError, match="No space left on device; give another path"):
            write_page(data, target)
    assert target.read_text() == "older"
    before = sorted(p.name for p in folder.iterdir())
    write_page(data, target)
    assert target.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert sorted(p.name for p in folder.iterdir()) == before
    with pytest.raises(ResourceError, match="cannot be written"):
        write_page(data, folder / "nowhere" / "report.html")


def test_the_page_marks_trained_tokens(make_run: MakeRun) -> None:
    runs = [["user: <b>hi</b>\n", False], ["</script><img src=x>\x1b[31m", True], ["x" * 9000, True]]
    example = {"kind": "example", "step": 0, "origin": "a.jsonl:1", "tokens": 9, "trained": 4, "cut": True}
    html = render(read_run(make_run([{**example, "runs": runs}])))
    assert "<mark>&lt;/script&gt;&lt;img src=x&gt;\\x1b[31m</mark>" in html
    assert "user: &lt;b&gt;hi&lt;/b&gt;" in html
    page = Elements(html)
    words = " ".join(" ".join(page.words).split())
    assert "4 of 9 tokens" in words
    assert "truncated here" in words
    assert max(len(word) for word in page.words) < 2000
    assert not [tag for tag, _ in page.tags if tag == "img"]


def test_choices_are_shown_by_their_labels_and_flags_of_the_file_are_not(
    make_run: MakeRun, learnt: list[dict[str, Any]]
) -> None:
    folder = make_run(learnt)
    choices = json.loads((folder / "choices.json").read_text())
    choices |= {"version": 2, "logs_checkpoints": True, "model_commit": "abc123"}
    (folder / "choices.json").write_text(json.dumps(choices))
    page = render(read_run(folder))
    for label, value in (
        ("precision", "everything in fp32"),
        ("CPU threads", "2"),
        ("deterministic", "no"),
        ("commit of the model on the hub", "abc123"),
    ):
        assert f"<tr><td>{label}</td><td>{value}</td></tr>" in page
    assert "logs_checkpoints" not in page
    assert "<td>version</td>" not in page


@pytest.mark.parametrize(
    "damaged",
    [
        {},
        {"impl": "triton"},
        {"impl": "triton", "reason": 3},
        {"layers": 4, "reason": "fastest"},
        {
            "layers": [1, {"unpacked": 3}],
            "kinds": [{"layers": [0], "reason": "a"}, {"layers": [1], "reason": "b"}],
        },
        {
            "layers": [{"unpacked": "triton"}],
            "kinds": [3, {"layers": [1], "reason": "a"}, {"layers": [True]}, {}],
        },
        {
            "layers": [{"unpacked": "triton"}],
            "kinds": [{"layers": [], "reason": "a"}, {"layers": [-1], "reason": "a"}],
        },
    ],
    ids=str,
)
def test_damaged_attention_backends_are_left_out(damaged: dict[str, Any]) -> None:
    assert attention_kinds(damaged) == []


def test_attention_backends_without_reasons_per_kind() -> None:
    """Files of an earlier version have one reason for layers with different backends."""
    layers = [{"packed": "triton", "unpacked": name} for name in ("sdpa_cudnn", "triton", "sdpa_cudnn")]
    rejected = [["flex", "slower"], ["varlen"], 3]
    (kind,) = attention_kinds({"layers": layers, "reason": "fastest", "rejected": rejected})
    assert (kind.impl, kind.layers, kind.rejected) == ("sdpa_cudnn, triton", "", (("flex", "slower"),))
