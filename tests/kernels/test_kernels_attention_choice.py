"""Which attention backend is chosen, its reason, and its costs."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.facts.errors import ModelError
from trimtab.kernels.attention import IMPLS, Layout, attention, choose_attention, spec

CPU = {
    "device": "cpu",
    "capability": None,
    "dtype": "fp32",
    "head_dim": 64,
    "packed": True,
    "window": None,
    "training": True,
}
H100 = {**CPU, "device": "cuda", "capability": (9, 0), "dtype": "bf16"}


@pytest.mark.parametrize(
    ("change", "impl"),
    [
        ({}, "triton"),
        ({"dtype": "fp16"}, "triton"),
        ({"triton": False}, "varlen"),
        ({"training": False}, "varlen"),
        ({"capability": (8, 0)}, "varlen"),
        ({"packed": False}, "sdpa_cudnn"),
        ({"packed": False, "window": 128}, "triton"),
        ({"packed": False, "deterministic": True}, "sdpa_flash"),
        ({"packed": False, "head_dim": 256}, "sdpa_flash"),
        ({"packed": False, "capability": (8, 0)}, "sdpa_flash"),
        ({"head_dim": 256, "capability": (8, 6)}, "sdpa_efficient"),
        ({"head_dim": 256, "capability": (8, 6), "training": False}, "varlen"),
        ({"head_dim": 512}, "sdpa_efficient"),
        ({"dtype": "fp32"}, "sdpa_efficient"),
        ({"softcap": 30.0}, "triton"),
        ({"softcap": 30.0, "capability": (8, 0)}, "flex"),
        ({"softcap": 30.0, "tokens": 64}, "triton"),
        ({"softcap": 30.0, "head_dim": 512, "tokens": 64}, "reference"),
        ({"dtype": "fp16", "capability": (7, 5)}, "sdpa_efficient"),
        ({"dtype": "bf16", "capability": (7, 5)}, "sdpa_math"),
        ({"device": "mps", "capability": None}, "sdpa_math"),
        ({"sinks": True, "packed": False}, "triton"),
        ({"lse": True, "capability": (8, 0)}, "triton"),
        ({"sinks": True, "triton": False}, "reference"),
        ({"causal": False, "packed": False}, "sdpa_cudnn"),
        ({"causal": False, "training": False}, "sdpa_efficient"),
    ],
)
def test_auto(change, impl):
    choice = choose_attention(**{**H100, **change})
    assert choice.impl == impl, choice
    assert [name for name, _ in choice.rejected] == [name for name in IMPLS if name != impl]


def test_auto_on_a_cpu():
    for packed in (False, True):
        for window in (None, 16):
            assert choose_attention(**{**CPU, "packed": packed, "window": window}).impl == "sdpa_flash"


def test_the_reasons_name_the_cause():
    old = dict(choose_attention(**{**H100, "dtype": "fp16", "capability": (7, 5)}).rejected)
    assert "7.5 is below 8.0" in old["varlen"]
    assert "not fp32" in dict(choose_attention(**{**H100, "dtype": "fp32"}).rejected)["sdpa_flash"]
    assert "no backward on a CPU" in dict(choose_attention(**CPU).rejected)["flex"]
    assert "attend across packed documents" in dict(choose_attention(**H100).rejected)["sdpa_cudnn"]
    assert "fp32, packed documents, on a CPU" in choose_attention(**CPU).reason


def test_a_requested_backend_is_used_or_raises():
    assert choose_attention(**CPU, requested="reference").impl == "reference"
    assert choose_attention(**{**CPU, "training": False}, requested="flex").impl == "flex"
    with pytest.raises(
        ModelError, match=r"'flex' cannot be used here: FlexAttention has no backward.*sdpa_flash"
    ):
        choose_attention(**CPU, requested="flex")
    with pytest.raises(ModelError, match="multiple of 8, this is 20"):
        choose_attention(**{**H100, "head_dim": 20}, requested="varlen")
    assert choose_attention(**H100, requested="triton").impl == "triton"
    with pytest.raises(ModelError, match="up to 256, this is 300"):
        choose_attention(**{**H100, "head_dim": 300}, requested="triton")
    assert choose_attention(**H100, tokens=128, requested="flex").impl == "flex"
    with pytest.raises(ModelError, match="at least 128 queries, some calls have 127"):
        choose_attention(**H100, tokens=127, requested="flex")
    with pytest.raises(ModelError, match="does not support softcap"):
        choose_attention(**H100, softcap=30.0, requested="varlen")
    for asked, lack in (
        ({"sinks": True}, "not support sinks"),
        ({"lse": True}, "log-sum-exp"),
        ({"causal": False}, "causal attention only"),
    ):
        with pytest.raises(ModelError, match=lack):
            choose_attention(**H100, **asked, requested="varlen")
    with pytest.raises(ModelError, match="unknown attention implementation 'eager'"):
        choose_attention(**CPU, requested="eager")


@given(
    device=st.sampled_from(["cpu", "cuda", "mps"]),
    capability=st.sampled_from([(7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]),
    dtype=st.sampled_from(["fp32", "bf16", "fp16"]),
    head_dim=st.integers(1, 600),
    packed=st.booleans(),
    window=st.none() | st.integers(1, 99),
    training=st.booleans(),
    deterministic=st.booleans(),
    tokens=st.none() | st.integers(1, 300),
    softcap=st.none() | st.just(30.0),
    causal=st.booleans(),
    sinks=st.booleans(),
    lse=st.booleans(),
)
def test_every_choice_is_accepted_when_requested(device, capability, **job):
    job |= {"device": device, "capability": capability if device == "cuda" else None}
    choice = choose_attention(**job)
    assert choose_attention(**job, requested=choice.impl).impl == choice.impl
    assert len(choice.rejected) == len(IMPLS) - 1
    assert all(reason for _, reason in choice.rejected)


def test_spec_and_choice_import_no_torch():
    code = (
        "import sys, trimtab.kernels.attention.choice, trimtab.kernels.accuracy;"
        "import trimtab.kernels.linear_cross_entropy.spec;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_visible_pairs_counts_the_mask():
    for T, S, window in (
        (7, 7, None),
        (7, 7, 3),
        (3, 9, None),
        (3, 9, 4),
        (9, 3, None),
        (1, 5, 2),
        (5, 5, 50),
        (4, 9, 7),
    ):
        assert spec.visible_pairs(T, S, window) == int(Layout.causal().visible(T, S, window).sum()), (
            T,
            S,
            window,
        )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("K", [1, 4])
@pytest.mark.parametrize("impl", ["reference", "sdpa_math", "sdpa_flash"])
def test_saved_bytes_match_autograd(impl, K, dtype):
    B, T, H, D = 2, 128, 4, 32
    case = spec.Case("", B, T, T, H, K, D)
    inputs = [x.requires_grad_() for x in spec.make_inputs(case, dtype)[:3]]
    layout = Layout.causal()
    form = layout.prepare(impl, "cpu", T, dtype=inputs[0].dtype)
    shared = {} if form.bias is None else {form.bias.untyped_storage().data_ptr()}
    storages = {}

    def pack(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = attention(*inputs, layout=layout, impl=impl)
    measured = sum(size for place, size in storages.items() if place not in shared)
    predicted = spec.saved_bytes(impl, B, T, T, H, K, D, dtype)
    assert out.requires_grad
    assert predicted == pytest.approx(measured, rel=0.15), (predicted, measured, sorted(storages.values()))
