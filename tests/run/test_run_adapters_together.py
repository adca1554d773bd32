"""Several adapters on a run's model, some with `modules_to_save`: each, and the base, computes what it does alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command import call
from tiny_model import write_recipe, write_tiny_model

import trimtab
from trimtab.adapt import active_adapters, merge_adapters, trained_parameters, use_adapters
from trimtab.adapt.lora import attach_adapters
from trimtab.adapt.peft_files import settings_of
from trimtab.export import export_merged, export_peft
from trimtab.facts.base_weights import BaseWeights
from trimtab.facts.errors import ModelError, RecipeError
from trimtab.model.decoder import Decoder

QUICK: dict[str, Any] = {
    "num_train_epochs": None,
    "max_steps": 3,
    "eval_steps": None,
    "save_steps": 3,
    "eval_on_start": False,
    "lr_scheduler_type": "constant",
    "learning_rate": 5e-3,
}
LORAS: dict[str, dict[str, Any]] = {
    "plain": {"r": 2, "target_modules": ["q_proj", "down_proj"], "lora_dropout": 0.2},
    "whole": {"r": 2, "target_modules": ["k_proj"], "modules_to_save": ["q_proj", "input_layernorm", "norm"]},
    "tokens": {"r": 2, "modules_to_save": ["embed_tokens"]},
}


def done(*words: object) -> None:
    code, said = call(*words)
    assert code == 0, said


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on one base, and their adapters as peft's folders."""
    home = tmp_path_factory.mktemp("together")
    write_tiny_model(home / "model", vocab_size=320)
    for name, lora in LORAS.items():
        model: dict[str, Any] = {"name": str(home / "model")}
        if name == "tokens":
            model["added_tokens"] = ["<|tool|>", "the cat"]
        (home / name).mkdir()
        done("train", write_recipe(home / name, **QUICK, model=model, lora=lora))
        done("export", "peft", home / name / "run", home / name / "adapter")
    return home


def opened(place: Path, dtype: str = "fp32", **more: Any) -> trimtab.Model:
    return trimtab.load(place, dtype=dtype, device="cpu", **more)


@torch.no_grad()
def logits_of(decoder: Decoder) -> torch.Tensor:
    return decoder.logits(decoder(torch.arange(2, 14)[None]))


def logits(model: trimtab.Model) -> torch.Tensor:
    return logits_of(model.opened.decoder)


@pytest.mark.parametrize("name", LORAS)
def test_a_run_without_its_adapter_is_the_base(name: str, home: Path) -> None:
    model, base = opened(home / name / "run"), opened(home / "model")
    own = logits(model)
    assert not torch.equal(own, logits(base))
    model.use_adapters()
    assert torch.equal(logits(model), logits(base))
    model.use_adapters("default")
    assert torch.equal(logits(model), own)
    assert torch.equal(logits(opened(home / "model", adapter=home / name / "adapter")), own)


@pytest.mark.parametrize("name", ["whole", "tokens"])
def test_another_adapter_on_a_run_computes_the_same_as_on_the_base(name: str, home: Path) -> None:
    model = opened(home / name / "run")
    model.add_adapter(home / "plain" / "adapter", "other")
    want = logits(opened(home / "model", adapter=home / "plain" / "adapter"))
    assert torch.equal(logits(model), want)
    model.add_adapter(home / "whole" / "adapter", "again")
    if name == "whole":
        with pytest.raises(RecipeError, match="both replace"):
            model.use_adapters("default", "again")


def test_the_adapter_in_use_is_the_one_that_is_saved(home: Path, tmp_path: Path) -> None:
    model = opened(home / "plain" / "run")
    model.add_adapter(home / "whole" / "adapter", "whole")
    model.save_adapter(tmp_path / "used")
    assert json.loads((tmp_path / "used" / "adapter_config.json").read_text())["target_modules"] == ["k_proj"]
    model.use_adapters("default")
    model.save_adapter(tmp_path / "default")
    found = json.loads((tmp_path / "default" / "adapter_config.json").read_text())["target_modules"]
    assert sorted(found) == ["down_proj", "q_proj"]
    for used, said in (((), "none are active"), (("default", "whole"), "2 are active")):
        model.use_adapters(*used)
        with pytest.raises(RecipeError, match=rf"default, whole, {said}.*adapter=NAME"):
            model.save_adapter(tmp_path / "unclear")


def test_added_tokens_are_exported_with_their_adapter(home: Path, tmp_path: Path) -> None:
    model = opened(home / "tokens" / "run")
    model.add_adapter(home / "plain" / "adapter", "other")
    model.save_adapter(tmp_path / "other")
    assert not (tmp_path / "other" / "tokenizer.json").exists()
    model.save_adapter(tmp_path / "own", adapter="default")
    assert (tmp_path / "own" / "tokenizer.json").exists()
    model.add_adapter(home / "tokens" / "adapter", "again")
    model.save_adapter(tmp_path / "again")
    assert (tmp_path / "again" / "tokenizer.json").exists()


