"""The GPU work of two commits: the comparison detects a constant in a kernel, a scalar, an operator and a buffer."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the emulated device stands for the GPU that is here", allow_module_level=True)

from tools.sameness import cases_gpu
from tools.sameness.gpu.calls_others import optimizer_calls
from tools.sameness.gpu.cases import NOT_RECORDED
from tools.sameness.gpu.child import compile_launched, record
from tools.sameness.gpu.compare import KernelVerdict, Pairs, Verdict, compare_case, compare_kernels
from tools.sameness.gpu.recording import Recording, Store

KERNEL = """
import torch
import triton
import triton.language as tl


@triton.jit
def _scale_kernel(x_ptr, y_ptr, count, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count)
    tl.store(y_ptr + at, x * factor + 2.0, mask=at < count)


def call():
    x = torch.ones(1000, device="cuda")
    y = torch.empty_like(x)
    _scale_kernel[(triton.cdiv(1000, 256),)](x, y, 1000, 0.5, BLOCK=256)
    y.neg()
"""
BY_POSITION = "x_ptr, y_ptr, count, factor, BLOCK: tl.constexpr"


@pytest.fixture
def record_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Recording]]:
    """Records the call of a module with this source; its kernels are compiled into `tmp_path`'s store."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    made: list[str] = []

    def run(source: str) -> Recording:
        name = f"sameness_copy_{len(made)}"
        made.append(f"{name}.kernels")
        path = tmp_path / name / "kernels.py"
        path.parent.mkdir()
        path.write_text(source)
        module = _imported(made[-1], path)
        # Both copies have the same name in the log, as two commits have.
        monkeypatch.setattr(module._scale_kernel.fn, "__module__", "demo.kernels")
        log, recording = record("demo", module.call)
        compile_launched(log, Store(tmp_path / str(len(made))))
        assert recording.error is None, recording.error
        return recording

    yield run
    for name in made:
        sys.modules.pop(name, None)


def _imported(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def compared(
    record_source: Callable[[str], Recording], folder: Path, changed: str
) -> tuple[Verdict, KernelVerdict]:
    pairs: Pairs = {}
    verdict = compare_case("demo", record_source(KERNEL), record_source(changed), pairs)
    (kernel,) = compare_kernels(pairs, Store(folder / "1"), Store(folder / "2"))
    return verdict, kernel


def test_a_copy_on_other_lines_is_identical(
    record_source: Callable[[str], Recording], tmp_path: Path
) -> None:
    moved = "# moved\n\n" + KERNEL.replace("    at = ", "    # commented\n    at = ")
    verdict, kernel = compared(record_source, tmp_path, moved)
    assert (verdict.text, verdict.launches, verdict.operators) == ("equal", 1, 3)
    assert (kernel.kernel, kernel.pairs, kernel.identical) == ("demo._scale_kernel", 1, 1)


def test_a_renamed_kernel_is_compared_by_its_current_name(
    record_source: Callable[[str], Recording], tmp_path: Path
) -> None:
    parent, head = record_source(KERNEL), record_source(KERNEL)
    for entry in parent.entries:
        if entry.kernel:
            object.__setattr__(entry, "name", "launch demo._former_kernel")
    pairs: Pairs = {}
    assert compare_case("demo", parent, head, {}).different
    renamed = {"demo._former_kernel": "demo._scale_kernel"}
    assert compare_case("demo", parent, head, pairs, renamed).text == "equal"
    (kernel,) = compare_kernels(pairs, Store(tmp_path / "1"), Store(tmp_path / "2"))
    assert (kernel.pairs, kernel.identical) == (1, 1)


def test_a_changed_constant_in_a_kernel_is_reported(
    record_source: Callable[[str], Recording], tmp_path: Path
) -> None:
    verdict, kernel = compared(record_source, tmp_path, KERNEL.replace("+ 2.0", "+ 3.0"))
    assert verdict.text == "equal"
    assert kernel.identical == 0
    (diff,) = kernel.differences.values()
    assert any("0f40400000" in line for line in diff), "3.0 in hexadecimal"


def test_a_changed_tile_is_reported_with_its_constant(
    record_source: Callable[[str], Recording], tmp_path: Path
) -> None:
    verdict, kernel = compared(record_source, tmp_path, KERNEL.replace("256", "128"))
    assert verdict.text == "entry 1: launch demo._scale_kernel grid: [4, 1, 1] → [8, 1, 1]"
    (diff,) = kernel.differences.values()
    assert diff[0] == "constants BLOCK: 256 → 128"


def test_another_number_of_warps_is_reported(
    record_source: Callable[[str], Recording], tmp_path: Path
) -> None:
    _, kernel = compared(record_source, tmp_path, KERNEL.replace("BLOCK=256)", "BLOCK=256, num_warps=8)"))
    assert list(kernel.differences.values()) == [("options num_warps: 4 → 8",)]


def test_a_disabled_parameter_and_another_order_are_the_same_code(
    record_source: Callable[[str], Recording], tmp_path: Path
) -> None:
    source = KERNEL.replace(
        BY_POSITION, "factor, count, x_ptr, y_ptr, OFFSET: tl.constexpr, BLOCK: tl.constexpr"
    )
    source = source.replace("x * factor", "(x * factor if OFFSET == 0 else x)")
    source = source.replace("(x, y, 1000, 0.5,", "(0.5, 1000, x, y, OFFSET=0.0,")
    verdict, kernel = compared(record_source, tmp_path, source)
    assert (verdict.text, kernel.identical, kernel.by_name) == ("equal", 0, 1)
    assert kernel.added == {"+OFFSET=0.0"}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("1000, 0.5", "1000, 0.25", "factor: 0x1.0000000000000p-1 → 0x1.0000000000000p-2"),
        ("y.neg()", "y.abs()", "aten.neg.default"),
        ("y.neg()", "y[:500].neg()", "fp32[500](1,)"),
        ("y.neg()", "x.neg()", "aten.neg.default 0: #2 fp32[1000](1,) → #1 fp32[1000](1,)"),
        ("y.neg()", "y.neg().neg()", "3 → 4 operators and launches"),
    ],
)
def test_another_scalar_operator_shape_buffer_or_count_is_reported(
    record_source: Callable[[str], Recording], old: str, new: str, said: str
) -> None:
    verdict = compare_case("demo", record_source(KERNEL), record_source(KERNEL.replace(old, new)), {})
    assert verdict.different
    assert said in verdict.text


