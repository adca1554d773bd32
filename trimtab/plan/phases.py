"""Memory of each phase of a run: loading, the parts of a step, evaluation, samples, checkpoints, merge and export.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.data import spec as data_spec
from trimtab.facts.operations import MemoryPart, bytes_by_part
from trimtab.facts.phases import RunPhase
from trimtab.plan import inference, weights_io
from trimtab.plan.checkpoints import copy_bytes
from trimtab.plan.disk import Disk
from trimtab.plan.job import Job
from trimtab.plan.memory import BYTES_OUTSIDE_ALLOCATOR, PROCESS_BYTES, Buckets, Memory, Phase
from trimtab.plan.timeline import Parts, Point, activation_parts, step_timeline
from trimtab.recipe.keys import Recipe
from trimtab.recipe.rules import has_domain_set

ROWS = 64
"""Texts per batch of the probe and of generation."""
PROBE_TOKENS = 104
"""Upper bound on the tokens of the probe's longest text: its bytes plus one."""
PROMPT_TOKENS = 128
"""Upper bound on the tokens of a problem's prompt."""
ANSWER_TOKENS, SAMPLE_TOKENS = 64, 48
"""Generated tokens per problem and per prompt (`trimtab.run.evaluation`)."""
SAVED_DTYPE = "bf16"
"""The default dtype of `trimtab merge` and `trimtab export hf`."""


AFTERWARDS = (RunPhase.MERGE, RunPhase.EXPORT)
"""Phases with a separate command, which may run on another machine."""


PHASE_REMEDIES = {
    RunPhase.LOAD: "use a smaller model or a larger device",
    RunPhase.EVALUATION: "set a smaller per_device_train_batch_size, which evaluation uses too, with more "
    "gradient_accumulation_steps, or a shorter max_seq_length",
    RunPhase.PROBE: "set probe: false",
    RunPhase.GENERATION: "set fewer prompts and a smaller number of answers, which are generated in one batch",
    RunPhase.CHECKPOINT: "use a smaller model or a larger device",
}
"""Remedies for phases other than the training step."""


@dataclass(frozen=True)
class PhaseMemory:
    """Peak memory of one phase.

    Example:
        >>> PhaseMemory(RunPhase.LOAD, "cuda", Buckets(5, 0, 0, 0, 1), host=2, process_bytes=3).needed
        9
    """

    phase: RunPhase
    device: str
    """The device of the tensors: "cuda" or "cpu"."""
    buckets: Buckets
    """Bytes of tensors on that device at the phase's peak."""
    host: int
    """Bytes of host memory, including the process; on a CPU also the tensors."""
    process_bytes: int = 0
    """Bytes of the device in addition to tensors."""
    note: str = ""
    parts: Mapping[MemoryPart, int] | None = None
    """The activations bucket by part; None if there are no activations."""

    @property
    def needed(self) -> int:
        """Bytes that the device must have: on a CPU all host memory."""
        return self.host if self.device == "cpu" else self.buckets.total + self.process_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        parts = {part.value: size for part, size in (self.parts or {}).items() if size}
        return {
            "phase": self.phase.value,
            "device": self.device,
            **self.buckets.to_dict(),
            "parts": parts,
            "needed": self.needed,
            "host": self.host,
            "note": self.note,
        }


