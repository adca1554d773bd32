"""A run's process-wide torch settings end with the run."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_model import write_recipe
from whole_run import Silent, run

from trimtab import launch
from trimtab.adapt import workspace
from trimtab.plan.resolved import Resolved
from trimtab.recipe import load
from trimtab.run.device import detect
from trimtab.run.folder import read_json
from trimtab.run.prepare import prepare
from trimtab.run.torch_setup import memory_fraction, restore_torch_settings, set_up_torch


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


class Gpu:
    """Simulates a GPU of 100 bytes, of which the process has reserved some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.share, self.reserved, self.emptied, self.peaks = 0.75, 0, 0, 0
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        cuda = {
            "is_initialized": lambda: True,
            "init": lambda: None,
            "mem_get_info": lambda: (90, 100),
            "memory_reserved": lambda: self.reserved,
            "get_per_process_memory_fraction": lambda: self.share,
            "set_per_process_memory_fraction": lambda share: setattr(self, "share", share),
            "empty_cache": lambda: setattr(self, "emptied", self.emptied + 1),
            "reset_peak_memory_stats": lambda: setattr(self, "peaks", self.peaks + 1),
        }
        for name, function in cuda.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def resolved(folder: Path, *, deterministic: bool = False, cap: int | None = None) -> Resolved:
    made = prepare(load(write_recipe(folder, device="cpu"))).resolved
    memory = replace(made.memory_plan, allocator_bytes=cap)
    return replace(made, device="cuda", deterministic=deterministic, threads=2, memory=memory)


@pytest.mark.parametrize("fails", [False, True])
def test_settings_do_not_affect_the_next_run(tmp_path: Path, gpu: Gpu, fails: bool) -> None:
    wanted = resolved(tmp_path, deterministic=True, cap=40)

    def one() -> None:
        with restore_torch_settings(), workspace.borrow((8,), torch.float32, torch.device("cpu")):
            set_up_torch(wanted)
            assert torch.are_deterministic_algorithms_enabled()
            assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
            assert (torch.get_num_threads(), gpu.share, gpu.emptied, gpu.peaks) == (2, 0.4, 1, 1)
            if fails:
                raise KeyboardInterrupt

    if fails:
        with pytest.raises(KeyboardInterrupt):
            one()
    else:
        one()
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    assert (torch.get_num_threads(), gpu.share, gpu.emptied) == (1, 0.75, 2)
    assert workspace.allocated_bytes() == 0


def test_a_limit_is_added_to_reserved_memory_and_below_the_process_limit(tmp_path: Path, gpu: Gpu) -> None:
    gpu.reserved = 20
    for cap, share in ((40, 0.6), (70, 0.75)):
        with restore_torch_settings():
            set_up_torch(resolved(tmp_path, cap=cap))
            assert gpu.share == share
    assert gpu.share == 0.75


@pytest.mark.parametrize("error", [NotImplementedError, RuntimeError])
def test_an_allocator_without_a_limit_allows_all(
    monkeypatch: pytest.MonkeyPatch, gpu: Gpu, error: type[Exception]
) -> None:
    def silent() -> float:
        raise error("not supported")

    assert memory_fraction() == 0.75
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", silent)
    assert memory_fraction() == 1.0


def test_an_exception_that_is_kept_references_no_model(gpu: Gpu) -> None:
    seen: list[weakref.ref[torch.nn.Module]] = []

    def one() -> None:
        model = torch.nn.Linear(2, 2)
        seen.append(weakref.ref(model))
        try:
            raise torch.OutOfMemoryError
        except torch.OutOfMemoryError as error:
            raise ValueError("no memory") from error

    with pytest.raises(ValueError, match="no memory") as cached_digest, restore_torch_settings():
        one()
    assert seen[0]() is None
    assert cached_digest.value.__cause__ is not None


def test_cached_memory_is_free_and_memory_above_the_limit_is_not(
    monkeypatch: pytest.MonkeyPatch, gpu: Gpu
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = SimpleNamespace(is_integrated=0, uuid="a-b")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    gpu.reserved = 20
    assert (detect("cuda").free_bytes, gpu.emptied) == (55, 1)
    gpu.share, gpu.reserved = 1.0, 10
    assert detect("cuda").free_bytes == 90


def test_nondeterministic_kernels_run_whatever_the_process_has_set(tmp_path: Path, gpu: Gpu) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    with restore_torch_settings():
        set_up_torch(resolved(tmp_path))
        assert not torch.are_deterministic_algorithms_enabled()
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.mark.parametrize("warn_only", [False, True])
def test_a_deterministic_process_gets_a_deterministic_run(tmp_path: Path, warn_only: bool) -> None:
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    folder = run(tmp_path, "run", max_steps=1, num_train_epochs=None)
    assert torch.are_deterministic_algorithms_enabled()
    assert read_json(folder / "choices.json")["deterministic"] is not warn_only
    assert load(folder / "recipe.yaml").deterministic is not warn_only


def test_an_optimizer_in_backward_does_not_keep_the_weights_alive(tmp_path: Path) -> None:
    def parameters() -> set[int]:
        return {id(found) for found in gc.get_objects() if type(found) is torch.nn.Parameter}

    before = parameters()
    settings = {"optim_in_backward": True, "max_grad_norm": 0.0, "gradient_accumulation_steps": 1}
    run(tmp_path, "run", max_steps=2, num_train_epochs=None, **settings)
    gc.collect()
    assert parameters() <= before


def test_threads_of_a_resumed_run_end_with_it(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    folder = run(tmp_path, "run", max_steps=2, num_train_epochs=None, save_steps=1)
    shutil.rmtree(folder / "checkpoints/step-00000002")
    torch.set_num_threads(1)
    seen = []
    launch.resume(folder, [], Silent(), after_step=lambda _: seen.append(torch.get_num_threads()))
    assert seen == [2]
    assert torch.get_num_threads() == 1


def test_the_recipe_s_threads_take_precedence_and_may_change_on_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    seen: list[int] = []

    def look(step: int) -> None:
        seen.append(torch.get_num_threads())
        if step == 1:
            raise KeyboardInterrupt

    path = write_recipe(tmp_path, num_threads=2, max_steps=3, num_train_epochs=None, save_steps=1)
    with pytest.raises(KeyboardInterrupt):
        launch.train(load(path), Silent(), after_step=look)
    folder = tmp_path / "run"
    assert read_json(folder / "choices.json")["threads"] == 2
    same = Silent()
    with pytest.raises(KeyboardInterrupt):
        launch.resume(folder, [], same, after_step=lambda step: look(step - 1))
    assert not any("num_threads" in text for text in same.messages)
    other = Silent()
    launch.resume(folder, ["num_threads=3"], other, after_step=look)
    assert seen == [2, 2, 3]
    assert (
        "the run began with 2 CPU threads and continues with num_threads: 3: the order of summation may change, "
        "and losses may differ in the last bits from an uninterrupted run"
    ) in other.messages
    assert read_json(folder / "plan.json")["choices"]["threads"] == 3
    assert torch.get_num_threads() == 1


def test_more_threads_than_cores_are_reported(tmp_path: Path) -> None:
    notes = prepare(load(write_recipe(tmp_path, num_threads=1024))).plan.notes
    assert any(note.startswith("num_threads: 1024 is more than this machine's") for note in notes)
    assert not prepare(load(write_recipe(tmp_path, num_threads=1))).plan.notes
