"""Chooses the attention backends of each layer from what the layer computes: head size, window, soft cap, sinks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trimtab.facts.blocks import AttentionShape, BlockShape
from trimtab.facts.devices import DeviceFacts
from trimtab.facts.shapes import ModelShape
from trimtab.kernels.attention.choice import choose_attention
from trimtab.plan.resolved import AttentionConfig, LayerAttention
from trimtab.recipe import Recipe


def choose_for_training(
    recipe: Recipe, shape: ModelShape, device: DeviceFacts, dtype: str
) -> AttentionConfig:
    """The backends for packed and for unpacked sequences; evaluation always packs, training with `packing: true`.

    Raises ModelError if a layer cannot use the backend that the recipe requests.
    """
    requested = recipe.model.attn_implementation

    def choose(requirements: dict[str, Any]) -> LayerAttention:
        arguments: dict[str, Any] = {
            **requirements,
            "device": device.kind,
            "capability": device.capability,
            "dtype": dtype,
            "training": True,
            "requested": requested,
            "deterministic": recipe.deterministic,
            "tokens": recipe.max_seq_length,
            "triton": device.triton,
        }
        packed = choose_attention(packed=True, **arguments)
        unpacked, reason = packed.impl, packed.reason
        if not recipe.packing and requested == "auto":
            choice = choose_attention(packed=False, **arguments)
            if choice.impl != packed.impl:
                unpacked = choice.impl
                reason = f"{choice.reason}; {packed.impl} for evaluation, which packs documents"
        return LayerAttention(packed.impl, unpacked, reason, packed.rejected)

    return _choose_per_kind(shape, choose, tokens=recipe.max_seq_length)


def choose_for_inference(
    shape: ModelShape, device: str, *, dtype: str, capability: tuple[int, int] | None
) -> AttentionConfig:
    """The backends for evaluation and generation.

    Args:
        shape: the model's shape.
        device: a device type: cpu, cuda, …
        dtype: of queries, keys and values.
        capability: a CUDA device's compute capability.
    """

    def choose(requirements: dict[str, Any]) -> LayerAttention:
        choice = choose_attention(
            **requirements,
            device=device,
            capability=capability,
            dtype=dtype,
            packed=True,
            training=False,
            requested="auto",
            tokens=1,  # generation decodes one token at a time
        )
        return LayerAttention(choice.impl, choice.impl, choice.reason, choice.rejected)

    return _choose_per_kind(shape, choose)


def _choose_per_kind(
    shape: ModelShape, choose: Callable[[dict[str, Any]], LayerAttention], *, tokens: int | None = None
) -> AttentionConfig:
    """Chooses once for all layers with the same requirements."""
    found: dict[tuple[tuple[str, Any], ...], LayerAttention] = {}
    layers = []
    for block in shape.blocks:
        requirements = _requirements(block, tokens)
        key = tuple(requirements.items())
        if key not in found:
            found[key] = choose(requirements)
        layers.append(found[key])
    return AttentionConfig(tuple(layers))


def _requirements(block: BlockShape, tokens: int | None) -> dict[str, Any]:
    """The arguments of `choose_attention` that depend on the layer.

    Args:
        block: the layer.
        tokens: length of the longest sequence, which no longer window restricts; None if it is not known.
    """
    mixer = block.mixer
    window = mixer.window
    if window is not None and tokens is not None and window >= tokens:
        window = None
    found: dict[str, Any] = {"head_dim": mixer.head_dim, "window": window}
    if isinstance(mixer, AttentionShape):
        found |= {"softcap": mixer.softcap, "sinks": mixer.sinks}
    return found
