"""Adapters with added tokens: their tokenizer is saved with them, and compared with the recipe's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command import call
from tiny_model import write_recipe, write_tiny_model

import trimtab
from trimtab.facts.errors import RecipeError

QUICK: dict[str, Any] = {
    "num_train_epochs": None,
    "max_steps": 2,
    "eval_steps": None,
    "save_steps": 2,
    "eval_on_start": False,
    "lr_scheduler_type": "constant",
}
TOKENS = ["<|tool|>", "the cat"]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"


def done(*words: object) -> str:
    code, said = call(*words)
    assert code == 0, said
    return said


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with unused embedding rows, a run that uses two of them for added tokens, and its adapter."""
    home = tmp_path_factory.mktemp("tokens")
    write_tiny_model(home / "model", vocab_size=320)
    model = {"name": str(home / "model"), "added_tokens": TOKENS}
    done(
        "train", write_recipe(home, **QUICK, model=model, lora={"r": 2, "modules_to_save": ["embed_tokens"]})
    )
    done("export", "peft", home / "run", home / "adapter")
    return home


def ids_of(folder: Path, **more: Any) -> list[int]:
    return trimtab.load(folder, device="cpu", dtype="fp32", **more).opened.tokenizer.encode("the cat<|tool|>")


def test_tokens_are_exported_if_the_embedding_has_unused_rows(home: Path, tmp_path: Path) -> None:
    assert ids_of(home / "model") != (own := ids_of(home / "run"))
    assert len(own) == 2
    assert ids_of(home / "model", adapter=home / "adapter") == own
    done("merge", home / "model", tmp_path / "merged", "--adapter", home / "adapter")
    assert ids_of(tmp_path / "merged") == own
    with pytest.raises(RecipeError, match=r"has added tokens.*<\|tool\|>.*load it together with the model"):
        trimtab.load(home / "model", device="cpu").add_adapter(home / "adapter", "late")
    again = trimtab.load(home / "model", adapter=home / "adapter", device="cpu")
    again.save_adapter(tmp_path / "again")
    assert ids_of(home / "model", adapter=tmp_path / "again") == own


@pytest.mark.parametrize("tokens", [[], TOKENS[::-1], ["<|other|>", "the dog"], TOKENS[:1]])
@pytest.mark.parametrize("spare", [True, False])
def test_training_continues_with_the_same_tokens_only(
    home: Path, tokens: list[str], spare: bool, tmp_path: Path
) -> None:
    place = home
    if not spare:
        place = tmp_path / "tight"
        model = {"name": str(write_tiny_model(place / "model")), "added_tokens": TOKENS}
        lora = {"r": 2, "modules_to_save": ["embed_tokens"]}
        done("train", write_recipe(place, **QUICK, model=model, lora=lora))
        done("export", "peft", place / "run", place / "adapter")
    model = {"name": str(place / "model"), "added_tokens": tokens}
    code, said = call(
        "train", write_recipe(tmp_path, **QUICK, model=model, lora={"adapter": str(place / "adapter")})
    )
    assert code == 2, said
    assert "was trained with tokens that this recipe lacks" in said
    assert "model.added_tokens: ['<|tool|>', 'the cat']" in " ".join(said.split())
    assert not (tmp_path / "run").exists()
    model["added_tokens"] = TOKENS
    done("train", write_recipe(tmp_path, **QUICK, model=model, lora={"adapter": str(place / "adapter")}))


def test_a_chat_template_is_exported(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    model = {"name": str(tmp_path / "model"), "chat_template": TEMPLATE}
    done("train", write_recipe(tmp_path, **QUICK, model=model, lora={"r": 2}))
    done("export", "peft", tmp_path / "run", tmp_path / "adapter")
    words = ("--chat", "hi", "--max-new-tokens", 2)
    assert call("generate", tmp_path / "model", *words)[0] == 4
    done("generate", tmp_path / "model", "--adapter", tmp_path / "adapter", *words)
    opened = trimtab.load(tmp_path / "model", adapter=tmp_path / "adapter", device="cpu").opened
    assert opened.tokenizer.chat_template == TEMPLATE


def test_tokens_that_cannot_be_generated_are_reported(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", tie_embeddings=False)
    model = {"name": str(tmp_path / "model"), "added_tokens": TOKENS}
    lora: dict[str, Any] = {"r": 2, "modules_to_save": ["embed_tokens"]}
    said = done("train", write_recipe(tmp_path, **QUICK, model=model, lora=lora))
    assert "not to generate them" in " ".join(said.split())
    lora["modules_to_save"].append("lm_head")
    both = write_recipe(tmp_path, **QUICK, model=model, lora=lora, output_dir=str(tmp_path / "both"))
    assert "not to generate them" not in " ".join(done("train", both).split())
