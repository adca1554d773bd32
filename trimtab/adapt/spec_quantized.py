"""Costs of a model with quantized linear layers, and the choice of their kernels. No torch.

The weights of the blocks' linear layers are packed; embeddings, norms, biases and the head are not. A product needs
one dequantized weight at a time, in a workspace that all layers share and that never shrinks. If memory allows, blocks
may also have dequantized copies of their weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from trimtab.facts.blocks import Linear
from trimtab.facts.dtypes import nbytes
from trimtab.facts.errors import RecipeError
from trimtab.facts.shapes import ModelShape
from trimtab.kernels.choice import ImplChoice
from trimtab.kernels.int8 import spec as int8_spec
from trimtab.kernels.nf4 import spec as nf4_spec

KINDS = ("nf4", "int8")
BLOCK = 64
"""Number of elements that share a scale in NF4, as in QLoRA."""
NEVER = ("lm_head",)
"""The head is never quantized: the loss reads its weight directly."""


@dataclass(frozen=True)
class Quantization:
    """Quantization of a run's frozen linear layers.

    Example:
        >>> Quantization("nf4", double=True).block_size
        64
    """

    kind: str
    """nf4 or int8."""
    block: int = BLOCK
    """Number of elements that share a scale; 0 for kinds without blocks."""
    double: bool = False
    """Whether the scales are quantized to 8 bits too (double quantization)."""
    dtype: str = "bf16"
    """The dtype that weights are rounded to before quantization."""
    impl: str = "reference"
    reason: str = ""

    @property
    def block_size(self) -> int:
        """`block`, or the default for kinds without blocks."""
        return self.block or BLOCK

    @property
    def bytes_per_weight(self) -> float:
        """Packed bytes per weight, including the scales of blocks; those of rows are negligible.

        Example:
            >>> Quantization("nf4", double=True).bytes_per_weight, Quantization("int8", block=0).bytes_per_weight
            (0.515625, 1.0)
        """
        if self.kind == "int8":
            return 1.0
        return 0.5 + (1 if self.double else 4) / self.block_size


def choose_quantized_kernels(*, device: str, triton: bool = True, requested: str = "auto") -> ImplChoice:
    """Selects the implementation of dequantization, once, when the layers are created; raises if it cannot run.

    Args:
        device: "cpu" or "cuda", the device of the weights.
        triton: whether Triton runs on that CUDA device.
        requested: auto, reference or triton.

    Example:
        >>> choose_quantized_kernels(device="cpu").impl, choose_quantized_kernels(device="cuda").impl
        ('reference', 'triton')
    """
    available = device == "cuda" and triton
    where = "here" if device == "cuda" else f"on the {device}"
    if requested == "auto":
        if available:
            return ImplChoice("triton", "one launch per weight; bitwise identical to torch's operations")
        return ImplChoice("reference", f"torch operations: the Triton kernels do not run {where}")
    if requested not in nf4_spec.IMPLS:
        raise RecipeError(
            f"quantized layers have no implementation {requested!r}", f"choose {', '.join(nf4_spec.IMPLS)}"
        )
    if requested == "triton" and not available:
        raise RecipeError(
            f"the Triton kernels require a CUDA device and Triton, and do not run {where}",
            "use auto",
        )
    return ImplChoice(requested, "requested by name")


def linear_shapes(shape: ModelShape, skip: tuple[str, ...] = ()) -> dict[str, tuple[int, int]]:
    """The weights that `quantize_layout` packs, by parameter name: two dimensions, inside a block.

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> tiny = uniform_shape("llama", 64, 16, 32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=4)
        >>> len(linear_shapes(tiny)), linear_shapes(tiny)["model.layers.0.mlp.up_proj.weight"]
        (7, (32, 16))
    """
    return {
        name: (linear.out_features, linear.in_features)
        for name, linear in packed_linears(shape, skip).items()
    }


def packed_linears(shape: ModelShape, skip: tuple[str, ...] = ()) -> dict[str, Linear]:
    """The linear layers whose weights are packed, by parameter name; each expert's matrix separately."""
    found = ((f"model.layers.{layer}.{linear.name}.weight", linear) for layer, linear in shape.linears())
    return {name: linear for name, linear in found if not linear.routes and not skipped(name, skip)}


def skipped(name: str, skip: tuple[str, ...]) -> bool:
    """Whether `skip` names a weight or its module: by its path, or the last component.

    Example:
        >>> skipped("model.layers.0.mlp.up_proj.weight", ("up_proj",))
        True
    """
    module = name.removesuffix(".weight")
    return module in skip or module.rpartition(".")[2] in skip


def packed_bytes(dims: tuple[int, int], kind: str, *, block: int = BLOCK, double: bool = True) -> int:
    """Bytes of one packed weight [out, in], including its tables.

    Example:
        >>> packed_bytes((4096, 4096), "nf4") / 2**20, packed_bytes((4096, 4096), "int8") / 2**20
        (8.254947662353516, 16.015625)
    """
    _known(kind)
    if kind == "int8":
        return int8_spec.tensor_bytes(dims, dims[1], affine=False)
    return nf4_spec.weight_bytes(dims, block, double)


