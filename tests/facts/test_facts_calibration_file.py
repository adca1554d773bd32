"""Calibration files: one per device and thread count, written atomically, ignored with a warning if they are
invalid."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from trimtab.facts import files
from trimtab.facts.calibration import Calibration, KernelSample
from trimtab.facts.calibration_file import (
    calibration_folder,
    calibration_path,
    read_calibration,
    write_calibration,
)
from trimtab.facts.errors import ResourceError
from trimtab.facts.operations import OperationKind

SAMPLE = KernelSample(OperationKind.PRODUCT, "bf16", 2e9, 3e6, 1e-4, dims=(512, 1024, 2048))
MADE = Calibration(
    "NVIDIA H200",
    flops={"bf16": 7e14},
    copy=4.2e12,
    launch_seconds=5e-6,
    samples=(
        SAMPLE,
        dataclasses.replace(SAMPLE, kind=OperationKind.NORM, backward=True, impl="triton", dims=()),
    ),
    to_host=5.5e10,
    from_host=5.5e10,
    warnings=("other processes use the GPU",),
)


def test_calibration_folder_follows_xdg_cache_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert calibration_folder() == tmp_path / "trimtab" / "calibration"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert calibration_folder() == Path.home() / ".cache" / "trimtab" / "calibration"


def test_each_device_and_thread_count_has_its_own_file(tmp_path: Path) -> None:
    cpu = dataclasses.replace(MADE, device="a CPU", threads=2)
    for one in (MADE, cpu, dataclasses.replace(cpu, threads=4, copy=9e9)):
        write_calibration(one, tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    assert read_calibration("NVIDIA H200", folder=tmp_path) == MADE
    assert read_calibration("a CPU", 2, folder=tmp_path) == cpu
    assert read_calibration("a CPU", 8, folder=tmp_path) is None


DAMAGES = {
    "empty": lambda text: "",
    "cut short": lambda text: text[: len(text) // 2],
    "a list": lambda text: "[]",
    "another version": lambda text: text.replace('"version": 2', '"version": 99'),
    "no version": lambda text: text.replace('"version": 2', '"old": 1'),
    "an unknown kind": lambda text: text.replace("matrix product", "matrix sum"),
    "a key too many": lambda text: text.replace('"copy"', '"more": 1, "copy"'),
    "no rate": lambda text: text.replace("4200000000000.0", "0"),
    "not a number": lambda text: text.replace("4200000000000.0", "NaN"),
    "text for a rate": lambda text: text.replace("4200000000000.0", '"fast"'),
    "rates as a list": lambda text: text.replace('{\n    "bf16": 700000000000000.0\n  }', "[1]"),
    "a rate that divides to infinity": lambda text: text.replace("4200000000000.0", "1e-320"),
    "a rate with 400 digits": lambda text: text.replace("4200000000000.0", "1" + 400 * "0"),
    "true for a rate": lambda text: text.replace("4200000000000.0", "true"),
    "no amount": lambda text: text.replace('"moved": 3000000.0', '"moved": null'),
    "a negative amount": lambda text: text.replace('"moved": 3000000.0', '"moved": -1'),
    "an infinite amount": lambda text: text.replace('"moved": 3000000.0', '"moved": Infinity'),
    "a list for a dtype": lambda text: text.replace('"dtype": "bf16"', '"dtype": []'),
    "a number for a date": lambda text: text.replace('"measured_at": ""', '"measured_at": 20261101'),
    "of another device": lambda text: text.replace("NVIDIA H200", "NVIDIA A10"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_invalid_calibration_file_is_ignored_with_a_warning(damage: str, tmp_path: Path) -> None:
    path = write_calibration(MADE, tmp_path)
    changed = DAMAGES[damage](path.read_text())
    assert changed != path.read_text()
    path.write_text(changed)
    notes: list[str] = []
    assert read_calibration("NVIDIA H200", folder=tmp_path, note=notes.append) is None
    (note,) = notes
    assert str(path) in note
    assert "--calibrate" in note
    with pytest.warns(UserWarning, match="is ignored"):
        assert read_calibration("NVIDIA H200", folder=tmp_path) is None


def test_an_interrupted_write_keeps_the_previous_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_calibration(MADE, tmp_path)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(files.os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_calibration(dataclasses.replace(MADE, copy=1.0), tmp_path)
    assert read_calibration("NVIDIA H200", folder=tmp_path) == MADE
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_an_unwritable_calibration_folder_raises_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match="XDG_CACHE_HOME"):
        write_calibration(MADE, tmp_path / "file")


def test_the_file_is_readable_json(tmp_path: Path) -> None:
    plain = json.loads(write_calibration(MADE, tmp_path).read_text())
    assert plain["samples"][0]["dims"] == [512, 1024, 2048]
    assert calibration_path("NVIDIA H200", folder=tmp_path).exists()
