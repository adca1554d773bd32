"""The kind of a CUDA kernel or of a torch operator, from its name. Imports no torch.

Kernels are matched by rules: the first match decides. Operators of a CPU profile (`aten::…`) are listed by name. Views,
allocations and autograd's own work compute nothing and are `other`.
"""

from __future__ import annotations

import enum
import re


class KernelKind(enum.Enum):
    """The kind of work of a kernel or operator."""

    GEMM = "GEMM"
    """Matrix products, with the reductions of products that are split over their inner dimension."""
    ATTENTION = "attention"
    """Fused attention. Plain attention consists of products, a softmax and elementwise operations."""
    NORM = "norm"
    SOFTMAX = "softmax"
    """Softmax and cross entropy."""
    ELEMENTWISE = "elementwise"
    OPTIMIZER = "optimizer"
    REDUCTION = "reduction"
    COPY = "copy"
    """Copies, casts, fills, gathers and transfers: they move bytes and compute nothing."""
    OTHER = "other"


_KERNEL_RULES: tuple[tuple[KernelKind, str], ...] = (
    (KernelKind.COPY, r"^Mem(cpy|set)\b"),
    (KernelKind.OPTIMIZER, r"multi_tensor_apply|[Aa]dam|^_?step(8|32)_kernel|\bsgd\b"),
    # attention before products: its kernel names contain those of products
    (KernelKind.ATTENTION, r"flash|fmha|sdpa|attention|cudnn::fusion|MemEff"),
    (KernelKind.GEMM, r"gemm|nvjet|cutlass|cublas|splitKreduce|gemv|xmma|wgmma|^triton_tem_|dot_kernel"),
    (KernelKind.GEMM, r"^_?rows_kernel$|reduce_1Block_kernel"),
    # inductor names its kernels by their form and the operators that they fuse
    (KernelKind.ELEMENTWISE, r"^triton_poi_"),
    (KernelKind.SOFTMAX, r"soft_?max|SoftMax|logsumexp|nll_loss|cross_entropy"),
    (KernelKind.SOFTMAX, r"^(loss_and_gradient|row_numbers|row_statistics|gradient)_kernel$"),
    (KernelKind.NORM, r"^triton_(red|per)_\w*(rsqrt|norm)"),
    (KernelKind.REDUCTION, r"^triton_(red|per|split_scan)_"),
    (KernelKind.NORM, r"layer_?norm|LayerNorm|rms_?norm|RMSNorm|GammaBeta|RowwiseMoments|_normed_"),
    (KernelKind.COPY, r"copy_kernel|copy_device_to_device|FillFunctor|CatArray"),
    (KernelKind.COPY, r"indexSelect|index_elementwise|gather_kernel|scatter_gather"),
    (
        KernelKind.REDUCTION,
        r"reduce_kernel|\bcub::|\bat_cuda_detail::cub|sum_and_scatter|segment|^_?sum_kernel$",
    ),
    (KernelKind.REDUCTION, r"embedding_backward|compute_grad_weight|tensor_kernel_scan|scan_"),
    (KernelKind.ELEMENTWISE, r"elementwise|distribution_|triu_tril|arange|pointwise|gated_mlp"),
    (KernelKind.ELEMENTWISE, r"^_?(rope|\w*quantize\w*|scale|groups|long|tensor|round)_kernel$"),
    # profiles of earlier versions: gated activations and norms had one name, attention's three kernels these
    (KernelKind.ATTENTION, r"^(forward|query|key)_kernel$"),
    (KernelKind.ELEMENTWISE, r"^_(forward|backward)_kernel$"),
)
_KERNELS = tuple((kind, re.compile(rule)) for kind, rule in _KERNEL_RULES)

