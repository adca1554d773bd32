"""Other users of a GPU: processes that `nvidia-smi` lists, MIG slices and MPS limits. No torch.

Uses `nvidia-smi -q -x` rather than `--query-compute-apps`, which leaves out graphics processes (a display server, a
browser) that use GPU memory too.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from xml.etree import ElementTree

from trimtab.facts.units import format_bytes, parse_bytes

TIMEOUT_SECONDS = 10
"""Timeout for nvidia-smi; on a machine with eight GPUs it takes less than two seconds."""
MPS_LIMIT = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
"""Environment variable: memory that a client of CUDA's Multi-Process Service may allocate, by device: `0=8G,1=4G`
(https://docs.nvidia.com/deploy/mps/latest/appendix-environment-variables.html)."""
MPS_SERVER = "nvidia-cuda-mps-server"
SHOWN = 4
"""Number of processes that a message names, the largest first."""


@dataclass(frozen=True)
class GpuProcess:
    """Another process with memory on a GPU.

    Example:
        >>> GpuProcess(1234, "python", 2 * 2**30).describe()
        'python 2.00 GiB'
    """

    pid: int
    name: str
    """The program's name, without its folder."""
    used_bytes: int | None
    """None if the driver does not report it."""
    graphics: bool = False
    """Whether it only uses graphics, not compute."""

    def describe(self) -> str:
        """Its name and memory."""
        return self.name if self.used_bytes is None else f"{self.name} {format_bytes(self.used_bytes)}"


def other_processes(index: int | None = None, *, uuid: str | None = None) -> tuple[GpuProcess, ...]:
    """The other processes on a GPU, the largest first; empty if there are none or they are not visible.

    In a container, without permissions and on a MIG slice the driver may list none, or list process ids of the host,
    so that this process is not recognized. Without `nvidia-smi` none are known.

    Args:
        index: torch's index of the GPU, after `CUDA_VISIBLE_DEVICES`; 0 if None.
        uuid: the driver's id of the GPU (`GPU-…`), which is unambiguous; it takes precedence over the index.

    Example:
        >>> other_processes(0)  # doctest: +SKIP
        (GpuProcess(pid=4242, name='python', used_bytes=3113851289, graphics=False),)
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    command = [program, "-q", "-x", "-i", uuid or _selector(index or 0, os.environ)]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True
        ).stdout
        root = ElementTree.fromstring(answer)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError, ElementTree.ParseError):
        return ()
    found = [process for entry in root.iter("process_info") if (process := _process(entry)) is not None]
    others = {process.pid: process for process in found if process.pid != os.getpid()}
    return tuple(sorted(others.values(), key=lambda process: -(process.used_bytes or 0)))


def describe_sharing(name: str, processes: Sequence[GpuProcess], limit: int | None = None) -> str | None:
    """Describes how a GPU is shared; None if it is not, as far as known.

    Args:
        name: torch's name of the device.
        processes: the other processes on it.
        limit: the memory limit of MPS for this process, in bytes.

    Example:
        >>> describe_sharing("NVIDIA A10", [GpuProcess(7, "python", 3 * 10**9), GpuProcess(8, "Xorg", 2 * 10**8, True)])
        '2.98 GiB of this GPU are used by 2 other processes (python 2.79 GiB, Xorg 190.7 MiB)'
    """
    parts = []
    if (part := mig_slice(name)) is not None:
        parts.append(
            f"this is the MIG slice {part}, a part of the GPU with its own memory and multiprocessors"
        )
    if limit is not None:
        parts.append(f"MPS allows this process {format_bytes(limit)} ({MPS_LIMIT})")
    elif any(process.name == MPS_SERVER for process in processes):
        parts.append("processes share this GPU through MPS")
    users = [process for process in processes if process.name != MPS_SERVER]
    if users:
        used = sum(process.used_bytes or 0 for process in users)
        amount = f"{format_bytes(used)} of this GPU are" if used else "this GPU is also"
        listed = ", ".join(process.describe() for process in users[:SHOWN])
        more = f" and {len(users) - SHOWN} more" if len(users) > SHOWN else ""
        word = "process" if len(users) == 1 else "processes"
        parts.append(f"{amount} used by {len(users)} other {word} ({listed}{more})")
    return "; ".join(parts) or None


def mig_slice(name: str) -> str | None:
    """The profile of a MIG slice from its device name; None for a complete GPU.

    Example:
        >>> mig_slice("NVIDIA A100-SXM4-40GB MIG 1g.5gb"), mig_slice("NVIDIA H200")
        ('1g.5gb', None)
    """
    found = re.search(r"\bMIG (\S+)$", name)
    return found[1] if found else None


def mps_limit(index: int, environment: Mapping[str, str] | None = None) -> int | None:
    """Bytes that MPS lets this process allocate on a device; None without a limit.

    Example:
        >>> mps_limit(1, {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=8G,1=512M"}) // 2**20
        512
    """
    text = (os.environ if environment is None else environment).get(MPS_LIMIT, "")
    for part in text.split(","):
        device, _, size = part.partition("=")
        if device.strip() == str(index):
            unit = size.strip()[-1:].lower()
            return parse_bytes(f"{size.strip()}iB" if unit in "kmg" else size.strip())
    return None


def _selector(index: int, environment: Mapping[str, str]) -> str:
    """nvidia-smi's selector for a GPU by torch's index."""
    visible = [
        entry.strip() for entry in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()
    ]
    return visible[index] if index < len(visible) else str(index)


def _process(entry: ElementTree.Element) -> GpuProcess | None:
    pid = (entry.findtext("pid") or "").strip()
    if not pid.isdecimal():
        return None
    words = (entry.findtext("process_name") or "").strip().split()
    used = re.fullmatch(r"(\d+) MiB", (entry.findtext("used_memory") or "").strip())
    return GpuProcess(
        int(pid),
        PurePosixPath(words[0]).name if words else "a process",
        int(used[1]) * 2**20 if used else None,
        graphics=(entry.findtext("type") or "").strip() == "G",
    )
