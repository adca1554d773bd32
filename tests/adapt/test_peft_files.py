"""peft as the oracle: our adapters load there, its adapters load here, to the same logits; and files that are wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from lora_cases import (
    TIED,
    UNTIED,
    adapted,
    base,
    distance,
    exact_logits,
    logits,
    save_base,
    scatter,
    their_logits,
    theirs,
)
from safetensors.torch import load_file, save_file

from trimtab.adapt import LoraSettings, add_adapters, init_adapters, load_adapter, save_adapter, use_adapters
from trimtab.adapt.lora import active_adapters, adapter_names
from trimtab.adapt.peft_files import own_tensors
from trimtab.facts.errors import ModelError, RecipeError

CASES = {
    "all-linear": (TIED, {"r": 4, "lora_alpha": 8}),
    "rslora": (UNTIED, {"r": 4, "lora_alpha": 8, "use_rslora": True}),
    "dora": (UNTIED, {"r": 4, "lora_alpha": 8, "use_dora": True}),
    "ranks": (TIED, {"r": 2, "rank_pattern": {"down_proj": 5, r"layers\.0\.self_attn\.q_proj": 3},
                     "alpha_pattern": {"o_proj": 7.0}}),
    "some": (TIED, {"r": 3, "target_modules": ("q_proj", "v_proj")}),
    "pattern": (TIED, {"r": 3, "target_modules": r"model\.layers\.1\..*(q|up)_proj"}),
    "head": (UNTIED, {"r": 3, "target_modules": ("q_proj", "lm_head")}),
    "embedding": (UNTIED, {"r": 3, "target_modules": ("q_proj", "embed_tokens")}),
    "whole, untied": (UNTIED, {"r": 3, "modules_to_save": ("embed_tokens", "lm_head")}),
    "whole, tied": (TIED, {"r": 3, "modules_to_save": ("embed_tokens",)}),
    "norms": (TIED, {"r": 3, "modules_to_save": ("input_layernorm", "model.norm")}),
}  # fmt: skip


def change_whole(decoder: torch.nn.Module, modules: tuple[str, ...]) -> None:
    """Modules trained as a whole, as if they had been."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if any(name.removesuffix(".weight").endswith(word) for word in modules):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.oracle
@pytest.mark.parametrize("case", CASES)
def test_peft_loads_ours_to_the_same_logits(case: str, tmp_path: Path) -> None:
    shape, given = CASES[case]
    settings = LoraSettings(**given)
    decoder = adapted(settings, shape)
    change_whole(decoder, settings.modules_to_save)
    (tmp_path / "adapter").mkdir()
    save_adapter(decoder, tmp_path / "adapter", base_name=str(save_base(tmp_path / "base", shape)))
    model = theirs(tmp_path / "base", tmp_path / "adapter")
    assert distance(exact_logits(decoder), their_logits(model)) < 3e-5
    assert not torch.allclose(logits(base(shape)), logits(decoder), atol=1e-2)

    again = base(shape)
    load_adapter(again, tmp_path / "adapter")
    assert torch.equal(logits(again), logits(decoder))
    use_adapters(again, [])
    assert torch.equal(logits(again), logits(base(shape)))
    use_adapters(again, "default")
    assert torch.equal(logits(again), logits(decoder))


@pytest.mark.oracle
@pytest.mark.parametrize("case", [c for c in CASES if c != "whole, tied"])
def test_we_load_peft_s_to_the_same_logits(case: str, tmp_path: Path) -> None:
    shape, given = CASES[case]
    save_base(tmp_path / "base", shape)
    config = {"target_modules": "all-linear", **given}
    for key in ("target_modules", "modules_to_save"):
        if isinstance(config.get(key), tuple):
            config[key] = [word.rpartition(".")[2] for word in config[key]]
    model = theirs(tmp_path / "base", **config)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(tmp_path / "adapter")
    decoder = base(shape)
    load_adapter(decoder, tmp_path / "adapter")
    expected = their_logits(model)
    assert distance(exact_logits(decoder), expected) < 3e-5
    with torch.no_grad():
        for parameter in own_tensors(decoder).values():
            parameter.mul_(1.005)
    assert distance(exact_logits(decoder), expected) > 1e-4, "the comparison could not fail"


def written(folder: Path, settings: LoraSettings | None = None) -> Path:
    folder.mkdir()
    save_adapter(adapted(settings or LoraSettings(r=2)), folder, base_name="some/base")
    return folder


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder: Path, change) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def refused(folder: Path, *words: str, shape=TIED) -> None:
    with pytest.raises(ModelError) as found:
        load_adapter(base(shape), folder)
    for word in words:
        assert word in str(found.value), str(found.value)


