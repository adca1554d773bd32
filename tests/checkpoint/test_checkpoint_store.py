"""Saving and loading: every dtype and shape, in place, exact, bounded, pruned, and nothing unpickled."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystem

from trimtab.checkpoint import SavedCheckpoint, Store, layout, read_manifest
from trimtab.checkpoint import manifest as manifests
from trimtab.checkpoint import scalars as plain
from trimtab.checkpoint import tensors as files
from trimtab.checkpoint.spec import checkpoint_bytes, host_bytes
from trimtab.facts.base_weights import BaseWeights
from trimtab.facts.errors import CheckpointError, ResourceError
from trimtab.facts.files import FileDigest

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn,
]  # fmt: skip
SHAPES: list[tuple[int, ...]] = [(3, 5), (7,), (1,), (), (0,), (0, 4), (4, 0), (2, 3, 4)]


@pytest.fixture
def events() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path, events: list[str]) -> Iterator[Store]:
    with Store(tmp_path / "checkpoints", on_event=events.append) as opened:
        yield opened


def found_latest(store: Store) -> SavedCheckpoint:
    found = store.latest()
    assert found is not None
    return found


def state_of(step: int) -> dict[str, torch.Tensor]:
    return {"model.weight": torch.full((4, 3), float(step)), "exp_avg.model.weight": torch.arange(12) + step}


def test_every_dtype_and_shape_loads_bitwise_identical_and_in_place(store: Store) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for dtype in DTYPES:
        for shape in SHAPES:
            raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), generator=generator)
            raw = raw % 2 if dtype == torch.bool else raw
            # Random bytes: NaNs with payloads and denormals must survive too.
            tensors[f"{dtype}.{shape}"] = raw.to(torch.uint8).view(dtype).reshape(shape)
    store.save(1, tensors, {}, wait=True)

    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    addresses = {name: target.data_ptr() for name, target in targets.items()}
    store.load(found_latest(store), targets)
    for name, tensor in tensors.items():
        assert targets[name].data_ptr() == addresses[name]
        assert torch.equal(
            targets[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
        ), name


def test_parameters_views_and_tied_tensors(store: Store) -> None:
    base = torch.randn(6, 8)
    parameter = torch.nn.Parameter(torch.randn(3, 3))
    store.save(1, {"t": base.t(), "part": base[1:3, ::2], "tied": base, "p": parameter}, {}, wait=True)
    targets = {
        "t": torch.zeros(6, 8).t(),
        "part": torch.zeros(2, 8)[:, ::2],
        "tied": torch.zeros(6, 8),
        "p": torch.nn.Parameter(torch.zeros(3, 3)),
    }
    store.load(found_latest(store), targets)
    assert torch.equal(targets["t"], base.t())
    assert torch.equal(targets["part"], base[1:3, ::2])
    assert torch.equal(targets["tied"], base)
    assert torch.equal(targets["p"].data, parameter.data)


def test_many_files_when_the_state_is_larger_than_one(tmp_path: Path) -> None:
    tensors = {f"layer.{i}": torch.full((256,), float(i)) for i in range(10)}  # 1 KiB each
    tensors["big"] = torch.randn(2048)
    with Store(tmp_path, file_bytes=4096, on_event=lambda _: None) as store:
        store.save(1, tensors, {}, wait=True)
        found = found_latest(store)
        sizes = [path.stat().st_size for path in found.path.glob("*.safetensors")]
        assert len(sizes) == 4
        assert sorted(sizes)[-2] < 4096 + 2048  # headers aside, only the one big tensor exceeds the bound
        targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        store.load(found, targets)
    assert all(torch.equal(targets[name], tensor) for name, tensor in tensors.items())


def test_no_tensors_at_all(store: Store) -> None:
    store.save(3, {}, {"loader": 1}, wait=True)
    assert store.load(found_latest(store), {}) == {"loader": 1}


def test_scalars_come_back_exactly(store: Store) -> None:
    scalars = {
        "loss": 0.1 + 0.2, "best": math.inf, "low": -math.inf, "big": 2**80, "none": None, "flag": True,
        "text": "π </script> \x00", "nested": {"list": [1, [2.5, {"a": {}}]], "tiny": 5e-324},
    }  # fmt: skip
    store.save(1, {"w": torch.zeros(1)}, {**scalars, "nan": math.nan, "tuple": (1, 2)}, wait=True)
    back = store.load(found_latest(store), {"w": torch.zeros(1)})
    assert math.isnan(back.pop("nan"))
    assert back.pop("tuple") == [1, 2]
    assert back == scalars
    text = (found_latest(store).path / "state.json").read_text()
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


@pytest.mark.parametrize("value", [{1: 2}, torch.zeros(1), {"a": {2}}, {"$float": "nan"}, b"x"])
def test_scalars_that_json_would_change_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match=r"scalars\.x"):
        plain.encode({"x": value})


def test_a_scalar_among_the_tensors_is_refused_before_anything_is_written(store: Store) -> None:
    with pytest.raises(TypeError, match="lr is a float"):
        store.save(1, {"w": torch.zeros(1), "lr": 0.1}, {})  # type: ignore[dict-item]
    assert not store.folder.exists()


def test_the_state_is_copied_when_save_is_called(store: Store) -> None:
    weight = torch.arange(200_000, dtype=torch.float32)
    for step in range(3):
        store.save(step, {"w": weight}, {})
        weight.add_(1)  # the loop continues while the thread writes
    store.wait()
    target = torch.zeros_like(weight)
    store.load(found_latest(store), {"w": target})
    assert torch.equal(target, torch.arange(200_000, dtype=torch.float32) + 2)


def test_a_second_save_waits_for_the_first_and_reports_it(
    store: Store, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, order = threading.Event(), []
    write = files.write

    def slow(*arguments: object) -> None:
        order.append("begin")
        gate.wait(20)
        write(*arguments)  # type: ignore[arg-type]
        order.append("end")

    monkeypatch.setattr(files, "write", slow)
    store.save(1, state_of(1), {})
    assert store._pending is not None
    assert not store._pending[1].done()  # save came back although nothing is written yet
    threading.Timer(0.2, gate.set).start()
    store.save(2, state_of(2), {}, wait=True)
    assert order == ["begin", "end", "begin", "end"]
    assert "waiting until the checkpoint of step 1 is written" in events


def test_host_buffers_are_reused() -> None:
    host = files.HostCopy()
    first = host.copy(state_of(1))
    second = host.copy(state_of(2))
    assert {n: t.data_ptr() for n, t in first.items()} == {n: t.data_ptr() for n, t in second.items()}
    other = host.copy({"model.weight": torch.ones(2)})
    assert set(host._buffers) == {"model.weight"}  # what is no longer saved is let go
    assert torch.equal(other["model.weight"], torch.ones(2))


def test_keep_last_prunes_old_checkpoints_but_not_the_best(store: Store) -> None:
    for step in range(1, 7):
        store.save(step, state_of(step), {}, tags={"best"} if step == 2 else ())
    store.wait()
    assert [path.name[-1] for path in layout.step_folders(store.folder)] == ["2", "5", "6"]
    best = store.best()
    assert best is not None
    assert best.step == 2
    assert (store.folder / "latest").read_text() == "step-00000006\n"
    assert (store.folder / "best").read_text() == "step-00000002\n"
    store.save(7, state_of(7), {}, tags={"best"}, wait=True)
    assert [path.name[-1] for path in layout.step_folders(store.folder)] == ["6", "7"]


def test_keeping_all_and_keeping_one(tmp_path: Path) -> None:
    for keep_last, names in [(None, ["1", "2", "3"]), (1, ["3"])]:
        folder = tmp_path / str(keep_last)
        with Store(folder, keep_last=keep_last, on_event=lambda _: None) as store:
            for step in (1, 2, 3):
                store.save(step, state_of(step), {})
        assert [path.name[-1] for path in layout.step_folders(folder)] == names


def test_latest_is_the_last_published_even_after_going_back(store: Store) -> None:
    for step in (10, 20, 15):  # 15: a run that was taken up again at 10 while 20 still lay there
        store.save(step, state_of(step), {}, wait=True)
    assert found_latest(store).step == 15
    assert (store.folder / "latest").read_text() == "step-00000015\n"


def test_saving_a_step_again_replaces_it(store: Store) -> None:
    store.save(5, state_of(5), {}, tags={"best"}, wait=True)
    store.save(5, state_of(5), {"again": 1}, wait=True)  # the last save of a run, at a step just saved
    assert read_manifest(store.folder / "step-00000005").tags == ("best",)
    with Store(store.folder, on_event=lambda _: None) as later:  # another process comes to the step once more
        later.save(5, state_of(6), {}, wait=True)
    assert read_manifest(store.folder / "step-00000005").tags == ()
    target = state_of(0)
    store.load(found_latest(store), target)
    assert torch.equal(target["model.weight"], state_of(6)["model.weight"])
    assert sorted(p.name for p in store.folder.iterdir()) == [".writer.lock", "latest", "step-00000005"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"extra": torch.zeros(1)}, "missing in the checkpoint: extra"),
        ({"model.weight": None}, "only in the checkpoint: model.weight"),
        (
            {"model.weight": torch.zeros(3, 4)},
            r"model.weight \[4, 3\] in the checkpoint, \[3, 4\] in this run",
        ),
        (
            {"model.weight": torch.zeros(4, 3, dtype=torch.bfloat16)},
            "model.weight float32 in the checkpoint, bfloat16 in this run",
        ),
        ({f"layer.{i}": torch.zeros(1) for i in range(9)}, "layer.0, layer.1, layer.2 and 6 more"),
    ],
)
def test_a_checkpoint_from_another_model(store: Store, change: dict[str, torch.Tensor], words: str) -> None:
    store.save(1, state_of(1), {}, wait=True)
    target = {name: tensor for name, tensor in {**state_of(9), **change}.items() if tensor is not None}
    before = {name: tensor.clone() for name, tensor in target.items()}
    with pytest.raises(CheckpointError, match=words):
        store.load(found_latest(store), target)
    assert all(torch.equal(target[name], before[name]) for name in before)


def test_partial_loads_weights_without_optimizer_states(store: Store) -> None:
    store.save(1, state_of(1), {"a": 1}, wait=True)
    target = {"model.weight": torch.zeros(4, 3)}
    assert store.load(found_latest(store), target, partial=True) == {"a": 1}
    assert torch.equal(target["model.weight"], torch.full((4, 3), 1.0))
    with pytest.raises(CheckpointError, match="missing in the checkpoint: other"):
        store.load(found_latest(store), {"other": torch.zeros(1)}, partial=True)


def test_nothing_is_pickled_or_unpickled(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a pickle was used")

    for module, names in [(pickle, ("load", "loads", "dump", "dumps")), (torch, ("load", "save"))]:
        for name in names:
            monkeypatch.setattr(module, name, refuse)
    store.save(1, state_of(1), {"a": 1}, wait=True)
    found = found_latest(store)
    store.load(found, state_of(0))
    names = sorted(path.name for path in found.path.iterdir())
    assert names == ["manifest.json", "shard-00001-model-00001-of-00001.safetensors", "state.json"]
    for name in ("manifest.json", "state.json"):
        json.loads((found.path / name).read_text())


def test_an_empty_or_missing_folder_has_no_latest(tmp_path: Path, events: list[str]) -> None:
    store = Store(tmp_path / "none", on_event=events.append)
    assert store.latest() is None
    assert store.best() is None
    assert not (tmp_path / "none").exists()
    assert events == []


def test_errors_of_the_thread_are_reported_and_do_not_prevent_the_next_save(
    store: Store, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(1, state_of(1), {}, wait=True)

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(FileSystem, "create_stream", fail)
        store.save(2, state_of(2), {})
        with pytest.raises(CheckpointError, match=r"step 2.*Input/output error"):
            store.wait()
        store.wait()  # raised once
        store.save(2, state_of(2), {})
        with pytest.raises(CheckpointError, match=r"step 3.*Input/output error"):
            store.save(3, state_of(3), {}, wait=True)
    store.save(4, state_of(4), {}, wait=True)
    assert any("step 2 was not written" in event for event in events)
    assert any("step 3 was not written" in event for event in events)
    assert found_latest(store).step == 4
    assert not [path for path in store.folder.iterdir() if path.name.startswith(".tmp")]


def test_a_write_that_stores_other_bytes_is_detected(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    write = files.write

    def flip(folder: Path, *rest: object) -> None:
        write(folder, *rest)  # type: ignore[arg-type]
        path = next(folder.glob("*.safetensors"))
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    monkeypatch.setattr(files, "write", flip)
    with pytest.raises(CheckpointError, match="reads back different"):
        store.save(1, state_of(1), {}, wait=True)
    assert store.latest() is None


def test_a_full_disk_is_reported_before_anything_is_copied(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(1, state_of(1), {}, wait=True)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(ResourceError, match=r"step 2 .* needs .* bytes\), 1000 B \(1000 bytes\) are free"):
        store.save(2, state_of(2), {})
    assert found_latest(store).step == 1


def test_a_newer_format_is_an_error_and_not_skipped(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(1, state_of(1), {}, wait=True)
    with monkeypatch.context() as patched:
        patched.setattr(manifests, "VERSION", 3)
        patched.setitem(manifests._READERS, 3, manifests._READERS[2])
        patched.setattr(
            store, "_base", BaseWeights("somewhere")
        )  # a checkpoint without one stays at version 1
        store.save(2, state_of(2), {}, wait=True)
    for use in (store.latest, store.best, lambda: store.save(3, state_of(3), {}, wait=True)):
        with pytest.raises(CheckpointError, match=r"later trimtab \(checkpoint format 3, here 2\)"):
            use()
    assert (store.folder / "step-00000002").is_dir()


def test_the_base_of_adapters_is_named(tmp_path: Path) -> None:
    base = BaseWeights("a/b", "abc", {"model.safetensors": FileDigest(3, "0" * 64)})
    with Store(tmp_path, base=base) as named:
        named.save(1, state_of(1), {}, wait=True)
        assert manifests.read_manifest(found_latest(named).path).base == base
    with Store(tmp_path) as plain:
        plain.save(2, state_of(2), {}, wait=True)
        assert manifests.read_manifest(found_latest(plain).path).base is None
        assert json.loads((found_latest(plain).path / "manifest.json").read_text())["version"] == 1


def test_costs_are_an_upper_bound_of_the_disk(store: Store) -> None:
    tensors = {f"model.layers.{i}.mlp.down_proj.weight": torch.zeros(16, 16) for i in range(200)}
    store.save(1, tensors, {"loader": {"epoch": 1}}, wait=True)
    used = sum(path.stat().st_size for path in found_latest(store).path.iterdir())
    parameters = 200 * 16 * 16 * 4
    bound = checkpoint_bytes(parameters, 0, num_tensors=200)
    assert parameters < used < bound
    assert host_bytes(bound, 1024) == 3 * bound  # all in one file
    assert host_bytes(8 * 2**30, 2**30, num_ranks=4) == 2 * 2**30 + 2 * 2**30


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak memory mark")
def test_host_memory_stays_within_the_declared_bound(tmp_path: Path) -> None:
    code = """
