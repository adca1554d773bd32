"""The planner's sums against what autograd saves; recomputation changes only memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from tests.plan.declared import blocks_by_layer, bytes_around, full_training
from trimtab.facts.errors import ModelError
from trimtab.facts.operations import saved_activations, total_bytes
from trimtab.facts.shapes import ModelShape, uniform_shape
from trimtab.kernels.attention import Layout
from trimtab.model import build, init_weights
from trimtab.model.parts import LayerKernels
from trimtab.model.spec import flops_per_token, parameter_bytes
from trimtab.plan.job import Job

LLAMA = uniform_shape(
    "llama", 128, 64, 160, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, tie_embeddings=True
)
QWEN2 = uniform_shape(
    "qwen2", 128, 64, 96, num_layers=2, num_heads=8, num_kv_heads=8, head_dim=8, qkv_bias=True
)
QWEN3 = uniform_shape(
    "qwen3", 128, 64, 96, num_layers=2, num_heads=4, num_kv_heads=1, head_dim=32, qk_norm=True
)
MISTRAL = uniform_shape("mistral", 128, 64, 96, 2, num_heads=4, num_kv_heads=2, head_dim=16, sliding_window=9)
B, T = 2, 96


def really_saved(forward: Callable[[], torch.Tensor], model: torch.nn.Module) -> int:
    """Bytes of the distinct storages that autograd saves during a forward pass, without parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # referenced, so that no address is reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = forward()
    total = sum(storage.nbytes() for storage in kept.values())
    return total - (out.untyped_storage().nbytes() if out.untyped_storage().data_ptr() in kept else 0)


def declared_bytes(job: Job) -> int:
    """Bytes of saved activations of the blocks and the final norm, and of the tensors that they share."""
    blocks = blocks_by_layer(job)
    saved = [saved_activations(block.operations, block.requires_grad) for block in blocks]
    return sum(map(total_bytes, saved)) + bytes_around(job) + job.batch * job.tokens * 8


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("attention", ["reference", "sdpa_math", "sdpa_flash"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", [LLAMA, QWEN2, QWEN3, MISTRAL], ids=lambda shape: shape.family)
def test_saved_bytes_match_autograd(shape: ModelShape, dtype: str, attention: str, packed: bool) -> None:
    decoder = init_weights(build(shape, dtype=dtype, device="cpu", attention=attention), seed=0)
    ids_BT = torch.zeros(B, T, dtype=torch.int64)
    documents_BT = torch.tensor([[0] * 40 + [1] * 56, [0] * 96], dtype=torch.int32)
    layout = Layout.packed(documents_BT) if packed else Layout.causal()
    real = really_saved(lambda: decoder(ids_BT, layout=layout), decoder)
    declared = declared_bytes(full_training(shape, B, T, dtype, attention=attention, packed=packed))
    # With the others autograd does not save the layout's mask, or saves a mask of its own.
    assert abs(declared / real - 1) <= (0 if attention == "sdpa_flash" else 0.04), (declared, real)


@pytest.mark.parametrize("shape", [LLAMA, QWEN3], ids=lambda shape: shape.family)
def test_saved_bytes_under_autocast(shape: ModelShape) -> None:
    decoder = init_weights(build(shape, dtype="fp32", device="cpu", attention="sdpa_flash"), seed=0)
    ids_BT = torch.zeros(B, T, dtype=torch.int64)

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return decoder(ids_BT)

    real = really_saved(forward, decoder)
    job = full_training(shape, B, T, "bf16", weights_dtype="fp32", gradient_dtype="fp32", packed=False)
    assert declared_bytes(job) == real


def test_flops_match_torchs_counter() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    decoder = init_weights(build(LLAMA, dtype="fp32", device="cpu", attention="reference"), seed=0)
    ids_BT = torch.zeros(1, T, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        decoder.logits(decoder(ids_BT))
    said = flops_per_token(LLAMA, T, training=False) * T
    # The reference multiplies masked pairs too: T² instead of T (T + 1) / 2 of them.
    masked = 4 * (T * T - T * (T + 1) // 2) * LLAMA.attention.q_size * LLAMA.num_layers
    assert said + masked == counter.get_total_flops()


def test_flops_with_a_window_and_in_training() -> None:
    assert parameter_bytes(LLAMA, "bf16") == 2 * LLAMA.num_parameters
    short, long = flops_per_token(MISTRAL, 9), flops_per_token(MISTRAL, 9000)
    # With a sliding window of 9 attention costs 9 keys per token for any document length.
    assert long - flops_per_token(MISTRAL, 8000) < 1
    assert short < long
    assert flops_per_token(LLAMA, 64) > 3 * flops_per_token(LLAMA, 64, training=False) > 0


def test_the_spec_imports_no_torch() -> None:
    code = "import sys, trimtab.model.spec, trimtab.model.source; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_unpacked_sequences_may_have_their_own_attention_backend() -> None:
    decoder = init_weights(
        build(
            LLAMA,
            dtype="fp32",
            device="cpu",
            kernels=[LayerKernels("varlen", "sdpa_math")] * LLAMA.num_layers,
        ),
        seed=0,
    )
    plain = init_weights(build(LLAMA, dtype="fp32", device="cpu", attention="sdpa_math"), seed=0)
    ids_BT = torch.arange(12).view(2, 6)
    torch.testing.assert_close(decoder(ids_BT), plain(ids_BT), rtol=0, atol=0)
    with pytest.raises(ModelError, match="varlen"):
        decoder(ids_BT, layout=Layout.packed(torch.zeros(2, 6, dtype=torch.int32)))
