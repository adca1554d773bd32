"""Models whose layers differ: each layer has the attention backend for what it computes, in plans and in runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import tiny_shape, write_tiny_model
from whole_run import Silent, losses, relative, run

from trimtab import launch
from trimtab.data import Batch
from trimtab.facts.blocks import BlockShape
from trimtab.facts.devices import DeviceFacts
from trimtab.facts.errors import ModelError
from trimtab.facts.operations import Kernel, OperationKind
from trimtab.facts.phases import RunPhase
from trimtab.facts.shapes import ModelShape
from trimtab.kernels.attention import Layout
from trimtab.kernels.attention.choice import choose_attention
from trimtab.model import Decoder, build, init_weights, read_shape, spec
from trimtab.model.parts import LayerKernels
from trimtab.model.spec_operations import Execution
from trimtab.plan import inference, make_plan
from trimtab.plan.changes import reversals, savings
from trimtab.plan.layers import declare_layer
from trimtab.plan.make import job_of
from trimtab.plan.rates import Rates
from trimtab.plan.resolved import Resolved
from trimtab.plan.step_time import step_time
from trimtab.recipe import loads
from trimtab.report import read_run
from trimtab.report.page import render
from trimtab.report.plan_panel import plan_rows
from trimtab.run import build as building
from trimtab.run.microbatch import MicrobatchLoss
from trimtab.run.resolve import resolve_inference, resolve_recipe

CPU = DeviceFacts("a CPU", "cpu", memory_bytes=2**34)
H200 = DeviceFacts("NVIDIA H200", "cuda", 150 * 10**9, capability=(9, 0), bf16=True)
A100 = DeviceFacts("NVIDIA A100", "cuda", 80 * 10**9, capability=(8, 0), bf16=True)
WINDOWS = (None, 9, None, 9)
"""The sliding window of each layer, as `layer_types` of Qwen2 and Qwen3 describes it."""


def windowed(block: BlockShape, window: int | None, **more: Any) -> BlockShape:
    return dataclasses.replace(block, mixer=dataclasses.replace(block.attention, window=window, **more))


def alternating(windows: tuple[int | None, ...] = WINDOWS, **more: Any) -> ModelShape:
    shape = tiny_shape(family="qwen2", num_layers=len(windows), head_dim=64, **more)
    blocks = zip(shape.blocks, windows, strict=True)
    return dataclasses.replace(shape, blocks=tuple(windowed(block, window) for block, window in blocks))


def resolve(lines: str, device: DeviceFacts, shape: ModelShape, *overrides: str) -> Resolved:
    recipe = loads(f"model: x\ndata: {{train: y}}\nmax_seq_length: 64\n{lines}", overrides)
    return resolve_recipe(recipe, shape, device, threads=1)


def backends(resolved: Resolved) -> list[tuple[str, str]]:
    return [(layer.packed, layer.unpacked) for layer in resolved.attention.layers]


def test_unpacked_layers_without_a_window_have_their_own_backend_on_an_h200() -> None:
    layers = resolve("packing: false", H200, alternating()).attention.layers
    full, sliding = layers[:2]
    assert [(layer.packed, layer.unpacked) for layer in layers] == [
        ("triton", "sdpa_cudnn"),
        ("triton", "triton"),
    ] * 2
    assert (full, sliding) == layers[2:]
    assert "unpacked sequences, on" in full.reason
    assert "triton for evaluation" in full.reason
    assert "sliding window of 9" in sliding.reason
    assert "it supports no mask" in dict(sliding.rejected)["sdpa_cudnn"]


@pytest.mark.parametrize("device", [CPU, H200, A100], ids=lambda device: device.name)
@pytest.mark.parametrize("lines", ["", "packing: false", "packing: false\ndeterministic: true"])
@pytest.mark.parametrize("window", [None, 9, 64])
def test_equal_layers_resolve_as_one_layer_does(device: DeviceFacts, lines: str, window: int | None) -> None:
    """The choice for a model whose layers are alike, directly from `choose_attention`."""
    shape, recipe = alternating((window,) * 4), loads(f"model: x\ndata: {{train: y}}\n{lines}")
    arguments: dict[str, Any] = {
        "device": device.kind,
        "capability": device.capability,
        "dtype": "bf16" if device.bf16 else "fp32",
        "head_dim": 64,
        "window": None if window == 64 else window,  # not smaller than the sequence length
        "training": True,
        "deterministic": recipe.deterministic,
        "tokens": 64,
    }
    packed, unpacked = (choose_attention(packed=word, **arguments) for word in (True, False))
    unpacked = packed if recipe.packing else unpacked
    layers = resolve(lines, device, shape).attention.layers
    assert len(set(layers)) == 1
    assert (layers[0].packed, layers[0].unpacked) == (packed.impl, unpacked.impl)
    assert layers[0].rejected == packed.rejected
    mixed = resolve(lines, device, alternating((window, 3))).attention.layers
    assert mixed[0] == layers[0]


def test_a_requested_backend_must_support_every_layer() -> None:
    def request(name: str, device: DeviceFacts) -> Resolved:
        return resolve("packing: false", device, alternating(), f"model.attn_implementation={name}")

    with pytest.raises(ModelError, match="attend across packed documents"):
        request("sdpa_cudnn", H200)
    assert backends(request("varlen", H200)) == [("varlen", "varlen")] * 4
    assert backends(request("reference", CPU)) == [("reference", "reference")] * 4


def test_soft_caps_and_sinks_are_requirements_of_a_layer() -> None:
    plain = alternating((None,) * 4)
    options = [{}, {"softcap": 50.0}, {"sinks": True}, {"head_dim": 512}]
    shape = dataclasses.replace(
        plain,
        blocks=tuple(
            windowed(block, None, **more) for block, more in zip(plain.blocks, options, strict=True)
        ),
    )
    layers = resolve("packing: false", H200, shape).attention.layers
    assert [layer.unpacked for layer in layers] == ["sdpa_cudnn", "triton", "triton", "sdpa_efficient"]
    assert dict(layers[1].rejected)["sdpa_cudnn"] == "it does not support softcap"
    assert dict(layers[2].rejected)["flex"] == "it does not support sinks"
    assert [layer.packed for layer in resolve("", CPU, shape).attention.layers] == [
        "sdpa_flash", "reference", "reference", "sdpa_flash",
    ]  # fmt: skip
    inference = resolve_inference(shape, "cuda", dtype="bf16", capability=(9, 0)).attention.layers
    assert [layer.packed for layer in inference] == ["varlen", "triton", "triton", "sdpa_efficient"]


def test_graphs_depend_on_the_backends_of_all_layers() -> None:
    """A window makes no difference to the backends of packed sequences, a head size does."""
    assert resolve("packing: false", H200, alternating()).graphs.enabled
    assert resolve("", H200, alternating()).graphs.enabled
    assert "varlen attention reads tensors" in resolve("", A100, alternating()).graphs.reason
    first, second = alternating((None, 9)).blocks
    wide = windowed(second, 9, head_dim=512)
    mixed = dataclasses.replace(alternating((None, 9)), blocks=(wide, first))
    assert backends(resolve("", A100, mixed)) == [("sdpa_efficient",) * 2, ("varlen",) * 2]
    assert "varlen attention reads tensors" in resolve("", A100, mixed).graphs.reason


def test_the_plan_counts_each_layers_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = alternating()
    recipe = loads("model: x\ndata: {train: y}\nmax_seq_length: 64\npacking: false")
    resolved = resolve_recipe(recipe, shape, H200, threads=1)
    job = job_of(recipe, shape, H200, resolved)
    assert job.attention_backends == ("sdpa_cudnn", "triton") * 2
    kernels = []
    for layer in range(2):
        operations = declare_layer(job, layer).attention
        attention = next(operation for operation in operations if operation.name == "attention")
        assert attention.backward.kernels
        kernels += [attention.forward.kernels[0].impl, attention.backward.kernels[0].impl]
    assert kernels == ["sdpa_cudnn"] * 2 + ["triton"] * 2
    timed: set[str] = set()
    seconds = Rates.seconds

    def record(self: Rates, kernel: Kernel, dtype: str, *, impl: str = "", backward: bool = False) -> float:
        if kernel.kind is OperationKind.ATTENTION:
            timed.add(impl)
        return seconds(self, kernel, dtype, impl=impl, backward=backward)

    monkeypatch.setattr(Rates, "seconds", record)
    assert step_time(job, H200) is not None
    assert timed == {"sdpa_cudnn", "triton"}
    written = json.loads(json.dumps(make_plan(recipe, shape, resolved, device=H200).to_dict()))
    shown = [value.partition(":")[0] for name, value in plan_rows(written) if name == "attention"]
    assert shown == ["sdpa_cudnn in layers 0, 2", "triton in layers 1, 3"]


@pytest.mark.parametrize("device", [CPU, A100, H200], ids=lambda device: device.name)
def test_evaluation_is_planned_with_its_own_backends(device: DeviceFacts) -> None:
    """Training may be unpacked, evaluation is packed; on a CPU it then has masks."""
    found = []
    for packing in ("true", "false"):
        text = f"model: x\ndata: {{train: y, eval_share: 0.1}}\nmax_seq_length: 64\npacking: {packing}\nprobe: false"
        recipe = loads(text, ["prompts=[a, b]"])
        resolved = resolve_recipe(recipe, alternating(), device, threads=1)
        plan = make_plan(recipe, alternating(), resolved, device=device)
        phases = [plan.phases.of(RunPhase.EVALUATION), plan.phases.of(RunPhase.GENERATION)]
        assert all(phases)
        found.append([phase.buckets for phase in phases if phase is not None])
        expected = tuple(layer.packed for layer in resolved.attention.layers)
        for change in (*reversals(plan), *savings(plan, plan.job)):
            if change.name == "packing":
                assert change.job.packed is (packing == "false")
                assert change.job.for_evaluation().attention_backends == expected
    assert found[0] == found[1]


def test_a_mask_of_any_layer_is_planned_for_generation() -> None:
    recipe = loads("model: x\ndata: {train: y}\nmax_seq_length: 64")
    shape = alternating()
    job = job_of(recipe, shape, CPU, resolve_recipe(recipe, shape, CPU, threads=1))
    sizes = [
        inference.total(inference.generation_tensors(job.changed(layer_attention=names), 8, 30, 10))
        for names in (("varlen",) * 4, ("varlen", "varlen", "sdpa_flash", "varlen"))
    ]
    assert sizes[0] < sizes[1]


def mixed_decoder(*names: str, windows: tuple[int | None, ...] = WINDOWS) -> Decoder:
    kernels = [LayerKernels(name, name) for name in names]
    shape = alternating(windows)
    return init_weights(build(shape, dtype="fp32", device="cpu", kernels=kernels), seed=0)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    documents_BT = torch.randint(0, 3, (2, 40), generator=generator).sort(1).values
    return torch.randint(0, 300, (2, 40), generator=generator), documents_BT


@pytest.mark.parametrize("packed", [False, True])
def test_layers_with_different_backends_compute_the_same(packed: bool) -> None:
    ids_BT, documents_BT = batch()
    found = []
    for names in (("reference",) * 4, ("sdpa_flash", "sdpa_math", "reference", "sdpa_flash")):
        decoder = mixed_decoder(*names)
        layout = Layout.packed(documents_BT) if packed else Layout.causal()
        loss = decoder.loss(ids_BT, ids_BT.roll(-1, 1), None, layout, reduction="mean")
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in decoder.parameters())])
    for got, want in zip(*reversed(found), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("names", [("sdpa_flash",) * 4, ("sdpa_flash", "reference", "triton", "sdpa_math")])
def test_layers_with_the_same_mask_share_it_and_the_plan_counts_it_once(
    names: tuple[str, ...], packed: bool
) -> None:
    decoder = mixed_decoder(*names, windows=(None, 9, 1000, 9))  # 1000: longer than the sequences
    _, documents_BT = batch()
    layout = Layout.packed(documents_BT) if packed else Layout.causal()
    x_BTC = torch.zeros(*documents_BT.shape, decoder.shape.hidden_size)
    storages: dict[int, int] = {}
    for ready in decoder._prepare_layouts(layout, x_BTC).values():
        for tensor in vars(ready.form).values():
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    B, T = documents_BT.shape
    execution = Execution(B, T, "fp32", names[0])
    planned = spec.shared_bytes(decoder.shape, execution, names, packed=packed)
    without_masks = spec.shared_bytes(decoder.shape, execution, ["varlen"] * 4, packed=False) - 8 * (B + 1)
    assert planned - without_masks == sum(storages.values())


def test_bounds_are_not_inputs_of_graphs_if_another_layer_reads_a_mask() -> None:

    ids_BT, documents_BT = batch()
    rows = Batch(ids_BT, ids_BT, ids_BT, documents_BT, ids_BT.numel(), [])
    for names, inputs in ((("triton",) * 4, "first"), (("triton", "sdpa_flash") * 2, "documents")):
        loss = MicrobatchLoss(mixed_decoder(*names), torch.device("cpu"), torch.no_grad, packing=True)
        assert inputs in loss.inputs(rows)


def windows_of(folder: Path) -> tuple[int | None, ...]:
    shape = read_shape(folder)
    return tuple(shape.window(layer) for layer in range(shape.num_layers))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a Qwen2 model whose layers alternate, by `layer_types`."""
    write_tiny_model(tmp_path / "model", family="qwen2", num_layers=4, head_dim=64, qkv_bias=True)
    config = tmp_path / "model" / "config.json"
    values = json.loads(config.read_text())
    kinds = ["full_attention", "sliding_attention"] * 2
    config.write_text(
        json.dumps({**values, "layer_types": kinds, "use_sliding_window": True, "sliding_window": 9})
    )
    assert windows_of(tmp_path / "model") == WINDOWS
    return tmp_path


