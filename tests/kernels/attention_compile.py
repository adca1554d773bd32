"""Every configuration of the attention kernels, compiled without a GPU."""

# D head size, G query heads per key/value head

from __future__ import annotations

from typing import Any

from triton_tools import Compiled, compile_for

from trimtab.kernels.attention import kernels_backward, kernels_forward
from trimtab.kernels.attention.tiles import Tiles, padded, tiles

KERNELS = {
    "forward": kernels_forward.attention_forward_kernel,
    "query": kernels_backward.attention_query_kernel,
    "key": kernels_backward.attention_key_kernel,
}
STATISTICS = ("lse_ptr", "delta_ptr")
BOUNDS = ("first_ptr", "last_ptr")
OPTIONAL = {
    "sinks_ptr": "*fp32",
    "dlse_ptr": "*fp32",
    "query_last_ptr": "*i32",
    "key_first_ptr": "*i32",
    "offset": "i32",
}
"""Arguments that are None in a call without options; the kernel is then compiled without them."""


def compiled(
    name: str,
    chip: int,
    dtype: str,
    D: int,
    *,
    G: int = 4,
    packed: bool = True,
    softcap: bool = False,
    tma: bool = False,
    options: bool = False,
    with_tiles: Tiles | None = None,
) -> Compiled:
    """One kernel as a launch on `chip` would compile it, with all optional arguments or with none."""
    kernel = KERNELS[name]
    chosen = with_tiles or tiles(name, D, 4 if dtype == "fp32" else 2, chip, packed=packed)
    constants: dict[str, Any] = {"G": G, "D": D, "DP": padded(D), "BR": chosen.rows, "BN": chosen.keys}
    if not options:
        constants |= {argument: None for argument in OPTIONAL if argument in kernel.arg_names}
    constants |= {
        "CAUSAL": not options,
        "TWO_SIDED": options,
        "PACKED": packed,
        "SOFTCAP": softcap,
        "PRECISION": "ieee",
        "TMA": tma,
    }
    heads, rows = (G, chosen.rows) if name == "key" else (1, chosen.keys)
    described = f"tensordesc<{dtype}[1,{rows // heads},{heads},{padded(D)}]>"
    signature = {}
    for argument in kernel.arg_names:
        if argument in constants:
            continue
        if tma and argument in (("q_ptr", "do_ptr") if name == "key" else ("k_ptr", "v_ptr")):
            signature[argument] = described
        elif argument in OPTIONAL:
            signature[argument] = OPTIONAL[argument]
        elif argument in STATISTICS:
            signature[argument] = "*fp32"
        elif argument in BOUNDS:
            signature[argument] = "*i32"
        elif argument.endswith("_ptr"):
            signature[argument] = f"*{dtype}"
        elif argument.startswith("stride"):
            signature[argument] = "i32:16"
        else:
            signature[argument] = "i32" if argument in ("T", "S", "K", "window") else "fp32"
    return compile_for(chip, kernel, signature, constants, num_warps=chosen.warps, num_stages=chosen.stages)
