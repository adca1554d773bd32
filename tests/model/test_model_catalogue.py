"""The catalogue of known models: every entry's shape has the number of parameters that its publisher states."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trimtab.facts.errors import ModelError
from trimtab.model import catalogue
from trimtab.model.catalogue import (
    CatalogueEntry,
    catalogue_entries,
    find_model,
    known_models,
    parse_catalogue,
    suggest_models,
)
from trimtab.model.families import FAMILIES, PLAN_ONLY, shape_from_config

WHOLE = {
    "name": "a/b",
    "aliases": ["a/b-Instruct"],
    "config": {"model_type": "llama"},
    "context_lengths": {},
    "parameters": "1.5B",
    "source": {"shape": "https://one", "parameters": "https://two"},
}


@pytest.mark.parametrize("entry", catalogue_entries(), ids=lambda entry: entry.name)
def test_an_entry_has_its_publishers_parameters(entry: CatalogueEntry) -> None:
    assert entry.has_parameters(entry.shape.num_parameters), (entry.parameters, entry.shape.num_parameters)
    assert 0 < entry.shape.num_active_parameters <= entry.shape.num_parameters
    assert entry.shape_source.startswith("https://")
    assert entry.parameters_source.startswith("https://")
    assert entry.trainable == (entry.shape.family in ("llama", "mistral", "qwen2", "qwen3"))
    if entry.trainable:
        assert shape_from_config(entry.config) == entry.shape
    for name in (entry.name, *entry.aliases):
        found = find_model(name)
        assert found is not None
        assert found is find_model(name.upper())
        assert found.name == entry.name
        assert found.shape.num_parameters == entry.shape.num_parameters
        expected = entry.context_lengths.get(name, entry.shape.max_positions)
        assert found.shape.max_positions == expected


def test_every_family_has_entries() -> None:
    assert len(known_models()) >= 100
    assert len(set(known_models())) == len(known_models())
    families = {entry.config["model_type"] for entry in catalogue_entries()}
    assert families == {*FAMILIES, *PLAN_ONLY} - {"gemma3"}  # whose text model is an entry


def test_the_docs_page_has_the_counts() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    variants = sum(len(entry.aliases) for entry in catalogue_entries())
    assert f"{len(known_models())} shapes and {variants} variants" in text
    for name in (*FAMILIES, *PLAN_ONLY):
        assert f"`{name}`" in text, name


def test_a_wrong_shape_has_another_parameter_count() -> None:
    """One layer, one token or one bias more no longer matches the publisher's model."""
    entry = find_model("Qwen/Qwen2.5-7B")
    assert entry is not None
    for key, value in (("num_hidden_layers", 29), ("vocab_size", 152_065), ("tie_word_embeddings", True)):
        other = shape_from_config({**entry.config, key: value})
        assert not entry.has_parameters(other.num_parameters), key


@pytest.mark.parametrize(
    ("stated", "count", "expected"),
    [
        ("8.03B", 8_030_261_248, True),
        ("8.03B", 8_040_261_248, False),
        ("671B", 671_499_999_999, True),
        ("671B", 671_600_000_000, False),
        ("68M", 68_030_208, True),
        (5, 5, True),
        (5, 6, False),
    ],
)
def test_rounded_parameters(stated: int | str, count: int, expected: bool) -> None:
    (entry,) = parse_catalogue(json.dumps({"version": 1, "models": [{**WHOLE, "parameters": stated}]}))
    assert entry.has_parameters(count) is expected


def test_published_active_parameters() -> None:
    """Model cards: Mixtral 8x7B 12.9B, Qwen3-30B-A3B 3.3B, DeepSeek-V3 37B, gpt-oss-20b 3.6B without its embedding."""
    active = {name: find_model(name).shape.num_active_parameters / 1e9 for name in (  # type: ignore[union-attr]
        "mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3", "openai/gpt-oss-20b"
    )}  # fmt: skip
    assert [round(value, 1) for value in active.values()] == [12.9, 3.4, 37.6, 4.2]
    oss = find_model("openai/gpt-oss-20b")
    assert oss is not None
    embedding = oss.shape.vocab_size * oss.shape.hidden_size
    assert round((oss.shape.num_active_parameters - embedding) / 1e9, 2) == 3.61


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-8B-Instruct", "unsloth/Qwen3-8B-bnb-4bit", "copies/qwen3-8b-GGUF"]
)
def test_a_quantized_or_tuned_copy_suggests_its_model(name: str) -> None:
    assert suggest_models(name)[0] == "Qwen/Qwen3-8B"


def test_unknown_names_suggest_similar_ones() -> None:
    assert find_model("Qwen/Qwen3-9B") is None
    assert "Qwen/Qwen3-8B" in suggest_models("Qwen/Qwen3-9B")
    assert suggest_models("gpt-oss20b")[0] == "openai/gpt-oss-20b"
    assert suggest_models("zzzzzzzzzzzz") == ()


def test_variants_have_their_own_context_lengths() -> None:
    lengths = {
        name: find_model(f"Qwen/Qwen3-4B{name}").shape.max_positions  # type: ignore[union-attr]
        for name in ("", "-Base", "-Instruct-2507")
    }
    assert lengths == {"": 40_960, "-Base": 32_768, "-Instruct-2507": 262_144}


def test_a_name_without_its_organization() -> None:
    """It is found where a single entry has it; mirrors with the same shape do not make it ambiguous."""
    entry = find_model("llama-3.2-1b-instruct")
    assert entry is not None
    assert entry.name == "meta-llama/Llama-3.2-1B"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"version": 2, "models": []}',
        json.dumps({"version": 1, "models": [{**WHOLE, "parameters": "many"}]}),
        json.dumps({"version": 1, "models": [{**WHOLE, "parameters": True}]}),
        json.dumps({"version": 1, "models": [{**WHOLE, "parameters": 1.5}]}),
        json.dumps({"version": 1, "models": [{**WHOLE, "source": {"shape": "here", "parameters": ""}}]}),
        json.dumps({"version": 1, "models": [{**WHOLE, "name": "b"}]}),
        json.dumps({"version": 1, "models": [{**WHOLE, "context_lengths": {"a/c": 5}}]}),
        json.dumps({"version": 1, "models": [{**WHOLE, "config": {}}]}),
        json.dumps({"version": 1, "models": [{k: v for k, v in WHOLE.items() if k != "source"}]}),
        json.dumps({"version": 1, "models": [WHOLE, {**WHOLE, "name": "a/c"}]}),
    ],
)
def test_a_damaged_file_is_an_error(text: str) -> None:
    with pytest.raises(ModelError, match="the catalogue of models"):
        parse_catalogue(text)


def test_the_catalogue_is_read_lazily_and_without_torch() -> None:
    code = (
        "import sys; from trimtab.model import catalogue as c; assert not c._entries.cache_info().currsize; "
        "assert c.find_model('qwen/qwen3-8b').shape.num_layers == 36; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert catalogue.DATA.endswith(".json")
