"""The kind of a kernel by its name: names of recorded profiles, of our Triton kernels, of other GPUs, of operators."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trimtab.lab.kernel_kinds import KernelKind, kind_of, short_name

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "benchmarks" / "results" / "step-profiles-h200.txt"
ENTRY = re.compile(r"\s+([\d.]+) ms +\d+ [x×] (.*)")


def recorded_profiles() -> list[list[tuple[str, float]]]:
    """(name, ms) of each profile in the file."""
    found: list[list[tuple[str, float]]] = []
    for line in RECORDED.read_text(encoding="utf-8").splitlines():
        if re.match(r"kernels \d+,? busy", line):
            found.append([])
        elif entry := ENTRY.match(line):
            found[-1].append((entry[2], float(entry[1])))
    return found


def test_recorded_profiles_leave_nothing_without_a_kind() -> None:
    profiles = recorded_profiles()
    assert len(profiles) >= 20
    for profile in profiles:
        other = [name for name, _ in profile if kind_of(name) is KernelKind.OTHER]
        assert not other
        shares = {kind: sum(t for n, t in profile if kind_of(n) is kind) for kind in KernelKind}
        products = shares[KernelKind.GEMM] + shares[KernelKind.ATTENTION]
        assert products > 0.4 * sum(shares.values()), "a training step is mostly products"


FORM = "void at::native::"
KERNELS = {
    KernelKind.GEMM: [
        "ampere_sgemm_128x64_tn",
        "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize32x32x64_stage3_warpsize2x2x1_ffma_aligna4",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x128_32x5_tn_align8>(…)",
        "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false, false>(…)",
        "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(…)",
        "triton_tem_fused_mm_0",
        "_rows_kernel",
    ],
    KernelKind.ATTENTION: [
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4>>(…)",
        "void pytorch_flash::flash_bwd_dot_do_o_kernel<true>(…)",
        "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float>::Params)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
        "triton_tem_fused_flex_attention_0",
        "forward_kernel",
        "key_kernel",
    ],
    KernelKind.SOFTMAX: [
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, false>(…)",
        FORM + "(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float>(…)",
        FORM + "(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(…)",
        "triton_red_fused__log_softmax_0",
        "loss_and_gradient_kernel",
    ],
    KernelKind.NORM: [
        FORM + "(anonymous namespace)::vectorized_layer_norm_kernel<float, float, true>(…)",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0",
        "triton_per_fused_native_layer_norm_backward_3",
        "_rms_norm_forward_kernel",
        "_rope_normed_backward_kernel",
    ],
    KernelKind.ELEMENTWISE: [
        FORM
        + "vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>>(…)",
        FORM + "elementwise_kernel<128, 2, at::native::gpu_kernel_impl<at::native::MulFunctor<float>>>(…)",
        FORM + "distribution_elementwise_grid_stride_kernel<float, 4>(…)",
        FORM + "triu_tril_kernel<bool, int, true, 4, false>(…)",
        "triton_poi_fused_mul_silu_2",
        "_gated_mlp_backward_kernel",
        "_dequantize_transposed_kernel",
        "_rope_kernel",
    ],
    KernelKind.OPTIMIZER: [
        FORM + "(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>>(…)",
        FORM
        + "(anonymous namespace)::multi_tensor_apply_kernel<…, at::native::FusedAdamMathFunctor<float, 4>>",
        "_step8_kernel",
        "_step32_kernel",
        "_adamw_kernel",
    ],
    KernelKind.REDUCTION: [
        FORM + "reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float>>>(…)",
        "triton_red_fused_sum_4",
        FORM + "(anonymous namespace)::embedding_backward_feature_kernel<float, float, long>(…)",
        "_sum_kernel",
    ],
    KernelKind.COPY: [
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
        FORM + "unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>(…)",
        FORM + "(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 4, 64, 64>(…)",
        FORM + "(anonymous namespace)::indexSelectLargeIndex<float, long, unsigned int, 2, 2, -2, true>(…)",
        FORM + "vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul>>(…)",
    ],
    KernelKind.OTHER: ["ncclDevKernel_AllReduce_Sum_f32_RING_LL(…)", "", "spin_kernel(long)"],
}


@pytest.mark.parametrize(("kind", "name"), [(k, name) for k, names in KERNELS.items() for name in names])
def test_kernels(kind: KernelKind, name: str) -> None:
    assert kind_of(name) is kind


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (KernelKind.GEMM, "aten::mm aten::addmm_ aten::bmm aten::_int_mm mkldnn::_linear_pointwise"),
        (
            KernelKind.ATTENTION,
            "aten::_scaled_dot_product_flash_attention_for_cpu trimtab::attention_backward",
        ),
        (KernelKind.SOFTMAX, "aten::_softmax aten::_log_softmax_backward_data aten::nll_loss_forward"),
        (
            KernelKind.NORM,
            "aten::rms_norm aten::_fused_rms_norm trimtab::add_rms_norm trimtab::norm_add_norm",
        ),
        (KernelKind.ELEMENTWISE, "aten::mul aten::add_ aten::silu_backward aten::__and__ trimtab::rope"),
        (KernelKind.OPTIMIZER, "aten::_fused_adamw_ aten::_foreach_mul_"),
        (KernelKind.REDUCTION, "aten::sum aten::mean aten::linalg_vector_norm"),
        (KernelKind.COPY, "aten::copy_ aten::fill_ aten::_to_copy aten::cat aten::index_select"),
        (KernelKind.OTHER, "aten::view aten::as_strided aten::empty_strided MmBackward0 no::such"),
    ],
)
def test_operators(kind: KernelKind, names: str) -> None:
    assert {name: kind_of(name) for name in names.split()} == dict.fromkeys(names.split(), kind)


def triton_kernels() -> list[str]:
    """Names of all launched Triton kernels; names of functions that kernels call do not end with "_kernel"."""
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "trimtab" / "kernels").rglob("*.py")]
    return sorted(set(re.findall(r"@triton\.jit\b.*\ndef (\w+_kernel)\(", "\n".join(sources))))


def test_every_triton_kernel_of_ours_has_a_kind() -> None:
    names = triton_kernels()
    assert len(names) >= 20
    assert [name for name in names if kind_of(name) is KernelKind.OTHER] == []


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("attention", KernelKind.ATTENTION),
        ("rms_norm", KernelKind.NORM),
        ("gated_mlp", KernelKind.ELEMENTWISE),
        ("adamw8bit", KernelKind.OPTIMIZER),
    ],
)
def test_our_kernels_are_named_by_what_they_do(folder: str, kind: KernelKind) -> None:
    text = "\n".join(path.read_text() for path in (ROOT / "trimtab" / "kernels" / folder).glob("*.py"))
    names = re.findall(r"@triton\.jit\b.*\ndef (\w+_kernel)\(", text)
    assert names
    assert {name: kind_of(name) for name in names} == dict.fromkeys(names, kind)


def test_short_names_distinguish_kernels() -> None:
    copied = (
        FORM
        + "elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda(…)>"
    )
    assert short_name(copied) == "elementwise_kernel (direct_copy_kernel_cuda)"
    assert short_name(FORM + "(anonymous namespace)::sum_and_scatter<c10::BFloat16, long>(long const*)") == (
        "sum_and_scatter"
    )
    mean = FORM + "reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>(…)"
    assert short_name(mean) == "reduce_kernel (MeanOps)"
    assert short_name("Memcpy HtoD (Pinned -> Device)") == "Memcpy HtoD (Pinned -> Device)"
    assert short_name("x" * 99) == "x" * 59 + "…"
