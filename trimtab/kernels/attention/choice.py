"""Selects the attention backend from the device and the requirements, with the reason. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.facts.errors import ModelError
from trimtab.kernels.attention.spec import (
    BIDIRECTIONAL,
    CAPPED,
    IMPLS,
    MASKED,
    MIN_FLEX_QUERIES,
    TILED,
    WITH_LSE,
    WITH_SINKS,
)
from trimtab.kernels.choice import ImplChoice


@dataclass(frozen=True)
class _Requirements:
    """Requirements on the backend: device, tensors, masks."""

    device: str
    capability: tuple[int, int] | None
    dtype: str
    head_dim: int
    packed: bool
    window: int | None
    training: bool
    deterministic: bool
    tokens: int | None
    softcap: float | None
    triton: bool
    causal: bool
    sinks: bool
    lse: bool

    @property
    def mask(self) -> bool:
        return self.packed or self.window is not None


def choose_attention(
    *,
    device: str,
    capability: tuple[int, int] | None,
    dtype: str,
    head_dim: int,
    packed: bool,
    window: int | None,
    training: bool,
    requested: str = "auto",
    deterministic: bool = False,
    tokens: int | None = None,
    softcap: float | None = None,
    triton: bool = True,
    causal: bool = True,
    sinks: bool = False,
    lse: bool = False,
) -> ImplChoice:
    """Selects the attention backend for these requirements, or confirms the requested one.

    Args:
        device: "cpu", "cuda", or another torch device type.
        capability: Compute capability of a CUDA device, such as (9, 0); None for other devices.
        dtype: Dtype of queries, keys and values: "fp32", "bf16" or "fp16".
        head_dim: Size of a head.
        packed: Whether sequences contain several packed documents.
        window: The sliding window; None if it is not smaller than the sequence length.
        training: Whether gradients are needed.
        requested: "auto", or one of `IMPLS`; raises `ModelError` with the reason if it does not meet the requirements.
        deterministic: Whether the backward pass must be deterministic.
        tokens: The minimum number of queries in a call, if known.
        softcap: The soft cap of scores, if the model has one.
        triton: Whether Triton is installed.
        causal: Whether the mask is causal.
        sinks: Whether the model has learned logits in the denominator of the softmax.
        lse: Whether the log-sum-exp is needed, for example to combine results over parts of the keys.

    Example:
        >>> choose_attention(
        ...     device="cpu", capability=None, dtype="fp32", head_dim=64, packed=True, window=None, training=True
        ... ).impl
        'sdpa_flash'
    """
    needs = _Requirements(
        device, capability, dtype, head_dim, packed, window, training, deterministic, tokens, softcap, triton,
        causal, sinks, lse,
    )  # fmt: skip
    obstacles = {impl: _unsupported_reason(impl, needs) for impl in IMPLS}
    if requested != "auto":
        if requested not in IMPLS:
            raise ModelError(
                f"unknown attention implementation {requested!r}", f"use auto or one of {', '.join(IMPLS)}"
            )
        obstacle = obstacles[requested]
        if obstacle is not None:
            alternative = choose_attention(**vars(needs)).impl
            raise ModelError(
                f"attention {requested!r} cannot be used here: {obstacle}",
                f"use auto (here: {alternative})",
            )
        others = tuple((impl, obstacles[impl] or "not requested") for impl in IMPLS if impl != requested)
        return ImplChoice(requested, "requested by name", others)

    order = _preference(needs)
    impl = next(impl for impl in order if obstacles[impl] is None)
    rejected = tuple((o, obstacles[o] or _reason_against(o, impl, needs)) for o in IMPLS if o != impl)
    return ImplChoice(impl, _reason_for(impl, needs), rejected)


def _preference(needs: _Requirements) -> tuple[str, ...]:
    """Backends, fastest first, as measured in this package's README; `_unsupported_reason` rejects unsupported ones."""
    if needs.device == "cuda":
        hopper = needs.capability is not None and needs.capability >= (9, 0)
        first = ("sdpa_cudnn", "sdpa_flash") if hopper else ("sdpa_flash", "sdpa_cudnn")
        # Training with packed documents or a window: 1.7 times as fast as the next on an H200, in 16 bits.
        own = hopper and needs.training and needs.dtype != "fp32"
        masked = ("triton", "varlen") if own else ("varlen",)
        # flex comes after sdpa_efficient: it compiles at first use and recompiles for each new shape.
        return (*first, *masked, "sdpa_efficient", "flex", "sdpa_math", "triton", "reference")
    return ("sdpa_flash", "sdpa_math", "reference")


def _unsupported_reason(impl: str, needs: _Requirements) -> str | None:
    """Why a backend cannot meet the requirements, or None."""
    if needs.softcap is not None and impl not in CAPPED:
        return "it does not support softcap"
    if not needs.causal and impl not in BIDIRECTIONAL:
        return "it supports causal attention only"
    if needs.sinks and impl not in WITH_SINKS:
        return "it does not support sinks"
    if needs.lse and impl not in WITH_LSE:
        return "it does not return a differentiable log-sum-exp"
    if impl in ("reference", "sdpa_math"):
        return None
    if impl == "flex":
        return _flex_unsupported_reason(needs)
    if needs.device == "cpu" and impl == "sdpa_flash":
        return None
    if needs.device != "cuda":
        return f"it requires a CUDA GPU, and the device is {needs.device}"
    assert needs.capability is not None, "a CUDA device has a capability"
    if impl == "triton":
        return _triton_unsupported_reason(needs, needs.capability)
    if impl == "sdpa_efficient":
        return _efficient_unsupported_reason(needs, needs.capability)
    return _flash_unsupported_reason(impl, needs, needs.capability)