def test_memory_that_nothing_uses_is_a_note(record_source: Callable[[str], Recording]) -> None:
    more = KERNEL.replace("    y = ", '    torch.empty(7, device="cuda")\n    y = ')
    verdict = compare_case("demo", record_source(KERNEL), record_source(more), {})
    assert (verdict.text, verdict.note) == ("equal", "+1 × fp32[7](1,)")


def test_a_case_that_fails_in_one_commit_differs() -> None:
    fine, broken = Recording("demo"), Recording("demo", error="ModelError: no")
    assert compare_case("demo", fine, broken, {}).text == "runs → ModelError: no"
    assert not compare_case("demo", broken, broken, {}).different
    assert compare_case("demo", broken, broken, {}).failed
    assert compare_case("demo", fine, None, {}).different


def test_a_recording_that_was_killed_is_recorded_again(
    record_source: Callable[[str], Recording], tmp_path: Path
) -> None:
    store, recording = Store(tmp_path / "killed"), record_source(KERNEL)
    (key,) = recording.specializations
    assert store.claim(key)
    assert not store.claim(key), "another process does it"
    store.write(recording)
    assert store.read("demo") == recording
    assert (store.missing(["demo"]), store.read_kernel(key)) == ([], "its compilation was stopped")
    store.recover()
    assert (store.missing(["demo"]), store.claim(key)) == (["demo"], True)


def test_tensors_are_on_the_emulated_device_and_end_with_it() -> None:
    seen: list[object] = []

    def case() -> None:
        layer = torch.nn.Linear(4, 2, device="meta").to_empty(device="cuda")
        x = torch.arange(8.0).reshape(2, 4).to("cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = layer(x)
        y.float().sum().backward()
        assert layer.weight.grad is not None
        seen.extend(
            [x.device, type(x), y.dtype, layer.weight.grad.is_cuda, x.cpu().is_cuda, x.tolist()[1][3]]
        )
        host = torch.zeros(4)
        host.copy_(x[1])
        seen.extend([host.is_cuda, host[3].item(), torch.tensor([5], device="cuda").item()])

    before = torch.Tensor.to
    log, recording = record("demo", case)
    assert recording.error is None, recording.error
    expected = [torch.device("cuda:0"), torch.Tensor, torch.bfloat16, True, False, 7.0, False, 7.0, 5]
    assert seen == expected
    names = [entry.name for entry in log.entries if not entry.is_allocation]
    assert "aten.addmm.default" in names
    assert not any("detach" in name or "view" in name for name in names), "views are no work"
    assert torch.Tensor.to is before
    assert not torch.cuda.is_available()


def test_the_example_kernel_is_launched() -> None:
    call = dict(optimizer_calls())["weighted_sum/bf16"]
    log, recording = record("call", call)
    assert recording.error is None, recording.error
    kernels = [entry.name for entry in log.entries if entry.kernel]
    assert kernels == ["launch weighted_sum._forward_kernel", "launch weighted_sum._backward_kernel"]
    forward = next(entry for entry in log.entries if entry.kernel)
    assert forward.arguments["x_ptr"] == "#1 bf16 of 36864"


def test_reasons_for_recipes_that_are_not_recorded_are_up_to_date() -> None:
    names = [case.name for case in cases_gpu.CASES]
    assert [one for one in NOT_RECORDED if not any(fnmatch(name, one) for name in names)] == []
