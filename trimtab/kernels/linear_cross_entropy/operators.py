"""The Triton implementation as torch operators, and the function behind impl="triton".

linear_cross_entropy_summed     Σ scale · loss with its gradients; differentiable: its backward scales them
linear_cross_entropy_losses     scale · loss per token, and lse and nll; its backward is the next operator
linear_cross_entropy_gradients  gradients of hidden, weight and bias for known lse and nll
linear_cross_entropy_partials   the row statistics of a vocabulary shard (`shards.py`)
linear_cross_entropy_scale_     x ← x · factor
"""

# N tokens, C hidden size, V vocabulary, S parts of a row

from __future__ import annotations

from typing import Any

import torch

from trimtab.facts.errors import ModelError
from trimtab.kernels.launching import once_differentiable
from trimtab.kernels.linear_cross_entropy import impl_triton
from trimtab.kernels.linear_cross_entropy.inputs import token_scales
from trimtab.kernels.linear_cross_entropy.objective import Objective
from trimtab.kernels.linear_cross_entropy.schedule import schedule

Tensor = torch.Tensor
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_INPUTS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor labels"
_OBJECTIVE = "float label_smoothing, float z_loss, float softcap"
_WANTED = "bool hidden_grad, bool weight_grad, bool bias_grad, ScalarType weight_grad_dtype"

torch.library.define(
    "trimtab::linear_cross_entropy_summed",
    f"({_INPUTS}, Tensor scale, {_OBJECTIVE}, int rows, {_WANTED}) -> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "trimtab::linear_cross_entropy_losses",
    f"({_INPUTS}, Tensor scale, {_OBJECTIVE}, int rows, int scratch_bytes, ScalarType weight_grad_dtype)"
    " -> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "trimtab::linear_cross_entropy_gradients",
    f"(Tensor scale, {_INPUTS}, Tensor lse, Tensor nll, {_OBJECTIVE}, int first, int vocabulary,"
    f" int scratch_bytes, {_WANTED}) -> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "trimtab::linear_cross_entropy_partials", f"({_INPUTS}, float softcap, int first, int rows) -> Tensor"
)
torch.library.define("trimtab::linear_cross_entropy_scale_", "(Tensor(a!) x, Tensor factor) -> ()")
torch.library.impl("trimtab::linear_cross_entropy_scale_", ("cpu", "cuda"), impl_triton.scale_)


