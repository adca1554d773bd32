"""CUDA graphs: when they are used, and that a captured microbatch is bitwise identical to an eager one."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from trimtab.adapt import LoraSettings, add_adapters, init_adapters, quantize_layout, recompute
from trimtab.adapt.lora import create_dropout_masks
from trimtab.adapt.lora_dropout import DropoutMasks
from trimtab.adapt.lora_layers import LoRALinear
from trimtab.adapt.step_resources import StepResources
from trimtab.data import Batch
from trimtab.facts.devices import DeviceFacts
from trimtab.facts.errors import RecipeError
from trimtab.facts.shapes import ModelShape, uniform_shape
from trimtab.model import Decoder, build, init_weights
from trimtab.model.parts import LayerKernels
from trimtab.plan.resolved import CudaGraphsConfig
from trimtab.recipe import Recipe, loads
from trimtab.run.microbatch import MicrobatchLoss
from trimtab.run.resolve import resolve_recipe
from trimtab.trainer.graphs import WARM_UP, Graphs

SHAPE = uniform_shape(
    "qwen3", 512, 256, 512, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=64, qk_norm=True
)
H200 = DeviceFacts("NVIDIA H200", "cuda", 150 * 10**9, capability=(9, 0), bf16=True)
A100 = DeviceFacts("NVIDIA A100", "cuda", 80 * 10**9, capability=(8, 0), bf16=True)
CPU = DeviceFacts("a CPU", "cpu", memory_bytes=2**34)


def graphs_of(lines: str, device: DeviceFacts = H200) -> CudaGraphsConfig:
    return resolved_graphs(loads(f"model: x\ndata: {{train: y}}\nmax_seq_length: 512\n{lines}"), device)


def resolved_graphs(recipe: Recipe, device: DeviceFacts) -> CudaGraphsConfig:
    return resolve_recipe(recipe, SHAPE, device, threads=1).graphs


def test_graphs_are_enabled_if_launches_cost_more_than_arithmetic() -> None:
    assert graphs_of("") == CudaGraphsConfig(
        True, "forward and backward of a microbatch take one launch instead of thousands"
    )
    long = graphs_of("per_device_train_batch_size: 2000000")
    assert long.enabled is False
    assert "the overhead of kernel launches is hidden" in long.reason
    assert graphs_of("cuda_graphs: true\nper_device_train_batch_size: 2000000").enabled is True
    assert graphs_of("cuda_graphs: false") == CudaGraphsConfig(False, "set in the recipe")


@pytest.mark.parametrize(
    ("lines", "device", "why"),
    [
        ("", CPU, "CUDA graphs need a CUDA GPU"),
        ("", A100, "varlen attention reads tensors whose size depends on the documents"),
        (
            "optim_in_backward: true\nmax_grad_norm: 0\ngradient_accumulation_steps: 1",
            H200,
            "optim_in_backward reads the learning rate",
        ),
    ],
)
def test_graphs_are_disabled_if_a_step_cannot_be_captured(lines: str, device: DeviceFacts, why: str) -> None:
    chosen = graphs_of(lines, device)
    assert chosen.enabled is False
    assert chosen.reason.startswith(why)
    with pytest.raises(RecipeError, match=f"cuda_graphs: true is not possible here: {why[:20]}"):
        graphs_of(f"{lines}\ncuda_graphs: true", device)


def test_masks_are_computed_inside_a_graph() -> None:
    recipe = loads(
        "data: {train: y}\nmax_seq_length: 512\ndtype: fp32\n"
        "model: {name: x, attn_implementation: sdpa_efficient}"
    )
    assert resolved_graphs(recipe, H200).enabled is True


def test_single_documents_need_no_triton_attention() -> None:
    assert graphs_of("packing: false", A100).enabled is True


def batch_of(seed: int, length: int = 384, rows: int = 2) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(0, 512, (rows, length), generator=generator)
    documents_BT = torch.randint(0, 2 + seed % 7, (rows, length), generator=generator).sort(1).values
    first_BT = torch.ones_like(ids_BT, dtype=torch.bool)
    first_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    place_T = torch.arange(length)
    positions_BT = place_T - torch.where(first_BT, place_T, 0).cummax(1).values
    return Batch(ids_BT, ids_BT.roll(-1, 1), positions_BT, documents_BT, ids_BT.numel(), [["x"]] * rows)


@pytest.mark.parametrize("attention", ["reference", "sdpa_math"])
@pytest.mark.parametrize("packing", [True, False])
def test_host_and_device_parts_equal_the_direct_loss(attention: str, packing: bool) -> None:
    decoder = build(SHAPE, dtype="fp32", device="cpu", attention=attention)
    loss = MicrobatchLoss(init_weights(decoder, seed=0), torch.device("cpu"), nullcontext, packing=packing)
    batches = [batch_of(seed) for seed in (3, 4)]
    found = [loss.compute(loss.inputs(batch)) for batch in batches]
    assert found[0] != found[1]
    assert all(map(torch.equal, found, [loss(batch).total for batch in batches]))


def test_documents_as_tensors_of_one_size() -> None:
    """On a CPU the layout of attention "triton" is not used."""
    decoder = build(SHAPE, dtype="fp32", device="meta", attention="triton")
    batch = batch_of(3)
    packed = MicrobatchLoss(decoder, torch.device("cpu"), nullcontext, packing=True).inputs(batch)
    place_T = torch.arange(384)
    assert torch.equal(packed["first"], (place_T - batch.positions_BT).int())
    assert all(tensor.shape == (2, 384) for tensor in packed.values())


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def with_alternating_windows(shape: ModelShape) -> ModelShape:
    blocks = tuple(
        dataclasses.replace(block, mixer=dataclasses.replace(block.attention, window=9 if i % 2 else None))
        for i, block in enumerate(shape.blocks)
    )
    return dataclasses.replace(shape, blocks=blocks)


def made(kind: str) -> Decoder:
    shape, settings = SHAPE, {"dtype": "bf16", "attention": "triton"}
    kernels = None
    if kind in ("masked", "alternating"):
        settings = {"dtype": "fp32", "attention": "sdpa_efficient"}
    if kind == "alternating":
        shape = with_alternating_windows(SHAPE)
        kernels = [LayerKernels(name, name, "triton") for name in ("triton", "sdpa_efficient", "triton")]
    decoder = build(shape, device="cuda", pointwise="triton", loss_impl="triton", kernels=kernels, **settings)
    init_weights(decoder, seed=0)
    if kind in ("qlora", "dropout"):
        weights = {name: p.detach().clone() for name, p in decoder.named_parameters()}
        quantize_layout(decoder, "nf4", impl="triton", device="cuda")
        add_adapters(decoder, LoraSettings(r=8, lora_dropout=0.2 if kind == "dropout" else 0.0))
        with torch.no_grad():
            for name, module in decoder.named_modules():
                if isinstance(module, LoRALinear):
                    module.set_weight(weights[f"{name}.weight"])
        decoder.to("cuda")
        init_adapters(decoder, seed=0)
    elif kind not in ("none", "masked", "alternating"):
        recompute.apply(decoder, [kind] * SHAPE.num_layers)
    return decoder


def parameters_of(decoder: Decoder) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in decoder.named_parameters() if p.requires_grad}


def run_steps(
    graphs: Graphs,
    steps: range,
    microbatches: int = 3,
    short: tuple[int, int] | None = None,
    masks: DropoutMasks | None = None,
) -> list[torch.Tensor]:
    """Losses of microbatches and gradients of steps, with gradient descent; `short` is the microbatch of one row."""
    found: list[torch.Tensor] = []
    for step in steps:
        for micro in range(microbatches):
            batch = batch_of(10 * step + micro, rows=1 if (step, micro) == short else 2)
            if masks is not None:
                masks.set(seed=0, step=step, first_sequence=2 * micro, tokens=384)
            loss = graphs.backward(batch, 1 / (768 * microbatches))
            found.append(loss.clone())
        for parameter in graphs.parameters.values():
            assert parameter.grad is not None
            found.append(parameter.grad.clone())
            parameter.data.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None
    return found


def eager_graphs(decoder: Decoder, loss: Any) -> Graphs:
    graphs = Graphs(loss, parameters_of(decoder), torch.device("cuda"))
    graphs.failed = True
    return graphs


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize(
    "kind",
    [
        "none",
        "block",
        "selective",
        "pointwise",
        "offload",
        "offload_attention",
        "offload_half",
        "qlora",
        "masked",
        "alternating",
    ],
)
@pytest.mark.parametrize("packing", [True, False])
def test_a_captured_microbatch_is_bitwise_identical_to_an_eager_one(kind: str, packing: bool) -> None:
    device = torch.device("cuda")
    ours, theirs = made(kind), made(kind)
    losses = [MicrobatchLoss(d, device, nullcontext, packing=packing) for d in (ours, theirs)]
    graphs = Graphs(losses[0], parameters_of(ours), device, resources=StepResources(ours))
    eager = eager_graphs(theirs, losses[1])
    assert all(map(torch.equal, run_steps(graphs, range(5)), run_steps(eager, range(5))))
    assert len(graphs._captured) == 2
    graphs.release()
    assert not graphs._captured
    assert all(map(torch.equal, run_steps(graphs, range(5, 7)), run_steps(eager, range(5, 7))))
    assert len(graphs._captured) == 2


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("recompute_policy", ["none", "block"])
def test_replays_read_the_current_dropout_masks(recompute_policy: str) -> None:
    device = torch.device("cuda")
    found: list[list[torch.Tensor]] = []
    for captured, renewed in ((True, True), (False, True), (True, False)):
        decoder = made("dropout")
        recompute.apply(decoder, [recompute_policy] * SHAPE.num_layers)
        masks = create_dropout_masks(decoder, device)
        assert masks is not None
        loss = MicrobatchLoss(decoder, device, nullcontext, packing=True)
        graphs = Graphs(loss, parameters_of(decoder), device, resources=StepResources(decoder))
        graphs.failed = not captured
        found.append(run_steps(graphs, range(4), masks=masks if renewed else None))
        assert len(graphs._captured) == (2 if captured else 0)
        graphs.release()
    assert all(map(torch.equal, found[0], found[1]))
    assert not torch.equal(found[0][-1], found[2][-1]), "other masks give other gradients"


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("short", [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_fewer_rows_run_eagerly(short: tuple[int, int]) -> None:
    device = torch.device("cuda")
    ours, theirs = made("none"), made("none")
    losses = [MicrobatchLoss(d, device, nullcontext, packing=True) for d in (ours, theirs)]
    graphs = Graphs(losses[0], parameters_of(ours), device)
    found = run_steps(graphs, range(6), short=short)
    assert all(map(torch.equal, found, run_steps(eager_graphs(theirs, losses[1]), range(6), short=short)))
    assert len(graphs._captured) == 2, "complete microbatches are still captured"


class Waiting(MicrobatchLoss):
    """Synchronizes with the device, which cannot be captured: always, or only if gradients are accumulated."""

    later = False

    def compute(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = super().compute(inputs)
        if not self.later or any(parameter.grad is not None for parameter in self.decoder.parameters()):
            assert float(loss.detach()) > 0
        return loss


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("later", [False, True], ids=["the first graph", "the second"])
def test_a_step_that_synchronizes_falls_back_to_eager_with_a_message(later: bool) -> None:
    device = torch.device("cuda")
    ours, theirs = made("none"), made("none")
    said: list[str] = []
    loss = Waiting(ours, device, nullcontext, packing=True)
    loss.later = later
    graphs = Graphs(loss, parameters_of(ours), device, on_event=said.append)
    eager = eager_graphs(theirs, MicrobatchLoss(theirs, device, nullcontext, packing=True))
    steps = range(WARM_UP + 2)
    assert all(map(torch.equal, run_steps(graphs, steps), run_steps(eager, steps)))
    assert graphs.failed
    assert not graphs._captured, "the graph that was captured is released"
    assert len(said) == 1
    assert said[0].startswith("CUDA graph capture failed, and steps run eagerly: ")
    # The failed capture leaves no state: the next possible capture succeeds.
    del graphs, eager, loss
    gc.collect()  # other tests' too
    torch.cuda.empty_cache()
    pools = {segment["segment_pool_id"] for segment in torch.cuda.memory_snapshot()}
    assert pools <= {(0, 0)}, pools
    after = Graphs(MicrobatchLoss(ours, device, nullcontext, packing=True), parameters_of(ours), device)
    run_steps(after, steps)
    assert len(after._captured) == 2


class OutOfMemory(MicrobatchLoss):
    """Runs out of memory while it is captured, in the forward or the backward pass: within a limit, as a run's."""

    later = backward = False

    def inputs(self, batch: Batch) -> dict[str, torch.Tensor]:
        allowed = torch.cuda.memory_reserved() + 2**30
        torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.get_device_properties().total_memory)
        return super().inputs(batch)

    def compute(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        gradients = any(parameter.grad is not None for parameter in self.decoder.parameters())
        fails = torch.cuda.is_current_stream_capturing() and gradients == self.later
        if fails and not self.backward:
            exceed_limit()
        loss = super().compute(inputs)
        if fails and self.backward:
            loss.register_hook(lambda gradient: exceed_limit())
        return loss


def exceed_limit() -> None:
    torch.empty(2**32, dtype=torch.uint8, device="cuda")


@pytest.fixture
def restored_limit() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.usefixtures("restored_limit")
@pytest.mark.parametrize("kind", ["selective", "pointwise", "offload"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("later", [False, True], ids=["the first graph", "the second"])
def test_out_of_memory_in_a_capture_falls_back_to_eager(later: bool, backward: bool, kind: str) -> None:
    """CUDA does not reject such a capture (unless offloading has begun to use other streams): torch ends it, and the
    graph's destructor, rather than we, drops its reference to the memory pool."""
    device = torch.device("cuda")
    ours, theirs = made(kind), made(kind)
    said: list[str] = []
    loss = OutOfMemory(ours, device, nullcontext, packing=True)
    loss.later, loss.backward = later, backward
    graphs = Graphs(loss, parameters_of(ours), device, resources=StepResources(ours), on_event=said.append)
    eager = eager_graphs(theirs, MicrobatchLoss(theirs, device, nullcontext, packing=True))
    steps, stream = range(WARM_UP + 2), torch.cuda.current_stream()
    assert all(map(torch.equal, run_steps(graphs, steps), run_steps(eager, steps)))
    assert graphs.failed
    assert not graphs._captured
    assert len(said) == 1
    assert said[0].startswith("CUDA graph capture failed, and steps run eagerly: CUDA out of memory")
    assert torch.cuda.current_stream() == stream
    del graphs, eager, loss
    gc.collect()
    torch.cuda.empty_cache()
    pools = {segment["segment_pool_id"] for segment in torch.cuda.memory_snapshot()}
    assert pools <= {(0, 0)}, pools
    after = Graphs(
        MicrobatchLoss(ours, device, nullcontext, packing=True),
        parameters_of(ours),
        device,
        resources=StepResources(ours),
    )
    run_steps(after, steps)
    assert len(after._captured) == 2


@pytest.mark.gpu
@needs_cuda
def test_no_more_memory_than_an_eager_step() -> None:
    device = torch.device("cuda")
    peaks = []
    for recorded in (False, True):
        decoder = made("none")
        loss = MicrobatchLoss(decoder, device, nullcontext, packing=True)
        graphs = Graphs(loss, parameters_of(decoder), device) if recorded else eager_graphs(decoder, loss)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for step in range(WARM_UP + 2):
            graphs.backward(batch_of(step, length=4096), 1.0)
            decoder.zero_grad()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_reserved())
        graphs.release()
        del decoder, loss, graphs
        torch.cuda.empty_cache()
    # Two memory pools instead of one, each with segments of 20 MiB.
    assert peaks[1] < 1.05 * peaks[0] + 40 * 2**20, peaks
