"""Memory savings and costs of each recompute policy, for one job on one device."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from trimtab.adapt.spec_recompute import POLICIES, recompute_cost
from trimtab.facts.devices import DeviceFacts
from trimtab.plan import memory_search
from trimtab.plan.device_rates import rates_of
from trimtab.plan.job import Job
from trimtab.plan.layers import declared_blocks, layer_memory, num_tiles
from trimtab.plan.time import training_flops


@dataclass(frozen=True)
class PolicyCost:
    """Savings and costs of a policy in one layer, for one microbatch."""

    policy: str
    kept: int
    """Bytes of saved activations on the device, from the layer's forward pass to its backward."""
    saved: int
    """Bytes saved on the device compared with `none`."""
    host: int
    """Bytes of offloaded activations in host memory."""
    arithmetic: float
    """FLOPs of recomputation, as a share of the layer's forward and backward pass."""
    seconds: float | None
    """Extra seconds at the device's rates, including memory traffic and copies that are not hidden; None if the rates
    are unknown."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def policy_costs(job: Job, device: DeviceFacts) -> list[PolicyCost]:
    """Returns a row per policy for the most common kind of layer, with the job's number of tiles.

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
    blocks = declared_blocks(job)
    longest_run = max(range(len(blocks)), key=lambda run: len(blocks[run][1]))
    block = blocks[longest_run][0]
    saved_by_none = layer_memory(job, block, "none").on_device
    layer_flops = training_flops([block])
    has_rates = rates_of(device, job.dtype) is not None
    seconds = memory_search.policy_seconds(job, memory_search.search_rates(device, job.dtype))[longest_run]
    rows = []
    for policy in POLICIES:
        memory = layer_memory(job, block, policy)
        recomputed = recompute_cost(block, policy, num_tiles(job))
        rows.append(
            PolicyCost(
                policy,
                kept=memory.on_device,
                saved=saved_by_none - memory.on_device,
                host=memory.host,
                arithmetic=(recomputed.products + recomputed.attention) / layer_flops,
                seconds=seconds[policy] if has_rates else None,
            )
        )
    return rows
