"""peft as the oracle: each loads the other's adapters with the same logits; and invalid files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_cases import (
    IDS_BT,
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
from trimtab.adapt.lora import active_adapters, adapter_names, create_dropout_masks, trained_parameters
from trimtab.adapt.merging import merge_adapters
from trimtab.adapt.peft_config import read_adapter_folder
from trimtab.adapt.peft_files import adapter_tensors, copy_adapter_tensors
from trimtab.adapt.spec import adapter_parameters
from trimtab.checkpoint.manifest import digests
from trimtab.facts.base_weights import BaseWeights
from trimtab.facts.errors import CheckpointError, ModelError, RecipeError
from trimtab.facts.files import FileDigest
from trimtab.run.base_weights import check_adapter_base, check_base

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
    "adapted here, whole there": (TIED, {"r": 3, "target_modules": ("model.layers.0.self_attn.q_proj",),
                                         "modules_to_save": ("model.layers.1.self_attn.q_proj",)}),
    "beyond the matrices": (UNTIED, {"r": 40, "target_modules": ("q_proj", "k_proj", "embed_tokens"),
                                     "rank_pattern": {"k_proj": 20}, "any_rank": True}),
}  # fmt: skip


def change_whole(decoder: torch.nn.Module, modules: tuple[str, ...]) -> None:
    """Changes fully trained modules, as if they had been trained."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if any(name.removesuffix(".weight").endswith(word) for word in modules):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def save_moved(model: Any, folder: Path) -> None:
    """Saves a peft model with randomized trainable parameters."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)


@pytest.mark.oracle
@pytest.mark.parametrize("case", CASES)
def test_peft_loads_trimtabs_adapters_with_the_same_logits(case: str, tmp_path: Path) -> None:
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
@pytest.mark.parametrize("case", CASES)
def test_trimtab_loads_pefts_adapters_with_the_same_logits(case: str, tmp_path: Path) -> None:
    shape, given = CASES[case]
    save_base(tmp_path / "base", shape)
    config = {"target_modules": "all-linear", **given}
    config.pop("any_rank", None)
    for key in ("target_modules", "modules_to_save"):
        if isinstance(config.get(key), tuple):
            config[key] = [word if ".layers." in word else word.rpartition(".")[2] for word in config[key]]
    if case == "whole, tied":
        config["ensure_weight_tying"] = True
    model = theirs(tmp_path / "base", **config)
    save_moved(model, tmp_path / "adapter")
    decoder = base(shape)
    load_adapter(decoder, tmp_path / "adapter")
    expected = their_logits(model)
    assert distance(exact_logits(decoder), expected) < 3e-5
    with torch.no_grad():
        for parameter in adapter_tensors(decoder).values():
            parameter.mul_(1.005)
    assert distance(exact_logits(decoder), expected) > 1e-4, "the comparison could not fail"


@pytest.mark.oracle
@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["lm_head", "embed_tokens"]},
        {"target_modules": "all-linear", "modules_to_save": ["down_proj"]},
        {"target_modules": ["q_proj", "v_proj"], "alpha_pattern": {".*_proj": 5, "q_proj": 6}},
        {"target_modules": ["q_proj"], "layers_to_transform": [0],
         "rank_pattern": {"layers.0.self_attn.q_proj": 5, "q_proj": 6}},
    ],
    ids=["head named twice", "linear named twice", "alpha of the first", "rank of the first"],
)  # fmt: skip
def test_configs_that_name_a_module_more_than_once(config: dict[str, Any], tmp_path: Path) -> None:
    save_base(tmp_path / "base", UNTIED)
    model = theirs(tmp_path / "base", r=4, **config)
    save_moved(model, tmp_path / "adapter")
    decoder = base(UNTIED)
    load_adapter(decoder, tmp_path / "adapter")
    assert distance(exact_logits(decoder), their_logits(model)) < 3e-5


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("targets", "whole", "apart"),
    [
        (["q_proj"], ["embed_tokens"], "trains the embedding separately from the head"),
        (["q_proj"], ["lm_head"], "trains the head separately from the embedding"),
        (["q_proj", "lm_head"], None, "trains the head separately from the embedding"),
    ],
)
def test_an_embedding_that_peft_trained_separately_from_its_head(
    tmp_path: Path, targets: list[str], whole: list[str] | None, apart: str
) -> None:
    save_base(tmp_path / "base", TIED)
    model = theirs(tmp_path / "base", r=2, target_modules=targets, modules_to_save=whole)
    model.save_pretrained(tmp_path / "adapter")
    refused(tmp_path / "adapter", apart, "ensure_weight_tying=True")


def test_an_embedding_that_peft_adapted_and_that_is_the_head(tmp_path: Path) -> None:
    save_base(tmp_path / "base", TIED)
    theirs(tmp_path / "base", r=2, target_modules=["q_proj", "embed_tokens"]).save_pretrained(
        tmp_path / "adapter"
    )
    refused(
        tmp_path / "adapter",
        "embed_tokens, whose matrix is also",
        "if this is its base",
        "lora.modules_to_save",
    )


def test_an_adapter_of_larger_rank_than_its_matrices_can_be_trained(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", LoraSettings(r=40, any_rank=True))
    found = read_adapter_folder(folder)
    settings = LoraSettings.from_dict(json.loads(json.dumps(found.settings.to_dict())))
    assert dict(adapter_parameters(TIED, settings))[
        "model.layers.0.self_attn.k_proj.lora_B.default.weight"
    ] == (
        16,
        40,
    )
    decoder = add_adapters(base(), settings)
    copy_adapter_tensors(decoder, found)
    trained = trained_parameters(decoder)
    optimizer = torch.optim.SGD(trained.values(), lr=0.01)
    losses = []
    for _ in range(3):
        loss = decoder.train().loss(IDS_BT, IDS_BT)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[0] > losses[1] > losses[2]
    (tmp_path / "b").mkdir()
    save_adapter(decoder, tmp_path / "b", base_name="some/base")
    again = base()
    load_adapter(again, tmp_path / "b")
    assert torch.equal(logits(again), logits(decoder.eval()))


def test_dropout_on_the_head_raises_only_in_training(tmp_path: Path) -> None:
    plain = adapted(LoraSettings(r=2, target_modules=("q_proj", "lm_head")), UNTIED)
    (tmp_path / "a").mkdir()
    save_adapter(plain, tmp_path / "a", base_name="some/base")
    edit_config(tmp_path / "a", lora_dropout=0.1)
    decoder = base(UNTIED)
    found = load_adapter(decoder, tmp_path / "a")
    assert torch.equal(logits(decoder.eval()), logits(plain.eval()))
    masks = create_dropout_masks(decoder, torch.device("cpu"))
    assert masks is not None
    masks.set(0, 0, 0, 20)
    with pytest.raises(RecipeError, match=r"has dropout on the inputs of lm_head.*decoder\.eval"):
        decoder.train().loss(IDS_BT, IDS_BT)
    with pytest.raises(RecipeError, match=r"lm_head's merged matrix; set lora_dropout: 0"):
        add_adapters(base(UNTIED), found.settings)
    merge_adapters(decoder.eval(), dtype="fp32")
    torch.testing.assert_close(logits(decoder), logits(plain), rtol=1e-4, atol=1e-5)


def written(folder: Path, settings: LoraSettings | None = None) -> Path:
    folder.mkdir()
    save_adapter(adapted(settings or LoraSettings(r=2)), folder, base_name="some/base")
    return folder


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder: Path, change, metadata: dict[str, str] | None = None) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata=metadata)


def refused(folder: Path, *words: str, shape=TIED) -> None:
    with pytest.raises(ModelError) as found:
        load_adapter(base(shape), folder)
    for word in words:
        assert word in str(found.value), str(found.value)


def test_missing_and_incomplete_files_raise(tmp_path: Path) -> None:
    refused(tmp_path, "not an adapter folder")
    folder = written(tmp_path / "a")
    (folder / "adapter_model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    refused(folder, "not a complete safetensors file")
    (folder / "adapter_model.safetensors").unlink()
    refused(folder, "has no adapter_model.safetensors")
    (folder / "adapter_model.bin").write_bytes(b"")
    refused(folder, "only a pickle")


WRONG = {
    "r": [None, True, 2.0, "2", [2], 10**400],
    "lora_alpha": [0, None, True, "8", float("nan"), float("inf"), 10**400],
    "lora_dropout": [1.0, -0.1, "a", True, float("nan")],
    "use_rslora": ["false", 1],
    "use_dora": ["true", 0],
    "rank_pattern": [[1], {"q_proj": "x"}, {"q_proj": None}, {"q_proj": 0}, {"q_proj": 2.5}, {"(": 4},
                     {"(?i)q_proj": 4}],
    "alpha_pattern": ["q_proj", {"q_proj": None}, {"q_proj": 0}, {"q_proj": float("inf")}, {"(": 4}],
    "target_modules": [5, ["q_proj", 5], {"q_proj": 1}, True],
    "base_model_name_or_path": [5, ["a"]],
}  # fmt: skip
"""Invalid values of the config's keys."""


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"peft_type": "IA3"}, "not describe a LoRA adapter"),
        ({"r": 0}, "r is 0"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"init_lora_weights": "pissa_niter_4"}, "it also changed the base weights"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        *((change, f"{key} is ") for key in WRONG for change in ({key: value} for value in WRONG[key])),
    ],
)
def test_configs_with_another_meaning_raise(changes: dict, word: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "a")
    edit_config(folder, **changes)
    refused(folder, word)


