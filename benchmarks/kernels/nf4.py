"""NF4 compared with bitsandbytes and Unsloth: double quantization, blocks of 64, bf16, bitwise identical results.

Unsloth patches other libraries on import, so it is imported only when its cases are built.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from trimtab.kernels import nf4
from trimtab.kernels.accuracy import TOLERANCE, check_accuracy
from trimtab.kernels.nf4 import NF4Weight, spec
from trimtab.lab.contests import Candidates, Contest, Implementation, floor, missing

SHAPES = ((1024, 4096), (4096, 4096), (14336, 4096), (28672, 8192))
MATMULS = ((1, (4096, 4096)), (2, (4096, 4096)), (16, (4096, 4096)), (1, (14336, 4096)), (2, (14336, 4096)))


def _weight(shape: tuple[int, int]) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(0)
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) * 0.02


def _differing(got: torch.Tensor, truth: torch.Tensor, what: str) -> str | None:
    """Returns how many elements differ, or None if all bits are equal; -0.0 and 0.0 are different."""
    if got.element_size() == 2:
        got, truth = got.contiguous().view(torch.int16), truth.contiguous().view(torch.int16)
    wrong = int((got.reshape(-1) != truth.reshape(-1)).sum())
    return f"{wrong} of {truth.numel()} {what} differ" if wrong else None


def _dequantize_bench(shape: tuple[int, int]) -> Candidates:
    packed = nf4.quantize(_weight(shape), impl="triton")
    truth = nf4.dequantize(packed, impl="reference")
    contestants: dict[str, Implementation] = {}
    absent: dict[str, str] = {}

    def add(name: str, run: Callable[[], torch.Tensor], ours: bool = False) -> None:
        contestants[name] = Implementation(run, lambda: _differing(run(), truth, "values"), ours=ours)

    add("trimtab", lambda: nf4.dequantize(packed, impl="triton"), ours=True)
    transposed = partial(nf4.dequantize, packed, transposed=True, impl="triton")
    add("trimtab transposed", lambda: transposed().t(), ours=True)
    if reason := missing("bitsandbytes"):
        absent["bitsandbytes"] = absent["unsloth"] = reason
        return Candidates(contestants, absent)
    from bitsandbytes.functional import QuantState, dequantize_4bit

    entries = packed.to_bitsandbytes()
    codes = entries.pop("weight")
    state = QuantState.from_dict(
        {key.removeprefix("weight."): value for key, value in entries.items()}, "cuda"
    )
    add("bitsandbytes", lambda: dequantize_4bit(codes, state))
    if reason := missing("unsloth"):
        absent["unsloth"] = reason
    else:
        import unsloth  # noqa: F401 (its kernels cannot be imported without it)
        from unsloth.kernels.utils import fast_dequantize

        add("unsloth", lambda: fast_dequantize(codes, state))
    return Candidates(contestants, absent)


def _quantize_bench(shape: tuple[int, int]) -> Candidates:
    weight = _weight(shape)
    contestants: dict[str, Implementation] = {}
    absent: dict[str, str] = {}
    truth = nf4.quantize(weight, impl="reference").to_bitsandbytes()

    def compared(entries: dict[str, torch.Tensor]) -> str | None:
        found = [
            _differing(entries[name], value.to(entries[name].device), name) for name, value in truth.items()
        ]
        return "; ".join(sentence for sentence in found if sentence) or None

    if reason := missing("bitsandbytes"):
        absent["bitsandbytes"] = reason
    else:
        from bitsandbytes.functional import quantize_4bit

        def theirs() -> Any:
            return quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)

        def their_entries() -> dict[str, torch.Tensor]:
            codes, state = theirs()
            rest = {f"weight.{name}": value for name, value in state.as_dict(packed=True).items()}
            return {"weight": codes, **rest}

        # bitsandbytes' result is the ground truth; the reference may differ in the last bit of a reciprocal
        truth = their_entries()
        contestants["bitsandbytes"] = Implementation(theirs, lambda: compared(their_entries()))

    def ours(check: bool) -> NF4Weight:
        return nf4.quantize(weight, check=check, impl="triton")

    for name, check in (("trimtab", False), ("trimtab, finite values checked", True)):
        contestants[name] = Implementation(
            partial(ours, check), lambda: compared(ours(False).to_bitsandbytes()), ours=True
        )
    return Candidates(contestants, absent)


def _matmul_bench(rows: int, shape: tuple[int, int]) -> Candidates:
    packed = nf4.quantize(_weight(shape), impl="triton")
    x_MK = torch.randn(rows, shape[1], device="cuda", dtype=torch.bfloat16)
    weight_NK = nf4.dequantize(packed, impl="reference")
    truth = x_MK.double() @ weight_NK.double().t()
    reference = x_MK @ weight_NK.t()
    contestants: dict[str, Implementation] = {}
    absent: dict[str, str] = {}

    def add(name: str, run: Callable[[], torch.Tensor], ours: bool = False) -> None:
        def check() -> str | None:
            checked = check_accuracy(
                name, run(), truth=truth, reference=reference, tolerance=TOLERANCE["bf16"]
            )
            return None if checked else str(checked)

        contestants[name] = Implementation(run, check, ours=ours)

    add("trimtab", lambda: nf4.matmul(x_MK, packed, impl="triton"), ours=True)
    add("dequantized, then torch", lambda: x_MK @ nf4.dequantize(packed, impl="triton").t())
    add("torch on bf16 weights", lambda: x_MK @ weight_NK.t())
    if reason := missing("bitsandbytes"):
        absent["bitsandbytes"] = reason
    else:
        import bitsandbytes

        entries = packed.to_bitsandbytes()
        codes = entries.pop("weight")
        state = bitsandbytes.functional.QuantState.from_dict(
            {key.removeprefix("weight."): value for key, value in entries.items()}, "cuda"
        )
        add("bitsandbytes", lambda: bitsandbytes.matmul_4bit(x_MK, codes.t(), quant_state=state))
    return Candidates(contestants, absent)


def cases() -> list[Contest]:
    """Dequantize and quantize at four shapes, and the product with a few rows."""
    found = []
    for shape in SHAPES:
        name = "×".join(map(str, shape))
        moved = floor(bytes_moved=spec.dequantize_bytes_moved(shape))
        found.append(Contest("nf4", f"dequantize {name}", partial(_dequantize_bench, shape), moved))
    for shape in SHAPES:
        name = "×".join(map(str, shape))
        moved = floor(bytes_moved=spec.quantize_bytes_moved(shape))
        found.append(Contest("nf4", f"quantize {name}", partial(_quantize_bench, shape), moved))
    for rows, shape in MATMULS:
        name = f"matmul {rows} × {'×'.join(map(str, shape))}"
        moved = floor(bytes_moved=spec.matmul_bytes_moved(rows, shape), flops=spec.matmul_flops(rows, shape))
        found.append(Contest("nf4", name, partial(_matmul_bench, rows, shape), moved))
    return found
