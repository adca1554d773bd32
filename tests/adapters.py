"""Entry points for external tests: functions under the names that these tests expect."""

from __future__ import annotations

import torch


def get_flashattention_autograd_function_pytorch() -> type[torch.autograd.Function]:
    """FlashAttention-2 in plain PyTorch: forward(ctx, Q, K, V, is_causal=False) on (batch, n, d)."""
    from trimtab.kernels.attention.impl_tiled import FlashAttention

    return FlashAttention


def get_flashattention_autograd_function_triton() -> type[torch.autograd.Function]:
    """The same function with Triton kernels."""
    from trimtab.kernels.attention.impl_triton import FlashAttention

    return FlashAttention
