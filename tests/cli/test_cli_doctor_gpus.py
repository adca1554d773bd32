"""`trimtab doctor` on GPUs that are shared: with the CPU, with other processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_world import Call

from trimtab.facts.devices import DeviceFacts


def device(**more: object) -> DeviceFacts:
    made = {"capability": (12, 1), "bf16": True, "free_bytes": 90 * 2**30, **more}
    return DeviceFacts("NVIDIA GB10", "cuda", 120 * 2**30, **made)  # type: ignore[arg-type]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trimtab.cli.doctor._attention_rows", list)

    def install(found: DeviceFacts) -> None:
        monkeypatch.setattr("trimtab.run.device.detect", lambda: found)

    return install


def test_unified_memory_and_other_processes_are_named(cli: Call, tmp_path: Path, seen) -> None:
    shared = "3.10 GiB of this GPU are used by 2 other processes (secret-program 2.90 GiB, Xorg 200.0 MiB)"
    seen(device(unified=True, shared=shared))
    result = cli("doctor", "--report", tmp_path / "doctor.txt")
    words = " ".join(result.out.split())
    assert "CPU and GPU share one memory" in words
    assert shared in words
    report = (tmp_path / "doctor.txt").read_text()
    assert "3.10 GiB of this GPU are used by 2 other processes\n" in report
    assert "secret-program" not in report


def test_a_dedicated_gpu_has_no_such_lines(cli: Call, seen) -> None:
    seen(device())
    result = cli("doctor")
    assert "share" not in result.out
    assert "other process" not in result.out
