"""The decoder on a CUDA device: the CPU's results, and the planner's saved bytes against autograd."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_model_spec import LLAMA, MISTRAL, QWEN2, QWEN3, B, T, declared_bytes, really_saved

from tests.plan.declared import full_training
from trimtab.adapt import recompute
from trimtab.facts.shapes import ModelShape
from trimtab.kernels.attention import Layout
from trimtab.model import build, init_weights, load_weights, save_folder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DOCUMENTS = torch.tensor([[0] * 40 + [1] * 56, [0] * 96], dtype=torch.int32)


KEPT = [
    (shape, attention)
    for shape in (LLAMA, QWEN3)
    for attention in ("reference", "sdpa_flash", "sdpa_efficient")
]


# varlen on a shape without GQA: whether it repeats heads depends on torch's version.
@pytest.mark.parametrize(
    ("shape", "attention"), [*KEPT, (QWEN2, "varlen")], ids=lambda value: getattr(value, "family", value)
)
def test_saved_bytes_on_a_gpu(shape: ModelShape, attention: str) -> None:
    decoder = init_weights(build(shape, dtype="bf16", device="cuda", attention=attention), seed=0)
    ids_BT = torch.zeros(B, T, dtype=torch.int64, device="cuda")
    packed = attention != "sdpa_flash"
    layout = Layout.packed(DOCUMENTS) if packed else Layout.causal()
    real = really_saved(lambda: decoder(ids_BT, layout=layout), decoder)
    declared = declared_bytes(
        full_training(shape, B, T, "bf16", attention=attention, packed=packed, device="cuda")
    )
    assert abs(declared / real - 1) < 0.04, (declared, real)


@pytest.mark.parametrize("shape", [LLAMA, MISTRAL, QWEN3], ids=lambda shape: shape.family)
def test_loss_and_gradients_as_on_the_cpu(shape: ModelShape, tmp_path: Path) -> None:
    ids_BT = torch.randint(0, 128, (B, T), generator=torch.Generator().manual_seed(0))
    labels_BT = ids_BT.roll(-1, 1)
    source = init_weights(build(shape, dtype="fp32", device="cpu", attention="reference"), seed=0)
    save_folder(source, tmp_path / "m", dtype="fp32")
    losses, gradients = [], []
    for device in ("cpu", "cuda"):
        decoder = build(shape, dtype="fp32", device=device, attention="reference")
        load_weights(decoder, tmp_path / "m")
        recompute.apply(decoder, ["block" if device == "cuda" else "none"] * shape.num_layers)
        loss = decoder.loss(
            ids_BT.to(device), labels_BT.to(device), None, Layout.packed(DOCUMENTS), reduction="mean"
        )
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append([p.grad.cpu() for p in decoder.parameters() if p.grad is not None])
    assert abs(losses[0] - losses[1]) < 1e-5
    assert all((a - b).abs().max() < 1e-5 for a, b in zip(*gradients, strict=True))


def test_compiled_blocks_are_whole_graphs() -> None:
    decoder = init_weights(build(LLAMA, dtype="bf16", device="cuda", attention="varlen"), seed=0)
    ids_BT = torch.randint(0, 128, (B, T), device="cuda")
    layout = Layout.packed(DOCUMENTS)
    layout.prepare("varlen", "cuda", T, B=B)
    with torch.no_grad():
        plain = float(decoder.loss(ids_BT, ids_BT.roll(-1, 1), None, layout, reduction="mean"))
    for block in decoder.model.layers:
        block.compile(fullgraph=True)
    loss = decoder.loss(ids_BT, ids_BT.roll(-1, 1), None, layout, reduction="mean")
    loss.backward()
    assert abs(float(loss.detach()) - plain) < 1e-2
    assert [name for name, _ in decoder.named_parameters()] == [name for name, _ in LLAMA.parameters()]