def test_harmless_config_values_are_accepted(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", LoraSettings(r=2, lora_alpha=8))
    said = ("lora_alpha", "lora_dropout", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")
    path = folder / "adapter_config.json"
    short = {key: value for key, value in json.loads(path.read_text()).items() if key not in said}
    path.write_text(json.dumps(short))
    plain = read_adapter_folder(folder)
    edit_config(folder, **dict.fromkeys(said[1:]), target_modules=None, base_model_name_or_path=None)
    assert read_adapter_folder(folder).settings == plain.settings
    assert (plain.settings.lora_alpha, plain.settings.use_rslora) == (8, False)
    edit_config(folder, use_rslora=True, lora_alpha=-1.5, lora_dropout=0.99, rank_pattern={"other": 4})
    settings = read_adapter_folder(folder).settings
    assert (settings.use_rslora, settings.lora_alpha, settings.lora_dropout) == (True, -1.5, 0.99)


def test_a_config_nested_too_deeply(tmp_path: Path) -> None:
    folder = written(tmp_path / "a")
    (folder / "adapter_config.json").write_text('{"r": ' + "[" * 100_000 + "]" * 100_000 + "}")
    refused(folder, "adapter_config.json cannot be read")


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.tensor(1.0), ["has shape []", "a matrix"]),
        (torch.ones(2), ["has shape [2]", "a matrix"]),
        (torch.ones(2, 32, dtype=torch.float8_e4m3fn), ["has dtype F8_E4M3", "BF16, F32"]),
        (torch.ones(2, 32, dtype=torch.int32), ["has dtype I32", "BF16, F32"]),
        (torch.ones(2, 32, dtype=torch.bool), ["has dtype BOOL", "BF16, F32"]),
    ],
    ids=["a number", "a vector", "float8", "int", "bool"],
)
@pytest.mark.parametrize("factor", ["A", "B"])
def test_invalid_tensors_raise(tensor: torch.Tensor, words: list[str], factor: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "a")
    name = f"model.layers.0.mlp.up_proj.lora_{factor}.weight"
    edit_tensors(folder, lambda tensors: tensors.update({f"base_model.model.{name}": tensor}))
    refused(folder, f"adapter_model.safetensors: {name}", *words)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = written(tmp_path / "a")
    edit_tensors(folder, lambda tensors: tensors.update({k: t.to(dtype) for k, t in tensors.items()}))
    load_adapter(base(), folder)


