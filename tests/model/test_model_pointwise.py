"""A decoder whose norms, RoPE and gated activations are fused kernels: the same model, every gradient."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_tools import interpreted
from trimtab.adapt import recompute as policies
from trimtab.facts.shapes import uniform_shape
from trimtab.model import build, init_weights

pytest.importorskip("triton")
from trimtab.kernels import partial_sums
from trimtab.kernels.gated_mlp import impl_triton as gated
from trimtab.kernels.rms_norm import impl_triton as norm
from trimtab.kernels.rope import impl_triton as rope

SIZES = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}


def trained(pointwise: str, qk_norm: bool, dtype: str, device: str, recompute: bool = False):  # type: ignore[no-untyped-def]
    shape = uniform_shape("qwen3", 64, 24, 40, **SIZES, qk_norm=qk_norm)
    decoder = build(shape, dtype=dtype, device=device, attention="reference", pointwise=pointwise)
    init_weights(decoder, seed=0)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.mul_(1.0 if "norm" in name else 10.0)  # far from linear
    if recompute:
        policies.apply(decoder, ["block"] * shape.num_layers)
    ids_BT = torch.arange(14, device=device).view(2, 7) * 3 % 64
    logits = decoder.logits(decoder(ids_BT))
    logits.float().square().mean().backward()
    return [logits.detach(), *(parameter.grad for parameter in decoder.parameters())]


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_same_model(qk_norm: bool, recompute: bool) -> None:
    want = trained("reference", qk_norm, "fp32", "cpu")
    with interpreted(norm, rope, gated, partial_sums):
        got = trained("triton", qk_norm, "fp32", "cpu", recompute)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5 * float(y.abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_same_model_on_a_gpu(qk_norm: bool, dtype: str) -> None:
    want, own = trained("reference", qk_norm, "fp64", "cuda"), trained("reference", qk_norm, dtype, "cuda")
    got = trained("triton", qk_norm, dtype, "cuda")
    for x, y, plain in zip(got, want, own, strict=True):
        allowed = 2 * (plain.double() - y).abs().max() + 1e-5 * y.abs().max()
        assert (x.double() - y).abs().max() <= allowed
