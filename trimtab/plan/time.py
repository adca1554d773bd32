"""Arithmetic of a run, and its seconds where they can be told honestly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trimtab.adapt import spec as adapt_spec
from trimtab.adapt import spec_recompute
from trimtab.adapt.spec import LoraSettings
from trimtab.facts.devices import DeviceFacts
from trimtab.facts.shapes import ModelShape
from trimtab.model import spec as model_spec


@dataclass(frozen=True)
class Time:
    """FLOPs a token, forward and backward with attention and head, and what they take."""

    flops_per_token: float
    flops: float | None
    """Of the whole run; None where the number of tokens is unknown."""
    floor_seconds: float | None
    """The device's ceiling all the time: no run can be faster."""
    seconds: float | None
    """An estimate; None unless it was measured which share of the ceiling training reaches."""
    basis: str
    """Where `seconds` and `floor_seconds` come from, or why there are none."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def flops_per_token(
    shape: ModelShape,
    tokens: int,
    layers: Sequence[str],
    *,
    mlp_tiles: int = 1,
    lora: LoraSettings | None = None,
) -> float:
    """FLOPs per token of forward, backward and recomputation; the arguments are those of `estimate`."""
    per_token = model_spec.flops_per_token(shape, tokens)
    if lora is not None:
        per_token += adapt_spec.flops_per_token(shape, lora) - adapt_spec.frozen_flops_per_token(shape, lora)
    for layer, policy in enumerate(layers):
        again = spec_recompute.again(shape, policy, tokens, layer=layer, mlp_tiles=mlp_tiles)
        per_token += again.products + again.attention
    return per_token


def estimate(
    shape: ModelShape,
    device: DeviceFacts,
    *,
    dtype: str,
    tokens: int,
    processed: int | None,
    layers: Sequence[str],
    mlp_tiles: int = 1,
    num_devices: int = 1,
    lora: LoraSettings | None = None,
) -> Time:
    """Time of a run.

    Args:
        shape: the model.
        device: with a measured or known ceiling, or without.
        dtype: the format computed in.
        tokens: tokens of a window; attention is counted as if each were one document, the most it can be.
        processed: tokens that pass through the model in the whole run, padding included; None if unknown.
        layers: the recompute policy of each layer.
        mlp_tiles: parts of the tokens that feed-forward halves are computed in.
        num_devices: devices that share the work.
        lora: the adapters, where the model's own weights have no gradients.
    """
    per_token = flops_per_token(shape, tokens, layers, mlp_tiles=mlp_tiles, lora=lora)
    flops = None if processed is None else per_token * processed
    ceiling = device.ceiling(dtype)
    if ceiling is None:
        return Time(per_token, flops, None, None, f"no known {dtype} arithmetic rate of {device.name}")
    rate, source = ceiling
    named = f"{rate / 1e12:.3g} TFLOP/s in {dtype} ({source})"
    if flops is None:
        return Time(per_token, None, None, None, f"{named}; the number of tokens is not known yet")
    floor = flops / (rate * num_devices)
    if device.utilization is None:
        return Time(
            per_token, flops, floor, None, f"{named}; which share of it training reaches is not measured"
        )
    where = f" ({device.utilization_basis})" if device.utilization_basis else ""
    basis = f"{device.utilization:.0%} of {named}, as measured{where}"
    return Time(per_token, flops, floor, floor / device.utilization, basis)
