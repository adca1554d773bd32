"""`trimtab doctor`."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from trimtab import __version__
from trimtab.cli.interrupts import begin_work
from trimtab.cli.verb import new_app
from trimtab.facts.compilers import compile_obstacle
from trimtab.facts.devices import DeviceFacts, host_cores
from trimtab.facts.errors import RecipeError, ResourceError
from trimtab.facts.openmp import describe_wait_policy
from trimtab.facts.units import format_bytes
from trimtab.report.console import new_console
from trimtab.report.plain import as_text

app = new_app()

PACKAGES = {
    "torch": "pip install 'trimtab[train]'",
    "pyarrow": "pip install 'trimtab[train]'",
    "triton": "comes with torch's CUDA builds; nothing here needs it on a CPU",
    "tensorboard": "pip install 'trimtab[tensorboard]'",
    "wandb": "pip install 'trimtab[wandb]'",
}
REPORTED_PACKAGES = (
    *PACKAGES,
    "numpy",
    "pydantic",
    "safetensors",
    "tokenizers",
    "huggingface_hub",
    "transformers",
    "peft",
    "bitsandbytes",
)
PACKAGES_HEADING = "packages"
"""Heading that identifies a report file."""
SHARED_LABEL = "shared"
REPORTED_VARIABLES = (
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
    "KMP_BLOCKTIME",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TOKENIZERS_PARALLELISM",
    "HF_HUB_OFFLINE",
)
"""Environment variables that explain speed or memory. An allow-list, so that no token, key or path is written."""


@dataclass(frozen=True)
class DoctorRow:
    """A line of the table: a checked property and its value."""

    label: str
    text: str
    style: str = ""
    chosen: bool = False
    """Whether this is the implementation that will be used."""


@app.command()
def doctor(
    folder: Annotated[Path, typer.Option(help="Folder for runs, whose free disk space is shown.")] = Path(
        "."
    ),
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also write the findings to this text file, to attach to a bug report. It contains versions and "
            "hardware, but no tokens, paths or names.",
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Let --report overwrite a file that is not an earlier report."),
    ] = False,
) -> int:
    """Check this machine: device, versions, threads, attention, disk, and how to install missing packages.

    The exit code is 0 if training can run on this machine and 8 if a dependency is missing. For a bug report, attach
    the file that this command writes:

        trimtab doctor --report doctor.txt
    """
    if report is not None and not overwrite:
        _refuse_foreign(report)
    console = new_console()
    rows, ready = _findings(folder)
    attention = _attention_rows() if _version("torch") else []
    console.print(_table(rows))
    if attention:
        console.print(_table(attention[1:], title=attention[0].text))
    verdict = (
        "ready: try `trimtab demo`"
        if ready
        else "not ready: install the missing packages listed above, then try again"
    )
    console.print(verdict)
    if report is not None:
        begin_work()
        _write_report(report, [*rows, *attention], verdict)
        console.print(as_text(f"wrote {report}"), soft_wrap=True)
    return 0 if ready else 8


def _findings(folder: Path) -> tuple[list[DoctorRow], bool]:
    """All rows except attention, and whether training can run on this machine."""
    rows = [DoctorRow("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")]
    ready = sys.version_info[:2] in ((3, 11), (3, 12), (3, 13))
    if not ready:
        rows.append(DoctorRow("", "trimtab is tested on Python 3.11 to 3.13", "red"))
    for name, remedy in PACKAGES.items():
        rows.append(DoctorRow(name, _version(name) or f"not installed: {remedy}"))
    if _version("torch"):
        rows += _device_rows()
    else:
        ready = False
    place = folder.resolve()
    existing = next(parent for parent in (place, *place.parents) if parent.is_dir())
    rows.append(DoctorRow("disk", f"{format_bytes(shutil.disk_usage(existing).free)} free in {existing}"))
    return rows, ready


def _table(rows: list[DoctorRow], title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", box=None, show_header=False, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(as_text(row.label, "bold green" if row.chosen else ""), as_text(row.text, row.style))
    return table


def _version(name: str) -> str | None:
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # a folder of that name, such as wandb's output, is not a package
        return None


def _compile_row(kind: str, capability: tuple[int, int] | None) -> str:
    obstacle = compile_obstacle(kind, capability)
    if obstacle is not None:
        return f"not available: {obstacle}"
    return "available" + (" (off by default on a CPU)" if kind == "cpu" else "")


def _device_rows() -> list[DoctorRow]:
    from trimtab.run.device import detect

    device = detect()
    memory = format_bytes(device.memory_bytes)
    rows = [
        DoctorRow("device", f"{device.name} ({device.kind}), {memory} memory"),
        DoctorRow("free memory", format_bytes(device.available_bytes)),
        *_sharing_rows(device),
        DoctorRow("torch.compile", _compile_row(device.kind, device.capability)),
        *_processor_rows(device.cores or host_cores()),
    ]
    if device.kind == "cpu":
        import torch

        if torch.version.cuda is None:
            rows.append(
                DoctorRow(
                    "cuda",
                    "torch is built without CUDA: for an NVIDIA GPU install torch's CUDA build",
                )
            )
        else:
            built = f"torch is built for CUDA {torch.version.cuda}, but no GPU is visible: check nvidia-smi"
            rows.append(DoctorRow("cuda", built))
        slow = "no bf16 instructions: fp32 is the default and the fastest"
        rows.append(DoctorRow("dtypes", "bf16 in hardware" if device.bf16 else slow))
    else:
        rows.append(DoctorRow("capability", ".".join(map(str, device.capability or ()))))
        rows.append(
            DoctorRow("dtypes", "bf16" if device.bf16 else "no bf16 below capability 8.0: fp16 or fp32")
        )
    return rows


def _sharing_rows(device: DeviceFacts) -> list[DoctorRow]:
    """Rows about device memory that is shared with the CPU or with other processes."""
    rows = []
    if device.unified:
        rows.append(
            DoctorRow("unified memory", "CPU and GPU share one memory: the host's free memory is the limit")
        )
    elif device.kind == "cpu" and (platform.system(), platform.machine()) == ("Darwin", "arm64"):
        rows.append(
            DoctorRow(
                "unified memory", "the Apple GPU shares the CPU's memory; trimtab trains on the CPU here"
            )
        )
    if device.shared is not None:
        rows.append(DoctorRow(SHARED_LABEL, device.shared))
    return rows


def _processor_rows(cores: int) -> list[DoctorRow]:
    """Rows about the number of threads, the OpenMP wait policy and the machine's load."""
    from trimtab.run.device import threads

    limit = os.environ.get("OMP_NUM_THREADS")
    source = f" (OMP_NUM_THREADS={limit})" if limit else ""
    count = threads()
    rows = [
        DoctorRow("threads", f"torch uses {count} of {cores} cores{source}"),
        DoctorRow("wait policy", describe_wait_policy()),
    ]
    if hasattr(os, "getloadavg"):
        load = os.getloadavg()[0]
        text = f"{load:.1f} runnable processes on average over the last minute, {cores} cores"
        if load + count > cores * 1.5:
            text += ": other programs compete for the cores, and steps on the CPU take longer"
        rows.append(DoctorRow("load", text))
    return rows


