"""What a model with quantized linear layers costs, and which code reads them. No torch.

The weights of the blocks' linear layers are packed; embeddings, norms, biases and the head stay as they are. A product
holds one dequantized weight at a time, in a workspace that all layers share and that stays once it has grown. Blocks
may keep their weights unpacked as well, where memory is left.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from trimtab.facts.dtypes import nbytes
from trimtab.facts.errors import RecipeError
from trimtab.facts.shapes import ModelShape
from trimtab.kernels.choice import ImplChoice
from trimtab.kernels.int8 import spec as int8_spec
from trimtab.kernels.nf4 import spec as nf4_spec

KINDS = ("nf4", "int8")
BLOCK = 64
"""Values that share a scale in NF4, as QLoRA has it."""
NEVER = ("lm_head",)
"""The head's weight is read by the loss itself."""


@dataclass(frozen=True)
class Quantization:
    """How a run's frozen linear layers are quantized.

    Example:
        >>> Quantization("nf4", double=True).block_size
        64
    """

    kind: str
    """nf4 or int8."""
    block: int = BLOCK
    """Values that share a scale; 0 where the kind has no blocks."""
    double: bool = False
    """Whether the scales are quantized to 8 bits as well."""
    dtype: str = "bf16"
    """The number format that weights are rounded to before they are quantized."""
    impl: str = "reference"
    reason: str = ""

    @property
    def block_size(self) -> int:
        """`block`, or the usual one for kinds that have no blocks."""
        return self.block or BLOCK


def choose_quantized_kernels(*, device: str, triton: bool = True, requested: str = "auto") -> ImplChoice:
    """Which code dequantizes: decided once, when the layers are laid out; one that cannot run is an error.

    Args:
        device: "cpu" or "cuda", where the weights will lie.
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
            return ImplChoice("triton", "one launch a weight; the same bits as torch's operations")
        return ImplChoice("reference", f"torch's own operations: Triton's kernels do not run {where}")
    if requested not in nf4_spec.IMPLS:
        raise RecipeError(
            f"quantized layers have no implementation {requested!r}", f"choose {', '.join(nf4_spec.IMPLS)}"
        )
    if requested == "triton" and not available:
        raise RecipeError(
            f"Triton's kernels need a CUDA device and Triton, and do not run {where}",
            "leave it at auto",
        )
    return ImplChoice(requested, "asked for by name")


def linear_shapes(shape: ModelShape, skip: tuple[str, ...] = ()) -> dict[str, tuple[int, int]]:
    """The weights that `quantize_layout` packs, by parameter name: two dimensions, inside a block.

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> tiny = uniform_shape("llama", 64, 16, 32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=4)
        >>> len(linear_shapes(tiny)), linear_shapes(tiny)["model.layers.0.mlp.up_proj.weight"]
        (7, (32, 16))
    """
    return {
        name: (dims[0], dims[1])
        for name, dims in shape.parameters()
        if len(dims) == 2 and name.startswith("model.layers.") and not skipped(name, skip)
    }


def skipped(name: str, skip: tuple[str, ...]) -> bool:
    """Whether a weight or its module is named by `skip`: by its whole path, or by its last word.

    Example:
        >>> skipped("model.layers.0.mlp.up_proj.weight", ("up_proj",))
        True
    """
    module = name.removesuffix(".weight")
    return module in skip or module.rpartition(".")[2] in skip


def packed_bytes(dims: tuple[int, int], kind: str, *, block: int = BLOCK, double: bool = True) -> int:
    """Bytes of one packed weight [out, in], its tables included.

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
    """Bytes of all weights of a quantized model: packed ones, and the others in `dtype`.

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> llama = uniform_shape("llama", 128256, 4096, 14336, 32, num_heads=32, num_kv_heads=8, head_dim=128)
        >>> round(weight_bytes(llama, "nf4", "bf16") / 2**30, 2)
        5.31
    """
    packed = linear_shapes(shape, skip)
    rest = shape.num_parameters - sum(math.prod(dims) for dims in packed.values())
    return nbytes(dtype, rest) + sum(
        packed_bytes(dims, kind, block=block, double=double) for dims in packed.values()
    )


def workspace_bytes(shape: ModelShape, dtype: str, *, skip: tuple[str, ...] = ()) -> int:
    """Bytes of the one dequantized weight that exists at a time: held from the first product on."""
    packed = linear_shapes(shape, skip)
    return max((nbytes(dtype, math.prod(dims)) for dims in packed.values()), default=0)


def unpacked_bytes(shape: ModelShape, layers: int, dtype: str, *, skip: tuple[str, ...] = ()) -> int:
    """Bytes of the weights of the first so many blocks, kept unpacked beside the packed ones in the products' format.

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> llama = uniform_shape("llama", 128256, 4096, 14336, 32, num_heads=32, num_kv_heads=8, head_dim=128)
        >>> round(unpacked_bytes(llama, 32, "bf16") / 2**30, 2)
        13.0
    """
    if not layers:
        return 0
    kept = (
        math.prod(dims)
        for name, dims in linear_shapes(shape, skip).items()
        if int(name.removeprefix("model.layers.").partition(".")[0]) < layers
    )
    return nbytes(dtype, sum(kept))


SAVED_FOR_BACKWARD = 0
"""Activation bytes that a product keeps: the gradient of its input needs the packed weight alone."""

QUANTIZE_CHUNK, DEQUANTIZE_CHUNK = 1 << 22, 1 << 18
"""NF4 values that torch's operations have in hand at once."""
QUANTIZE_BYTES, DEQUANTIZE_BYTES = 21, 13
"""Of each of them, at most: fp32 numbers, indices, codes."""


def scratch_bytes(
    shape: ModelShape,
    kind: str,
    *,
    impl: str,
    block: int = BLOCK,
    double: bool = True,
    skip: tuple[str, ...] = (),
) -> int:
    """Bytes that dequantizing takes besides the workspace, for the time of one product: none with Triton.

    torch's operations hold up to 256 Ki values of NF4 and all scales at a time, of INT8 the whole weight in fp32.
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
    """Of one product; the gradient of its input takes as many, and the weight has none."""
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
    """Most bytes on the device while weights are read: the model, one weight in `dtype`, its packed copy.

    torch's operations hold the values in hand in fp32 besides (NF4: up to 4 Mi of them). Plans do not count it: it
    is for tests and for sizing a device by hand.
    """
    packed = linear_shapes(shape, skip)
    largest = max((math.prod(dims) for dims in packed.values()), default=0)
    copy = max((packed_bytes(dims, kind, block=block, double=double) for dims in packed.values()), default=0)
    chunk = largest if kind == "int8" else min(largest, QUANTIZE_CHUNK)
    own = 0 if impl == "triton" else chunk * QUANTIZE_BYTES
    standing = weight_bytes(shape, kind, dtype, block=block, double=double, skip=skip)
    return standing + nbytes(dtype, largest) + copy + own


def _known(kind: str) -> None:
    if kind not in KINDS:
        raise RecipeError(f"weights cannot be kept as {kind!r}", f"choose {' or '.join(KINDS)}")


def check_whole(names: Iterable[str]) -> None:
    """RecipeError if one of these parameters, which are to be trained whole, is kept in few bits.

    Example:
        >>> check_whole(["model.norm.weight", "lm_head.weight"])
    """
    for name in names:
        module, _, part = name.rpartition(".")
        if part == "weight" and module.endswith("_proj"):  # as every linear layer of a block is called
            raise RecipeError(
                f"lora.modules_to_save names {module}, which is kept in few bits and cannot be trained",
                "leave it out, or load the model without load_in_4bit and load_in_8bit",
            )
