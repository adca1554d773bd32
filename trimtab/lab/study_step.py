"""A study model's step: forward, backward and optimizer step over one batch of random tokens.

There are two sets of kernels: `reference`, plain attention and torch's own operations as in the reference study, and
`fast`, those that `trimtab train` chooses on this device; and two losses: the sum of the logits, which the reference
study times, and the cross entropy of training. Weights are fp32; bf16 and fp16 run under autocast. `study_modes`
compiles a step or captures it as CUDA graphs.
"""

# B batch, T tokens (context length), V vocabulary

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch.nn import functional as F

from trimtab.facts.shapes import ModelShape
from trimtab.kernels.attention import choose_attention
from trimtab.kernels.choice import choose_pointwise
from trimtab.kernels.triton_support import runs_triton
from trimtab.lab.eager_model import build_eager_model
from trimtab.lab.step_settings import Kernels, Loss, Precision, StepSettings, TimedPart
from trimtab.lab.study import NotSupported
from trimtab.lab.study_models import first_layers, named_shape
from trimtab.lab.timing import Run
from trimtab.model.building import torch_dtype
from trimtab.model.decoder import Decoder
from trimtab.optim import AdamW

__all__ = ["Kernels", "Loss", "Precision", "StepSettings", "StudyStep", "TimedPart", "check_supported"]

LEARNING_RATE = 1e-4
SEED = 0


class StudyStep:
    """A study model with its batch; studies time its methods.

    Args:
        settings: the configuration.
        layers: number of layers to build, the first ones; all by default.

    Example:
        >>> step = StudyStep(StepSettings("tiny", context=16, batch=2))
        >>> step.forward().shape, step.decoder.shape.num_layers
        (torch.Size([]), 2)
        >>> step.forward_backward()
        >>> step.update()
    """

    def __init__(self, settings: StepSettings, layers: int | None = None) -> None:
        check_supported(settings)
        self.settings = settings
        shape = first_layers(named_shape(settings.size), layers)
        self.decoder = _decoder(shape, settings)
        self.ids_BT, self.labels_BT = _tokens(settings, shape.vocab_size)
        self.compiled_loss: Callable[[], torch.Tensor] | None = None
        """`plain_loss`, compiled by `trimtab.lab.study_modes`; `loss` calls it if it is set."""

    @cached_property
    def optimizer(self) -> AdamW:
        """Created at the first update: a step without updates needs no memory for optimizer states."""
        return AdamW(self.decoder.named_parameters(), lr=LEARNING_RATE)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """All parameters; all are trainable."""
        return list(self.decoder.parameters())

    def loss(self) -> torch.Tensor:
        """The loss of the batch, compiled or not."""
        return self.plain_loss() if self.compiled_loss is None else self.compiled_loss()

    def plain_loss(self) -> torch.Tensor:
        """The loss of the batch, in the precision of the surrounding `computing`."""
        settings = self.settings
        if settings.loss is Loss.CROSS_ENTROPY and settings.kernels is Kernels.FAST:
            return self.decoder.loss(self.ids_BT, self.labels_BT, reduction="mean")
        logits_BTV = self.decoder.logits(self.decoder(self.ids_BT))
        if settings.loss is Loss.LOGITS_SUM:
            return logits_BTV.sum()
        return F.cross_entropy(logits_BTV.flatten(0, 1), self.labels_BT.flatten())

    def forward(self) -> torch.Tensor:
        """Forward pass that saves activations for backward."""
        with self.computing():
            return self.loss()

    @torch.no_grad()
    def inference(self) -> torch.Tensor:
        """Forward pass that saves nothing."""
        with self.computing():
            return self.loss()

    def backward(self, loss: torch.Tensor) -> None:
        """Backward pass of a loss from `forward`; gradients are accumulated into `.grad`."""
        with self._products():
            loss.backward()

    def forward_backward(self) -> None:
        """Forward and backward pass; gradients are accumulated into `.grad`."""
        self.backward(self.forward())

    def update(self) -> None:
        """Optimizer step, which also frees the gradients."""
        self.optimizer.step()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Frees the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def full_step(self) -> None:
        """Forward, backward and optimizer step."""
        self.forward_backward()
        self.update()

    def prepared(self, part: TimedPart) -> Callable[[], Run]:
        """The function to call before each timed run of a part; it returns the run.

        It frees the gradients of the previous run, so that none accumulate and the run does not time that.

        Example:
            >>> step = StudyStep(StepSettings("tiny", context=16, batch=2))
            >>> backward = step.prepared(TimedPart.BACKWARD)()    # a forward pass has run
            >>> backward()                                   # the timed run
        """

        def forward() -> Run:
            return self.forward

        def backward() -> Run:
            self.drop_gradients()
            loss = self.forward()
            return lambda: self.backward(loss)

        def both() -> Run:
            self.drop_gradients()
            return self.forward_backward

        def full() -> Run:
            self.drop_gradients()
            return self.full_step

        return {
            TimedPart.FORWARD: forward,
            TimedPart.BACKWARD: backward,
            TimedPart.FORWARD_BACKWARD: both,
            TimedPart.FULL: full,
        }[part]

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Applies the settings' precision to a forward pass inside."""
        precision, device = self.settings.precision, self.settings.device.split(":")[0]
        cast: Any = contextlib.nullcontext()
        if precision.is_mixed:
            cast = torch.autocast(device, dtype=torch_dtype(precision.value))
        with self._products(), cast:
            yield

    @contextlib.contextmanager
    def _products(self) -> Iterator[None]:
        """Selects TF32 or full fp32 for fp32 products inside, in forward and backward."""
        before = torch.get_float32_matmul_precision()
        tf32 = self.settings.precision is Precision.TF32
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


