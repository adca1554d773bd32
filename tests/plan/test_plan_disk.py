"""The most checkpoints on disk at the same time, against a simulation of saves and deletions."""

from __future__ import annotations

import itertools

import pytest

from trimtab.facts.devices import DeviceFacts
from trimtab.facts.errors import ResourceError
from trimtab.facts.shapes import uniform_shape
from trimtab.plan import check_disk, make_plan
from trimtab.plan.disk import Disk, SaveSchedule
from trimtab.recipe import loads
from trimtab.run.resolve import resolve_recipe

GPU = DeviceFacts("NVIDIA H200", "cuda", memory_bytes=150 * 10**9, capability=(9, 0), bf16=True)
LLAMA_1B = uniform_shape(
    "llama", 128_256, 2048, 8192, 16, num_heads=32, num_kv_heads=8, head_dim=64, tie_embeddings=True
)


def max_coexisting(saving: SaveSchedule) -> int:
    """The most coexisting checkpoints over all sequences of improving evaluations, as the store saves and deletes."""
    assert saving.total_steps is not None
    steps = range(1, saving.total_steps + 1)
    evaluations = [step for step in steps if saving.best_steps and step % saving.best_steps == 0]
    peak = 0
    for improved in itertools.product([False, True], repeat=len(evaluations)):
        best = {step for step, better in zip(evaluations, improved, strict=True) if better}
        on_disk: list[int] = []
        for step in steps:
            due = saving.save_steps is not None and step % saving.save_steps == 0
            if not (due or step in best or step == saving.total_steps):
                continue
            on_disk.append(step)
            peak = max(peak, len(on_disk))
            newest_best = max((saved for saved in on_disk if saved in best), default=None)
            on_disk = [saved for saved in on_disk if saved in on_disk[-saving.keep :] or saved == newest_best]
    return peak


@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("save_steps", [None, 1, 2, 3, 20])
@pytest.mark.parametrize("best_steps", [None, 1, 2, 4, 20])
@pytest.mark.parametrize("total_steps", [1, 4, 7])
def test_max_checkpoints(keep: int, save_steps: int | None, best_steps: int | None, total_steps: int) -> None:
    saving = SaveSchedule(keep, save_steps, best_steps, total_steps)
    assert saving.max_checkpoints() == max_coexisting(saving)
    unknown = SaveSchedule(keep, save_steps, best_steps, None)
    assert unknown.max_checkpoints() >= saving.max_checkpoints()


def plan_disk(keys: str) -> Disk:
    recipe = loads(f"model: a\ndata: {{train: x}}\noptim: adamw_torch\n{keys}")
    return make_plan(recipe, LLAMA_1B, resolve_recipe(recipe, LLAMA_1B, GPU, threads=8), device=GPU).disk


def test_a_run_that_saves_only_at_the_end_needs_one_checkpoint() -> None:
    """1.2 B bf16 weights with fp32 moments: 11.5 GiB, three such checkpoints would take 34.5."""
    disk = plan_disk("save_steps: null\nmax_steps: 30")
    assert disk.saving.max_checkpoints() == 1
    check_disk(disk, 12 * 2**30, "runs/a")
    with pytest.raises(ResourceError, match=r"the checkpoint takes 11\.5 GiB"):
        check_disk(disk, 11 * 2**30, "runs/a")


def test_the_best_checkpoint_is_among_the_newest_if_only_improvements_are_saved() -> None:
    assert plan_disk("save_steps: null\neval_steps: 10\nmax_steps: 1000").saving.max_checkpoints() == 3
    assert plan_disk("save_steps: 10\neval_steps: 10\nmax_steps: 1000").saving.max_checkpoints() == 4
