"""Kernels and optimizers called from Python: names of implementations, formats, and 4-bit weights in files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import torch
from cases import World, case, in_turn, listed, settings

from trimtab.facts.errors import ModelError, ResourceError
from trimtab.kernels import int8, nf4
from trimtab.kernels.adamw8bit.choice import choose_adamw8bit
from trimtab.kernels.attention import Layout, attention
from trimtab.kernels.attention.choice import choose_attention
from trimtab.kernels.gated_mlp import gated_activation
from trimtab.kernels.linear_cross_entropy import linear_cross_entropy
from trimtab.kernels.linear_cross_entropy.shards import (
    PLAIN,
    combine_partials,
    shard_gradients,
    shard_partials,
)
from trimtab.kernels.linear_loss import linear_loss
from trimtab.kernels.nf4.layout import STATE
from trimtab.kernels.rms_norm import rms_norm
from trimtab.kernels.rope import rope
from trimtab.kernels.weighted_sum import weighted_sum
from trimtab.optim import AdamW
from trimtab.optim.by_name import build
from trimtab.optim.in_backward import OptimizerInBackward

GPU_ONLY = re.compile("CUDA|GPU|Triton|interpret|cuda|soft cap")


def known(attempt: Callable[[str], object], names: list[str]) -> None:
    """Each name is an implementation's: it runs, or says what this machine lacks for it. The first runs anywhere."""
    attempt(names[0])
    for name in names[1:]:
        if name == "flex":  # compiles for a quarter of a minute; tests/kernels runs it
            continue
        try:
            attempt(name)
        except (ModelError, ResourceError) as error:
            refused = error.cause
        else:
            continue
        assert GPU_ONLY.search(refused), refused


def offers(key: str, attempt: Callable[[str], object], after: str = "one of") -> None:
    """A case of an unknown name: those that are offered instead are known."""
    case(key, lambda w: attempt("unknown"), lambda w, remedy: known(attempt, listed(remedy, after)))


HIDDEN, HEAD, LABELS = torch.ones(3, 4), torch.ones(8, 4), torch.tensor([1, -100, 7])
Q = torch.randn(1, 8, 2, 8)


def attend(impl: str, layout: Layout | None = None, **options: Any) -> object:
    return attention(Q, Q, Q, layout=layout or Layout.causal(), impl=impl, **options)


offers("kernels/attention/__init__.py:_dispatch: use one of {}", attend)
for lacking, options in (
    ("sdpa_flash", {"softcap": 5.0}),
    ("flex", {"causal": False}),
    ("varlen", {"offset": 3}),
    ("sdpa_math", {"sinks_H": torch.zeros(2)}),
    ("sdpa_flash", {"return_lse": True}),
):
    case(
        "kernels/attention/__init__.py:_check_supported: use one of {}",
        lambda w, impl=lacking, options=options: attend(impl, **options),
        lambda w, remedy, options=options: known(
            lambda impl: attend(impl, **options), listed(remedy, "one of")
        ),
    )
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2]])
case(
    "kernels/attention/layout.py:Layout._check: with a key/value cache give the documents of all keys, or "
    "Layout.causal()",
    lambda w: attention(Q[:, :1], Q, Q, layout=Layout.packed(DOCUMENTS[:, :4]), impl="reference"),
    lambda w, remedy: (
        attention(Q[:, :1], Q, Q, layout=Layout.packed(DOCUMENTS), impl="reference"),
        attention(Q[:, :1], Q, Q, layout=Layout.causal(), impl="reference"),
    ),
)


def training(impl: str) -> None:
    q = Q.clone().requires_grad_()
    attention(q, q, q, layout=Layout.causal(), impl=impl).sum().backward()


def last_name(remedy: str) -> str:
    return re.findall(r"use (\w+)", remedy)[0]