def check_supported(settings: StepSettings) -> None:
    """Raises NotSupported for a precision that the device does not support."""
    cuda = settings.device.startswith("cuda")
    if settings.precision is Precision.TF32 and not (cuda and torch.cuda.get_device_capability() >= (8, 0)):
        raise NotSupported("TF32 needs an NVIDIA GPU with compute capability 8.0 or newer")
    if settings.precision is Precision.BF16 and cuda and torch.cuda.get_device_capability() < (8, 0):
        raise NotSupported("bf16 needs a GPU with compute capability 8.0 or newer")


def _decoder(shape: ModelShape, settings: StepSettings) -> Decoder:
    """A decoder with random weights, drawn on the device: only their range matters."""
    attention = ["reference"] * shape.num_layers
    pointwise, loss_impl = "reference", "chunked"
    if settings.kernels is Kernels.FAST:
        attention = [_attention(shape, layer, settings) for layer in range(shape.num_layers)]
        triton = runs_triton(torch.device(settings.device))
        pointwise = choose_pointwise(triton=triton, autocast=settings.precision.is_mixed).impl
        loss_impl = "triton" if triton else loss_impl
    precision = settings.precision
    decoder = build_eager_model(
        shape,
        settings.device,
        dtype=precision.value if precision.is_mixed else "fp32",
        weights_dtype="fp32",
        attention=attention,
        pointwise=pointwise,
        loss_impl=loss_impl,
    )
    generator = torch.Generator(settings.device).manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith(".bias"):
                parameter.zero_()
            else:
                parameter.normal_(0.0, shape.initializer_range, generator=generator)
    return decoder.train()


def _attention(shape: ModelShape, layer: int, settings: StepSettings) -> str:
    cuda = settings.device.startswith("cuda")
    window = shape.window(layer)
    return choose_attention(
        device="cuda" if cuda else "cpu",
        capability=torch.cuda.get_device_capability() if cuda else None,
        dtype=settings.precision.value if settings.precision.is_mixed else "fp32",
        head_dim=shape.blocks[layer].attention.head_dim,
        packed=False,
        window=window if window is not None and window < settings.context else None,
        training=True,
        tokens=settings.context,
        triton=runs_triton(torch.device(settings.device)),
    ).impl


def _tokens(settings: StepSettings, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    ids_BT = torch.randint(vocab_size, (settings.batch, settings.context + 1), generator=generator)
    ids_BT = ids_BT.to(settings.device)
    return ids_BT[:, :-1].contiguous(), ids_BT[:, 1:].contiguous()