_OPERATORS: dict[KernelKind, str] = {
    KernelKind.GEMM: "mm addmm bmm baddbmm addbmm mv addmv dot vdot matmul linear einsum _int_mm _scaled_mm "
    "_grouped_mm _scaled_grouped_mm _weight_int8pack_mm _linear_pointwise mkldnn_linear _mkl_linear ger outer",
    KernelKind.NORM: "rms_norm layer_norm native_layer_norm native_layer_norm_backward _fused_rms_norm "
    "_fused_rms_norm_backward",
    KernelKind.SOFTMAX: "softmax _softmax log_softmax _log_softmax _softmax_backward_data "
    "_log_softmax_backward_data logsumexp nll_loss nll_loss_nd nll_loss_forward nll_loss_backward "
    "cross_entropy_loss _safe_softmax",
    KernelKind.REDUCTION: "sum mean amax amin max min prod cumsum norm linalg_vector_norm argmax argmin any all "
    "nansum std var aminmax count_nonzero embedding_dense_backward embedding_backward",
    KernelKind.COPY: "copy clone contiguous _to_copy to cat stack fill zero zeros zeros_like ones ones_like full "
    "full_like new_zeros embedding index_select index gather scatter index_put _index_put_impl index_copy "
    "index_add repeat_interleave repeat slice_backward select_backward constant_pad_nd pad roll flip type_as "
    "_efficientzerotensor masked_select narrow_copy",
    KernelKind.ELEMENTWISE: "add sub rsub mul div neg pow sqrt rsqrt exp exp2 expm1 log log1p log2 abs sign silu "
    "silu_backward gelu gelu_backward sigmoid sigmoid_backward tanh tanh_backward relu threshold_backward cos sin "
    "where masked_fill maximum minimum clamp clamp_min clamp_max addcmul addcdiv lerp reciprocal square erf round "
    "floor ceil trunc eq ne lt le gt ge logical_not logical_and logical_or bitwise_and bitwise_or bitwise_xor "
    "bitwise_not __and__ __or__ __xor__ __lshift__ __rshift__ bitwise_left_shift bitwise_right_shift triu tril "
    "isfinite isnan isinf nan_to_num remainder fmod floor_divide copysign frexp ldexp arange bucketize "
    "random uniform normal bernoulli native_dropout native_dropout_backward dropout softplus logaddexp",
}
_BY_OPERATOR = {name: kind for kind, names in _OPERATORS.items() for name in names.split()}


def kind_of(name: str) -> KernelKind:
    """The kind of a kernel or operator.

    Example:
        >>> kind_of("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT").value, kind_of("aten::_softmax").value
        ('GEMM', 'softmax')
    """
    space, colons, operator = name.partition("::")
    if colons and space in ("aten", "mkldnn", "quantized", "trimtab", "torch", "autograd"):
        return _operator_kind(operator)
    return next((kind for kind, rule in _KERNELS if rule.search(name)), KernelKind.OTHER)


def _operator_kind(operator: str) -> KernelKind:
    """The kind of a torch operator without its namespace; in-place variants have the kind of the operator."""
    if "attention" in operator:
        return KernelKind.ATTENTION
    if operator.startswith(("_fused_adam", "_fused_sgd", "_foreach_", "_amp_")):
        return KernelKind.OPTIMIZER
    if "rms_norm" in operator or operator.startswith("norm_add"):
        return KernelKind.NORM
    if operator.startswith(("gated_activation", "rope", "dequantize", "quantize")):
        return KernelKind.ELEMENTWISE
    plain = operator if operator.endswith("__") else operator.rstrip("_")
    return _BY_OPERATOR.get(plain, KernelKind.OTHER)


_WRAPPER = re.compile(r"gpu_kernel_impl\w*|[AB]?UnaryFunctor|BinaryFunctor")
"""Functors that apply another functor, whose name follows."""


def short_name(name: str, length: int = 60) -> str:
    """A kernel's name for tables: without return type, namespaces and template arguments, but with the function that
    an elementwise kernel applies.

    Example:
        >>> short_name("void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<float>, …>")
        'vectorized_elementwise_kernel (CUDAFunctor_add)'
        >>> short_name("aten::mm")
        'aten::mm'
    """
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    head, template, rest = plain.partition("<")
    head = head.partition("(")[0]
    if not template or not head.strip():
        return _cut(name, length)
    head = head.rpartition("::")[2]
    inner = _inner_name(rest)
    return _cut(f"{head} ({inner})" if inner else head, length)


def _inner_name(template: str) -> str:
    """The first function or functor among template arguments."""
    words = re.findall(r"\w+", template)
    named = [word for word in words if re.search(r"Functor|_kernel_cuda$|Ops$|_impl$", word)]
    telling = [word for word in named if not _WRAPPER.fullmatch(word)]
    return (telling or [""])[0]


def _cut(name: str, length: int) -> str:
    return name if len(name) <= length else name[: length - 1] + "…"