case(
    "kernels/attention/impl_flex.py:attention_flex: use sdpa_flash to train there",
    lambda w: training("flex"),
    lambda w, remedy: training(last_name(remedy)),
)
for key, name in (
    ("kernels/attention/impl_sdpa.py:attention_sdpa: use sdpa_flash on a CPU", "sdpa_cudnn"),
    (
        "kernels/attention/impl_varlen.py:attention_varlen: use sdpa_flash on a CPU, sdpa_efficient for fp32 on a GPU",
        "varlen",
    ),
    ("kernels/attention/launch_triton.py:check: use sdpa_flash on a CPU", "triton"),
):
    case(key, lambda w, name=name: attend(name), lambda w, remedy: attend(last_name(remedy)))


def named_attention(w: World, name: str) -> str:
    return w.plan(f"model.attn_implementation={name}")


case(
    "kernels/attention/choice.py:choose_attention: use auto (here: {})",
    lambda w: named_attention(w, "sdpa_cudnn"),
    lambda w, remedy: (
        in_turn(lambda name: named_attention(w, name), re.findall(r"auto|here: (\w+)", remedy)[1:])
        or named_attention(w, "auto")
    ),
)


def chosen(name: str) -> object:
    facts = {"device": "cpu", "capability": None, "dtype": "fp32", "head_dim": 8, "window": None}
    return choose_attention(**facts, packed=True, training=True, requested=name)


case(
    "kernels/attention/choice.py:choose_attention: use auto or one of {}",
    lambda w: chosen("unknown"),
    lambda w, remedy: (chosen("auto"), known_choices(listed(remedy, "one of"))),
)


def known_choices(names: list[str]) -> None:
    for name in names:
        try:
            chosen(name)
        except ModelError as error:
            refused = error.cause
        else:
            continue
        assert "cannot be used here" in refused


GATES = torch.ones(2, 4), torch.ones(2, 4)
case(
    "kernels/gated_mlp/__init__.py:gated_activation: use one of {}",
    lambda w: gated_activation(*GATES, activation="relu"),
    lambda w, remedy: in_turn(
        lambda name: gated_activation(*GATES, activation=name), listed(remedy, "one of")
    ),
)
offers(
    "kernels/gated_mlp/__init__.py:gated_activation: use one of {}",
    lambda name: gated_activation(*GATES, impl=name),
)
offers(
    "kernels/linear_cross_entropy/__init__.py:linear_cross_entropy: use one of {}",
    lambda name: linear_cross_entropy(HIDDEN, HEAD, LABELS, impl=name),
)
offers(
    "kernels/linear_cross_entropy/shards.py:shard_partials: use one of {}",
    lambda name: shard_partials(HIDDEN, HEAD, LABELS, first=0, impl=name),
)


def sharded(name: str) -> object:
    numbers = combine_partials(shard_partials(HIDDEN, HEAD, LABELS, first=0)[None])
    return shard_gradients(
        torch.ones(3), HIDDEN, HEAD, LABELS, numbers, first=0, vocabulary=8, objective=PLAIN, impl=name
    )


offers("kernels/linear_cross_entropy/shards.py:shard_gradients: use one of {}", sharded)
case(
    "kernels/linear_cross_entropy/labels.py:check_labels: the labels come from a tokenizer with more tokens than the "
    "model's head; use the model's own tokenizer, and ignore_index for tokens without a target",
    lambda w: linear_cross_entropy(HIDDEN, HEAD, torch.tensor([1, 9, 7])),
    lambda w, remedy: (
        linear_cross_entropy(HIDDEN, HEAD, torch.tensor([1, 7, 7])),
        linear_cross_entropy(HIDDEN, HEAD, torch.tensor([1, -7, 7]), ignore_index=-7),
    ),
)


def wide(impl: str) -> object:
    return linear_cross_entropy(HIDDEN.double(), HEAD.double(), LABELS, impl=impl)


case(
    "kernels/linear_cross_entropy/operators.py:check_dtype: use impl='chunked' or 'reference'",
    lambda w: wide("triton"),
    lambda w, remedy: in_turn(wide, re.findall("'(.*?)'", remedy)),
)


