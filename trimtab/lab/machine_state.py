"""Warns about conditions that distort measurements on this machine; measures the rates of host link and disk."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from trimtab.facts.devices import host_cores
from trimtab.facts.units import format_bytes
from trimtab.lab.probes_products import torch_dtype
from trimtab.lab.timing import Run, time_once, time_together
from trimtab.run.gpu_processes import other_processes

BUSY_LOAD = 0.5
"""Load average per core before the measurement, above which a CPU counts as busy."""
BUSY_GPU = 10
"""Utilization in percent before the measurement, above which a GPU counts as busy."""
OTHERS_BYTES = 3 * 2**30 // 2
"""GPU memory in use outside this process's tensors, above which other processes are suspected; a CUDA context takes
about 0.5 GiB."""
SLOWDOWNS = {
    0x08: "a hardware slowdown",
    0x20: "a software thermal slowdown",
    0x40: "a hardware thermal slowdown",
    0x80: "a power brake",
}
"""Bits of NVML's clock event reasons that distort a measurement; the usual power cap (0x04) does not."""
LINK_BYTES = 256 * 2**20
SUSTAINED_SIZE, SUSTAINED_SECONDS, COPY_SHARE = 8192, 1.5, 0.25
"""Size of the products that a GPU computes for this time, and the time of copies relative to that of products."""
DISK_BYTES = 128 * 2**20
LOAD_SECONDS = 0.4
"""Seconds for which the GPU computes while its clock is queried."""


def load_warnings(device: str) -> list[str]:
    """Warnings about other work on the machine; call it before measuring."""
    warnings = []
    if hasattr(os, "getloadavg"):
        load, cores = os.getloadavg()[0], host_cores() or 1
        if load > BUSY_LOAD * cores:
            warnings.append(f"the machine is busy: a load average of {load:.1f} on {cores} cores")
    if device.startswith("cuda"):
        used = _nvidia_smi("utilization.gpu")
        if used is not None and used.isdigit() and int(used) > BUSY_GPU:
            warnings.append(f"the GPU is busy: {used} % utilization before the measurement")
        names = [
            process.describe()
            for process in other_processes(torch.cuda.current_device())
            if not process.graphics
        ]
        free, total = torch.cuda.mem_get_info()
        others = total - free - torch.cuda.memory_reserved()
        if names:
            warnings.append(f"other processes use the GPU: {', '.join(names)}")
        elif others > OTHERS_BYTES:  # in a container the driver may list none
            warnings.append(f"other processes use {format_bytes(others)} of the GPU's memory")
    return warnings


def clock_warnings(work: Run) -> list[str]:
    """Warnings about a throttled clock of a CUDA GPU, queried while it runs `work`; none without nvidia-smi."""
    once = max(min(time_once(work, "cuda") for _ in range(3)), 1e-5)
    for _ in range(min(1000, round(LOAD_SECONDS / once))):
        work()
    reasons = _nvidia_smi("clocks_event_reasons.active") or _nvidia_smi("clocks_throttle_reasons.active")
    torch.cuda.synchronize()
    return slowdowns(reasons or "")


def sustained_slowdown(dtype: str) -> float:
    """How much longer a large product takes on a CUDA GPU while it computes without a pause, at least 1.

    Products and copies alternate as in a training step, so that the GPU reaches the clock rate and power of one. The
    products at the end are compared with those at the beginning.
    """
    kind = torch_dtype(dtype)
    a, b = (torch.randn(SUSTAINED_SIZE, SUSTAINED_SIZE, device="cuda", dtype=kind) for _ in range(2))
    out = torch.empty_like(a)
    source = torch.empty(LINK_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    once = time_once(lambda: torch.mm(a, b, out=out), "cuda")
    copies = max(1, round(COPY_SHARE * once / max(time_once(lambda: target.copy_(source), "cuda"), 1e-6)))
    count = max(8, min(2000, round(SUSTAINED_SECONDS / (once * (1 + COPY_SHARE)))))
    events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(count)]
    torch.cuda.synchronize()
    for start, stop in events:
        start.record()
        torch.mm(a, b, out=out)
        stop.record()
        for _ in range(copies):
            target.copy_(source)
    torch.cuda.synchronize()
    times = [start.elapsed_time(stop) for start, stop in events]
    part = max(2, count // 8)
    return max(1.0, statistics.median(times[-part:]) / statistics.median(times[:part]))


def slowdowns(reasons: str) -> list[str]:
    """Warnings for NVML's bit mask of clock event reasons.

    Example:
        >>> slowdowns("0x0000000000000044")
        ['the clock of the GPU is reduced: a hardware thermal slowdown']
        >>> slowdowns("[N/A]")
        []
    """
    try:
        mask = int(reasons, 16)
    except ValueError:
        return []
    names = [name for bit, name in SLOWDOWNS.items() if mask & bit]
    return [f"the clock of the GPU is reduced: {', '.join(names)}"] if names else []


def _nvidia_smi(field: str) -> str | None:
    """One value of torch's current GPU, without its unit; None if it cannot be queried."""
    words = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    if shutil.which(words[0]) is None:
        return None
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    if uuid is not None:
        words.append(f"--id=GPU-{uuid}")
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else None


def host_link() -> tuple[float, float]:
    """(bytes per second to the host, from the host) of a CUDA GPU, with pinned memory."""
    on_host = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(LINK_BYTES, dtype=torch.uint8, device="cuda")
    runs: dict[str, Run] = {
        "to": lambda: on_host.copy_(on_device, non_blocking=True),
        "from": lambda: on_device.copy_(on_host, non_blocking=True),
    }
    times = time_together(runs, rounds=3, budget_ms=60)
    return LINK_BYTES / times["to"].seconds, LINK_BYTES / times["from"].seconds


def disk_rates(folder: Path, nbytes: int | None = None) -> tuple[float, float]:
    """(bytes per second written and synchronized, bytes per second read) of a temporary file in a folder.

    The file is dropped from the page cache before it is read, if the operating system supports that.

    Raises:
        OSError: the folder cannot be written, or is full.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     all(rate > 0 for rate in disk_rates(Path(folder), 2**16))
        True
    """
    nbytes = DISK_BYTES if nbytes is None else nbytes
    block = os.urandom(min(nbytes, 2**22))  # random: some file systems compress
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".trimtab-calibration-") as file:
        start = time.perf_counter()
        for _ in range(max(1, nbytes // len(block))):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter() - start
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        start = time.perf_counter()
        total = 0
        while read := file.read(len(block)):
            total += len(read)
        seconds = time.perf_counter() - start
    return total / written, total / seconds