def test_files_that_are_not_there_or_not_whole(tmp_path: Path) -> None:
    refused(tmp_path, "not an adapter's folder")
    folder = written(tmp_path / "a")
    (folder / "adapter_model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    refused(folder, "not a whole safetensors file")
    (folder / "adapter_model.safetensors").unlink()
    refused(folder, "has no adapter_model.safetensors")
    (folder / "adapter_model.bin").write_bytes(b"")
    refused(folder, "only a pickle")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"peft_type": "IA3"}, "no LoRA adapter"),
        ({"r": 0}, "r is 0"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"init_lora_weights": "pissa_niter_4"}, "whose weights were changed"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
    ],
)
def test_configs_that_mean_something_else(changes: dict, word: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "a")
    edit_config(folder, **changes)
    refused(folder, word)


def test_an_adapter_for_another_base(tmp_path: Path) -> None:
    import dataclasses

    folder = written(tmp_path / "a")
    wider = dataclasses.replace(TIED, hidden_size=64)
    refused(folder, "does not fit", "[2, 32] there and [2, 64] here", "some/base", shape=wider)
    fewer = dataclasses.replace(TIED, num_layers=1)
    refused(folder, "does not fit", "model.layers.1", shape=fewer)


def test_numbers_that_are_not(tmp_path: Path) -> None:
    folder = written(tmp_path / "a")

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        next(iter(tensors.values()))[0, 0] = torch.nan

    edit_tensors(folder, spoil)
    refused(folder, "holds NaN or infinity")


def test_a_refused_adapter_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    decoder = base(TIED)
    load_adapter(decoder, written(tmp_path / "good"), adapter="good")
    ids_BT = torch.arange(12)[None]
    before = decoder.logits(decoder(ids_BT))
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
    changes = {
        "nan": lambda tensors: next(iter(tensors.values())).fill_(torch.nan),
        "few": lambda tensors: tensors.pop(name),
        "wide": lambda tensors: tensors.update({name: torch.zeros(3, 3)}),
    }
    for kind, change in changes.items():
        folder = written(tmp_path / kind)
        edit_tensors(folder, change)
        with pytest.raises(ModelError):
            load_adapter(decoder, folder, adapter="second")
        assert (adapter_names(decoder), active_adapters(decoder)) == (["good"], ["good"]), kind
        assert torch.equal(decoder.logits(decoder(ids_BT)), before)
    load_adapter(decoder, written(tmp_path / "other"), adapter="second")
    with pytest.raises(RecipeError, match="adapter good is named 2 times"):
        use_adapters(decoder, ["good", "good"])


def test_a_tensor_too_few_and_one_too_many(tmp_path: Path) -> None:
    folder = written(tmp_path / "a")
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
    edit_tensors(folder, lambda tensors: tensors.pop(name))
    refused(folder, "lacks model.layers.0.mlp.up_proj.lora_B.weight")
    other = written(tmp_path / "b")
    edit_tensors(other, lambda tensors: tensors.update({"base_model.model.model.x.weight": torch.zeros(1)}))
    refused(other, "replaces model.x,")


def test_a_rank_that_the_weights_do_not_have(tmp_path: Path) -> None:
    folder = written(tmp_path / "a")
    r = json.loads((folder / "adapter_config.json").read_text())["r"]
    edit_config(folder, r=r + 1, rank_pattern={})
    refused(folder, f"rank {r + 1}, and adapter_model.safetensors has it in rank", "belong together")


@pytest.mark.parametrize("words", [["q_proj", "up_proj"], "all-linear", r".*\.(q_proj|up_proj)", "(broken"])
def test_a_module_that_the_config_names_and_the_weights_lack(words: object, tmp_path: Path) -> None:
    decoder = base(TIED)
    add_adapters(decoder, LoraSettings(r=2, target_modules="all-linear"))
    init_adapters(decoder, seed=0)
    folder = tmp_path / "a"
    folder.mkdir()
    save_adapter(decoder, folder, base_name="some/base")
    edit_config(folder, target_modules=words)
    load_adapter(base(TIED), folder)

    def cut(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if "layers.1.mlp.up_proj" in key]:
            del tensors[key]

    edit_tensors(folder, cut)
    if words == "(broken":  # what is no expression names nothing
        load_adapter(base(TIED), folder)
        return
    refused(
        folder, "lacks model.layers.1.mlp.up_proj, which adapter_config.json names", "get the adapter again"
    )
    edit_config(folder, layers_to_transform=[0, 1])  # in words of its own it may leave some out
    load_adapter(base(TIED), folder)


def test_an_adapter_that_diverged_is_not_written(tmp_path: Path) -> None:
    decoder = adapted(LoraSettings(r=2))
    decoder.model.layers[0].mlp.up_proj.lora_A["default"].weight.data.fill_(torch.inf)
    with pytest.raises(ModelError, match="NaN or infinity"):
        save_adapter(decoder, tmp_path, base_name="x")


def test_a_second_adapter_beside_a_fresh_one(tmp_path: Path) -> None:
    folder = written(tmp_path / "a")
    alone = base()
    load_adapter(alone, folder)
    decoder = base()
    add_adapters(decoder, LoraSettings(r=3), adapter="mine")
    init_adapters(decoder, seed=0, adapter="mine")
    scatter(decoder, "mine")
    load_adapter(decoder, folder, adapter="theirs")
    assert torch.equal(logits(decoder), logits(alone))