@pytest.mark.parametrize("packing", [True, False])
def test_a_run_with_alternating_layers(folder: Path, packing: bool) -> None:
    trained = run(folder, "run", packing=packing, max_steps=4, num_train_epochs=None)
    attention = json.loads((trained / "choices.json").read_text())["attention"]
    assert [kind["layers"] for kind in attention["kinds"]] == [[0, 2], [1, 3]]
    reasons = [kind["reason"] for kind in attention["kinds"]]
    assert ["sliding window of 9" in reason for reason in reasons] == [False, True]
    assert windows_of(trained / "model") == WINDOWS
    model = {"name": str(folder / "model"), "attn_implementation": "reference"}
    reference = run(folder, "reference", packing=packing, max_steps=4, num_train_epochs=None, model=model)
    assert relative(losses(trained), losses(reference)) < 1e-5
    page = render(read_run(trained))
    assert all(
        f"Attention in {layers}: <code>sdpa_flash</code>" in page for layers in ("layers 0, 2", "layers 1, 3")
    )


def test_a_resumed_run_keeps_the_backends_of_its_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of an earlier version, which chose one backend per head size, and one with a backend per layer."""
    same = run(folder, "same", max_steps=2, num_train_epochs=None, save_steps=2)
    launch.resume(same, ["max_steps=4"], Silent())
    built = []
    build_model = building.build_model

    def record(shape: ModelShape, resolved: Resolved, *args: Any, **more: Any) -> Decoder:
        built.append([(layer.packed, layer.unpacked) for layer in resolved.attention.layers])
        return build_model(shape, resolved, *args, **more)

    one: dict[str, Any] = {"impl": "sdpa_math", "reason": "packed documents", "rejected": [["flex", "slow"]]}
    names = ["sdpa_math", "sdpa_flash", "reference", "sdpa_flash"]
    layers = [{"packed": name, "unpacked": name} for name in names]
    two = {"layers": layers, "reason": "two kinds", "rejected": []}
    for count, (attention, expected) in enumerate(((one, ["sdpa_math"] * 4), (two, names))):
        half = run(folder, f"half-{count}", max_steps=2, num_train_epochs=None, save_steps=2)
        choices = json.loads((half / "choices.json").read_text())
        (half / "choices.json").write_text(json.dumps({**choices, "attention": attention}))
        monkeypatch.setattr(building, "build_model", record)
        assert launch.resume(half, ["max_steps=4"], Silent()).status == "finished"
        monkeypatch.undo()
        assert built.pop() == [(name, name) for name in expected]
        after = json.loads((half / "choices.json").read_text())["attention"]
        assert {key: after[key] for key in attention} == attention
        assert relative(losses(half), losses(same)) < 1e-5
