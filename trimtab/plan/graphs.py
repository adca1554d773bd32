"""Whether a run captures CUDA graphs, and whether their memory fits. Imports no torch.

A capture allocates from a memory pool of its own. While it runs, cached memory cannot be returned to the driver, and
afterwards the optimizer step cannot use the pool. So the memory that the allocator reserves (`plan.reserved`) has to
fit, whereas an eager step needs only the peak of its tensors: it frees cached memory before an allocation fails.
"""

from __future__ import annotations

from collections.abc import Callable

from trimtab.facts.devices import DeviceFacts
from trimtab.facts.errors import RecipeError
from trimtab.facts.units import format_bytes
from trimtab.plan.job import Job
from trimtab.plan.memory import BYTES_OUTSIDE_ALLOCATOR, CUBLAS_BYTES, Moment, Phase, predict
from trimtab.plan.memory_search import MemorySetting
from trimtab.plan.reserved import reserved_memory
from trimtab.plan.resolved import CudaGraphsConfig
from trimtab.plan.time import flops_per_token
from trimtab.recipe.keys import Recipe

MAX_MICROBATCH_SECONDS = 2.0
"""CUDA graphs are not captured if a microbatch's arithmetic takes longer: the GPU is busy while the host launches
the next kernels. Launching the 7700 kernels of an 8B model with adapters and recomputed layers took 0.9 s (H200)."""

MAX_POOL_RATIO = 2
"""A capture is taken to fit, without simulating its allocations, if it would fit with a pool this many times as large
as its tensors. The simulation takes about a millisecond per layer; the largest ratio of 80 simulated jobs was 1.13."""

MAX_SEARCHES = 3
"""Further memory searches for a setting with which CUDA graphs fit."""

SEARCH_MARGIN = 0.005
"""Share of the limit that such a setting leaves free. The errors of the predicted reserved memory of 35 measured runs
had a median of 0.1 % and a maximum of 4.3 %."""


def requested_graphs(recipe: Recipe, job: Job, device: DeviceFacts) -> CudaGraphsConfig:
    """Returns whether CUDA graphs are captured if their memory fits.

    Raises RecipeError for `cuda_graphs: true` if they cannot be captured.

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> from trimtab.recipe import loads
        >>> tiny = uniform_shape("llama", 512, 64, 128, 2, num_heads=4, num_kv_heads=2, head_dim=16)
        >>> job = Job(tiny, 2, 64, 1, "bf16", "bf16", "bf16", "adamw_8bit", "triton", "cuda", pointwise="triton")
        >>> gpu = DeviceFacts("NVIDIA H200", "cuda", 150 * 10**9, capability=(9, 0), bf16=True)
        >>> requested_graphs(loads("model: a\\ndata: {train: x}"), job, gpu).enabled
        True
    """
    obstacle = _find_obstacle(recipe, job, device)
    if recipe.cuda_graphs is True:
        if obstacle is not None:
            raise RecipeError(f"cuda_graphs: true is not possible here: {obstacle}", "set cuda_graphs: auto")
        return CudaGraphsConfig(True, "set in the recipe")
    if recipe.cuda_graphs is False:
        return CudaGraphsConfig(False, "set in the recipe")
    if obstacle is not None:
        return CudaGraphsConfig(False, obstacle)
    ceiling = device.ceiling(job.dtype)
    if ceiling is not None:
        flops = flops_per_token(job)
        seconds = flops * job.batch * job.tokens / ceiling[0]
        if seconds > MAX_MICROBATCH_SECONDS:
            reason = (
                f"a microbatch takes {seconds:.1f} s at least, so the overhead of kernel launches is hidden"
            )
            return CudaGraphsConfig(False, reason)
    return CudaGraphsConfig(True, "forward and backward of a microbatch take one launch instead of thousands")


def resolve_cuda_graphs(
    recipe: Recipe, job: Job, device: DeviceFacts, limit: int, basis: str
) -> CudaGraphsConfig:
    """Returns whether forward and backward of a job, whose memory plan is known, are captured as CUDA graphs.

    Results are identical either way, so a resumed run may decide differently.

    Args:
        recipe: the recipe; `cuda_graphs: true` is not turned off for want of memory (`plan.fit` refuses such a run).
        job: the job with its recompute policies, tiles and loss memory.
        device: the device of the run.
        limit: bytes on the device, including the CUDA context.
        basis: a description of the limit.
    """
    requested = requested_graphs(recipe, job, device)
    if not requested.enabled or recipe.cuda_graphs is True:
        return requested
    lacking = graphs_shortfall(job, limit, capped=recipe.memory_limit is not None)
    return requested if lacking == 0 else graphs_do_not_fit(limit, lacking, basis)


