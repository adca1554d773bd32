"""`trimtab doctor`."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import sys
from importlib import metadata
from pathlib import Path

import typer
from rich.table import Table

from trimtab.cli.verb import new_app
from trimtab.facts.compilers import compile_obstacle
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


@app.command()
def doctor(
    folder: Path = typer.Option(Path("."), help="Where runs would be written: its free space is shown."),
) -> int:
    """Look at this machine: device, versions, attention, disk, and what to do about what is missing.

    Exits with 0 when training can start here and with 8 when something it needs is missing.
    """
    console = new_console()
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_row("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    ready = sys.version_info[:2] in ((3, 11), (3, 12), (3, 13))
    if not ready:
        table.add_row("", as_text("trimtab is tested on Python 3.11 to 3.13", "red"))
    for name, remedy in PACKAGES.items():
        table.add_row(name, as_text(_version(name) or f"not installed: {remedy}"))
    if _version("torch"):
        _device_rows(table)
    else:
        ready = False
    there = next(place for place in (folder.resolve(), *folder.resolve().parents) if place.is_dir())
    table.add_row("disk", as_text(f"{format_bytes(shutil.disk_usage(there).free)} free in {there}"))
    console.print(table)
    if _version("torch"):
        console.print(_attention_table())
    console.print(
        "ready: try `trimtab demo`" if ready else "not ready: install what is missing above, then try again"
    )
    return 0 if ready else 8


def _version(name: str) -> str | None:
    if importlib.util.find_spec(name) is None:
        return None
    return metadata.version(name)


def _compile_row(kind: str, capability: tuple[int, int] | None) -> str:
    obstacle = compile_obstacle(kind, capability)
    if obstacle is not None:
        return f"torch.compile cannot work: {obstacle}"
    return "torch.compile works" + (" (off by default on a CPU)" if kind == "cpu" else "")


def _device_rows(table: Table) -> None:
    from trimtab.launch import detect

    device = detect()
    table.add_row("device", f"{device.name} ({device.kind}), {format_bytes(device.memory_bytes)} memory")
    table.add_row("free memory", format_bytes(device.available_bytes))
    table.add_row("compiling", _compile_row(device.kind, device.capability))
    if device.kind == "cpu":
        import torch

        table.add_row("cores", f"{device.cores}, torch uses {torch.get_num_threads()}")
        if torch.version.cuda is None:
            table.add_row("cuda", "this torch has no CUDA: for an NVIDIA GPU install torch's CUDA build")
        else:
            table.add_row(
                "cuda", f"torch is built for CUDA {torch.version.cuda}, no GPU is visible: check nvidia-smi"
            )
        formats = (
            "bf16 in hardware" if device.bf16 else "no bf16 instructions: fp32 is the default and the fastest"
        )
        table.add_row("formats", formats)
    else:
        table.add_row("capability", ".".join(map(str, device.capability or ())))
        table.add_row("formats", "bf16" if device.bf16 else "no bf16 below capability 8.0: fp16 or fp32")


def _attention_table() -> Table:
    from trimtab.kernels.attention.choice import choose
    from trimtab.launch import detect

    device = detect()
    dtype = "bf16" if device.bf16 else "fp32"
    choice = choose(
        device=device.kind,
        capability=device.capability,
        dtype=dtype,
        head_dim=128,
        packed=True,
        window=None,
        training=True,
        triton=device.triton,
    )
    table = Table(
        title=f"attention for packed training, heads of 128, {dtype}", title_justify="left", box=None
    )
    table.add_column("implementation", no_wrap=True)
    table.add_column("")
    table.add_row(as_text(choice.impl, "bold green"), as_text(f"will be used: {choice.reason}"))
    for name, why in choice.rejected:
        table.add_row(name, why)
    return table
