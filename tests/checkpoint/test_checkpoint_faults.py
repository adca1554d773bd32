"""kill −9 at any instant, changed files, full disks, read-only folders: no valid checkpoint is lost."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from trimtab.checkpoint import SavedCheckpoint, Store, layout
from trimtab.checkpoint.lock import FileLock
from trimtab.facts.errors import CheckpointError, ResourceError

HERE = Path(__file__).parent


def run_script(name: str, *arguments: str, limit: int = 120) -> dict[str, object]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(HERE / name), *arguments],
        env=environment, capture_output=True, text=True, timeout=limit, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


def state_of(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((5, 3), float(step)), "m": torch.arange(7) * step}


def save_steps(folder: Path, *steps: int) -> None:
    with Store(folder, on_event=lambda _: None) as store:
        for step in steps:
            store.save(step, state_of(step), {"step": step})


def open_and_check(folder: Path) -> tuple[SavedCheckpoint | None, list[str]]:
    """The latest checkpoint, its content compared with its step, and the reported messages."""
    said: list[str] = []
    with Store(folder, on_event=said.append) as store:
        found = store.latest()
        if found is not None:
            target = {name: torch.zeros_like(tensor) for name, tensor in state_of(0).items()}
            assert store.load(found, target) == {"step": found.step}
            assert all(torch.equal(target[name], tensor) for name, tensor in state_of(found.step).items())
    return found, said


@pytest.mark.slow
def test_kill_at_random_instants_of_a_tight_save_loop(tmp_path: Path) -> None:
    result = run_script("kill_saves.py", "random", str(tmp_path), "40")
    assert result["kills"] == 40
    assert result["failures"] == []
    # The kills really fell into saves: unfinished ones were lying there.
    assert int(str(result["unfinished"])) >= 10
    assert int(str(result["last_step"])) > 20


@pytest.mark.slow
def test_kill_at_every_file_operation_of_a_save(tmp_path: Path) -> None:
    result = run_script("kill_saves.py", "every", str(tmp_path))
    assert result["failures"] == []
    assert int(str(result["kills"])) >= 20


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def empty(path: Path) -> None:
    path.write_bytes(b"")


FILES = ["manifest.json", "state.json", "shard-00001-model-00001-of-00001.safetensors"]


@pytest.mark.parametrize("damage", [flip, cut, empty, Path.unlink], ids=["flip", "cut", "empty", "delete"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_skipped_and_reported(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    save_steps(tmp_path, 1, 2)
    damage(tmp_path / "step-00000002" / name)
    found, said = open_and_check(tmp_path)
    assert found is not None
    assert found.step == 1
    assert any(f"step-00000002/{name}" in message for message in said), said


def test_any_flipped_byte_of_the_manifest_is_noticed(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    path = tmp_path / "step-00000001" / "manifest.json"
    content = path.read_bytes()
    for index in range(0, len(content), 7):
        path.write_bytes(content[:index] + bytes([content[index] ^ 0x01]) + content[index + 1 :])
        found, said = open_and_check(tmp_path)
        assert found is None, index
        assert "manifest.json" in said[0]
    path.write_bytes(content)
    assert open_and_check(tmp_path)[0] is not None


def test_two_damaged_checkpoints_are_both_reported(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    for step in (1, 2):
        flip(tmp_path / f"step-0000000{step}" / FILES[2])
    found, said = open_and_check(tmp_path)
    assert found is None
    assert len(said) == 2
    assert all("does not match its checksum" in message for message in said)


def test_a_foreign_tensor_file_is_an_error(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    source = tmp_path / "step-00000002" / FILES[2]
    shutil.copy(source, source.with_name("extra.safetensors"))
    found, said = open_and_check(tmp_path)
    assert found is not None
    assert found.step == 1
    assert "step-00000002/extra.safetensors does not belong" in said[0]


@pytest.mark.parametrize("content", [b"", b"step-00000077\n", b"\xff\xfe\x00", b"../../etc"])
def test_a_wrong_pointer_is_ignored_and_repaired(tmp_path: Path, content: bytes) -> None:
    save_steps(tmp_path, 1, 2)
    (tmp_path / "latest").write_bytes(content)
    found, _ = open_and_check(tmp_path)
    assert found is not None
    assert found.step == 2
    assert (tmp_path / "latest").read_text() == "step-00000002\n"


def test_a_found_checkpoint_that_was_not_verified_is_verified_by_load(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    flip(tmp_path / "step-00000001" / FILES[2])
    store = Store(tmp_path, on_event=lambda _: None)
    found = store.latest(verify=False)
    assert found is not None
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        store.load(found, state_of(0))


def test_temporary_files_are_removed_unless_a_process_is_writing(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    leftover = tmp_path / ".tmp-step-00000002-999999"
    leftover.mkdir()
    (leftover / "half.safetensors").write_bytes(b"half")
    writer = FileLock(tmp_path / layout.WRITER_LOCK)
    assert writer.try_acquire()
    assert open_and_check(tmp_path)[1] == []
    assert leftover.exists()
    with (
        Store(tmp_path, on_event=lambda _: None) as store,
        pytest.raises(CheckpointError, match="is writing"),
    ):
        store.save(2, state_of(2), {}, wait=True)
    writer.release()
    assert open_and_check(tmp_path)[1] == [f"removed {leftover.name}, left by an interrupted save"]
    assert not leftover.exists()


def test_a_file_size_limit_fails_the_save_and_nothing_else(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    big = {"w": torch.zeros(200_000)}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    said: list[str] = []
    store = Store(tmp_path, on_event=said.append)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        store.save(2, big, {})
        with pytest.raises(ResourceError, match=r"cannot write the checkpoint of step 2.*bytes\)"):
            store.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".tmp")]
    found, _ = open_and_check(tmp_path)
    assert found is not None
    assert found.step == 1
    store.save(3, big, {}, wait=True)  # the store continues once there is space
    assert store.latest() is not None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small disk")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_detected_before_the_save(small_disk: Path) -> None:
    save_steps(small_disk, 1)
    with (
        Store(small_disk, on_event=lambda _: None) as store,
        pytest.raises(ResourceError, match=r"needs .* bytes\), .* are free"),
    ):
        store.save(2, {"w": torch.zeros(600_000)}, {})
    assert open_and_check(small_disk)[0] is not None


@pytest.mark.parametrize("keep_last", [1, 3])
def test_a_full_disk_advises_fewer_checkpoints_only_where_there_are_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_last: int
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=0))
    with Store(tmp_path, keep_last=keep_last) as store, pytest.raises(ResourceError) as caught:
        store.save(1, state_of(1), {})
    assert ("save_total_limit" in str(caught.value)) == (keep_last > 1)


def test_a_disk_that_fills_up_while_writing(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_steps(small_disk, 1)
    said: list[str] = []
    store = Store(small_disk, on_event=said.append)
    monkeypatch.setattr(
        store, "_check_space", lambda step, needed: None
    )  # the space went after it was checked
    store.save(2, {"w": torch.zeros(600_000)}, {})
    with pytest.raises(ResourceError, match=r"step 2 .*needs 2.* bytes\), .* are free"):
        store.wait()
    assert "step 2 was not written" in said[0]
    found, said = open_and_check(small_disk)
    assert found is not None
    assert found.step == 1
    assert said == []  # nothing was left lying
    save_steps(small_disk, 3)
    assert open_and_check(small_disk)[0] == SavedCheckpoint(3, small_disk / "step-00000003", True)


def test_a_full_disk_can_still_be_read(small_disk: Path) -> None:
    save_steps(small_disk, 1)
    (small_disk / "latest").unlink()  # and a pointer that would have to be written
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free))
    found, _ = open_and_check(small_disk)
    assert found is not None


def test_a_read_only_folder(small_disk: Path) -> None:
    save_steps(small_disk, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    found, said = open_and_check(small_disk)
    assert found is not None
    assert found.step == 1
    assert "could not clean up" in said[0]
    with (
        Store(small_disk, on_event=lambda _: None) as store,
        pytest.raises(CheckpointError, match=r"step 2 .*Read-only file system"),
    ):
        store.save(2, state_of(2), {}, wait=True)


def test_a_folder_without_permission(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere; the read-only disk is tested instead")
    save_steps(tmp_path, 1)
    tmp_path.chmod(0o500)
    try:
        assert open_and_check(tmp_path)[0] is not None
        with (
            Store(tmp_path, on_event=lambda _: None) as store,
            pytest.raises(CheckpointError, match="Permission denied"),
        ):
            store.save(2, state_of(2), {}, wait=True)
    finally:
        tmp_path.chmod(0o700)