def graphs_do_not_fit(limit: int, lacking: int, basis: str) -> CudaGraphsConfig:
    """Returns the configuration without CUDA graphs for which `lacking` bytes are missing.

    Example:
        >>> graphs_do_not_fit(7 * 2**30, 2**29, "memory_limit: 7GiB").reason
        'CUDA graphs would not fit memory_limit: 7GiB: with the memory that they reserve, the run would take 7.50 GiB'
    """
    needed = format_bytes(limit + lacking, up=True)
    reason = (
        f"CUDA graphs would not fit {basis}: with the memory that they reserve, the run would take {needed}"
    )
    return CudaGraphsConfig(False, reason)


def graphs_shortfall(job: Job, limit: int, *, capped: bool = False) -> int:
    """Returns the bytes by which the memory reserved with CUDA graphs exceeds a limit; 0 if it fits.

    Also 0 if not even an eager step fits: such a job is judged as with enough memory.

    Args:
        job: the job with its memory plan.
        limit: bytes on the device, including the CUDA context.
        capped: whether the allocator itself has the limit (`memory_limit`), not only the device. It then demands the
            whole size of a new block, of which an expandable segment may already hold a part.

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> tiny = uniform_shape("llama", 512, 64, 128, 2, num_heads=4, num_kv_heads=2, head_dim=16)
        >>> job = Job(tiny, 2, 64, 1, "bf16", "bf16", "bf16", "adamw_8bit", "triton", "cuda", pointwise="triton")
        >>> reserved = reserved_memory(job, graphs=True).process
        >>> graphs_shortfall(job, reserved), graphs_shortfall(job, reserved - 1000)
        (0, 1000)
    """
    memory, allowed = predict(job), limit - BYTES_OUTSIDE_ALLOCATOR[job.device]
    if memory.needed > limit:
        return 0
    update = memory.moments[Moment(Phase.OPTIMIZER_STEP)]
    pool = memory.forward_backward + CUBLAS_BYTES[job.device]
    if memory.before.total + update + MAX_POOL_RATIO * pool <= allowed:
        return 0
    if not capped:
        return max(reserved_memory(job, graphs=True).reserved - allowed, 0)
    simulated = reserved_memory(job, graphs=True, limit=allowed)
    return max(simulated.reserved - allowed, simulated.claimed - allowed, 0)


def find_setting_for_graphs(
    first: MemorySetting,
    lacking: int,
    limit: int,
    search: Callable[[int], tuple[MemorySetting, bool]],
    shortfall: Callable[[MemorySetting, int], int],
) -> tuple[MemorySetting, bool] | None:
    """Returns the result of the first search whose setting fits with CUDA graphs; None if none was found.

    Its reserved memory leaves `SEARCH_MARGIN` of the limit free: a slower setting is not worth a capture that runs out
    of memory because the simulation is off by a few MiB. The first setting needs no margin.

    Args:
        first: the fastest setting, with which graphs do not fit.
        lacking: its `graphs_shortfall`.
        limit: bytes on the device, including the process itself.
        search: returns (the fastest setting that needs at most these bytes, True), or (the lowest-memory setting,
            False) if none does.
        shortfall: the `graphs_shortfall` of a setting with a limit.
    """
    margin = int(SEARCH_MARGIN * limit)
    before, lacking, limit = first, lacking + margin, limit - margin
    for _ in range(MAX_SEARCHES):
        setting, fits = search(before.needed - lacking)
        if setting.needed > limit or setting == before:
            return None
        lacking = shortfall(setting, limit)
        if lacking == 0:
            return setting, fits
        if not fits:
            return None
        before = setting
    return None


def _find_obstacle(recipe: Recipe, job: Job, device: DeviceFacts) -> str | None:
    if device.kind != "cuda":
        return "CUDA graphs need a CUDA GPU"
    if job.in_backward:
        return "optim_in_backward reads the learning rate from the host"
    if recipe.group_by_length:
        return "group_by_length makes microbatches of many lengths, and a graph has a fixed one"
    sized = [impl for impl in job.attention_backends if impl in ("varlen", "flex")]
    if recipe.packing and sized:
        return f"{sized[0]} attention reads tensors whose size depends on the documents"
    return None
