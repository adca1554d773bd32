"""Nanoseconds per element of an optimizer step, compared with torch's and bitsandbytes' optimizers.

    python benchmarks/optimizer_cost.py --commit $(git rev-parse --short HEAD)

Writes benchmarks/results/optimizer-cost-<device>.json and prints it as a table. Times on a CPU are the
process's CPU time on one thread, on which other programs have little influence; best and median of several steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trimtab.lab.records import device_name
from trimtab.lab.timing import time_once
from trimtab.optim import OPTIMIZERS, build


def parameters(dtype: torch.dtype, device: str, count: int) -> dict[str, torch.nn.Parameter]:
    """Square matrices and biases with gradients."""
    width = 1024
    params = {}
    for i in range(max(1, count // width**2)):
        for name, shape in ((f"{i}.weight", (width, width)), (f"{i}.bias", (width,))):
            params[name] = torch.nn.Parameter(torch.randn(shape, device=device, dtype=dtype))
            params[name].grad = torch.randn_like(params[name])
    return params


def candidates(params: dict[str, torch.nn.Parameter]) -> dict[str, Callable[[], Any]]:
    """Optimizer steps by name."""
    steps: dict[str, Callable[[], Any]] = {}
    for name in OPTIMIZERS:
        steps[f"trimtab {name}"] = build(name, params.items(), lr=1e-5).step
    values = list(params.values())
    steps["torch AdamW(foreach=True)"] = torch.optim.AdamW(values, lr=1e-5, foreach=True).step
    steps["torch AdamW(fused=True)"] = torch.optim.AdamW(values, lr=1e-5, fused=True).step
    try:
        import bitsandbytes

        steps["bitsandbytes AdamW8bit"] = bitsandbytes.optim.AdamW8bit(values, lr=1e-5).step
    except ImportError:
        print("bitsandbytes is not installed: its row is omitted")
    return steps


def seconds(step: Callable[[], Any], device: str, repeats: int) -> list[float]:
    """Seconds of each of `repeats` steps, after two warm-up steps."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    return [time_once(step, device, clock) for _ in range(repeats + 2)][2:]


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--commit", default="unknown", help="commit to record with the results")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--millions", type=int, help="parameters, in millions (4 on a CPU, 512 on a GPU)")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    # Once a large block was freed, glibc no longer returns memory to the system after each operation. Training
    # processes have freed many; a new process would be measured with page faults (1.7 times slower).
    torch.empty(7 << 20)
    millions = options.millions or (4 if options.device == "cpu" else 512)
    rows = []
    print(f"{'optimizer':30} {'weights':8} {'best ns':>8} {'median':>8}")
    for dtype in (torch.float32, torch.bfloat16):
        params = parameters(dtype, options.device, millions << 20)
        count = sum(p.numel() for p in params.values())
        for name, step in candidates(params).items():
            times = [t / count * 1e9 for t in seconds(step, options.device, options.repeats)]
            weights = str(dtype).removeprefix("torch.")
            rows.append(
                {"name": name, "weights": weights, "best": min(times), "median": statistics.median(times)}
            )
            print(f"{name:30} {weights:8} {rows[-1]['best']:8.3f} {rows[-1]['median']:8.3f}", flush=True)
    place = {
        "device": device_name(options.device),
        "torch": torch.__version__,
        "threads": 1,
        "parameters": millions << 20,
    }
    out = Path(f"benchmarks/results/optimizer-cost-{options.device}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    report = {"version": 1, "commit": options.commit, "place": place, "unit": "ns an element", "rows": rows}
    out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