@torch.library.impl("trimtab::linear_cross_entropy_summed", ("cpu", "cuda"))
def _summed(  # type: ignore[no-untyped-def]
    hidden, weight, bias, labels, scale, smoothing, z_loss, softcap, rows, of_hidden, of_weight, of_bias, kind
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    objective, wanted = Objective(smoothing, z_loss, softcap), (of_hidden, of_weight, of_bias)
    return impl_triton.summed(hidden, weight, bias, labels, scale, objective, rows, wanted, kind)


@torch.library.impl("trimtab::linear_cross_entropy_losses", ("cpu", "cuda"))
def _losses(  # type: ignore[no-untyped-def]
    hidden, weight, bias, labels, scale, smoothing, z_loss, softcap, rows, scratch_bytes, kind
) -> tuple[Tensor, Tensor, Tensor]:
    objective = Objective(smoothing, z_loss, softcap)
    return impl_triton.losses(hidden, weight, bias, labels, scale, objective, rows)


@torch.library.impl("trimtab::linear_cross_entropy_gradients", ("cpu", "cuda"))
def _gradients(  # type: ignore[no-untyped-def]
    scale,
    hidden,
    weight,
    bias,
    labels,
    lse,
    nll,
    smoothing,
    z_loss,
    softcap,
    first,
    vocabulary,
    scratch_bytes,
    *rest,
) -> tuple[Tensor, Tensor, Tensor]:
    *wanted, kind = rest
    objective = Objective(smoothing, z_loss, softcap)
    return impl_triton.gradients(
        scale,
        hidden,
        weight,
        bias,
        labels,
        lse,
        nll,
        objective,
        first,
        vocabulary,
        scratch_bytes,
        tuple(wanted),
        kind,
    )


@torch.library.impl("trimtab::linear_cross_entropy_partials", ("cpu", "cuda"))
def _partials(hidden, weight, bias, labels, softcap, first, rows) -> Tensor:  # type: ignore[no-untyped-def]
    parts_4NS = impl_triton.partials(hidden, weight, bias, labels, Objective(softcap=softcap), rows, first)
    return _merge_parts(parts_4NS)


def _merge_parts(parts_4NS: Tensor) -> Tensor:
    """Merges the partial sums of each row; returns partials_4N."""
    largest_NS, sums_NS, label_NS, total_NS = parts_4NS.unbind(0)
    largest_N = largest_NS.amax(-1)
    sums_N = (sums_NS * torch.exp(largest_NS - largest_N[:, None])).sum(-1)
    return torch.stack((largest_N, sums_N, label_NS.sum(-1), total_NS.sum(-1)))


@torch.library.register_fake("trimtab::linear_cross_entropy_scale_")
def _(x: Tensor, factor: Tensor) -> None:
    return None


@torch.library.register_fake("trimtab::linear_cross_entropy_summed")
def _(hidden, weight, bias, labels, scale, smoothing, z_loss, softcap, rows, *rest):  # type: ignore[no-untyped-def]
    shapes = _empty_gradients(hidden, weight, *rest)
    return (hidden.new_empty((), dtype=torch.float32), *shapes)


@torch.library.register_fake("trimtab::linear_cross_entropy_losses")
def _(hidden, weight, bias, labels, scale, smoothing, z_loss, softcap, rows, scratch_bytes, kind):  # type: ignore[no-untyped-def]
    return tuple(hidden.new_empty(hidden.shape[0], dtype=torch.float32) for _ in range(3))


@torch.library.register_fake("trimtab::linear_cross_entropy_gradients")
def _(  # type: ignore[no-untyped-def]
    scale,
    hidden,
    weight,
    bias,
    labels,
    lse,
    nll,
    smoothing,
    z_loss,
    softcap,
    first,
    vocabulary,
    scratch_bytes,
    *rest,
):
    return _empty_gradients(hidden, weight, *rest)


@torch.library.register_fake("trimtab::linear_cross_entropy_partials")
def _(hidden, weight, bias, labels, softcap, first, rows):  # type: ignore[no-untyped-def]
    return hidden.new_empty(4, hidden.shape[0], dtype=torch.float32)


def _empty_gradients(  # type: ignore[no-untyped-def]
    hidden, weight, of_hidden, of_weight, of_bias, kind
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        hidden.new_empty(hidden.shape if of_hidden else (0,)),
        hidden.new_empty(weight.shape, dtype=kind) if of_weight else hidden.new_empty(0),
        hidden.new_empty(weight.shape[0], dtype=torch.float32) if of_bias else hidden.new_empty(0),
    )


def _setup_sum_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:])
    ctx.wanted = inputs[9:12]


