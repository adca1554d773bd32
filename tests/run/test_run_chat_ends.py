"""What a run on conversations stores for chat: stop tokens at the ends of answers, template variables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from chat_runs import TEMPLATE, Watching, recipe
from tiny_model import write_tiny_model
from tokenizers import AddedToken

import trimtab
from trimtab import launch, text
from trimtab.cli.main import main
from trimtab.recipe import load

MARKS = ["<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHORT: dict[str, Any] = {"num_train_epochs": None, "max_steps": 2, "eval_steps": None, "save_steps": None}


def with_marks(folder: Path, *, special: bool) -> Path:
    """A base model with ChatML's tokens and another end-of-text token."""
    write_tiny_model(folder, vocab_size=304)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens([AddedToken(mark, normalized=False, special=special) for mark in MARKS])
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("lora", [None, {"r": 2}], ids=["all", "lora"])
def test_generation_stops_where_trained_answers_end(tmp_path: Path, special: bool, lora: Any) -> None:
    with_marks(tmp_path / "model", special=special)
    view = Watching()
    launch.train(load(recipe(tmp_path, template=CHATML, lora=lora, **SHORT)), view)
    run = str(tmp_path / "run")
    kept = text.load(tmp_path / "run" / "model")
    end = kept.backend.token_to_id("<|im_end|>")
    assert kept.stop_ids == {0, end}
    assert kept.eos_id == 0
    assert any(
        "answers end with <|im_end|>: added to the stop tokens of generation" in m for m in view.messages
    )
    trained = [words for words, flag in view.of("example")[0]["runs"] if flag]
    assert all(words.endswith("<|im_end|>") for words in trained), "without the line break after it"
    assert trimtab.load(run).opened.tokenizer.stop_ids == {0, end}
    words = ["merge", run] if lora else ["export", "hf", run]
    assert main([*words, str(tmp_path / "out"), "--dtype", "fp32"]) == 0
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == [0, end]
    if lora:
        assert main(["export", "peft", run, str(tmp_path / "peft")]) == 0
        adapted = trimtab.load(tmp_path / "model", adapter=tmp_path / "peft")
        assert adapted.opened.tokenizer.stop_ids == {0, end}


def test_tokens_that_a_recipe_adds_end_answers_too(tmp_path: Path) -> None:
    model = {
        "name": str(write_tiny_model(tmp_path / "model")),
        "chat_template": CHATML,
        "added_tokens": MARKS,
    }
    path = recipe(tmp_path, lora={"r": 2, "modules_to_save": ["embed_tokens"]}, **SHORT)
    written = load(path, [f"model={json.dumps(model)}"])
    launch.train(written, Watching())
    kept = text.load(tmp_path / "run" / "model")
    assert kept.stop_ids == {0, kept.backend.token_to_id("<|im_end|>")}


def test_a_resumed_run_keeps_its_stop_tokens(tmp_path: Path) -> None:
    with_marks(tmp_path / "model", special=True)
    path = recipe(tmp_path, template=CHATML, lr_scheduler_type="constant", **SHORT)
    launch.train(load(path), Watching())
    view = Watching()
    launch.resume(tmp_path / "run", ["max_steps=3"], view)
    assert not any("added to the stop tokens" in message for message in view.messages), "it is known"
    assert len(text.load(tmp_path / "run" / "model").stop_ids) == 2


def test_the_template_gets_the_variables_of_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = TEMPLATE.replace("{{ 'assistant:' }}", "{{ 'assistant:' }}{{ mode }}").replace(
        "m.role + ': ' + m.content",
        "m.role + ':' + (mode if m.role == 'assistant' else '') + ' ' + m.content",
    )
    view = Watching()
    path = recipe(tmp_path, template=template, data={"chat_template_kwargs": {"mode": "the"}}, **SHORT)
    launch.train(load(path), view)
    opened = trimtab.load(tmp_path / "run").opened
    assert opened.tokenizer.render_chat([{"role": "user", "content": "it"}], True).endswith("assistant:the")
    words = ["eval", str(tmp_path / "run"), str(tmp_path / "heldout.jsonl"), "--no-probe", "--json"]
    assert (
        main([*words, "--cache-dir", str(tmp_path / "cache"), "--max-seq-length", "64", "--dtype", "fp32"])
        == 0
    )
    (record,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    last = view.of("eval")[-1]
    assert record["tokens"] == last["tokens"]
    assert record["loss"] == pytest.approx(last["loss"], rel=1e-5)


def test_an_example_that_is_truncated_before_an_answer_ends_is_reported(tmp_path: Path) -> None:
    view = Watching()
    launch.train(load(recipe(tmp_path, max_seq_length=28, **SHORT)), view)
    assert view.of("example")[0]["cut"]
    assert any("this example is truncated before its answer ends" in message for message in view.messages)
