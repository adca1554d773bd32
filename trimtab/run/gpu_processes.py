"""Who else uses a GPU: other processes as `nvidia-smi` lists them, MIG slices and MPS limits. No torch.

`nvidia-smi -q -x` is asked rather than `--query-compute-apps`, which leaves out graphics processes (a display server, a
browser) that hold memory as well.
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

SECONDS = 10
"""That nvidia-smi may take; on a machine with eight GPUs it answers within two."""
MPS_LIMIT = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
"""Memory that a client of CUDA's Multi-Process Service may allocate, by device: `0=8G,1=4G`
(https://docs.nvidia.com/deploy/mps/latest/appendix-environment-variables.html)."""
MPS_SERVER = "nvidia-cuda-mps-server"
SHOWN = 4
"""Processes that a sentence names, the largest first."""


@dataclass(frozen=True)
class GpuProcess:
    """Another process with memory on a GPU.

    Example:
        >>> GpuProcess(1234, "python", 2 * 2**30).describe()
        'python 2.00 GiB'
    """

    pid: int
    name: str
    """The program, without its folder."""
    used_bytes: int | None
    """None where the driver does not say."""
    graphics: bool = False
    """Whether it draws and computes nothing."""

    def describe(self) -> str:
        """Its name and memory."""
        return self.name if self.used_bytes is None else f"{self.name} {format_bytes(self.used_bytes)}"


def other_processes(index: int | None = None, *, uuid: str | None = None) -> tuple[GpuProcess, ...]:
    """The other processes on a GPU, the largest first; empty where there are none or they cannot be seen.

    In a container, without rights and on a MIG slice the driver may list none, or list the host's numbers of processes,
    under which this one is not recognized. Without `nvidia-smi` none are known.

    Args:
        index: of the GPU as torch numbers it; `CUDA_VISIBLE_DEVICES` is followed. The first one without it.
        uuid: the driver's own name of the GPU (`GPU-…`), which is certain; it goes before the index.

    Example:
        >>> other_processes(0)  # doctest: +SKIP
        (GpuProcess(pid=4242, name='python', used_bytes=3113851289, graphics=False),)
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    command = [program, "-q", "-x", "-i", uuid or _selector(index or 0, os.environ)]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True).stdout
        root = ElementTree.fromstring(answer)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError, ElementTree.ParseError):
        return ()
    found = [process for entry in root.iter("process_info") if (process := _process(entry)) is not None]
    others = {process.pid: process for process in found if process.pid != os.getpid()}
    return tuple(sorted(others.values(), key=lambda process: -(process.used_bytes or 0)))


def describe_sharing(name: str, processes: Sequence[GpuProcess], limit: int | None = None) -> str | None:
    """Who shares a GPU, in words; None where nothing is known to.

    Args:
        name: of the device, as torch has it.
        processes: those besides this one.
        limit: what MPS allows this process, in bytes.

    Example:
        >>> describe_sharing("NVIDIA A10", [GpuProcess(7, "python", 3 * 10**9), GpuProcess(8, "Xorg", 2 * 10**8, True)])
        '2.98 GiB of this card are used by 2 other processes (python 2.79 GiB, Xorg 190.7 MiB)'
    """
    said = []
    if (part := mig_slice(name)) is not None:
        said.append(
            f"this is the MIG slice {part}, a part of the card with its own memory and multiprocessors"
        )
    if limit is not None:
        said.append(f"MPS allows this process {format_bytes(limit)} ({MPS_LIMIT})")
    elif any(process.name == MPS_SERVER for process in processes):
        said.append("processes share this card through MPS")
    users = [process for process in processes if process.name != MPS_SERVER]
    if users:
        used = sum(process.used_bytes or 0 for process in users)
        amount = f"{format_bytes(used)} of this card are" if used else "this card is also"
        listed = ", ".join(process.describe() for process in users[:SHOWN])
        more = f" and {len(users) - SHOWN} more" if len(users) > SHOWN else ""
        word = "process" if len(users) == 1 else "processes"
        said.append(f"{amount} used by {len(users)} other {word} ({listed}{more})")
    return "; ".join(said) or None


def mig_slice(name: str) -> str | None:
    """The profile of a MIG slice from the name of its device; None for a whole card.

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
    """The GPU that torch numbers so, in nvidia-smi's words."""
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
