"""Selects the implementation of AdamW with fp32 or bf16 moments, with the reason. Does not import torch."""

from __future__ import annotations

from trimtab.kernels.choice import ImplChoice


def choose_adamw(*, device: str, triton: bool = True, fused: bool = False) -> ImplChoice:
    """Selects the implementation. All have the same accuracy and states, so a recipe cannot request one.

    Args:
        device: cpu or cuda.
        triton: whether Triton runs on the device.
        fused: whether torch's fused kernel updates all parameters: fp32 weights with fp32 moments.

    Example:
        >>> choose_adamw(device="cpu").impl, choose_adamw(device="cuda").impl
        ('torch', 'triton')
    """
    if fused:
        return ImplChoice("torch", "torch's fused kernel")
    if device == "cuda" and triton:
        return ImplChoice("triton", "one kernel for all weights, in fp32 like torch's operations")
    return ImplChoice("torch", "torch's own operations, on any device")