def _attention_rows() -> list[DoctorRow]:
    """A heading, the attention implementation that will be used, and why the others are rejected."""
    from trimtab.kernels.attention.choice import choose_attention
    from trimtab.run.device import detect

    device = detect()
    dtype = "bf16" if device.bf16 else "fp32"
    choice = choose_attention(
        device=device.kind,
        capability=device.capability,
        dtype=dtype,
        head_dim=128,
        packed=True,
        window=None,
        training=True,
        triton=device.triton,
    )
    return [
        DoctorRow("", f"attention for packed training, heads of 128, {dtype}"),
        DoctorRow(choice.impl, f"will be used: {choice.reason}", chosen=True),
        *(DoctorRow(name, why) for name, why in choice.rejected),
    ]


def _refuse_foreign(path: Path) -> None:
    """Raises a RecipeError if the file has content that is not an earlier report."""
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    if lines and not (lines[0].startswith("trimtab ") and PACKAGES_HEADING in lines):
        raise RecipeError(
            f"{path} exists and is not a report of `trimtab doctor`",
            "name another file with --report, or overwrite it with --overwrite",
        )


def _write_report(path: Path, rows: list[DoctorRow], verdict: str) -> None:
    """Writes the findings as plain text, without the folder's path, other users' programs and unlisted variables."""
    lines = [f"trimtab {__version__}", f"{platform.platform()}", ""]
    for row in rows:
        text = row.text.split(" free in ")[0] + " free" if row.label == "disk" else row.text
        if row.label == SHARED_LABEL:  # without the names of other users' programs
            text = re.sub(r" \(.*?\)", "", text)
        lines.append(f"{row.label}: {text}" if row.label else text)
    lines += ["", PACKAGES_HEADING]
    lines += [f"  {name} {_version(name) or 'not installed'}" for name in REPORTED_PACKAGES]
    lines += ["", "environment"]
    lines += [f"  {name}={os.environ[name]}" for name in REPORTED_VARIABLES if name in os.environ]
    lines += ["", verdict, ""]
    try:
        path.write_text("\n".join(lines), encoding="utf-8")
    except OSError as error:
        raise ResourceError(
            f"the report cannot be written to {path}: {error.strerror}", "name another file with --report"
        ) from error