def test_export_writes_current_values(home: Path, tmp_path: Path) -> None:
    decoder = opened(home / "whole" / "run").opened.decoder
    decoder.double().float()  # other storage, as on another device
    norm = decoder.get_parameter("model.norm.weight")
    with torch.no_grad():
        norm += 0.5
    trained = norm.detach().clone()
    export_peft(decoder, tmp_path / "out", base=BaseWeights("x"))
    assert torch.equal(norm, trained)
    again = opened(home / "model", adapter=tmp_path / "out").opened.decoder
    assert torch.equal(again.get_parameter("model.norm.weight"), trained)
    decoder.double()
    use_adapters(decoder, [])
    assert {parameter.dtype for parameter in decoder.parameters()} == {torch.float64}


def test_a_merged_model_stays_merged(home: Path, tmp_path: Path) -> None:
    model = opened(home / "whole" / "run")
    model.merge(tmp_path / "merged", dtype="fp32")
    merged = logits(model)
    model.use_adapters()
    assert torch.equal(logits(model), merged)


def test_a_merge_counts_what_the_adapters_in_use_replace(home: Path, tmp_path: Path) -> None:
    """Whether the model is a run's or a base with an adapter on it."""
    for model in (opened(home / "whole" / "run"), opened(home / "model", adapter=home / "whole" / "adapter")):
        decoder = model.opened.decoder
        with torch.no_grad():
            for name, parameter in decoder.named_parameters():
                if ".lora_B." in name:
                    parameter.zero_()
        assert merge_adapters(decoder, dtype="fp32").changed > 0, "what is replaced differs"
    model = opened(home / "whole" / "run")
    model.add_adapter(home / "plain" / "adapter", "untrained")
    with torch.no_grad():
        for name, parameter in model.opened.decoder.named_parameters():
            if ".lora_B.untrained" in name:
                parameter.zero_()
    with pytest.raises(
        ModelError, match=r"merging changes no weight in fp32.*; nothing was written; train it further$"
    ):
        model.merge(tmp_path / "nothing", dtype="fp32")


def test_rounded_modules_are_refused_on_export(home: Path, tmp_path: Path) -> None:
    for model in (opened(home / "whole" / "run", "bf16"),
                  opened(home / "model", "bf16", adapter=home / "whole" / "adapter")):  # fmt: skip
        with pytest.raises(ModelError, match=r"rounded to bfloat16.*dtype=\"fp32\""):
            model.save_adapter(tmp_path / "rounded")
    opened(home / "plain" / "run", "bf16").save_adapter(tmp_path / "plain")  # A and B are fp32 always


def test_an_export_does_not_change_the_model(home: Path, tmp_path: Path) -> None:
    for name in ("plain", "whole"):
        decoder = opened(home / name / "run").opened.decoder
        before, learning = logits_of(decoder), set(trained_parameters(decoder))
        decoder.train()
        export_peft(decoder, tmp_path / name, base=BaseWeights("x"), receipt=tmp_path / f"{name}.json")
        assert decoder.training
        assert set(trained_parameters(decoder)) == learning
        assert torch.equal(logits_of(decoder.eval()), before)
        export_peft(
            decoder, tmp_path / f"{name}-2", base=BaseWeights("x"), receipt=tmp_path / f"{name}-2.json"
        )
        first, second = (json.loads((tmp_path / f"{n}.json").read_text()) for n in (name, f"{name}-2"))
        assert first["logits_sha256"] == second["logits_sha256"], "nothing is dropped in training mode either"


def test_a_merge_in_training_mode_applies_no_dropout(home: Path, tmp_path: Path) -> None:
    model = opened(home / "plain" / "run")
    model.opened.decoder.train()
    export_merged(model.opened.decoder, model.opened.tokenizer, tmp_path / "merged", dtype="fp32")


def test_an_adapter_may_be_named_read_back(home: Path, tmp_path: Path) -> None:
    decoder = opened(home / "model").opened.decoder
    source = opened(home / "plain" / "run").opened.decoder
    attach_adapters(decoder, settings_of(source), "read_back")
    ours = dict(decoder.named_parameters())
    for name, parameter in source.named_parameters():
        if ".lora_" in name:
            ours[name.replace("default", "read_back")].data.copy_(parameter.data)
    export_peft(decoder, tmp_path / "out", base=BaseWeights("x"), adapter="read_back")
    assert active_adapters(decoder) == ["read_back"]
