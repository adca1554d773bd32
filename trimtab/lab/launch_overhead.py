"""Measures the host time per operation in eager mode, with a block so small that its kernels take almost no time."""

from __future__ import annotations

import statistics

import torch

from trimtab.facts.blocks import BlockShape
from trimtab.facts.devices import DeviceFacts
from trimtab.facts.operations import OperationKind
from trimtab.facts.shapes import uniform_shape
from trimtab.kernels.attention import Layout
from trimtab.lab.eager_model import build_eager_model
from trimtab.lab.probes_blocks import KernelChoices
from trimtab.lab.timing import time_once
from trimtab.model import init_weights
from trimtab.model.spec_block import block_operations
from trimtab.model.spec_operations import Execution

TOKENS = 16
HEAD_DIM = {"cpu": 8, "cuda": 64}
"""Small, so that arithmetic takes little time; every attention backend of a GPU supports 64."""
REPEATS = 25


def launch_seconds(device: DeviceFacts, dtype: str) -> float:
    """Host seconds per declared launch, forward and backward, Python, autograd and dispatcher included.

    Example:
        >>> 0 < launch_seconds(DeviceFacts("a CPU", "cpu", 2**30), "fp32") < 0.1
        True
    """
    choices = KernelChoices(device, dtype)
    head_dim = HEAD_DIM[device.kind]
    impl = choices.attention(head_dim, TOKENS, packed=False)
    shape = uniform_shape(
        "llama",
        vocab_size=64,
        hidden_size=4 * head_dim,
        intermediate_size=8 * head_dim,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        max_positions=TOKENS,
    )
    decoder = build_eager_model(
        shape, device.kind, dtype=dtype, weights_dtype=dtype, attention=[impl], pointwise=choices.pointwise
    )
    block = init_weights(decoder, 0).model.layers[0]
    x_BTC = choices.random(1, TOKENS, shape.hidden_size).requires_grad_()
    positions_BT = torch.arange(TOKENS, device=device.kind)[None]
    cos_BTF, sin_BTF = next(iter(decoder.rotary.values())).cos_sin(positions_BT, x_BTC.dtype, None)
    layout = Layout.causal().as_prepared(impl, device.kind, TOKENS, B=1, dtype=x_BTC.dtype)
    gradient_BTC = torch.ones_like(x_BTC)

    def step() -> None:
        # as between optimizer steps: otherwise gradients would accumulate
        block.zero_grad(set_to_none=True)
        block(x_BTC, cos_BTF, sin_BTF, layout).backward(gradient_BTC)

    times = [time_once(step, device.kind) for _ in range(REPEATS)][REPEATS // 5 :]
    return statistics.median(times) / _declared_launches(shape.blocks[0], shape.hidden_size, choices, impl)


def _declared_launches(block: BlockShape, hidden_size: int, choices: KernelChoices, impl: str) -> int:
    """Declared launches of forward and backward, with all weights trainable."""
    run = Execution(1, TOKENS, choices.dtype, impl, device=choices.kind, pointwise=choices.pointwise)
    total = 0
    for operation in block_operations(block, hidden_size, run):
        total += operation.forward.launches + operation.backward.launches
        total += operation.parameter_backward.launches if operation.kind is OperationKind.PRODUCT else 0
    return total
