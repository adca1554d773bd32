"""Conversations, a recipe for them and a recording view, for complete runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_model import write_recipe, write_tiny_model

TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


class Watching:
    """A view that records what it receives."""

    def __init__(self) -> None:
        self.total_steps = 0
        self.messages: list[str] = []
        self.records: list[dict[str, Any]] = []

    def plan(self, plan: object) -> None: ...
    def message(self, text: str) -> None:
        self.messages.append(text)

    def progress(self, what: str, done: int, total: int | None, unit: str = "") -> None: ...
    def record(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == kind]


def write_chats(path: Path, count: int, start: int = 0) -> Path:
    rows = []
    for i in range(start, start + count):
        messages = [
            {"role": "user", "content": f"the cat sees {i} dog"},
            {"role": "assistant", "content": f"it was {i} and a tree"},
        ]
        if i % 3 == 0:
            messages += [
                {"role": "user", "content": "over?"},
                {"role": "assistant", "content": "under the house"},
            ]
        rows.append({"messages": messages})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def recipe(folder: Path, train: Any = None, *, template: str | None = TEMPLATE, **changes: Any) -> Path:
    """The tiny recipe over conversations."""
    if not (folder / "model").exists():
        write_tiny_model(folder / "model")
    chats = write_chats(folder / "chats.jsonl", 40)
    model = {"name": str(folder / "model")} | ({"chat_template": template} if template else {})
    data = {
        "train": train or [{"source": str(chats)}],
        "eval": {"domain": [str(write_chats(folder / "heldout.jsonl", 8, 100))]},
        "cache_dir": str(folder / "cache"),
        "num_proc": 1,
        **changes.pop("data", {}),
    }
    return write_recipe(folder, model=model, data=data, **{"logging_steps": 1, **changes})