def entropy(logits_nV: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
    return logits_nV.logsumexp(1) + sum(x for x in more)


offers(
    "kernels/linear_loss/__init__.py:linear_loss: use one of {}",
    lambda name: linear_loss(HIDDEN, HEAD, entropy, impl=name),
)
TOLD = torch.ones(3, requires_grad=True)
LEARNING = torch.ones(3, 4, requires_grad=True)
case(
    "kernels/linear_loss/impl_chunked.py:_check_captured: detach() it if it is a constant, or pass it per token",
    lambda w: linear_loss(LEARNING, HEAD, lambda logits_nV: entropy(logits_nV) * TOLD.sum()),
    lambda w, remedy: (
        linear_loss(LEARNING, HEAD, lambda logits_nV: entropy(logits_nV) * TOLD.detach().sum()),
        linear_loss(LEARNING, HEAD, entropy, TOLD),
    ),
)
offers(
    "kernels/rms_norm/__init__.py:_unknown_impl_error: use one of {}",
    lambda name: rms_norm(HIDDEN, torch.ones(4), 0.0, impl=name),
)
offers(
    "kernels/rope/__init__.py:rope: use one of {}",
    lambda name: rope(Q, Q, torch.ones(1, 8, 4), torch.ones(1, 8, 4), impl=name),
)
offers(
    "kernels/weighted_sum/__init__.py:weighted_sum: use one of {}",
    lambda name: weighted_sum(HIDDEN, torch.ones(4), impl=name),
)
case(
    "kernels/launching.py:check_device: use impl='reference' on this device",
    lambda w: weighted_sum(HIDDEN, torch.ones(4), impl="triton"),
    lambda w, remedy: weighted_sum(HIDDEN, torch.ones(4), impl=re.findall("'(.*?)'", remedy)[0]),
)


# 8 and 4 bits.
X = torch.randn(4, 128)
case(
    "kernels/int8/ops.py:quantize: use granularity {}; scheme {}",
    lambda w: int8.quantize(X, granularity="column"),
    lambda w, remedy: [
        int8.quantize(X, granularity=granularity, scheme=scheme)
        for granularity in listed(remedy, "granularity")
        for scheme in listed(remedy, "scheme")
    ],
)
case(
    "kernels/int8/ops.py:quantize: use 1 or more; 128 is usual",
    lambda w: int8.quantize(X, granularity="group", group=0),
    lambda w, remedy: in_turn(
        lambda size: int8.quantize(X, granularity="group", group=int(size)), re.findall(r"\d+", remedy)
    ),
)
BAD = X.clone()
BAD[0, 0] = float("nan")
case(
    "kernels/int8/ops.py:quantize: cast the tensor first",
    lambda w: int8.quantize(X.double()),
    lambda w, remedy: int8.quantize(X.double().float()),
)
case(
    "kernels/int8/ops.py:quantize: reload or recompute the tensor",
    lambda w: int8.quantize(BAD),
    lambda w, remedy: int8.quantize(X),
)
case(
    "kernels/nf4/ops.py:quantize: use one of {}",
    lambda w: nf4.quantize(X, block=48),
    lambda w, remedy: in_turn(lambda block: nf4.quantize(X, block=int(block)), listed(remedy, "one of")),
)
case(
    "kernels/nf4/ops.py:quantize: cast the tensor first",
    lambda w: nf4.quantize(X.double()),
    lambda w, remedy: nf4.quantize(X.double().float()),
)
case(
    "kernels/nf4/ops.py:dequantize: omit transposed=True",
    lambda w: nf4.dequantize(nf4.quantize(X[0]), transposed=True),
    lambda w, remedy: nf4.dequantize(nf4.quantize(X[0])),
)
case(
    "kernels/nf4/weight.py:check_finite: download the weights again, or load them in bf16 or fp32 if they overflow in "
    "fp16",
    lambda w: nf4.quantize((X * 1e6).half()),
    lambda w, remedy: (nf4.quantize(X), nf4.quantize((X * 1e6).bfloat16()), nf4.quantize(X * 1e6)),
)
case(
    "kernels/nf4/weight.py:check_finite: scale the weights down, or quantize without double quantization "
    "(double=False; in a recipe bnb_4bit_use_double_quant: false)",
    lambda w: nf4.quantize(X / X.abs().amax() * 3e38),
    lambda w, remedy: (nf4.quantize(X), nf4.quantize(X / X.abs().amax() * 3e38, double=False)),
)


def stored(change: Callable[[dict[str, torch.Tensor]], object] | None = None, **facts: Any) -> object:
    """A weight as bitsandbytes stores it, changed, and read; `...` takes a fact away."""
    state = nf4.quantize(X).to_bitsandbytes("weight")
    key = f"weight.{STATE}"
    known_facts = {**json.loads(bytes(state[key].tolist())), **facts}
    text = json.dumps({name: value for name, value in known_facts.items() if value is not ...}).encode()
    state[key] = torch.tensor(list(text), dtype=torch.uint8)
    if change is not None:
        change(state)
    return nf4.NF4Weight.from_bitsandbytes(state, "weight")


def damaged(
    key: str, change: Callable[[dict[str, torch.Tensor]], object] | None = None, **facts: Any
) -> None:
    """A file that is fetched again, or quantized again as it should be."""
    case(f"kernels/nf4/layout.py:{key}", lambda w: stored(change, **facts), lambda w, remedy: stored())


AGAIN = "download the file again"
damaged("read: convert it with bitsandbytes", lambda state: state["weight.quant_map"].zero_())
damaged("read: convert it again with bitsandbytes", nested_blocksize=3)
damaged("read: the file is incomplete: download it again", nested_offset=None)
damaged(f"_get_entry: {AGAIN}", lambda state: state.pop("weight.absmax"))
damaged(f"_check_tensor: {AGAIN}", lambda state: state.update({"weight.absmax": torch.ones(1)}))
NF4 = "quantize it again with quant_type nf4"
damaged(
    f"read_metadata: {NF4}",
    lambda state: state.update({"weight.quant_state.bitsandbytes__fp4": torch.ones(1)}),
)
damaged(f"read_metadata: {NF4}", quant_type="fp4")
text_of = f"weight.{STATE}"
damaged(f"read_metadata: {AGAIN}", lambda state: state.update({text_of: torch.ones(3)}))
damaged(
    f"read_metadata: {AGAIN}", lambda state: state.update({text_of: torch.tensor([1], dtype=torch.uint8)})
)
damaged(f"read_metadata: {AGAIN}", shape=...)
case(
    "kernels/nf4/layout.py:read_metadata: quantize it again with blocks of {}",
    lambda w: stored(blocksize=48),
    lambda w, remedy: in_turn(
        lambda block: nf4.NF4Weight.from_bitsandbytes(
            nf4.quantize(X, block=int(block)).to_bitsandbytes("w"), "w"
        ),
        listed(remedy, "blocks of"),
    ),
)
case(
    "kernels/nf4/layout.py:read_metadata: quantize it again from {}",
    lambda w: stored(dtype="float64"),
    lambda w, remedy: in_turn(
        lambda name: nf4.NF4Weight.from_bitsandbytes(
            nf4.quantize(X.to(getattr(torch, name))).to_bitsandbytes("w"), "w"
        ),
        listed(remedy, "again from"),
    ),
)


# Optimizers.
def layer(dtype: torch.dtype = torch.float32) -> torch.nn.Linear:
    return torch.nn.Linear(4, 4, dtype=dtype)


def adamw(module: torch.nn.Module | None = None, **options: Any) -> AdamW:
    named = list((layer() if module is None else module).named_parameters())
    return AdamW([{"params": named}], **{"lr": 1e-3, **options})


case(
    "optim/adamw.py:AdamWBase.__init__: give a number from 0 to below 1",
    lambda w: adamw(betas=(1.0, 0.9)),
    lambda w, remedy: adamw(betas=(float(re.findall(r"\d", remedy)[0]), 0.999)),
)
case(
    "optim/adamw.py:AdamWBase.__init__: give 0 or more",
    lambda w: adamw(lr=-1.0),
    lambda w, remedy: adamw(lr=float(re.findall(r"\d", remedy)[0])),
)
case(
    "optim/adamw.py:AdamW.__init__: use fp32, bf16 or weights",
    lambda w: adamw(state_dtype="fp16"),
    lambda w, remedy: in_turn(lambda name: adamw(state_dtype=name), listed(remedy, "use")),
)
case(
    "optim/adamw.py:AdamW._new_state: use state_dtype='weights', or adamw_torch",
    lambda w: adamw(layer(torch.bfloat16), fused=True),
    lambda w, remedy: (
        adamw(layer(torch.bfloat16), fused=True, state_dtype=re.findall("'(.*?)'", remedy)[0]),
        build(remedy.split()[-1], layer(torch.bfloat16).named_parameters(), lr=1e-3),
    ),
)
case(
    "optim/base.py:NamedOptimizer.__init__: unfreeze some, or check the names given",
    lambda w: build("adamw_torch", layer().requires_grad_(False).named_parameters(), lr=1e-3),
    lambda w, remedy: build("adamw_torch", layer().requires_grad_(True).named_parameters(), lr=1e-3),
)
case(
    "optim/base.py:NamedOptimizer.__init__: use fp32 or bf16 for trained weights",
    lambda w: adamw(layer(torch.float16)),
    lambda w, remedy: (adamw(layer(torch.float32)), adamw(layer(torch.bfloat16))),
)


def transposed(*, contiguous: bool) -> AdamW:
    p = torch.nn.Parameter(torch.ones(3, 2).t())
    if contiguous:
        p = torch.nn.Parameter(p.detach().contiguous())
    return AdamW([{"params": [("w", p)]}], lr=1e-3)


case(
    "optim/base.py:NamedOptimizer.__init__: pass contiguous parameters to the optimizer",
    lambda w: transposed(contiguous=False),
    lambda w, remedy: transposed(contiguous=True),
)
case(
    "optim/base.py:NamedOptimizer.restore_scalars: use an earlier checkpoint",
    lambda w: adamw().restore_scalars({}),
    lambda w, remedy: adamw().restore_scalars(adamw().scalars()),
)
case(
    "optim/base.py:NamedOptimizer.load_state_dict: load it into the optimizer and the model that it was saved from",
    lambda w: adamw().load_state_dict(adamw(torch.nn.Linear(2, 2)).state_dict()),
    lambda w, remedy: adamw().load_state_dict(adamw().state_dict()),
)
case(
    "optim/by_name.py:build: choose one of {}",
    lambda w: build("lion", layer().named_parameters(), lr=1e-3),
    lambda w, remedy: in_turn(
        lambda name: build(name, layer().named_parameters(), lr=1e-3), listed(remedy, "one of")
    ),
)


def twice(*, begun: bool) -> None:
    module = layer()
    steps = OptimizerInBackward(adamw(module))
    for _ in range(2):
        if begun or steps.now is None:
            steps.begin()
        module(torch.ones(1, 4)).sum().backward()


case(
    "optim/in_backward.py:OptimizerInBackward._apply_gradient: call begin() before every backward(); an "
    "optimizer in the backward pass does not support gradient accumulation",
    lambda w: twice(begun=False),
    lambda w, remedy: twice(begun=True),
)


def eight_bit(w: World, name: str) -> str:
    return w.plan("optim=adamw_8bit", f"optim_implementation={name}")


case(
    "kernels/adamw8bit/choice.py:choose_adamw8bit: set optim_implementation: auto",
    lambda w: eight_bit(w, "triton"),
    lambda w, remedy: w.plan("optim=adamw_8bit", *settings(remedy)[0]),
)
offers(
    "kernels/adamw8bit/choice.py:choose_adamw8bit: choose one of {}",
    lambda name: choose_adamw8bit(device="cuda", triton=True, requested=name),
)
case(
    "optim/adamw.py:as_groups: pass model.named_parameters()",
    lambda w: AdamW(layer().parameters(), lr=1e-3),
    lambda w, remedy: AdamW(eval(remedy.removeprefix("pass "), {"model": layer()}), lr=1e-3),
)