def _flex_unsupported_reason(needs: _Requirements) -> str | None:
    if needs.device == "cpu":
        return "FlexAttention has no backward on a CPU" if needs.training else None
    if needs.device != "cuda":
        return f"FlexAttention is not compiled for {needs.device}"
    if needs.capability is not None and needs.capability < (8, 0):
        return f"the device's capability {_dotted(needs.capability)} is below 8.0"
    if needs.head_dim < 16:
        return f"it requires a head size of at least 16, this is {needs.head_dim}"
    if needs.tokens is not None and needs.tokens < MIN_FLEX_QUERIES:
        return f"on a GPU it requires at least {MIN_FLEX_QUERIES} queries, some calls have {needs.tokens}"
    return None


def _triton_unsupported_reason(needs: _Requirements, capability: tuple[int, int]) -> str | None:
    if not needs.triton:
        return "Triton is not installed"
    if capability < (7, 5):
        return f"the device's capability {_dotted(capability)} is below 7.5"
    if needs.dtype == "bf16" and capability < (8, 0):
        return f"bf16 requires capability 8.0, the device has {_dotted(capability)}"
    if needs.head_dim > 256:
        return f"it supports head sizes up to 256, this is {needs.head_dim}"
    return None


def _efficient_unsupported_reason(needs: _Requirements, capability: tuple[int, int]) -> str | None:
    if needs.dtype == "bf16" and capability < (8, 0):
        return f"bf16 requires capability 8.0, the device has {_dotted(capability)}"
    multiple = 4 if needs.dtype == "fp32" else 8
    if needs.head_dim % multiple:
        return f"it requires head sizes that are a multiple of {multiple} in {needs.dtype}, this is {needs.head_dim}"
    if needs.training and needs.deterministic:
        return "its backward is nondeterministic, and deterministic is required"
    return None


def _flash_unsupported_reason(impl: str, needs: _Requirements, capability: tuple[int, int]) -> str | None:
    """Why sdpa_flash, sdpa_cudnn or varlen cannot meet the requirements on CUDA, or None."""
    if capability < (8, 0):
        return f"the device's capability {_dotted(capability)} is below 8.0"
    if needs.dtype not in ("bf16", "fp16"):
        return f"it supports bf16 and fp16, not {needs.dtype}"
    if impl != "varlen" and needs.packed:
        return "it supports no mask, so tokens would attend across packed documents"
    if impl != "varlen" and needs.window is not None:
        return f"it supports no mask, so not the sliding window of {needs.window}"
    if impl != "sdpa_flash" and needs.head_dim % 8:
        return f"it requires head sizes that are a multiple of 8, this is {needs.head_dim}"
    if impl == "sdpa_cudnn":
        if needs.head_dim > 128:
            return f"it supports head sizes up to 128, this is {needs.head_dim}"
        if needs.training and needs.deterministic:
            return "its backward is nondeterministic, and deterministic is required"
    elif needs.head_dim > 256:
        return f"it supports head sizes up to 256, this is {needs.head_dim}"
    elif needs.training and needs.head_dim > 192 and capability not in ((8, 0), (9, 0), (10, 0)):
        needed = "an A100, H100 or B200"
        return (
            f"its backward for head sizes above 192 requires {needed}, not capability {_dotted(capability)}"
        )
    return None


def _reason_for(impl: str, needs: _Requirements) -> str:
    what = "packed documents" if needs.packed else "unpacked sequences"
    if needs.window is not None:
        what += f" with a sliding window of {needs.window}"
    where = "a CPU" if needs.device == "cpu" else needs.device
    if needs.device == "cuda" and needs.capability is not None:
        where = f"a GPU of capability {_dotted(needs.capability)}"
    why = {
        "sdpa_cudnn": "measured fastest for unmasked causal attention, memory linear in length",
        "sdpa_flash": "exact and tiled, memory linear in length",
        "varlen": "no attention across documents, masked tiles are skipped, memory linear in length",
        "sdpa_efficient": f"the tiled kernel that supports {needs.dtype} here",
        "flex": "the only tiled kernel that supports this run",
        "triton": "no attention across documents, masked tiles are skipped, deterministic, memory linear in length",
        "sdpa_math": "no tiled kernel supports this run; memory quadratic in length",
    }.get(impl, "no other backend supports this run")
    if needs.mask and impl in MASKED and impl in TILED:
        why = (
            why.replace(", memory linear in length", "") + "; the mask, shared by equal layers, is quadratic"
        )
    if needs.packed and impl in MASKED:
        why += "; a NaN in one document affects the others of its row"
    return f"{needs.dtype}, {what}, on {where}: {why}"


def _reason_against(other: str, chosen: str, needs: _Requirements) -> str:
    """Why a supported backend was not selected."""
    if other == "reference":
        return "for reading and testing: it materializes the attention weights"
    if other == "sdpa_math":
        return f"materializes the attention weights, where {chosen} is tiled"
    if other == "flex":
        return "compiles at first use and again for new shapes" + (
            "" if needs.device == "cuda" else "; forward only"
        )
    if other == "sdpa_efficient" and needs.mask:
        return f"reads a mask quadratic in length, slower than {chosen}"
    return f"slower than {chosen} here"


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
