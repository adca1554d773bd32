"""Triton without a GPU: kernels run in its interpreter, and are compiled for every supported GPU architecture.

Where Triton is not installed (macOS), tests that need either are skipped.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CHIPS = (75, 80, 86, 89, 90, 100, 120)
"""Compute capabilities: Turing, A100, consumer Ampere, Ada, Hopper, Blackwell, consumer Blackwell."""

SHARED_LIMIT = {
    75: 64 * 1024,
    80: 163 * 1024,
    86: 99 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
    120: 99 * 1024,
}
"""Maximum shared memory per block, in bytes."""


@contextmanager
def interpreted(*modules: ModuleType) -> Iterator[None]:
    """Interprets every Triton function that is a global of these modules, on CPU tensors.

    Name the modules of device functions too. bf16 is inaccurate there: products are garbage and casts to it
    truncate.

    Example:
        with interpreted(impl_triton):
            out = op(x, impl="triton")
    """
    pytest.importorskip("triton")
    import triton.language as tl
    from triton.language import core, math, random, standard
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction, mangle_type

    mangle_type(1)  # imports what would not import with the language patched
    # tl.zeros, tl.sigmoid and others are Triton functions themselves. And where a kernel calls one, the
    # interpreter patches the language for it and never reverts that: so all of it is saved and restored.
    language = (tl, core, math, standard, random, core.tensor, core.dtype, core.tensor_descriptor_base)
    saved = {owner: vars(owner).copy() for owner in (*modules, *language)}
    twins: dict[int, Any] = {}  # by id: a Triton function's own hash reads the globals that change here
    for owner, names in saved.items():
        found = {name: value for name, value in names.items() if isinstance(value, JITFunction)}
        assert found or owner not in modules, f"no Triton function in {owner.__name__}"
        for name, value in found.items():
            twins.setdefault(id(value), InterpretedFunction(value.fn))
            setattr(owner, name, twins[id(value)])
    try:
        yield
    finally:
        for owner, names in saved.items():
            for name, value in vars(owner).copy().items():
                # interpreter_semantic stays: functions that the interpreter rewrote and caches refer to it
                if name not in names and owner in language and name != "interpreter_semantic":
                    delattr(owner, name)
                elif name in names and names[name] is not value:
                    setattr(owner, name, names[name])


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel. `registers` and `spills` (bytes of local memory) are per thread."""

    shared: int
    registers: int | None
    spills: int | None
    ptx: str


def compile_for(
    chip: int,
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, object],
    *,
    num_warps: int = 4,
    num_stages: int = 3,
) -> Compiled:
    """Compiles a kernel for a compute capability; needs no GPU, takes about half a second.

    Args:
        chip: one of `CHIPS`.
        kernel: a function under `triton.jit`.
        signature: types of the run-time arguments: "*fp16", "i32", "fp32", … Pointers are assumed to be aligned to 16
            bytes, as torch's are; "i32:16" is an integer divisible by 16 (a stride, usually).
        constexprs: the others, arguments that are None included.
    """
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    assert isinstance(kernel, JITFunction), f"{kernel} is not a plain triton.jit function"
    unknown = set(kernel.arg_names) ^ {*signature, *constexprs}
    assert not unknown, f"{kernel.fn.__name__}: {sorted(unknown)} missing or unknown"
    types, attrs = {}, {}
    for index, name in enumerate(kernel.arg_names):
        kind, _, divisor = signature.get(name, "constexpr").partition(":")
        types[name] = kind
        if kind.startswith("*") or divisor == "16":
            attrs[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, types, dict(constexprs), attrs)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", chip, 32), options=options)
    registers, spills = _usage(compiled.asm["cubin"], Path(triton.__file__).parent)
    return Compiled(compiled.metadata.shared, registers, spills, compiled.asm["ptx"])


def _usage(cubin: bytes, package: Path) -> tuple[int | None, int | None]:
    tool = package / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", done.stdout)
    assert found, done.stdout
    return int(found[1]), int(found[2]) + int(found[3])


def leave_out_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables Triton launches until the test ends: callers allocate the same tensors as on a GPU, on the CPU, with
    uninitialized results."""
    jit = pytest.importorskip("triton.runtime.jit")
    from trimtab.kernels.gated_mlp import impl_triton as gated_mlp
    from trimtab.kernels.rms_norm import impl_triton as rms_norm
    from trimtab.kernels.rope import impl_triton as rope

    monkeypatch.setattr(jit.JITFunction, "__getitem__", lambda kernel, grid: lambda *_, **__: None)
    for module in (gated_mlp, rms_norm, rope):
        monkeypatch.setattr(module, "check_device", lambda *_: None)
