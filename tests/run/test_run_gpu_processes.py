"""Other processes on a GPU, with a fake nvidia-smi on the PATH."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from trimtab.run.device import detect
from trimtab.run.gpu_processes import GpuProcess, describe_sharing, mig_slice, mps_limit, other_processes

HEAD = '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n'


def entry(pid: int | str, name: str, used: str, kind: str = "C") -> str:
    return (
        f"<process_info><gpu_instance_id>N/A</gpu_instance_id><pid>{pid}</pid><type>{kind}</type>"
        f"<process_name>{name}</process_name><used_memory>{used}</used_memory></process_info>"
    )


def log(*entries: str) -> str:
    inner = "".join(entries)
    return f'{HEAD}<nvidia_smi_log><gpu id="00000000:01:00.0"><processes>{inner}</processes></gpu></nvidia_smi_log>'


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a fake nvidia-smi first on the PATH, with an output, an exit code and a record of its arguments."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(answer: str, code: int = 0) -> Path:
        (tmp_path / "answer.xml").write_text(answer, encoding="utf-8")
        program = tmp_path / "nvidia-smi"
        program.write_text(
            f"#!{sys.executable}\nimport pathlib, sys\n"
            f"here = pathlib.Path({str(tmp_path)!r})\n"
            "(here / 'arguments').write_text(' '.join(sys.argv[1:]))\n"
            f"sys.stdout.write((here / 'answer.xml').read_text())\nsys.exit({code})\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        return tmp_path / "arguments"

    return install


def test_without_nvidia_smi_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert other_processes(0) == ()


def test_others_are_listed_the_largest_first_and_this_process_is_not(smi) -> None:
    smi(
        log(
            entry(11, "/usr/lib/xorg/Xorg", "195 MiB", "G"),
            entry(os.getpid(), "python", "9000 MiB"),
            entry(12, "/opt/conda/bin/python3.11 train.py", "2900 MiB", "M+C"),
            entry(13, "hidden", "N/A"),
            entry("N/A", "strange", "5 MiB"),
            entry(14, "", "Insufficient Permissions"),
        )
    )
    assert other_processes(0) == (
        GpuProcess(12, "python3.11", 2900 * 2**20),
        GpuProcess(11, "Xorg", 195 * 2**20, graphics=True),
        GpuProcess(13, "hidden", None),
        GpuProcess(14, "a process", None),
    )


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("", 0),
        ("No devices were found", 6),
        (log(), 0),
        (log(entry(1, "python", "1 MiB")), 9),
        ("<a><b></a>", 0),
    ],
)
def test_unreadable_entries_are_ignored(smi, answer: str, code: int) -> None:
    smi(answer, code)
    assert other_processes(0) == ()


@pytest.mark.parametrize(
    ("visible", "index", "uuid", "selected"),
    [
        (None, None, None, "0"),
        (None, 2, None, "2"),
        ("3,1", 1, None, "1"),
        ("GPU-aa,GPU-bb", 1, None, "GPU-bb"),
        ("3,1", 0, "GPU-cc", "GPU-cc"),
    ],
)
def test_the_gpu_is_the_one_that_torch_means(
    smi,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    index: int | None,
    uuid: str | None,
    selected: str,
) -> None:
    arguments = smi(log())
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    other_processes(index, uuid=uuid)
    assert arguments.read_text() == f"-q -x -i {selected}"


def test_sharing_is_described() -> None:
    python, xorg = GpuProcess(1, "python", 2900 * 2**20), GpuProcess(2, "Xorg", 200 * 2**20, graphics=True)
    assert describe_sharing("NVIDIA A10", ()) is None
    assert describe_sharing("NVIDIA A10", (python, xorg)) == (
        "3.03 GiB of this GPU are used by 2 other processes (python 2.83 GiB, Xorg 200.0 MiB)"
    )
    assert describe_sharing("NVIDIA A10", (GpuProcess(1, "x", None),)) == (
        "this GPU is also used by 1 other process (x)"
    )
    many = [GpuProcess(pid, f"p{pid}", 2**30) for pid in range(6)]
    assert "by 6 other processes (p0 1.00 GiB, p1 1.00 GiB, p2 1.00 GiB, p3 1.00 GiB and 2 more)" in str(
        describe_sharing("NVIDIA A10", many)
    )


def test_mig_and_mps() -> None:
    assert "MIG slice 3g.20gb" in str(describe_sharing("NVIDIA A100-SXM4-40GB MIG 3g.20gb", ()))
    assert mig_slice("NVIDIA GeForce RTX 4090") is None
    server = GpuProcess(1, "nvidia-cuda-mps-server", 30 * 2**20)
    assert describe_sharing("NVIDIA A10", (server,)) == "processes share this GPU through MPS"
    assert "MPS allows this process 8.00 GiB" in str(describe_sharing("NVIDIA A10", (server,), 8 * 2**30))


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("", None),
        ("1=4G", None),
        ("0=4G", 4 * 2**30),
        ("1=1G, 0=512M", 512 * 2**20),
        ("0=lots", None),
        ("0=", None),
    ],
)
def test_the_limit_of_mps(text: str, limit: int | None) -> None:
    assert mps_limit(0, {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": text}) == limit


@pytest.mark.gpu
def test_a_real_card_is_recognized() -> None:
    found = detect("cuda")
    assert found.data_sheet is not None, f"{found.name} has no data sheet: add it to catalogue/gpus.json"
    assert found.memory_bytes == pytest.approx(found.data_sheet.memory_bytes, rel=0.1)
    assert found.unified == found.data_sheet.unified
    assert os.getpid() not in {process.pid for process in other_processes(0)}