import re, sys, torch
from trimtab.checkpoint import Store
store = Store(sys.argv[1], on_event=lambda _: None, file_bytes=16 * 2**20)
store.save(0, {"w": torch.ones(1)}, {}, wait=True)  # imports and threads
state = {f"w{i}": torch.ones(2**20) for i in range(48)}  # 192 MiB
# ru_maxrss would start at the peak of the process that forked this one; "5" resets the kernel's own mark.
open("/proc/self/clear_refs", "w").write("5")
peak = lambda: 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
before = peak()
for step in range(1, 4):
    store.save(step, state, {})
store.close()
print(peak() - before)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    bound = 192 * 2**20 + 2 * 16 * 2**20  # one copy and two files' worth
    assert 192 * 2**20 <= int(done.stdout) <= bound + 48 * 2**20  # the file being read back, the allocator


def test_the_spec_and_the_manifest_import_no_torch() -> None:
    code = (
        "import sys, trimtab.checkpoint.spec, trimtab.checkpoint.manifest, trimtab.checkpoint.layout;"
        "from trimtab.checkpoint import RunLock; sys.exit('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_the_example_in_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2] / "docs" / "checkpoints.md"
    (example,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, str(page), "exec"), {})
    assert (tmp_path / "runs/example/checkpoints/best").read_text() == "step-00000100\n"
