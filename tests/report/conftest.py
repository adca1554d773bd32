"""Run folders for the report's tests, and a browser for its pages."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

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


MIB = 2**20

PLAN: dict[str, Any] = {
    "version": 1,
    "model": {"name": "starter", "family": "llama", "parameters": 4_689_152},
    "memory": {
        "before": {
            "weights": 18 * MIB,
            "gradients": 0,
            "optimizer": 36 * MIB,
            "activations": 0,
            "other": 0,
            "total": 54 * MIB,
        },
        "peak": {
            "weights": 18 * MIB,
            "gradients": 18 * MIB,
            "optimizer": 36 * MIB,
            "activations": 444 * MIB,
            "other": 0,
            "total": 516 * MIB,
        },
        "moment": "the loss, at the end of forward",
        "outside": 400_000_000,
        "needed": 940_000_000,
        "available": 22_000_000_000,
    },
    "data": {"windows": 4800, "tokens": 1_190_000, "fill": 0.974, "steps": 300, "trained_tokens": 1_180_000},
    "time": {
        "flops_per_token": 3.1e7,
        "flops": 3.6e13,
        "floor_seconds": None,
        "seconds": None,
        "basis": "no known rate",
    },
    "disk": {"checkpoint_bytes": 56_617_984, "total_bytes": 226_471_936},
    "choices": {
        "device": "cpu",
        "dtype": "fp32",
        "attention": {
            "impl": "sdpa_flash",
            "reason": "fp32, packed documents, on a CPU: exact and tiled; the mask, one for all layers, is quadratic",
            "rejected": [
                ["reference", "for reading and testing"],
                ["flex", "FlexAttention has no backward on a CPU"],
            ],
        },
        "precision": "everything in fp32",
        "threads": 2,
        "deterministic": False,
        "optimizer": {"name": "adamw_torch", "reason": "set in the recipe"},
    },
    "notes": [],
}

SAMPLES = (
    (
        "Question: What is 34 + 25?\nSolution:",
        " The old man went down to the river, and the river was wide and cold, and he said to himself that he would "
        "not cross it before the morning came, nor would he go home.",
        " Add the tens: 30 + 20 = 50.\nAdd the ones: 4 + 5 = 9.\nThe answer is 59.",
    ),
    (
        "Question: Solve 3x + 4 = 19 for x.\nSolution:",
        " I do not know what you mean, said she.\n\n“You must ask my brother.”\n\nHe was silent.\n\nShe laughed.",
        " Subtract 4 from both sides: 3x = 15.\nDivide by 3: x = 5.\nThe answer is 5.",
    ),
    ("Question: Find the derivative of 4x^3 + 7x.\nSolution:", "   \n", " 12x^2 + 7"),
)


def training_records(steps: int = 300, every: int = 50) -> list[dict[str, Any]]:
    """Records of a run that learns, of every kind."""
    records: list[dict[str, Any]] = [_memory("before", gradients=0, activations=0)]
    for step in range(steps + 1):
        if step:
            loss = 1.1 + 2.4 * math.exp(-step / 60) + 0.05 * math.sin(step * 1.7)
            records.append(
                {
                    "kind": "train",
                    "step": step,
                    "loss": loss,
                    "lr": 2e-3 * (1 - step / steps),
                    "grad_norm": 1 + abs(math.sin(step * 0.9)),
                    "tokens": step * 3900,
                    "tokens_per_second": 11_800 + 40 * (step % 7),
                    "seconds": step * 0.33,
                    "memory_bytes": 1037 * MIB,
                }
            )
        if step == 1:
            records.append({**_memory("peak", gradients=18 * MIB, activations=447 * MIB), "step": 1})
        if step % every == 0:
            records += _evaluation(step, step / steps)
        if step in (0, steps):
            records += [
                {"kind": "sample", "step": step, "prompt": p, "completion": b if step == 0 else a}
                for p, b, a in SAMPLES
            ]
    return [*records, {**_memory("after", gradients=0, activations=0), "step": steps}]


def _memory(when: str, **buckets: int) -> dict[str, Any]:
    standing = {"weights": 18 * MIB, "optimizer": 36 * MIB, "other": 0}
    return {"kind": "memory", "step": 0, "when": when, **standing, **buckets}


def _evaluation(step: int, done: float) -> list[dict[str, Any]]:
    domain, general = 3.52 - 2.31 * done**0.4, 3.104 + 0.031 * done
    choices = {"grammar": (86, 87), "transitivity": (61, 56), "arithmetic": (52, 89)}
    right = {kind: _results(100, before, after, done) for kind, (before, after) in choices.items()}
    topics = {
        "arithmetic": [round(24 * done), 30],
        "algebra": [round(19 * done), 30],
        "calculus": [round(11 * done), 30],
    }
    return [
        {
            "kind": "eval",
            "step": step,
            "name": "domain",
            "loss": domain,
            "perplexity": math.exp(domain),
            "tokens": 9000,
            "units": _units(domain, done),
        },
        {
            "kind": "eval",
            "step": step,
            "name": "general",
            "loss": general,
            "perplexity": math.exp(general),
            "tokens": 9000,
            "units": _units(general, done),
        },
        {
            "kind": "probe",
            "step": step,
            "scores": {kind: results.count("1") / 100 for kind, results in right.items()},
            "items": dict.fromkeys(right, 100),
            "right": right,
        },
        {
            "kind": "answers",
            "step": step,
            "exact": sum(r for r, _ in topics.values()),
            "total": 90,
            "by_topic": topics,
            "right": "".join("1" * r + "0" * (total - r) for r, total in topics.values()),
        },
    ]


def _results(items: int, before: int, after: int, done: float) -> str:
    """Results of one kind of probe item; two more items than necessary become wrong, and as many right."""
    right = before + round((after - before) * done)
    moved = 2 if done else 0
    return "0" * moved + "1" * right + "0" * (items - right - moved)


def _units(mean: float, done: float) -> dict[str, Any]:
    """Sixty documents of equal length and different difficulty, whose losses change by slightly different amounts."""
    losses = [
        mean + 0.4 * math.sin(i * math.tau / 60) + 0.02 * done * math.cos(7 * i * math.tau / 60)
        for i in range(60)
    ]
    return {"unit": "document", "losses": losses, "tokens": [150] * 60}


@pytest.fixture
def learnt() -> list[dict[str, Any]]:
    """Records of a complete run of 300 steps."""
    return training_records()


@pytest.fixture
def learnt_without_items(learnt: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same records as written by older versions, without results by item."""
    return [{k: v for k, v in r.items() if k not in ("units", "right", "items")} for r in learnt]


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes a run folder; `records` may contain raw lines (str) as damage, and a file of None is omitted."""

    def write(
        records: list[Any], *, plan: Any = PLAN, recipe: str | None = "model: starter\n", name: str = "run"
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
        (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        if plan is not None:
            (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
            choices = {**plan.get("choices", {}), "model_commit": None, "data": {"commits": {}}}
            (folder / "choices.json").write_text(json.dumps(choices), encoding="utf-8")
        if recipe is not None:
            (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
        environment = {
            "python": "3.11.7",
            "system": "Linux x86_64",
            "versions": {"torch": "2.13.0"},
            "threads": 2,
        }
        (folder / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
        return folder

    return write


HOSTILE = (
    '</script><script>window.hacked=1</script><img src="https://evil.example/x" onerror="window.hacked=1">'
    '<a href="javascript:window.hacked=1">a</a><style>main{display:none}</style><!--'
    "[/b][red]markup[/red][link=https://evil.example]x[/link]{{ 7 * 7 }}{% include 'page.css' %}{# gone #}"
    "\x1b[31mred\x1b]0;title\x07\x1b[2J\x9b1m\u202eevil\u2066\u2028\x00\r\x08\ud800${1+1}`x`'\"&amp;\\"
)
"""Everything that could escape from where it stands: into a page, a script, markup, a terminal, a template."""


@pytest.fixture
def hostile() -> str:
    """Text with control characters and markup."""
    return HOSTILE


@pytest.fixture
def hostile_run(make_run: Callable[..., Path]) -> Path:
    """A run folder in which every text is hostile, its name included."""
    plan = json.loads(json.dumps(PLAN))
    plan["model"].update(name=HOSTILE, family=HOSTILE)
    plan["choices"]["attention"] = {"impl": HOSTILE, "reason": HOSTILE, "rejected": [[HOSTILE, HOSTILE]]}
    plan["choices"] |= {
        "precision": HOSTILE,
        HOSTILE: HOSTILE,
        "optimizer": {"name": HOSTILE, "reason": HOSTILE},
    }
    plan["memory"]["moment"] = HOSTILE
    plan["time"] |= {"seconds": 12.0, "basis": HOSTILE}
    plan["notes"] = [HOSTILE]
    records = []
    for record in training_records(40, 20):
        if "units" in record:
            record["units"] = {**record["units"], "unit": HOSTILE}
        for name in {"name", "prompt", "completion"} & set(record):
            record[name] = HOSTILE
        if record["kind"] == "probe":
            record["scores"] = {HOSTILE: 0.5 + record["step"] / 100}
            record["right"] = {HOSTILE: record["right"]["arithmetic"]}
            record["items"] = {HOSTILE: 100}
        if record["kind"] == "answers":
            record["by_topic"] = {HOSTILE: [record["step"], 90]}
        records.append(record)
    records.append({"kind": "event", "step": 3, "message": HOSTILE})
    name = HOSTILE.replace("/", "∕").replace("\x00", "").replace("\ud800", "")
    folder = make_run(records, plan=plan, recipe=None, name=name.encode()[:180].decode(errors="ignore"))
    (folder / "recipe.yaml").write_text(HOSTILE, encoding="utf-8", errors="surrogatepass")
    environment = {"gpu": HOSTILE, HOSTILE: HOSTILE, "versions": {HOSTILE: HOSTILE}}
    (folder / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    return folder
