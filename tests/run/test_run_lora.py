"""LoRA from the command line: training, resuming bit-identically, using the run, and all of its exports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from command import call
from tiny_model import write_recipe, write_tiny_model

import trimtab
from trimtab.adapt import active_adapters
from trimtab.adapt.peft_config import read_adapter_folder
from trimtab.checkpoint import read_manifest
from trimtab.facts.errors import ModelError, RecipeError
from trimtab.recipe import load
from trimtab.run.dtypes import list_dtypes
from trimtab.run.prepare import prepare

SMALL: dict[str, Any] = {
    "num_train_epochs": None,
    "max_steps": 6,
    "eval_steps": None,
    "save_steps": 3,
    "logging_steps": 1,
    "eval_on_start": False,
    "lr_scheduler_type": "constant",
    "gradient_accumulation_steps": 2,
}
DEEP = {
    "r": 4,
    "lora_alpha": 16,
    "lora_dropout": 0.2,
    "use_dora": True,
    "modules_to_save": ["embed_tokens"],
    "rank_pattern": {"down_proj": 2},
}


def losses(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["kind"] == "train"]


def new_run(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    code, said = call("train", write_recipe(folder, **{**SMALL, **changes}))
    assert code == 0, said
    return folder / "run"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that tests must not change."""
    return new_run(tmp_path_factory.mktemp("lora"), lora={"r": 4, "lora_alpha": 16})


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_run(tmp_path_factory.mktemp("deep"), lora=DEEP, embedding_learning_rate=1e-3)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters on some of the layers, all of them in 4 bits."""
    lora = {"r": 4, "target_modules": ["q_proj", "down_proj"], "lora_dropout": 0.1}
    return new_run(tmp_path_factory.mktemp("packed"), lora=lora, load_in_4bit=True)


@pytest.fixture(scope="module")
def bytes8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DoRA on layers in 8 bits, recomputed."""
    lora = {"r": 4, "use_dora": True}
    return new_run(tmp_path_factory.mktemp("int8"), lora=lora, load_in_8bit=True, gradient_checkpointing=True)


def test_a_checkpoint_holds_what_is_trained_and_names_its_base(plain: Path) -> None:
    manifest = read_manifest(plain / "checkpoints" / "step-00000006")
    parameters = [name for name in manifest.tensors if name.startswith("parameters.")]
    assert len(parameters) == 2 * 7 * 2
    assert all(".lora_" in name for name in manifest.tensors)
    assert manifest.base is not None
    assert manifest.base.source == str(plain.parent / "model")
    (file,) = manifest.base.files.values()
    stored = plain.parent / "model" / "model.safetensors"
    assert file.size == stored.stat().st_size
    assert len(file.sha256) == 64
    assert losses(plain)[-1] < losses(plain)[0]


