"""The timed forward and backward pass of a cell.

Forward is one call with gradients enabled, which therefore saves what backward needs. Backward is `torch.autograd.grad`
of q, k and v with a random gradient of the output; a forward pass precedes each repetition outside the timed part, so
that backward reads saved tensors as in a training step and frees them afterwards.
"""

# B batch, T tokens, H heads, D head dimension

from __future__ import annotations

from collections.abc import Callable

import torch

from trimtab.facts.dtypes import TORCH_NAMES
from trimtab.kernels.attention import Layout, attention
from trimtab.kernels.attention.impl_tiled import FlashAttention
from trimtab.kernels.attention.spec import SKIPS_DOCUMENTS
from trimtab.lab.studies.attention.settings import TILED, AttentionSettings, Mode
from trimtab.lab.timing import Run

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(q_BTHD, k_BTHD, v_BTHD) → o_BTHD."""


class AttentionRun:
    """Inputs of a cell and the two passes over them.

    Example:
        >>> run = AttentionRun(AttentionSettings("reference", length=8, batch=2, head_dim=4))
        >>> [tuple(x.shape) for x in run.forward_backward()]
        [(2, 8, 1, 4), (2, 8, 1, 4), (2, 8, 1, 4)]
    """

    def __init__(self, settings: AttentionSettings) -> None:
        self.attend = build_attention(settings)
        generator = torch.Generator(settings.device).manual_seed(0)
        shape = (settings.batch, settings.length, settings.heads, settings.head_dim)
        dtype = getattr(torch, TORCH_NAMES[settings.dtype])
        q, k, v, self.gradient_BTHD = (
            torch.randn(shape, generator=generator, device=settings.device, dtype=dtype) for _ in range(4)
        )
        self.inputs = tuple(x.requires_grad_() for x in (q, k, v))

    @property
    def input_bytes(self) -> int:
        """Of q, k and v."""
        return sum(x.nbytes for x in self.inputs)

    def forward(self) -> torch.Tensor:
        """o_BTHD, with everything saved for backward."""
        return self.attend(*self.inputs)

    def backward(self, o_BTHD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(dq, dk, dv)."""
        return torch.autograd.grad(o_BTHD, self.inputs, self.gradient_BTHD)

    def forward_backward(self) -> tuple[torch.Tensor, ...]:
        """(dq, dk, dv) of a new forward pass."""
        return self.backward(self.forward())

    def prepare_forward(self) -> Run:
        """For `time_samples`: returns the forward pass, which needs no preparation."""
        return self.forward

    def prepare_backward(self) -> Run:
        """For `time_samples`: runs a forward pass, outside the timed part, and returns its backward pass."""
        o_BTHD = self.forward()
        return lambda: self.backward(o_BTHD)


def build_attention(settings: AttentionSettings) -> Attend:
    """The backend of a cell as a function of q, k and v."""
    if settings.backend == TILED:
        return _attend_tiled(settings.causal)
    layout = Layout.causal()
    if settings.backend in SKIPS_DOCUMENTS:
        # The backend's form of the layout is built outside the compiled, timed code. The cache key is the device as
        # tensors report it: cuda:0, not cuda.
        device = torch.empty(0, device=settings.device).device
        layout.prepare(settings.backend, device, settings.length, B=settings.batch, causal=settings.causal)

    def attend(q_BTHD: torch.Tensor, k_BTHD: torch.Tensor, v_BTHD: torch.Tensor) -> torch.Tensor:
        return attention(q_BTHD, k_BTHD, v_BTHD, layout=layout, causal=settings.causal, impl=settings.backend)

    # fullgraph: "compiled" must not mean that only a part was compiled.
    return torch.compile(attend, fullgraph=True, dynamic=False) if settings.mode is Mode.COMPILED else attend


def _attend_tiled(causal: bool) -> Attend:
    def attend(q_BTHD: torch.Tensor, k_BTHD: torch.Tensor, v_BTHD: torch.Tensor) -> torch.Tensor:
        batch, _, heads, _ = q_BTHD.shape
        flat = (x.transpose(1, 2).flatten(0, 1) for x in (q_BTHD, k_BTHD, v_BTHD))
        o: torch.Tensor = FlashAttention.apply(*flat, causal)
        return o.unflatten(0, (batch, heads)).transpose(1, 2)

    return attend
