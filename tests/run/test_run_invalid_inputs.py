"""Runs with invalid recipes, data or settings: each ends with a specific error and exit code, without traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_model import write_recipe, write_texts, write_tiny_model

from trimtab.cli.main import main
from trimtab.facts.errors import DataError, RecipeError, TrainingError

TEMPLATE = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def small(folder: Path, model: Path, rows: list[Any] | None = None, **changes: Any) -> Path:
    """A recipe of three steps."""
    (folder / "model").symlink_to(model)
    source = write_texts(folder / "rows.jsonl", 5, 30)
    if rows is not None:
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": [str(source)], "eval_share": 0, "cache_dir": str(folder / "cache"), "num_proc": 1}
    return write_recipe(
        folder,
        **{
            "model": {"name": str(model), "chat_template": TEMPLATE},
            "data": data | changes.pop("data", {}),
            "num_train_epochs": None,
            "max_steps": 3,
            "eval_steps": None,
            "logging_steps": 1,
            **changes,
        },
    )


def refused(words: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> str:
    """Standard error of a command that ends with this exit code."""
    capsys.readouterr()
    assert main(words) == code
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


ASKED = {"role": "user", "content": "the cat"}
TOLD = {"role": "assistant", "content": "sees a dog"}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("messages", "part"),
    [
        ([ASKED], "contains nothing to train on: 12 without a token to train on"),
        (
            [{**ASKED, "content": "the cat " * 99}, TOLD],
            "within max_seq_length (64 tokens); raise max_seq_length",
        ),
    ],
)
def test_conversations_without_anything_to_train_on(
    tmp_path: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    messages: list[Any],
    part: str,
    streaming: bool,
) -> None:
    path = small(tmp_path, model, [{"messages": messages}] * 12, data={"streaming": streaming})
    assert part in refused(["train", str(path)], DataError.exit_code, capsys)
    assert not (tmp_path / "run").exists()


def test_a_stream_may_begin_with_nothing_to_train_on(tmp_path: Path, model: Path) -> None:
    rows = [{"messages": [ASKED]}] * 12 + [{"messages": [ASKED, TOLD]}] * 12
    path = small(tmp_path, model, rows, data={"streaming": True})
    assert main(["train", str(path)]) == 0


@pytest.mark.parametrize(
    ("override", "part"),
    [
        (
            'model.added_tokens=["\\ud800"]',
            "model.added_tokens.0 contains a character that UTF-8 cannot encode",
        ),
        ('prompts=["\\ud800 x"]', "prompts.0 contains a character that UTF-8 cannot encode"),
        ("data.chat_template_kwargs={messages: x}", "sets messages, which every chat template receives"),
    ],
)
def test_text_that_no_recipe_may_contain(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], override: str, part: str
) -> None:
    path = small(tmp_path, model)
    assert part in refused(["train", str(path), override], RecipeError.exit_code, capsys)


def test_a_diverged_adapter_run_says_how_to_continue_with_its_adapter(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exploding: dict[str, Any] = {"learning_rate": 1e30, "max_grad_norm": 0, "lr_scheduler_type": "constant"}
    path = small(tmp_path, model, lora={"r": 2}, **exploding)
    said = refused(["train", str(path)], TrainingError.exit_code, capsys)
    assert "is saved as step" in said
    assert "`trimtab export peft --checkpoint STEP`" in said
    assert "export hf" not in said


def test_adapters_that_diverge_at_the_first_step(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small(tmp_path, model, lora={"r": 2, "lora_alpha": 1e30})
    said = refused(["train", str(path)], TrainingError.exit_code, capsys)
    assert "nothing needed saving" in said
    assert "lower lora.lora_alpha" in said
    assert "export" not in said
    assert "those documents" not in said
