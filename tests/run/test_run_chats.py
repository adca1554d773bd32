"""Runs on conversations: loss on answers only, a resume repeats the run, errors before training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_runs import TEMPLATE, Watching, recipe, write_chats
from tiny_model import write_texts, write_tiny_model

from trimtab import launch, text
from trimtab.cli.main import main
from trimtab.data.batch import collate
from trimtab.data.packing import Piece
from trimtab.facts.errors import DataError, ModelError, RecipeError, TrimtabError
from trimtab.kernels.attention import Layout
from trimtab.model import build, load_weights, read_shape
from trimtab.recipe import build as build_recipe
from trimtab.recipe import load
from trimtab.report import read_run
from trimtab.run.locate import absolute


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Watching]:
    folder, view = tmp_path_factory.mktemp("chats"), Watching()
    assert launch.train(load(recipe(folder)), view).status == "finished"
    return folder, view


def test_only_answers_are_trained_on_and_shown(finished: tuple[Path, Watching]) -> None:
    folder, view = finished
    tokenizer = text.load(folder / "run" / "model")
    assert tokenizer.chat_template == TEMPLATE  # kept with the run, so that it can be talked to
    (example,) = view.of("example")
    assert example["runs"] == [
        ("user: the cat sees 0 dog\nassistant:", False),
        (" it was 0 and a tree<|end|>", True),
        ("\nuser: over?\nassistant:", False),
        (" under the house<|end|>", True),
        ("\n", False),
    ]
    (kept,) = read_run(folder / "run").of("example")
    assert [tuple(run) for run in kept["runs"]] == example["runs"]
    answers = [
        len(tokenizer.encode(f" {message['content']}<|end|>"))
        for line in (folder / "chats.jsonl").read_text().splitlines()
        for message in json.loads(line)["messages"]
        if message["role"] == "assistant"
    ]
    assert view.of("train")[-1]["tokens"] == 2 * sum(answers)  # two epochs
    assert any("40 examples (messages)" in line for line in view.messages)
    first, last = view.of("eval")[0], view.of("eval")[-1]
    assert last["loss"] < first["loss"] - 1


@pytest.mark.oracle
def test_the_loss_is_that_of_transformers_on_the_same_labels(finished: tuple[Path, Watching]) -> None:
    """Measured before training, conversation by conversation, with everything but the answers at -100."""
    transformers = pytest.importorskip("transformers")
    folder, view = finished
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    tokenizer = text.load(folder / "run" / "model")
    total, count = 0.0, 0
    for line in (folder / "heldout.jsonl").read_text().splitlines():
        ids: list[int] = []
        labels: list[int] = []
        for message in json.loads(line)["messages"]:
            if message["role"] == "user":
                part = tokenizer.encode(f"user: {message['content']}\nassistant:")
                ids, labels = ids + part, labels + [-100] * len(part)
            else:
                part = tokenizer.encode(f" {message['content']}<|end|>")
                after = tokenizer.encode("\n")
                ids, labels = ids + part + after, labels + part + [-100] * len(after)
        whole = tokenizer.encode(tokenizer.render_chat(json.loads(line)["messages"]))
        assert ids == whole  # the seams lie between tokens
        with torch.no_grad():
            logits = theirs(torch.tensor([ids])).logits[0, :-1]
        wanted = torch.tensor(labels[1:])
        total += torch.nn.functional.cross_entropy(logits, wanted, reduction="sum").item()
        count += int((wanted != -100).sum())
    first = view.of("eval")[0]
    assert first["tokens"] == count
    assert first["loss"] == pytest.approx(total / count, rel=1e-6)


def test_a_resumed_run_repeats_the_uninterrupted_one(finished: tuple[Path, Watching], tmp_path: Path) -> None:
    class Enough(Exception):
        """Simulates an interruption."""

    def stop(step: int) -> None:
        if step == 5:
            raise Enough

    _, view = finished
    path, other = recipe(tmp_path), Watching()
    with pytest.raises(Enough):
        launch.train(load(path), Watching(), after_step=stop)
    launch.resume(tmp_path / "run", [], other)
    unstopped = [record["loss"] for record in view.of("train")]
    assert [record["loss"] for record in other.of("train")] == unstopped[5:]
    assert len(read_run(tmp_path / "run").of("example")) == 1


def test_streaming_trains_on_answers_too(tmp_path: Path) -> None:
    view = Watching()
    path = recipe(tmp_path, num_train_epochs=None, max_steps=4, data={"streaming": True})
    launch.train(load(path), view)
    assert [flag for _, flag in view.of("example")[0]["runs"]] == [False, True] * 2 + [False]
    assert view.of("train")[-1]["tokens"] > 0


def test_answers_without_an_end_token_are_reported(tmp_path: Path, finished: tuple[Path, Watching]) -> None:
    view = Watching()
    template = TEMPLATE.replace("{{ eos_token }}", "")
    launch.train(load(recipe(tmp_path, template=template, num_train_epochs=None, max_steps=1)), view)
    assert any(
        "end with no special token: a model trained on them does not learn to stop" in m
        for m in view.messages
    )
    assert not any("no special token" in message for message in finished[1].messages)


def test_sources_of_several_forms_are_trained_on_together(tmp_path: Path) -> None:
    rows = [{"instruction": f"the {i} dog", "input": "", "output": f"runs {i}"} for i in range(10)]
    (tmp_path / "alpaca.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = [{"q": f"a red {i}", "a": f" tree {i}"} for i in range(10)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    train = [
        {"source": str(write_chats(tmp_path / "chats.jsonl", 10)), "train_on": "last"},
        str(tmp_path / "alpaca.jsonl"),
        {"source": str(tmp_path / "pairs.jsonl"), "columns": {"prompt": "q", "completion": "a"}},
        str(write_texts(tmp_path / "texts.jsonl", 3, 10)),
    ]
    view = Watching()
    launch.train(load(recipe(tmp_path, train, num_train_epochs=1)), view)
    said = "\n".join(view.messages)
    for name in ("(messages)", "(alpaca)", "(prompt-completion)"):
        assert name in said
    assert said.count("tokens trained on") == 4  # three, and the measured set; a text is trained on whole


MISTAKES: dict[str, tuple[dict[str, Any], type[TrimtabError], str]] = {
    "no template": ({"template": None}, ModelError, "no chat template; set model.chat_template to a Jinja file"),
    "no such file": ({"template": "chat.jinja"}, RecipeError, "there is no file chat.jinja"),
    "syntax": ({"template": "{% for %}"}, ModelError, "the chat template failed: .*line 1.*correct the chat"),
    "raises": ({"template": "{{ raise_exception('no!') }}"}, DataError, r"\.jsonl:1: the chat template failed: no!"),
    "format": ({"train": {"source": "chats.jsonl", "format": "alpaca"}}, DataError, "the columns messages, but not"),
    "too short": ({"max_seq_length": 4}, DataError, r"\(4 tokens\); raise max_seq_length"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_raise_before_training(
    tmp_path: Path, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    changes, kind, message = MISTAKES[mistake]
    with pytest.raises(kind, match=message):
        launch.train(load(recipe(tmp_path, **changes)), Watching())
    assert not (tmp_path / "run" / "choices.json").exists()


def test_template_strings_and_template_files_are_distinguished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template is not looked up as a path: it may be longer than a file name can be."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    for named, expected in (
        ("{# " + "long " * 100 + "#}" + TEMPLATE, "{# long"),
        ("{{ '[*]' }}" * 200, "{{ '[*]' }}"),
        ("chat.jinja", str(tmp_path / "chat.jinja")),
    ):
        resolved = absolute(
            build_recipe({"model": {"name": "x", "chat_template": named}, "data": {"train": "y"}})
        )
        assert (resolved.model.chat_template or "").startswith(expected)


def test_the_command_line_shows_evaluates_and_answers(
    finished: tuple[Path, Watching], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, view = finished
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    path = recipe(tmp_path, template=str(template), num_train_epochs=None, max_steps=1)
    assert main(["train", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "trained tokens of chats.jsonl:1 (" in shown
    assert "assistant:⟦ it was 0 and a tree<|end|>" in shown
    assert "\x1b" not in shown
    heldout = str(folder / "heldout.jsonl")
    words = ["eval", str(folder / "run"), heldout, "--no-probe", "--json", "--max-seq-length", "64"]
    assert main([*words, "--cache-dir", str(tmp_path / "cache"), "--dtype", "fp32"]) == 0
    (record,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    last = view.of("eval")[-1]
    assert record["tokens"] == last["tokens"]
    assert record["loss"] == pytest.approx(last["loss"], rel=1e-5)
    assert (
        main(["generate", str(folder / "run"), "--chat", "the cat sees 3 dog", "--max-new-tokens", "4"]) == 0
    )


def test_a_batch_without_a_target_adds_nothing(tmp_path: Path) -> None:
    """Its loss is 0 and its gradients are finite zeros: losses are not divided by the batch's own count."""
    folder = write_tiny_model(tmp_path / "model")
    decoder = build(read_shape(folder), dtype="fp32", device="cpu", attention="reference")
    load_weights(decoder, folder)
    ids = torch.arange(3, 11).numpy()
    batch = collate([[Piece(ids, "a:1", (ids * 0).astype("uint8"))]], 12)
    assert batch.num_targets == 0
    loss = decoder.loss(
        batch.input_ids_BT, batch.labels_BT, batch.positions_BT, Layout.packed(batch.documents_BT)
    )
    (loss / 7).backward()
    assert loss.item() == 0
    assert all(p.grad is not None and not p.grad.any() for p in decoder.parameters())