@pytest.mark.parametrize(
    "record",
    [
        "no JSON",
        "[" * 100_000,
        '["a"]',
        '"a"',
        "null",
        '{"source": "a"}',
        '{"source": 3, "files": {}}',
        '{"source": "a", "revision": [], "files": {}}',
        '{"source": "a", "files": ["model.safetensors"]}',
        '{"source": "a", "files": {"model.safetensors": {"sha256": "00"}}}',
        '{"source": "a", "files": {"model.safetensors": {"size": 1}}}',
    ],
)
def test_invalid_base_records_raise(record: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "a")
    edit_tensors(folder, lambda tensors: None, {"trimtab_base": record})
    refused(folder, "adapter_model.safetensors: trimtab_base in its header is ", "size and sha256")


def test_another_base_raises_with_a_remedy(tmp_path: Path) -> None:
    place = save_base(tmp_path / "base", TIED)
    size = (place / "model.safetensors").stat().st_size
    for files, different in (
        ({}, "different names"),
        ({"model.safetensors": FileDigest(size + 1, "")}, "a different size"),
        ({"model.safetensors": FileDigest(size, "")}, "different content"),
    ):
        record = BaseWeights("some/base", "abc", files)
        with pytest.raises(CheckpointError, match=different) as run:
            check_base(record, place)
        assert run.value.remedy == (
            "it was trained on some/base at revision abc; restore those weights at that path"
        )
        with pytest.raises(ModelError, match=different) as adapter:
            check_adapter_base(record, place, tmp_path / "adapter")
        assert adapter.value.remedy == "it was trained on some/base at revision abc; pass that model"
    check_base(name_base_of(place), place)


