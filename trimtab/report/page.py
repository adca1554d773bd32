"""The HTML report of a run: one self-contained file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trimtab.facts.units import format_bytes, format_count, format_seconds
from trimtab.report import summary, verdicts
from trimtab.report.attention_kinds import attention_kinds
from trimtab.report.buckets import shown_buckets, total
from trimtab.report.charts import charts
from trimtab.report.drawing import draw
from trimtab.report.example import shown_spans
from trimtab.report.html import figure_script, page_environment, policy, read_templates, write_html
from trimtab.report.receipt import receipt_rows
from trimtab.report.rundata import RunData, section

CHOICES = {
    "device": "device",
    "precision": "precision",
    "threads": "CPU threads",
    "deterministic": "deterministic",
    "model_commit": "commit of the model on the hub",
    "tokenizer_commit": "commit of the tokenizer on the hub",
}
"""Keys of choices.json that the page shows, with their labels; attention and memory have places of their own."""


def write_page(data: RunData, target: Path) -> None:
    """Writes the report of a run atomically, replacing an existing file.

    Example:
        >>> write_page(read_run(Path("runs/demo")), Path("report.html"))  # doctest: +SKIP
    """
    write_html(render(data), target, option="--out")


def render(data: RunData) -> str:
    """Returns the report's HTML."""
    environment = page_environment()
    drawn = [picture for picture in map(draw, charts(data)) if picture is not None]
    styles = read_templates("page.css")
    scripts: list[str] = []
    if drawn:
        scripts = [figure_script({picture.id: picture.figure for picture in drawn}, "hover.js")]
    return environment.get_template("page.html").render(
        policy=policy(scripts, styles),
        scripts=scripts,
        styles=styles,
        charts=drawn,
        **_contents(data),
        **_how(data),
    )


def _contents(data: RunData) -> dict[str, Any]:
    """Template values of the results: evaluations, speed, memory, samples."""
    model = section(data.plan, "model")
    name = str(model.get("name", data.folder.name))
    changes = verdicts.changes(data)
    facts = [
        str(model.get("family", "")),
        summary.parameters(model),
        f"run folder {data.folder.name}",
    ]
    return {
        "title": name,
        "facts": [fact for fact in facts if fact],
        "verdict": verdicts.verdict(changes),
        "measured": bool(changes),
        "nothing_tested": all(c.outcome == "untested" for c in changes),
        "probe": [c for c in changes if c.group == "probe"],
        "first": verdicts.first_label(changes),
        "speed": summary.speed(data),
        "memory": _memory(data),
        "receipt": receipt_rows(data),
        "example": _example(data),
        "samples": summary.samples(data),
        "answers": _answers(data),
        "last_step": data.of("train")[-1]["step"] if data.of("train") else None,
    }


def _example(data: RunData) -> dict[str, Any] | None:
    """The example that was shown before training; None if all tokens of the data are trained on."""
    rows = data.of("example")
    return {**rows[0], "runs": shown_spans(rows[0])} if rows else None


def _memory(data: RunData) -> dict[str, Any] | None:
    """Bars as (class, start, width, formatted size), in per mille of the largest total."""
    rows = summary.memory_rows(data)
    if not rows:
        return None
    names = shown_buckets(rows)
    scale = max(1, *(total(row.buckets) for row in rows))
    drawn = []
    for row in rows:
        start, bars = 0.0, []
        for name in names:
            width = 1000 * int(row.buckets.get(name, 0)) / scale
            bars.append((name, round(start, 2), round(width, 2), format_bytes(int(row.buckets.get(name, 0)))))
            start += width
        drawn.append(
            {"when": row.when, "source": row.source, "bars": bars, "total": format_bytes(total(row.buckets))}
        )
    sentences = [s for s in (summary.memory_verdict(data), summary.memory_basis(data)) if s]
    return {"names": names, "rows": drawn, "sentences": sentences, "tensors_only": data.device == "cpu"}


def _answers(data: RunData) -> dict[str, Any] | None:
    """Exact answers by topic in the first and the last evaluation."""
    asked = data.of("answers")
    if not asked:
        return None
    first, last = asked[0], asked[-1]
    repeated = first["step"] != last["step"]
    rows = [
        {
            "topic": topic,
            "before": first["by_topic"].get(topic, [0, 0]) if repeated else None,
            "after": counts,
        }
        for topic, counts in last["by_topic"].items()
    ]
    whole = {"topic": "all", "before": [first["exact"], first["total"]] if repeated else None}
    rows.append({**whole, "after": [last["exact"], last["total"]]})
    return {"rows": rows, "step": last["step"], "repeated": repeated}


def _how(data: RunData) -> dict[str, Any]:
    """Template values of the configuration: choices, notes, events, recipe, environment."""
    attention = section(data.choices, "attention") or section(section(data.plan, "choices"), "attention")
    simple = str | int | float | bool
    environment = {k: v for k, v in data.environment.items() if isinstance(v, simple)}
    environment |= {k: v for k, v in section(data.environment, "versions").items() if isinstance(v, simple)}
    notes = data.plan.get("notes")
    return {
        "attention": attention_kinds(attention),
        "choices": {
            label: _format(data.choices[key])
            for key, label in CHOICES.items()
            if isinstance(data.choices.get(key), simple)
        },
        "planned": _planned(data),
        "notes": notes if isinstance(notes, list) else [],
        "events": [{**event, "tone": _tone(event)} for event in data.of("event")],
        "environment": environment,
        "recipe": data.recipe,
        "problems": data.problems(),
    }


def _tone(event: dict[str, Any]) -> str:
    """The style of an event: a warning for a non-finite loss, a neutral notice otherwise."""
    return "warn" if str(event["message"]).startswith("not finite") else "notice"


def _format(value: str | int | float | bool) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _planned(data: RunData) -> dict[str, str]:
    """Further values of the plan: data, disk, time."""
    corpus, disk, time = (section(data.plan, name) for name in ("data", "disk", "time"))
    rows = {}
    if corpus.get("windows"):
        rows["data"] = (
            f"{format_count(corpus['tokens'])} tokens in {corpus['windows']} sequences, "
            f"{corpus['fill']:.1%} full"
        )
    if section(data.plan, "memory").get("moment"):
        rows["predicted peak at"] = str(data.plan["memory"]["moment"])
    if disk.get("checkpoint_bytes"):
        rows["disk"] = f"{format_bytes(disk['checkpoint_bytes'])} per checkpoint"
    if time.get("seconds"):
        steps = f" from step {time['trained_steps']} on" if time.get("trained_steps") else ""
        rows["time predicted"] = f"{format_seconds(time['seconds'])}{steps} ({time['basis']})"
    return rows