@pytest.mark.parametrize("which", ["plain", "deep", "packed", "bytes8"])
def test_resuming_repeats_the_uninterrupted_run_bit_by_bit(
    which: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    whole: Path = request.getfixturevalue(which)
    stopped = tmp_path / "run"
    shutil.copytree(whole, stopped)
    shutil.rmtree(stopped / "checkpoints" / "step-00000006")
    (stopped / "checkpoints" / "latest").write_text("step-00000003\n")
    code, said = call("train", "--resume", stopped)
    assert code == 0, said
    assert "continuing from step 3" in said
    assert losses(stopped) == losses(whole)
    one, two = (
        trimtab.load(run, dtype="fp32", device="cpu").opened.decoder.state_dict() for run in (whole, stopped)
    )
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_run_is_used_like_any_other(plain: Path) -> None:
    code, said = call("generate", plain, "the cat", "--max-new-tokens", 4)
    assert code == 0, said
    code, said = call("eval", plain, plain.parent / "general.jsonl", "--no-probe", "--json",
                      "--cache-dir", plain.parent / "cache")  # fmt: skip
    assert code == 0, said
    measured = next(json.loads(line) for line in said.splitlines() if line.startswith("{"))
    assert 0 < measured["loss"] < 20


@pytest.mark.parametrize("which", ["packed", "bytes8"])
def test_a_merge_of_packed_weights_is_what_was_trained(
    which: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    run: Path = request.getfixturevalue(which)
    assert losses(run)[-1] < losses(run)[0]
    assert call("merge", run, tmp_path / "merged", "--dtype", "fp32") == (0, ANY)
    assert call("export", "peft", run, tmp_path / "adapter") == (0, ANY)
    ids_BT = torch.arange(20)[None] * 3
    trained, merged = (
        trimtab.load(place, dtype="fp32", device="cpu").opened.decoder for place in (run, tmp_path / "merged")
    )
    with torch.no_grad():
        one, two = (model.logits(model(ids_BT)) for model in (trained, merged))
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


@pytest.mark.oracle
@pytest.mark.parametrize("which", ["plain", "deep"])
def test_exports_and_merges_compute_the_same_as_the_trained_model(
    which: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run: Path = request.getfixturevalue(which)
    assert call("export", "peft", run, tmp_path / "adapter") == (0, ANY)
    assert call("merge", run, tmp_path / "merged", "--dtype", "fp32") == (0, ANY)
    exports = [path for path in (run / "receipts").iterdir() if path.name != "plan.json"]
    kinds = {json.loads(path.read_text())["kind"]: path for path in exports}
    checks = {kind: json.loads(path.read_text())["checks"] for kind, path in kinds.items()}
    assert [check["name"] for check in checks["peft"]] == ["weights", "logits"]
    assert [check["name"] for check in checks["merge"]] == [
        "merge",
        "names and shapes",
        "weights",
        "logits",
        "tokenizer",
    ]
    ids_BT = torch.arange(20)[None] * 3
    model = trimtab.load(run, dtype="fp32", device="cpu").opened.decoder
    with torch.no_grad():
        ours = model.logits(model(ids_BT))
        base = AutoModelForCausalLM.from_pretrained(run.parent / "model", dtype=torch.float32)
        plain = base(ids_BT).logits
        with_adapter = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(ids_BT).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)(ids_BT).logits
    torch.testing.assert_close(with_adapter, ours, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merged, ours, rtol=1e-5, atol=1e-5)
    assert float((plain - ours).abs().max()) > 1e-2


def test_an_exported_adapter_loads_onto_its_base_and_starts_another_run(plain: Path, tmp_path: Path) -> None:
    assert call("export", "peft", plain, tmp_path / "adapter")[0] == 0
    model = plain.parent / "model"
    outputs = [
        call("generate", *words, "the cat", "--max-new-tokens", 6)[1]
        for words in ((plain,), (model, "--adapter", tmp_path / "adapter"))
    ]
    assert outputs[0].splitlines()[0] == outputs[1].splitlines()[0]
    shutil.copytree(model, tmp_path / "next" / "model")
    run = new_run(
        tmp_path / "next", lora={"adapter": str(tmp_path / "adapter")}, max_steps=2, save_steps=None
    )
    kept = json.loads((run / "choices.json").read_text())
    assert kept["lora"]["r"] == 4
    assert kept["lora"]["lora_alpha"] == 16
    manifest = read_manifest(run / "checkpoints" / "step-00000002")
    assert len(manifest.tensors) == len(read_manifest(plain / "checkpoints" / "step-00000006").tensors)
    # It continues from where the first run ended, not from the base.
    assert losses(run)[0] < losses(plain)[0] - 0.05


@pytest.mark.oracle
@pytest.mark.parametrize("tied", [True, False])
def test_added_tokens_grow_the_embedding_and_are_trained(tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_tiny_model(tmp_path / "model", tie_embeddings=tied)
    whole = ["embed_tokens"] if tied else ["embed_tokens", "lm_head"]
    run = new_run(
        tmp_path,
        model={"name": str(tmp_path / "model"), "added_tokens": ["<|tool|>", "the cat"]},
        lora={"r": 2, "target_modules": ["q_proj"], "modules_to_save": whole},
    )
    rows = json.loads((tmp_path / "model" / "config.json").read_text())["vocab_size"] + 2
    assert json.loads((run / "model" / "config.json").read_text())["vocab_size"] == rows
    model = trimtab.load(run, dtype="fp32", device="cpu")
    assert model.opened.tokenizer.encode("the cat") == [rows - 1]
    parameters = dict(model.opened.decoder.named_parameters())
    embedding = parameters["model.embed_tokens.weight"]
    assert embedding.shape[0] == rows
    # "the cat" occurs in the texts and is trained; "<|tool|>" does not, and only the head's gradient moves a tied row.
    start = trimtab.load(tmp_path / "model", dtype="fp32", device="cpu").opened.decoder.model.embed_tokens
    mean = start.weight.mean(0)
    assert float((embedding[rows - 1] - mean).abs().max()) > 1e-3
    assert call("merge", run, tmp_path / "merged", "--dtype", "fp32") == (0, ANY)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").encode("the cat") == [rows - 1]
    ids_BT = torch.arange(rows - 20, rows)[None]
    with torch.no_grad():
        ours = model.opened.decoder.logits(model.opened.decoder(ids_BT))
        torch.testing.assert_close(theirs(ids_BT).logits, ours, rtol=1e-5, atol=1e-5)
    assert call("export", "peft", run, tmp_path / "adapter") == (0, ANY)
    assert AutoTokenizer.from_pretrained(tmp_path / "adapter").encode("the cat") == [rows - 1]
    again = trimtab.load(tmp_path / "model", adapter=tmp_path / "adapter", dtype="fp32", device="cpu")
    assert again.opened.tokenizer.encode("the cat") == [rows - 1]
    with torch.no_grad():
        assert torch.equal(again.opened.decoder.logits(again.opened.decoder(ids_BT)), ours)
    with pytest.raises(RecipeError, match=r"has added tokens.*load it together with the model"):
        trimtab.load(tmp_path / "model", device="cpu").add_adapter(tmp_path / "adapter", "late")
    assert call("generate", tmp_path / "model", "x", "--adapter", tmp_path / "adapter")[0] == 0
    assert call("merge", tmp_path / "model", tmp_path / "m2", "--adapter", tmp_path / "adapter") == (0, ANY)
    assert AutoTokenizer.from_pretrained(tmp_path / "m2").encode("the cat") == [rows - 1]
    more = {"name": str(tmp_path / "model"), "added_tokens": ["<|tool|>", "the cat"]}
    recipe = {**SMALL, "lora": {"adapter": str(tmp_path / "adapter")}, "output_dir": str(tmp_path / "on")}
    assert call("train", write_recipe(tmp_path, **recipe, model=more)) == (0, ANY)
    assert losses(tmp_path / "on")[0] < losses(run)[0]


def test_a_merge_that_changes_nothing_or_is_not_finite_is_refused(tmp_path: Path) -> None:
    run = new_run(tmp_path / "a", lora={"r": 2}, learning_rate=1e-12, max_steps=1)
    code, said = call("merge", run, tmp_path / "merged")
    assert code == 4
    assert "changes no weight in bf16" in said
    assert not (tmp_path / "merged").exists()
    from safetensors.torch import load_file, save_file

    assert call("export", "peft", run, tmp_path / "adapter")[0] == 0
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = {name: torch.full_like(tensor, 1e30) for name, tensor in load_file(path).items()}
    save_file(tensors, path)
    code, said = call(
        "merge", tmp_path / "a" / "model", tmp_path / "merged", "--adapter", tmp_path / "adapter"
    )
    assert code == 4
    assert "is NaN or infinite" in said
    assert not (tmp_path / "merged").exists()


def test_another_base_is_refused(plain: Path, tmp_path: Path) -> None:
    """Same shapes, other values: only the checksum differs."""
    home = tmp_path / "home"
    shutil.copytree(plain.parent, home)
    for path in (home / "run" / "recipe.yaml", home / "run" / "choices.json"):
        path.write_text(path.read_text().replace(str(plain.parent), str(home)))
    shutil.rmtree(home / "model")
    write_tiny_model(home / "model", seed=7)
    assert call("export", "peft", plain, tmp_path / "adapter")[0] == 0
    for words, code in (
        (("train", "--resume", home / "run"), 5),
        (("merge", home / "model", tmp_path / "x", "--adapter", tmp_path / "adapter"), 4),
        (
            (
                "train",
                write_recipe(
                    home, lora={"adapter": str(tmp_path / "adapter")}, output_dir=str(tmp_path / "r")
                ),
            ),
            4,
        ),
    ):
        found, said = call(*words)
        assert found == code, said
        assert "was trained on other base weights" in said
        assert "different content" in said


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora": {"target_modules": ["q_proj", "wq"]}}, ["no wq", "choose from", "q_proj"]),
        ({"lora": {"r": 0}}, ["lora.r"]),
        ({"lora": {"r": 4000}}, ["lora.r is 4000", "at most"]),
        ({"lora": {"rank": 8}}, ["unknown key 'rank'", "r"]),
        ({"lora": {"adapter": "./nowhere", "r": 8}}, ["has its own r", "lora.r"]),
        ({"lora": {"alpha_pattern": {"q_proj": -1.0}}}, ["alpha_pattern"]),
        (
            {"lora": {}, "model": {"name": "starter", "added_tokens": ["<x>"]}},
            ["added_tokens", "embed_tokens"],
        ),
        ({"model": {"name": "starter", "added_tokens": ["the"]}}, ["has 'the' already"]),
        ({"load_in_4bit": True}, ["which cannot be trained", "lora"]),
        ({"lora": {}, "embedding_learning_rate": 1e-5}, ["neither embeddings nor head are trained"]),
        (
            {"load_in_4bit": True, "lora": {"modules_to_save": ["down_proj"], "target_modules": ["q_proj"]}},
            ["down_proj", "cannot be trained"],
        ),
    ],
)
def test_invalid_recipes(changes: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    code, said = call("train", write_recipe(tmp_path, **{**SMALL, **changes}))
    assert code == 2, said
    for word in words:
        assert word in said
    assert not (tmp_path / "run").exists()


def test_full_training_of_quantized_weights_is_refused_by_the_plan(tmp_path: Path) -> None:
    lora = {"modules_to_save": ["down_proj"], "target_modules": ["q_proj"]}
    code, said = call("plan", write_recipe(tmp_path, **{**SMALL, "load_in_4bit": True, "lora": lora}))
    assert code == 2, said
    assert "down_proj, which is quantized and cannot be trained" in said


def test_dtypes_of_a_run_with_adapters(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, **{**SMALL, "lora": {"r": 4}, "dtype": "bf16", "load_in_4bit": True})
    assert call("plan", path, "--dtypes") == (0, ANY)
    prepared = prepare(load(path))
    rows = {row.name: row for row in list_dtypes(prepared.shape, prepared.resolved).modules}
    a = rows["model.layers.0.self_attn.q_proj.lora_A.default.weight"]
    assert (a.weight, a.gradient) == ("fp32", "fp32")
    assert rows["model.norm"].output == "bf16"


@pytest.mark.parametrize(
    "formats", [{"dtype": "bf16"}, {"dtype": "bf16", "weights_dtype": "fp32"}, {"dtype": "fp16"}]
)
def test_dtypes_train(formats: dict[str, str], plain: Path, tmp_path: Path) -> None:
    """bf16 weights, bf16 autocast, fp16 autocast with loss scaling: losses close to those of fp32."""
    run = new_run(tmp_path, lora={"r": 4, "lora_alpha": 16}, **formats)
    assert losses(run) == pytest.approx(losses(plain), rel=0.02)
    manifest = read_manifest(run / "checkpoints" / "step-00000006")
    assert {entry.dtype for name, entry in manifest.tensors.items() if name.startswith("parameters.")} == {
        "float32"
    }


def test_dropout_on_the_head_matters_to_training_only(tmp_path: Path) -> None:
    """A peft adapter that was trained with it can be used for generation and merged, but not trained further."""
    write_tiny_model(tmp_path / "model", tie_embeddings=False)
    lora = {"r": 2, "target_modules": ["q_proj", "lm_head"]}
    run = new_run(tmp_path, lora=lora, max_steps=3, learning_rate=1e-2)
    adapter = tmp_path / "adapter"
    assert call("export", "peft", run, adapter) == (0, ANY)
    config = adapter / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_dropout": 0.0', '"lora_dropout": 0.1'))
    assert read_adapter_folder(adapter).settings.lora_dropout == 0.1
    assert call("generate", tmp_path / "model", "the", "--adapter", adapter) == (0, ANY)
    assert call("merge", tmp_path / "model", tmp_path / "merged", "--adapter", adapter) == (0, ANY)
    trimtab.load(tmp_path / "model", adapter=adapter, device="cpu").save_adapter(tmp_path / "again")
    recipe = {**SMALL, "lora": {"adapter": str(adapter)}, "output_dir": str(tmp_path / "on")}
    code, said = call("train", write_recipe(tmp_path, **recipe))
    assert code == 2, said
    for word in (
        "adapts lm_head with a lora_dropout of 0.1",
        "set lora_dropout to 0 in its adapter_config.json",
    ):
        assert word in " ".join(said.split())
    code, said = call("train", write_recipe(tmp_path, **{**recipe, "lora": {**lora, "lora_dropout": 0.1}}))
    assert code == 2, said
    assert "remove lm_head from lora.target_modules" in " ".join(said.split())


def test_export_hf_of_a_run_with_adapters_names_the_alternatives(plain: Path, tmp_path: Path) -> None:
    code, said = call("export", "hf", plain, tmp_path / "x")
    assert code == 2
    assert "trimtab merge" in said


def test_python_switches_adapters(plain: Path, deep: Path, tmp_path: Path) -> None:
    model = trimtab.load(plain, dtype="fp32", device="cpu")
    alone = model.generate("the cat", max_new_tokens=6)
    model.save_adapter(tmp_path / "adapter")
    base = trimtab.load(plain.parent / "model", dtype="fp32", device="cpu")
    before = base.generate("the cat", max_new_tokens=6)
    base.add_adapter(tmp_path / "adapter", "mine")
    assert base.adapters == ["mine"]
    assert base.generate("the cat", max_new_tokens=6) == alone
    base.use_adapters()
    assert base.generate("the cat", max_new_tokens=6) == before
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(ModelError, match="exists already"):
        model.merge(tmp_path / "full")
    assert model.adapters == ["default"], "refused before anything was merged"
    assert model.generate("the cat", max_new_tokens=6) == alone
    assert call("merge", plain, tmp_path / "full")[0] == 4


def test_an_export_does_not_replace_the_base_of_the_run(tmp_path: Path) -> None:
    run = new_run(tmp_path, lora={"r": 2}, max_steps=3)
    base = tmp_path / "model"
    before = (base / "model.safetensors").read_bytes()
    for words in (("merge", run, base), ("export", "peft", run, base)):
        code, said = call(*words, "--overwrite")
        assert code in (2, 4), said
        assert (base / "model.safetensors").read_bytes() == before
    with pytest.raises(RecipeError, match="contains the loaded model itself"):
        trimtab.load(run, device="cpu").merge(base, overwrite=True)
    assert call("generate", run, "the") == (0, ANY)


def test_an_opened_run_refuses_an_adapter_of_another_base(plain: Path, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", seed=7)
    other = new_run(tmp_path, lora={"r": 4, "lora_alpha": 16}, max_steps=3)
    assert call("export", "peft", other, tmp_path / "other")[0] == 0
    assert call("export", "peft", plain, tmp_path / "own")[0] == 0
    model = trimtab.load(plain, device="cpu")
    with pytest.raises(ModelError, match="other base weights"):
        model.add_adapter(tmp_path / "other", "other")
    assert model.adapters == ["default"]
    model.add_adapter(tmp_path / "own", "again")
    assert model.adapters == ["default", "again"]


def test_saving_an_adapter_leaves_those_in_use_as_they_were(plain: Path, tmp_path: Path) -> None:
    assert call("export", "peft", plain, tmp_path / "own")[0] == 0
    model = trimtab.load(plain, device="cpu")
    model.add_adapter(tmp_path / "own", "again")
    for used in ([], ["again"], ["default", "again"]):
        model.use_adapters(*used)
        model.save_adapter(tmp_path / f"saved-{len(used)}", adapter="default")
        assert active_adapters(model.opened.decoder) == used


def test_a_limit_that_cannot_be_met_is_refused_on_resume_as_well(plain: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(plain, run)
    code, said = call("train", "--resume", run, "max_steps=8", "memory_limit=1MB")
    assert code == 6, said
    assert "memory_limit" in said
    assert call("train", "--resume", run, "max_steps=8", "memory_limit=4GB") == (0, ANY)


@pytest.mark.parametrize("packed", [False, True])
def test_adapters_in_bf16_under_products_in_fp16(packed: bool, tmp_path: Path) -> None:
    lora = {"r": 2, "dtype": "bf16"}
    run = new_run(tmp_path, lora=lora, dtype="fp16", max_steps=4, learning_rate=1e-3, load_in_4bit=packed)
    found = losses(run)
    assert len(found) == 4
    assert found[-1] < found[0]


def test_an_adapter_with_non_finite_output_is_refused(plain: Path, tmp_path: Path) -> None:
    model = trimtab.load(plain, device="cpu")
    with torch.no_grad():
        for name, parameter in model.opened.decoder.named_parameters():
            if ".lora_B." in name:
                parameter.fill_(1e30)
    with pytest.raises(ModelError, match=r"is NaN or infinite.*earlier checkpoint"):
        model.save_adapter(tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_a_merge_in_16_bits_is_refused_and_leaves_the_model(
    plain: Path, packed: Path, tmp_path: Path
) -> None:
    for run in (plain, packed):
        model = trimtab.load(run, device="cpu", dtype="bf16")
        before = model.generate("the", max_new_tokens=4, temperature=0.0)
        with pytest.raises(ModelError, match=r'bfloat16.*dtype="fp32"'):
            model.merge(tmp_path / "merged")
        assert model.adapters == ["default"]
        assert model.generate("the", max_new_tokens=4, temperature=0.0) == before
        assert not (tmp_path / "merged").exists()


def test_a_checkpoint_is_of_a_run(plain: Path, tmp_path: Path) -> None:
    code, said = call("generate", plain.parent / "model", "the", "--checkpoint", "best")
    assert code == 2
    assert "is not a run folder" in said