def name_base_of(place: Path) -> BaseWeights:
    return BaseWeights("some/base", files=digests([place / "model.safetensors"]))


def test_an_adapter_for_another_base(tmp_path: Path) -> None:
    import dataclasses

    folder = written(tmp_path / "a")
    wider = dataclasses.replace(TIED, hidden_size=64)
    refused(folder, "does not fit", "[2, 32] in the file and [2, 64] in the model", "some/base", shape=wider)
    fewer = TIED.of_layers(range(1))
    refused(folder, "does not fit", "model.layers.1", shape=fewer)
    more = dataclasses.replace(TIED, blocks=TIED.blocks[:1] * 3)
    refused(folder, "does not fit", "it has weights for 2 layers, and this model has 3", shape=more)


@pytest.mark.parametrize("value", [True, {"a": 1}, ["b"]])
def test_unknown_keys_raise(tmp_path: Path, value: object) -> None:
    folder = written(tmp_path / "a")
    edit_config(folder, some_new_thing=value)
    refused(folder, "some_new_thing is", "trimtab does not support this key", "merge it with peft")
    edit_config(folder, some_new_thing=False, another=None, number=16, empty={}, inference_mode=True)
    load_adapter(base(TIED), folder)


def test_non_finite_tensors_raise(tmp_path: Path) -> None:
    folder = written(tmp_path / "a")

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        next(iter(tensors.values()))[0, 0] = torch.nan

    edit_tensors(folder, spoil)
    refused(folder, "contains NaN or infinity")


def test_a_rejected_adapter_leaves_the_model_unchanged(tmp_path: Path) -> None:
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


def test_a_missing_and_an_unexpected_tensor(tmp_path: Path) -> None:
    folder = written(tmp_path / "a")
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
    edit_tensors(folder, lambda tensors: tensors.pop(name))
    refused(folder, "has no model.layers.0.mlp.up_proj.lora_B.weight")
    other = written(tmp_path / "b")
    edit_tensors(other, lambda tensors: tensors.update({"base_model.model.model.x.weight": torch.zeros(1)}))
    refused(other, "replaces model.x,")


def test_a_rank_that_differs_from_the_weights(tmp_path: Path) -> None:
    folder = written(tmp_path / "a")
    r = json.loads((folder / "adapter_config.json").read_text())["r"]
    edit_config(folder, r=r + 1, rank_pattern={})
    refused(folder, f"sets rank {r + 1} for", "but adapter_model.safetensors has rank", "belong together")


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
    if words == "(broken":  # an invalid expression matches nothing
        load_adapter(base(TIED), folder)
        return
    refused(
        folder,
        "has no model.layers.1.mlp.up_proj, which adapter_config.json names",
        "download the adapter again",
    )
    edit_config(folder, layers_to_transform=[0, 1])  # this key may exclude some
    load_adapter(base(TIED), folder)


def test_an_adapter_that_diverged_is_not_written(tmp_path: Path) -> None:
    decoder = adapted(LoraSettings(r=2))
    decoder.model.layers[0].mlp.up_proj.lora_A["default"].weight.data.fill_(torch.inf)
    with pytest.raises(ModelError, match="NaN or infinity"):
        save_adapter(decoder, tmp_path, base_name="x")


def test_a_second_adapter_in_addition_to_a_new_one(tmp_path: Path) -> None:
    folder = written(tmp_path / "a")
    alone = base()
    load_adapter(alone, folder)
    decoder = base()
    add_adapters(decoder, LoraSettings(r=3), adapter="mine")
    init_adapters(decoder, seed=0, adapter="mine")
    scatter(decoder, "mine")
    load_adapter(decoder, folder, adapter="theirs")
    assert torch.equal(logits(decoder), logits(alone))