def weight_bytes(
    shape: ModelShape,
    kind: str,
    dtype: str,
    *,
    block: int = BLOCK,
    double: bool = True,
    skip: tuple[str, ...] = (),
) -> int:
    """Bytes of all weights of a quantized model: the packed ones, and the others in `dtype`.

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> llama = uniform_shape("llama", 128256, 4096, 14336, 32, num_heads=32, num_kv_heads=8, head_dim=128)
        >>> round(weight_bytes(llama, "nf4", "bf16") / 2**30, 2)
        5.31
    """
    total, counts = shape.num_parameters, Counter[tuple[int, int]]()
    for linear in packed_linears(shape, skip).values():
        counts[linear.out_features, linear.in_features] += linear.count
        total -= linear.weights
    return nbytes(dtype, total) + sum(
        count * packed_bytes(dims, kind, block=block, double=double) for dims, count in counts.items()
    )


def workspace_bytes(shape: ModelShape, dtype: str, *, skip: tuple[str, ...] = ()) -> int:
    """Bytes of the workspace for one dequantized weight (of one expert); persistent from the first product on."""
    packed = linear_shapes(shape, skip)
    return max((nbytes(dtype, math.prod(dims)) for dims in packed.values()), default=0)


def dequantized_bytes(shape: ModelShape, layers: int, dtype: str, *, skip: tuple[str, ...] = ()) -> int:
    """Bytes of dequantized copies of the first `layers` blocks' weights, in the compute dtype.

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> llama = uniform_shape("llama", 128256, 4096, 14336, 32, num_heads=32, num_kv_heads=8, head_dim=128)
        >>> round(dequantized_bytes(llama, 32, "bf16") / 2**30, 2)
        13.0
    """
    if not layers:
        return 0
    kept = (
        linear.weights
        for name, linear in packed_linears(shape, skip).items()
        if int(name.removeprefix("model.layers.").partition(".")[0]) < layers
    )
    return nbytes(dtype, sum(kept))


SAVED_FOR_BACKWARD = 0
"""Activation bytes that a product saves: the gradient of its input only needs the packed weight."""

QUANTIZE_CHUNK, DEQUANTIZE_CHUNK = 1 << 22, 1 << 18
"""NF4 elements per chunk of the reference implementation."""
QUANTIZE_BYTES, DEQUANTIZE_BYTES = 21, 13
"""Peak temporary bytes per element: fp32 values, indices, codes."""


def scratch_bytes(
    shape: ModelShape,
    kind: str,
    *,
    impl: str,
    block: int = BLOCK,
    double: bool = True,
    skip: tuple[str, ...] = (),
) -> int:
    """Bytes of temporary buffers of dequantization, in addition to the workspace: none with Triton.

    The reference processes up to 256 Ki elements of NF4 with all scales at a time, for INT8 the full weight in fp32.
    """
    _known(kind)
    if impl == "triton":
        return 0
    largest = max((math.prod(dims) for dims in linear_shapes(shape, skip).values()), default=0)
    if kind == "int8":
        return 4 * largest
    scales = 4 * nf4_spec.num_blocks(largest, block) if double else 0
    return min(largest, DEQUANTIZE_CHUNK) * DEQUANTIZE_BYTES + scales


def flops(rows: int, dims: tuple[int, int]) -> int:
    """FLOPs of one product. The gradient of its input costs the same; the weight has no gradient."""
    return nf4_spec.matmul_flops(rows, dims)


def loading_peak_bytes(
    shape: ModelShape,
    kind: str,
    dtype: str,
    *,
    impl: str,
    block: int = BLOCK,
    double: bool = True,
    skip: tuple[str, ...] = (),
) -> int:
    """Peak device memory while weights are loaded: the model, one weight in `dtype`, its packed copy.

    The reference implementation also allocates elements in fp32 (NF4: up to 4 Mi of them).
    """
    packed = linear_shapes(shape, skip)
    largest = max((math.prod(dims) for dims in packed.values()), default=0)
    copy = max((packed_bytes(dims, kind, block=block, double=double) for dims in packed.values()), default=0)
    chunk = largest if kind == "int8" else min(largest, QUANTIZE_CHUNK)
    own = 0 if impl == "triton" else chunk * QUANTIZE_BYTES
    model_bytes = weight_bytes(shape, kind, dtype, block=block, double=double, skip=skip)
    return model_bytes + nbytes(dtype, largest) + copy + own


def _known(kind: str) -> None:
    if kind not in KINDS:
        raise RecipeError(f"unknown quantization {kind!r}", f"choose {' or '.join(KINDS)}")


def check_not_quantized(shape: ModelShape, names: Iterable[str]) -> None:
    """Raises RecipeError if one of these fully trained parameters is quantized.

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> tiny = uniform_shape("llama", 64, 16, 32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=4)
        >>> check_not_quantized(tiny, ["model.norm.weight", "lm_head.weight"])
    """
    packed = linear_shapes(shape)
    for name in names:
        if name in packed:
            raise RecipeError(
                f"lora.modules_to_save names {name.removesuffix('.weight')}, which is quantized and cannot be "
                "trained",
                "remove it, or load the model without load_in_4bit and load_in_8bit",
            )
