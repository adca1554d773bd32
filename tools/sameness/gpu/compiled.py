"""Compiles kernels to PTX without a GPU, and removes everything but code from PTX."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import triton
from triton.backends.nvidia.compiler import CUDABackend

from tools.sameness.gpu.launches import TARGET

SCRATCH = ("global scratch", "profile scratch")
"""Parameters that Triton adds behind a kernel's own."""


@dataclass(frozen=True)
class Compiled:
    """A kernel as compiled for the GPU."""

    ptx: str
    shared: int
    """Bytes of shared memory that a program takes."""


def compile_kernel(source: Any, options: Mapping[str, Any]) -> Compiled:
    """Compiles a specialization to PTX, as a launch does; the assembler that follows reads nothing else."""
    with patch.object(CUDABackend, "make_cubin", lambda *_: b""):
        made = triton.compile(source, target=TARGET, options=dict(options))
    return Compiled(code(made.asm["ptx"]), int(made.metadata.shared))


def code(ptx: str) -> str:
    r"""PTX without comments, line numbers, names of files, and debugging sections.

    Example:
        >>> code(".loc 1 2 3\n\tadd.s32 %r1, %r2, %r3; // x.py:7\n")
        'add.s32 %r1, %r2, %r3;'
    """
    ptx = re.sub(r"\.section\s+\.debug\w*\s*\{.*?\}", "", ptx, flags=re.DOTALL)
    lines = (re.sub(r"\s*//.*", "", line).strip() for line in ptx.splitlines())
    return "\n".join(line for line in lines if line and not re.match(r"\.(loc|file)\b|\$L__(tmp|func)", line))


def canonical(ptx: str, signature: Mapping[str, str]) -> str:
    """PTX that does not depend on the order of a kernel's parameters, nor on its name.

    Parameters are called by their names and read first, in alphabetical order (a read changes nothing), and registers
    are numbered as they appear. PTX whose parameters are not those of the signature is returned unchanged.
    """
    names = [*(part for name, kind in signature.items() for part in _parts(name, kind)), *SCRATCH]
    header = re.search(r"\.entry (\w+)\((.*?)\)", ptx, flags=re.DOTALL)
    if header is None or len(header[2].strip().splitlines()) != len(names):
        return ptx
    kernel = header[1]
    named = re.sub(rf"\b{kernel}_param_(\d+)\b", lambda found: f"<{names[int(found[1])]}>", ptx)
    lines = re.sub(rf"\b{kernel}\b", "<kernel>", named).splitlines()
    declared = sorted(line.rstrip(",") for line in lines if line.startswith(".param"))
    reads = [line for line in lines if line.startswith("ld.param")]
    reads.sort(key=lambda line: line[line.index("[") :])
    rest = [line for line in lines if not line.startswith((".param", "ld.param"))]
    return _renumbered("\n".join([*declared, *reads, *rest]))


def _renumbered(ptx: str) -> str:
    """Registers numbered in the order in which they appear, each kind for itself."""
    numbers: dict[str, dict[str, int]] = defaultdict(dict)

    def renumber(found: re.Match[str]) -> str:
        kind = numbers[found[1]]
        return f"%{found[1]}{kind.setdefault(found[2], len(kind) + 1)}"

    return re.sub(r"%(\w*?[a-z])(\d+)\b", renumber, ptx)


def _parts(name: str, kind: str) -> list[str]:
    """The PTX parameters of one kernel parameter: a tensor descriptor is followed by its shape and strides."""
    if kind == "constexpr":
        return []
    if not kind.startswith("tensordesc<"):
        return [name]
    rank = kind[kind.index("[") :].count(",") + 1
    return [name, *(f"{name} {what} {i}" for what in ("size", "stride") for i in range(rank))]