@dataclass(frozen=True)
class RunMemory:
    """Memory of all phases of a run, and the timeline of a step."""

    phases: tuple[PhaseMemory, ...]
    timeline: tuple[Point, ...]
    activations: Mapping[MemoryPart, int]
    """The activations bucket of the predicted peak, by part."""

    def of(self, phase: RunPhase) -> PhaseMemory | None:
        """Returns one phase; None if the run does not have it."""
        return next((entry for entry in self.phases if entry.phase is phase), None)

    @property
    def during_run(self) -> tuple[PhaseMemory, ...]:
        """Phases of the run itself, without merge and export."""
        return tuple(entry for entry in self.phases if entry.phase not in AFTERWARDS)

    @property
    def peak(self) -> PhaseMemory:
        """The phase with the highest device memory."""
        return max(self.during_run, key=lambda entry: entry.needed)

    @property
    def host(self) -> int:
        """Peak host memory of the run."""
        return max(entry.host for entry in self.during_run)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON. Timeline points on a line between their neighbours are left out."""
        return {
            "phases": [entry.to_dict() for entry in self.phases],
            "peak": self.peak.phase.value,
            "host": self.host,
            "activations": {part.value: size for part, size in self.activations.items() if size},
            "timeline": [{"at": at, **point.to_dict()} for at, point in corners(self.timeline)],
        }


def corners(points: tuple[Point, ...]) -> Iterator[tuple[int, Point]]:
    """Yields (index, point) of a timeline, without points on the line between their neighbours."""
    for index, point in enumerate(points):
        neighbours = points[index - 1 : index + 2] if index else ()
        if len(neighbours) < 3 or not _on_line(*neighbours):
            yield index, point


def _on_line(before: Point, point: Point, after: Point) -> bool:
    if not before.moment.phase is point.moment.phase is after.moment.phase:
        return False
    values = [
        tuple(entry.buckets.to_dict().values()) + tuple(entry.parts.values())
        for entry in (before, point, after)
    ]
    return all(b - a == c - b for a, b, c in zip(*values, strict=True))


def run_memory(recipe: Recipe, job: Job, memory: Memory, disk: Disk) -> RunMemory:
    """Returns the memory of every phase of a run.

    Args:
        recipe: its evaluation, sampling and checkpoint settings.
        job: the settings that determine the memory of a step.
        memory: the predicted memory of the job.
        disk: the disk space of its checkpoints.
    """
    timeline = step_timeline(job)
    phases = _Phases(recipe, job, memory, disk)
    entries = [phases.load(), *phases.step(timeline), *phases.without_gradients(), phases.checkpoint()]
    return RunMemory((*entries, *phases.afterwards()), timeline, activation_parts(job, memory))


STEP_PHASES = {
    RunPhase.FORWARD: (Phase.LAYERS_FORWARD,),
    RunPhase.LOSS: (Phase.LOSS_FORWARD, Phase.LOSS_BACKWARD),
    RunPhase.BACKWARD: (Phase.FINAL_NORM_BACKWARD, Phase.LAYERS_BACKWARD, Phase.EMBEDDING_BACKWARD),
    RunPhase.OPTIMIZER_STEP: (Phase.OPTIMIZER_STEP,),
}


class _Phases:
    """Computes the phases of one run."""

    def __init__(self, recipe: Recipe, job: Job, memory: Memory, disk: Disk) -> None:
        self.recipe, self.job, self.memory, self.disk = recipe, job, memory, disk
        batches = data_spec.batch_bytes(job.batch, job.tokens) * job.accumulation
        # Offloaded activations have their own pinned pages; a microbatch's tensors use torch's pinned allocator.
        self.host = BYTES_OUTSIDE_ALLOCATOR["cpu"] + batches + memory.host + pinned_batch_bytes(job)

    def make(self, phase: RunPhase, buckets: Buckets, note: str = "", **more: Any) -> PhaseMemory:
        extra = more.pop("host", 0)
        # On a CPU the process is the interpreter plus its tensors.
        host = self.host + extra + (buckets.total if self.job.device == "cpu" else 0)
        return PhaseMemory(
            phase, self.job.device, buckets, host, PROCESS_BYTES[self.job.device], note, **more
        )

    def load(self) -> PhaseMemory:
        work = weights_io.loading_memory(self.job)
        action = (
            "weights are quantized one at a time" if self.job.quantization else "weights are read in chunks"
        )
        return self.make(
            RunPhase.LOAD,
            Buckets(work.model, 0, 0, 0, work.temporary),
            f"{action}; files are memory-mapped",
            host=weights_io.loading_host_bytes(self.job),
        )

    def step(self, timeline: tuple[Point, ...]) -> Iterator[PhaseMemory]:
        for phase, moments in STEP_PHASES.items():
            points = [point for point in timeline if point.moment.phase in moments]
            peak = max(points, key=lambda point: point.buckets.total)
            yield self.make(phase, peak.buckets, peak.moment.describe(), parts=peak.parts)

    def without_gradients(self) -> Iterator[PhaseMemory]:
        recipe, job = self.recipe, self.job.for_evaluation()
        if has_domain_set(recipe) or recipe.data.eval.general:
            note = f"{job.batch} × {job.tokens} tokens in one batch, per-token losses"
            yield self.forward_only(RunPhase.EVALUATION, inference.loss_tensors(job), note)
        if recipe.probe:
            tokens = min(PROBE_TOKENS, job.shape.max_positions)
            texts = job.changed(batch=ROWS, tokens=tokens)
            note = f"{ROWS} texts of at most {tokens} tokens in one batch"
            yield self.forward_only(RunPhase.PROBE, inference.loss_tensors(texts), note)
        batches = [(len(recipe.prompts), self._prompt_tokens(), SAMPLE_TOKENS)] if recipe.prompts else []
        if recipe.answers:
            batches.append((recipe.answers, PROMPT_TOKENS, ANSWER_TOKENS))
        candidates = []
        for count, prompt, new in batches:
            rows = min(count, ROWS)
            tensors = inference.generation_tensors(job, rows, prompt, new)
            candidates.append(
                (
                    tensors,
                    f"{rows} texts of at most {prompt} + {new} tokens in one batch, with their KV cache",
                )
            )
        if candidates:
            tensors, note = max(candidates, key=lambda candidate: inference.total(candidate[0]))
            yield self.forward_only(RunPhase.GENERATION, tensors, note)

    def _prompt_tokens(self) -> int:
        """Upper bound on the tokens of the longest prompt: its bytes plus one."""
        return min(max(len(text.encode()) for text in self.recipe.prompts) + 1, self.job.shape.max_positions)

    def forward_only(self, phase: RunPhase, tensors: inference.Tensors, note: str) -> PhaseMemory:
        before = self.memory.before
        parts: Parts = bytes_by_part(tensors)
        buckets = Buckets(before.weights, 0, before.optimizer, sum(parts.values()), 0)
        return self.make(phase, buckets, note, parts=parts)

    def checkpoint(self) -> PhaseMemory:
        """A copy of the state in host memory, written by a background thread in files of bounded size."""
        copy = copy_bytes(self.job, self.disk)
        if self.disk.saving.saves == 1:
            return self.make(
                RunPhase.CHECKPOINT, self.memory.before, "once, at the end of the run", host=copy
            )
        note = "a persistent copy of the state and two of its files, while training continues"
        return self.make(RunPhase.CHECKPOINT, self.memory.peak, note, host=copy)

    def afterwards(self) -> Iterator[PhaseMemory]:
        job = self.job
        if job.lora is not None:
            work = weights_io.merge_memory(job, SAVED_DTYPE)
            note = f"in fp32 on the CPU, saved in {SAVED_DTYPE}: base and merged weights in memory together"
            yield self._on_cpu(RunPhase.MERGE, work, note)
        else:
            work = weights_io.export_memory(job.shape, SAVED_DTYPE)
            note = f"in fp32 on the CPU, saved in {SAVED_DTYPE}, read back and compared"
            yield self._on_cpu(RunPhase.EXPORT, work, note)

    def _on_cpu(self, phase: RunPhase, work: weights_io.IOMemory, note: str) -> PhaseMemory:
        buckets = Buckets(work.model, 0, 0, 0, work.temporary)
        return PhaseMemory(
            phase, "cpu", buckets, BYTES_OUTSIDE_ALLOCATOR["cpu"] + work.total, PROCESS_BYTES["cpu"], note
        )


def pinned_batch_bytes(job: Job) -> int:
    """Returns the pinned host memory of a microbatch: torch's pinned allocator rounds up to powers of two.

    (`CachingHostAllocator.h` of torch 2.11 to 2.13: `PowerOf2Ceil`, without a threshold by default.)

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> tiny = uniform_shape("llama", 512, 64, 128, 2, num_heads=4, num_kv_heads=2, head_dim=16)
        >>> pinned_batch_bytes(Job(tiny, 3, 100, 1, "bf16", "bf16", "bf16", "adamw_8bit", "triton", "cuda"))
        14336
    """
    if job.device == "cpu":
        return 0
    N = job.batch * job.tokens
    return sum(1 << (size - 1).bit_length() for size in (8 * N, 8 * N, 8 * N, 4 * N))
