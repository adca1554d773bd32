"""What ships: sizes, the tokenizer, recipes that load."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from tokenizers import Tokenizer

from trimtab import starter
from trimtab.facts.errors import DataError
from trimtab.recipe import load


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(starter.base_folder() / "tokenizer.json"))


def test_the_base_model_is_small() -> None:
    files = [f for f in starter.base_folder().iterdir() if f.is_file()]
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= {f.name for f in files}
    assert sum(f.stat().st_size for f in files) < 10_000_000


def test_config_and_tokenizer_agree(tokenizer: Tokenizer) -> None:
    config = json.loads((starter.base_folder() / "config.json").read_text())
    assert config["vocab_size"] == tokenizer.get_vocab_size() == 4096
    assert config["eos_token_id"] == tokenizer.token_to_id("<|endoftext|>") == 0


@pytest.mark.parametrize(
    "text", ["Solve 3x + 5 = 20.\nAnswer: x = 5\n\n", "naïve — “quotes” 北京 🙂\t\r\n  end ", "2026"]
)
def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_each_digit_is_a_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("1234 + 56").tokens == ["1", "2", "3", "4", "Ġ+", "Ġ", "5", "6"]
    digits = [t for t in tokenizer.get_vocab() if re.search(r"\d", t)]
    assert sorted(digits) == list("0123456789")


def test_common_words_are_single_tokens(tokenizer: Tokenizer) -> None:
    for word in ("the", "derivative", "integral", "Question", "Answer", "friend", "garden", "because"):
        assert len(tokenizer.encode(f" {word}").ids) <= 2


@pytest.mark.parametrize("name", ["general", "replay"])
def test_shipped_text_is_small_and_readable(name: str) -> None:
    path = starter.data_file(name)
    assert path.stat().st_size <= 350_000
    found = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert all(found)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("name", ["demo", "pretrain"])
def test_recipes_load(name: str) -> None:
    recipe = load(starter.recipe_file(name))
    assert recipe.max_seq_length <= 512


def test_unknown_names_are_errors() -> None:
    with pytest.raises(DataError, match="general, replay"):
        starter.data_file("other")
    with pytest.raises(DataError, match="demo, pretrain"):
        starter.recipe_file("other")
    with pytest.raises(AttributeError):
        _ = starter.nothing  # type: ignore[attr-defined]


def test_mathematics_imports_no_torch() -> None:
    code = (
        "import sys; from trimtab import starter; next(starter.math_documents(0, 1));"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