def _scale_gradients(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if upstream is None:
        return (None,) * 13
    # In place where no other backward will read them: this halves the memory, and is free if upstream is 1.
    # A retained (retain_graph) or traced graph gets copies.
    saved = ctx.saved_tensors
    plain = all(type(x) is Tensor for x in (*saved, upstream))
    again = not plain or torch._C._autograd._get_current_graph_task_keep_graph()
    out: list[Tensor | None] = []
    for wanted, x in zip(ctx.wanted, saved, strict=True):
        if not wanted:
            out.append(None)
        elif again:
            out.append((x * upstream).to(x.dtype))
        else:
            torch.ops.trimtab.linear_cross_entropy_scale_(x, upstream)
            out.append(x)
    return (*out, *(None,) * 10)


def _setup_losses_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    hidden, weight, bias, labels, scale, *ctx.objective, _, ctx.scratch_bytes, ctx.kind = inputs
    ctx.save_for_backward(hidden, weight, bias, labels, scale, *output[1:])


def _differentiate(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if upstream is None:
        return (None,) * 11
    hidden, weight, bias, labels, scale, lse, nll = ctx.saved_tensors
    wanted = ctx.needs_input_grad[:3]
    scale = (scale * upstream).contiguous()
    found = torch.ops.trimtab.linear_cross_entropy_gradients(
        scale,
        hidden,
        weight,
        bias,
        labels,
        lse,
        nll,
        *ctx.objective,
        0,
        weight.shape[0],
        ctx.scratch_bytes,
        *wanted,
        ctx.kind,
    )
    return (*(x if want else None for want, x in zip(wanted, found, strict=True)), *(None,) * 8)


torch.library.register_autograd(
    "trimtab::linear_cross_entropy_summed", _scale_gradients, setup_context=_setup_sum_context
)
torch.library.register_autograd(
    "trimtab::linear_cross_entropy_losses", _differentiate, setup_context=_setup_losses_context
)
torch.library.register_autograd("trimtab::linear_cross_entropy_gradients", once_differentiable)
torch.library.register_autograd("trimtab::linear_cross_entropy_partials", once_differentiable)


def check_dtype(dtype: torch.dtype) -> None:
    """Raises for a dtype that the kernels do not support, such as fp64."""
    if dtype not in DTYPES:
        raise ModelError(
            f"the Triton loss supports bf16, fp16 and fp32, not {dtype}", "use impl='chunked' or 'reference'"
        )


def triton_loss(
    hidden_NC: Tensor,
    weight_VC: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    token_weights_N: Tensor | None,
    objective: Objective,
    *,
    ignore_index: int,
    by_token: bool,
    count: Tensor | None,
    memory_bytes: int | None,
    chunk_tokens: int | None,
    weight_gradient_dtype: torch.dtype,
) -> Tensor:
    """Σ weight · loss, divided by `count` where given, or one per token where `by_token`."""
    check_dtype(hidden_NC.dtype)
    # Divided in the forward, not through upstream: the backward then has nothing left to scale. Not in fp16, where
    # gradients of logits would lose precision.
    inside = count is not None and hidden_NC.dtype != torch.float16
    scale_N = token_scales(labels_N != ignore_index, token_weights_N, count if inside else None)
    over = None
    if token_weights_N is not None and hidden_NC.dtype == torch.float16:
        over = _overflow_factor(scale_N)
        scale_N = scale_N / over
    options = (objective.label_smoothing, objective.z_loss, objective.softcap)
    inputs = (hidden_NC, weight_VC, bias_V, labels_N.contiguous(), scale_N, *options)
    wanted = tuple(x is not None and x.requires_grad for x in (hidden_NC, weight_VC, bias_V))
    (N, C), V = hidden_NC.shape, weight_VC.shape[0]
    training = torch.is_grad_enabled() and any(wanted)
    plan = schedule(
        N,
        C,
        V,
        hidden_NC.element_size(),
        weight_gradient_dtype.itemsize,
        memory_bytes=memory_bytes,
        # Without gradients, losses per token use the chunks of the sum: their sum is bitwise identical to it.
        by_token=by_token and training,
        weight_grad=wanted[1],
    )
    rows = max(min(chunk_tokens or plan.rows, N), 1)
    if training and not by_token and (plan.strategy == "rows" or chunk_tokens is not None):
        loss = torch.ops.trimtab.linear_cross_entropy_summed(*inputs, rows, *wanted, weight_gradient_dtype)[0]
    else:
        loss = torch.ops.trimtab.linear_cross_entropy_losses(
            *inputs, rows, plan.scratch_bytes, weight_gradient_dtype
        )[0]
        loss = loss if by_token else loss.sum()
    if over is not None:
        loss = loss * over
    out: Tensor = loss if inside or count is None else loss / count
    return out


def _overflow_factor(scale_N: Tensor) -> Tensor:
    """Ratio of the largest token weight to the fp16 limit, at least 1; a device scalar.

    Dividing the weights by it and multiplying the loss by it gives the same gradients: the backward multiplies them,
    in fp32. A NaN weight is left out: it affects only its own row.
    """
    sizes_N = scale_N.abs().nan_to_num(nan=0.0, posinf=0.0)
    largest = torch.cat((sizes_N, sizes_N.new_zeros(1))).amax()
    return (largest / impl_triton.MAX_FP16_TOKEN_WEIGHT).clamp(min=1.0)
