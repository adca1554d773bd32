"""GPUs by index: validated against the GPUs that torch sees, current during a run, resuming on another one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_model import write_recipe, write_tiny_model
from whole_run import Silent, losses, run

import trimtab
from trimtab import launch
from trimtab.facts.calibration import Calibration
from trimtab.facts.calibration_file import write_calibration
from trimtab.facts.devices import host_memory
from trimtab.facts.errors import RecipeError, ResourceError
from trimtab.recipe import load, loads
from trimtab.run.device import current_gpu, detect
from trimtab.run.gpu_processes import GpuProcess
from trimtab.run.prepare import StoredConfig, prepare
from trimtab.run.resume import resume_device
from trimtab.run.target import planned_device
from trimtab.run.torch_setup import on_device_of


def test_a_cpu_has_the_calibration_of_the_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    name, default = detect("cpu").name, torch.get_num_threads()
    for threads in (default, default + 1):
        write_calibration(Calibration(name, {"fp32": 1e10 * threads}, 1e9, 1e-5, threads=threads))
    assert detect("cpu").calibration == detect("cpu", default).calibration
    assert detect("cpu", default + 1).calibration != detect("cpu").calibration
    assert detect("cpu", default + 2).calibration is None
    planned = planned_device(
        loads(f"model: a\ndata: {{train: x}}\nnum_threads: {default + 1}\ndevice: cpu"), None
    )
    assert planned.calibration is not None
    assert planned.calibration.threads == default + 1


class Gpus:
    """Simulates GPUs: the current device, and the free memory of each."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, count: int, *, called: str | None = None, integrated: int = 0
    ) -> None:
        self.current, self.entered = 0, []
        gpus = self

        class Device:
            """Replaces torch.cuda.device: the current device within the context."""

            def __init__(self, device: Any) -> None:
                self.index = device if isinstance(device, int) else torch.device(device).index

            def __enter__(self) -> None:
                self.before, gpus.current = gpus.current, self.index
                gpus.entered.append(self.index)

            def __exit__(self, *error: object) -> None:
                gpus.current = self.before

        cuda = {
            "is_available": lambda: True,
            "is_initialized": lambda: False,
            "device_count": lambda: count,
            "device": Device,
            "mem_get_info": lambda: ((gpus.current + 1) * 2**30, 80 * 2**30),
            "memory_reserved": lambda: 0,
            "get_device_capability": lambda *_: (9, 0),
            "get_device_name": lambda *_: called or f"GPU {gpus.current}",
            "current_device": lambda: gpus.current,
            "get_device_properties": lambda *_: SimpleNamespace(is_integrated=integrated, uuid="a-b"),
        }
        for name, value in cuda.items():
            monkeypatch.setattr(torch.cuda, name, value)


@pytest.mark.parametrize(
    ("name", "index", "current"), [("cuda:1", 1, 1), ("cuda:0", 0, 0), ("cuda", None, 0)]
)
def test_the_facts_are_those_of_the_gpu_that_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, index: int | None, current: int
) -> None:
    gpus = Gpus(monkeypatch, 2)
    found = detect(name)
    assert (found.kind, found.index, found.name) == ("cuda", index, f"GPU {current}")
    assert found.free_bytes == (current + 1) * 2**30
    assert gpus.current == 0, "asking changes nothing"


@pytest.mark.parametrize(
    ("called", "integrated"), [("NVIDIA GB10", 0), ("Orin", 0), ("NVIDIA Thor", 1), ("a new one", 1)]
)
def test_a_gpu_with_unified_memory_has_what_the_host_has(
    monkeypatch: pytest.MonkeyPatch, called: str, integrated: int
) -> None:
    Gpus(monkeypatch, 1, called=called, integrated=integrated)
    monkeypatch.setattr("trimtab.run.device.host_memory", lambda: (64 * 2**30, 50 * 2**30))
    found = detect("cuda")
    assert found.unified
    assert found.free_bytes == 50 * 2**30, "not the GiB that cudaMemGetInfo calls free"
    assert found.memory_bytes == 64 * 2**30
    assert (found.host_free_bytes, found.pinnable_bytes) == (None, 0), "the same bytes are not counted twice"


def test_a_discrete_gpu_has_no_unified_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, 1, called="NVIDIA H200")
    found = detect("cuda")
    assert not found.unified
    assert found.free_bytes == 2**30
    assert found.host_free_bytes == pytest.approx(host_memory()[1], rel=0.2)


def test_other_processes_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, 1)
    assert detect("cuda").shared is None
    asked = []

    def processes(index: int, *, uuid: str) -> tuple[GpuProcess, ...]:
        asked.append((index, uuid))
        return (GpuProcess(7, "python", 3 * 2**30),)

    monkeypatch.setattr("trimtab.run.device.other_processes", processes)
    monkeypatch.setenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=512M")
    found = detect("cuda")
    assert asked == [(0, "GPU-a-b")]
    assert "3.00 GiB of this GPU are used by 1 other process (python 3.00 GiB)" in str(found.shared)
    assert "MPS allows this process 512.0 MiB" in str(found.shared)
    assert found.free_bytes == 512 * 2**20


