"""What each recompute policy would save and cost, for one job on one device: the figures that a choice rests on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trimtab.adapt import spec_recompute
from trimtab.adapt.spec_recompute import POLICIES
from trimtab.facts.devices import DeviceFacts
from trimtab.model import spec as model_spec
from trimtab.plan import memory_search
from trimtab.plan.job import Job
from trimtab.plan.layers import layer_bytes


@dataclass(frozen=True)
class PolicyCost:
    """One policy in one layer, for one microbatch."""

    policy: str
    kept: int
    """Bytes on the device from the layer's forward pass to its backward."""
    saved: int
    """Bytes that `none` keeps there and this policy does not."""
    host: int
    """Bytes of the host's memory instead."""
    arithmetic: float
    """What is computed again, as a share of the layer's forward and backward pass."""
    seconds: float | None
    """What that takes, memory traffic and copies that are not hidden included, by the device's ceilings; None where
    they are not known."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def policy_costs(job: Job, device: DeviceFacts) -> list[PolicyCost]:
    """A row for each policy, with the job's own number of tiles.

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> shape = uniform_shape("qwen3", 151936, 1024, 3072, 28, num_heads=16, num_kv_heads=8, head_dim=128)
        >>> job = Job(shape, batch=4, tokens=1024, accumulation=1, dtype="bf16", weights_dtype="bf16",
        ...           gradient_dtype="bf16", optimizer="adamw_8bit", attention="triton", device="cuda",
        ...           pointwise="triton")
        >>> gpu = DeviceFacts("NVIDIA H200", "cuda", 150 * 10**9, capability=(9, 0), bf16=True)
        >>> for row in policy_costs(job, gpu)[:4]:
        ...     print(f"{row.policy}: {row.saved / 2**20:.0f} MiB less, {row.arithmetic:.0%} more")
        none: 0 MiB less, 0% more
        pointwise: 40 MiB less, 0% more
        selective: 128 MiB less, 23% more
        block: 144 MiB less, 27% more
    """
    plain = layer_bytes(job, "none").kept
    whole = _arithmetic(job)
    known = device.ceiling(job.dtype) is not None
    seconds = memory_search.policy_seconds(job, memory_search.rates_of(device, job.dtype))
    rows = []
    for policy in POLICIES:
        held = layer_bytes(job, policy)
        again = spec_recompute.again(job.shape, policy, job.tokens, dtype=job.dtype, mlp_tiles=job.mlp_tiles)
        rows.append(
            PolicyCost(
                policy,
                kept=held.kept,
                saved=plain - held.kept,
                host=held.host,
                arithmetic=(again.products + again.attention) / whole,
                seconds=seconds[policy] if known else None,
            )
        )
    return rows


def cost_of(rows: Sequence[PolicyCost], policies: Sequence[str]) -> tuple[int, float | None]:
    """(bytes saved, seconds added or None) of an assignment, over all its layers.

    Example:
        >>> rows = [PolicyCost("none", 8, 0, 0, 0.0, 0.0), PolicyCost("block", 1, 7, 0, 0.25, 0.5)]
        >>> cost_of(rows, ["block", "block", "none"])
        (14, 1.0)
    """
    of = {row.policy: row for row in rows}
    seconds = [of[policy].seconds for policy in policies]
    saved = sum(of[policy].saved for policy in policies)
    return saved, None if None in seconds else sum(s for s in seconds if s is not None)


def _arithmetic(job: Job) -> float:
    """FLOPs of a layer's forward and backward pass, a token; frozen products have no gradients of their own."""
    shape, tokens = job.shape, job.tokens
    passes = 3 if job.lora is None else 2
    attention = sum(model_spec.attention_flops(shape, 0, tokens, backward=way) for way in (False, True))
    return passes * model_spec.product_flops(shape) + attention