def test_a_gpu_that_torch_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, 2)
    with pytest.raises(
        ResourceError, match=r"cuda:2 was requested, and torch sees 2 CUDA GPUs \(cuda:0 to cuda:1\)"
    ) as told:
        detect("cuda:2")
    assert "CUDA_VISIBLE_DEVICES" in str(told.value)
    Gpus(monkeypatch, 1)
    with pytest.raises(ResourceError, match=r"torch sees one CUDA GPU \(cuda:0\); use one of these"):
        detect("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ResourceError, match="device: cuda:0 was requested, and torch sees no CUDA GPU"):
        detect("cuda:0")


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:01", "cuda:-1", "cuda:x", "cuda 1"])
def test_invalid_device_names(name: str) -> None:
    with pytest.raises(RecipeError, match="use auto, cpu, cuda or cuda:N"):
        detect(name)


def test_python_and_the_command_line_refuse_what_is_not_there(tmp_path: Path, capsys: Any) -> None:
    from trimtab.cli.main import main

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    model = write_tiny_model(tmp_path / "model")
    with pytest.raises(ResourceError, match="cuda:1 was requested"):
        trimtab.load(model, device="cuda:1")
    for words in (["generate", str(model), "a"], ["eval", str(model)]):
        assert main([*words, "--device", "cuda:1"]) == 6
        assert "device: cuda:1 was requested" in capsys.readouterr().err
    assert main(["plan", str(write_recipe(tmp_path)), "device=cuda:1"]) == 6


def test_a_run_sets_torch_s_current_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpus, seen = Gpus(monkeypatch, 3), []

    def go(*_: Any, **__: Any) -> str:
        seen.append(gpus.current)
        return "went"

    monkeypatch.setattr("trimtab.run.lifecycle._execute", go)
    assert launch.train(load(write_recipe(tmp_path, device="cuda:2")), Silent()) == "went"
    assert (seen, gpus.current) == ([2], 0)


def test_names_without_a_number_leave_the_current_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus(monkeypatch, 2)
    for name in ("auto", "cpu", "cuda"):
        with current_gpu(name):
            assert gpus.entered == []


def test_a_resumed_run_uses_the_requested_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Gpus(monkeypatch, 2)
    recipe = load(write_recipe(tmp_path, device="cuda"))
    began = prepare(recipe)
    assert began.resolved.device == "cuda"
    named = load(write_recipe(tmp_path, device="cuda:1"))
    device = resume_device(began.resolved, named, tmp_path, asked=True)
    elsewhere = prepare(named, StoredConfig(began.resolved, began.model, None, device))
    assert (elsewhere.device.name, elsewhere.resolved) == ("GPU 1", began.resolved)
    assert resume_device(began.resolved, named, tmp_path, asked=False).name == "GPU 1"
    unnamed = load(write_recipe(tmp_path, device="auto"))
    assert resume_device(began.resolved, unnamed, tmp_path, asked=False).name == "GPU 0"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ResourceError, match="device=cpu"):
        resume_device(began.resolved, unnamed, tmp_path, asked=False)


def test_models_on_several_gpus_are_each_used_on_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus(monkeypatch, 2)

    class On(torch.nn.Module):
        def __init__(self, device: str) -> None:
            super().__init__()
            self.place = torch.device(device)

        def parameters(self, recurse: bool = True) -> Any:
            return iter([type("Weight", (), {"device": self.place})()])

    for index in (1, 0, 1):
        with on_device_of(On(f"cuda:{index}")):
            assert gpus.current == index
    with on_device_of(On("cpu")):
        assert gpus.entered == [1, 0, 1]


@pytest.mark.gpu
def test_the_first_gpu_by_its_number(tmp_path: Path) -> None:
    changes = {
        "dtype": "fp32",
        "deterministic": True,
        "max_steps": 4,
        "num_train_epochs": None,
        "logging_steps": 1,
    }
    named = run(tmp_path, "named", device="cuda:0", **changes)
    assert losses(named) == losses(run(tmp_path, "unnamed", device="cuda", **changes))
    model = trimtab.load(named, device="cuda:0")
    assert str(next(model.opened.decoder.parameters()).device) == "cuda:0"
    assert model.generate("the cat", max_new_tokens=4) == trimtab.load(named, device="cuda").generate(
        "the cat", max_new_tokens=4
    )


@pytest.mark.gpu
def test_a_run_on_the_current_gpu_continues_on_a_numbered_one(tmp_path: Path) -> None:
    changes = {"deterministic": True, "max_steps": 4, "num_train_epochs": None, "logging_steps": 1}
    whole = run(tmp_path, "whole", device="cuda", **changes)

    class Stop(Exception):
        pass

    def stop(step: int) -> None:
        if step == 2:
            raise Stop

    path = write_recipe(
        tmp_path, **changes, device="cuda", save_steps=None, output_dir=str(tmp_path / "stopped")
    )
    with pytest.raises(Stop):
        launch.train(load(path), Silent(), after_step=stop)
    launch.resume(tmp_path / "stopped", ["device=cuda:0"], Silent())
    assert losses(tmp_path / "stopped") == losses(whole)
