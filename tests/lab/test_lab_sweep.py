"""Sweeps: every outcome of a cell is a result, and no measurement is lost or repeated."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from sample_study import STUDY, cell, make_known

from trimtab.facts.devices import host_cores
from trimtab.facts.errors import DataError
from trimtab.lab import cell_times, worker
from trimtab.lab.cell_times import CellTimes, Speed
from trimtab.lab.study import Cell, CellOutcome, Machine, Measurement
from trimtab.lab.sweep import LOG, RECORDS, TimeLimit, omp_threads, read_measurements, run_sweep
from trimtab.lab.worker_process import oom_kills


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    make_known(monkeypatch, tmp_path_factory.mktemp("worker") / "packages")


def sweep(cells: list[Cell], folder: Path, **options: Any) -> list[Measurement]:
    return run_sweep(cells, folder, device="cpu", commit="abc", **options)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / RECORDS).read_text().splitlines()]


def test_every_outcome_is_a_result_and_the_sweep_continues(tmp_path: Path) -> None:
    cells = [
        cell("measure", value=1),
        cell("measure", value=2),
        cell("allocate"),
        cell("measure", value=3),
        cell("raise as torch"),
        cell("refuse"),
        cell("predict"),
        cell("measure", value=4),
        cell("kill"),
        cell("abort"),
        cell("exit"),
        cell("fail"),
        cell("return no JSON"),
        cell("measure", value=5),
    ]
    found = sweep(cells, tmp_path)
    assert [one.cell for one in found] == cells
    ends = {one.cell.settings["do"]: (one.outcome, one.message) for one in found}
    oom, failed = CellOutcome.OUT_OF_MEMORY, CellOutcome.FAILED
    assert ends["measure"] == (CellOutcome.MEASURED, "")
    assert ends["allocate"][0] is oom
    assert ends["raise as torch"] == (oom, "CUDA out of memory. Tried to allocate 20 GiB.")
    assert ends["refuse"] == (CellOutcome.NOT_SUPPORTED, "fp8 needs capability 8.9")
    assert ends["predict"] == (CellOutcome.PREDICTED_OUT_OF_MEMORY, "needs 90 GiB of 80 GiB")
    assert ends["kill"] == (failed, f"the process was ended by SIGKILL; see {tmp_path / LOG}")
    assert ends["abort"] == (failed, f"the process was ended by SIGABRT; see {tmp_path / LOG}")
    assert ends["exit"] == (failed, f"the process ended with code 7; see {tmp_path / LOG}")
    assert ends["fail"] == (failed, "ValueError: no such backend")
    assert ends["return no JSON"][0] is failed
    assert "set is not JSON serializable" in ends["return no JSON"][1]

    # One process as long as all is well, a fresh one after memory ran out.
    one, two, three, four, five = (m.result["process"] for m in found if m.outcome is CellOutcome.MEASURED)
    assert one == two
    assert len({one, three, four, five}) == 4

    log = (tmp_path / LOG).read_text()
    assert "printed while measuring" in log
    assert "Traceback" in log
    assert "no such backend" in log
    assert [line["outcome"] for line in lines(tmp_path)] == [m.outcome.value for m in found]
    assert [m.to_dict() for m in found] == lines(tmp_path)
    assert all(m.machine.device and m.commit == "abc" and m.time for m in found)


@pytest.mark.parametrize("counts", [[3, 4], [None, None]])
def test_a_worker_that_the_kernel_kills_ran_out_of_memory(
    counts: list[int | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel's count of such kills; without a count, as on macOS, every SIGKILL is taken for one."""
    monkeypatch.setattr("trimtab.lab.worker_process.oom_kills", lambda: counts.pop(0))
    (found,) = sweep([cell("kill")], tmp_path)
    assert found.outcome is CellOutcome.OUT_OF_MEMORY
    assert found.message == "the process was killed, as the kernel does when memory is full"


def test_the_kernels_count_of_kills(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("nr_free_pages 7\noom_kill 12\noom_kill_disable 1\n")
    assert oom_kills(tmp_path / "vmstat") == 12
    (tmp_path / "old").write_text("nr_free_pages 7\n")
    assert oom_kills(tmp_path / "old") is None


def limited(seconds: float, monkeypatch: pytest.MonkeyPatch, **estimates: float) -> TimeLimit:
    """A time limit with the estimated seconds of each kind of cell; 0.01 for the others."""
    monkeypatch.setitem(
        cell_times._ESTIMATES, "sample", lambda settings, speed: estimates.get(settings["do"], 0.01)
    )
    return TimeLimit(seconds, CellTimes(Speed("cpu", {"fp32": 1e11}, 1e10)))


def test_a_cell_that_runs_at_the_time_limit_is_stopped_and_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [cell("measure", value=1), cell("sleep", pids=str(tmp_path / "pids")), cell("measure", value=2)]
    limit = limited(4.0, monkeypatch)
    told: list[str] = []
    found = sweep(cells, tmp_path, limit=limit, progress=lambda *words: told.append(words[2].name))
    assert [m.result["value"] for m in found] == [1]
    assert (limit.measured, limit.stopped) == ([cells[0]], [cells[1]])
    assert ended(tmp_path / "pids")
    assert [line["settings"]["do"] for line in lines(tmp_path)] == ["measure"]


def test_a_cell_that_would_not_end_in_time_waits_for_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [cell("measure", value=1), cell("refuse"), cell("measure", value=2)]
    limit = limited(60.0, monkeypatch, refuse=1000.0)
    assert [m.result["value"] for m in sweep(cells, tmp_path, limit=limit)] == [1, 2]
    assert not limit.stopped
    # As the first one it begins, so that every command makes progress.
    found = sweep(cells, tmp_path, limit=limited(60.0, monkeypatch, refuse=1000.0))
    assert [m.outcome for m in found] == [
        CellOutcome.MEASURED,
        CellOutcome.NOT_SUPPORTED,
        CellOutcome.MEASURED,
    ]


def test_estimates_follow_the_cells_that_were_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = limited(60.0, monkeypatch, measure=100.0)
    (one,) = sweep([cell("measure", value=1)], tmp_path, limit=limit)
    assert limit.times.seconds(cell("measure", value=2)) == pytest.approx(one.seconds)
    again = limited(60.0, monkeypatch, measure=100.0)
    sweep([cell("measure", value=1)], tmp_path, limit=again)
    assert again.times.seconds(cell("measure", value=2)) == pytest.approx(one.seconds, abs=1e-3), (
        "records count as well"
    )


def test_recorded_cells_are_not_measured_again(tmp_path: Path) -> None:
    cells = [cell("measure", value=1), cell("refuse"), cell("fail")]
    first = sweep(cells, tmp_path)
    told: list[tuple[int, int, str, bool]] = []
    cells.append(cell("measure", value=2))
    second = sweep(
        cells,
        tmp_path,
        progress=lambda *words: told.append((words[0], words[1], words[2].name, words[3] is None)),
    )
    assert [m.to_dict() for m in second[:2]] == [m.to_dict() for m in first[:2]]
    begun = [name for _, _, name, begins in told if begins]
    assert begun == ["sample fail", "sample measure 2"], "what failed is tried again"
    assert [(done, total) for done, total, _, begins in told if not begins] == [
        (1, 4),
        (2, 4),
        (3, 4),
        (4, 4),
    ]
    assert len(lines(tmp_path)) == 5

    third = sweep(cells[:1], tmp_path, remeasure=True)
    assert third[0].result["process"] != first[0].result["process"]
    assert len(lines(tmp_path)) == 6


def test_records_of_another_machine_or_version_do_not_count(tmp_path: Path) -> None:
    cells = [cell("measure", value=1)]
    (made,) = sweep(cells, tmp_path)
    others = [
        {**made.to_dict(), "device": "another GPU", "result": {"value": -1}},
        {**made.to_dict(), "versions": {**made.machine.versions, "torch": "2.0"}, "result": {"value": -2}},
        {**made.to_dict(), "settings": {"do": "measure", "value": 9}},
    ]
    (tmp_path / RECORDS).write_text("".join(f"{json.dumps(other)}\n" for other in others))
    (found,) = sweep(cells, tmp_path)
    assert found.result["value"] == 1
    assert len(lines(tmp_path)) == 4


def test_a_cpu_with_another_number_of_threads_is_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [cell("measure", value=1)]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (one,) = sweep(cells, tmp_path)
    assert one.machine.device.endswith(", 1 thread")
    monkeypatch.setenv("OMP_NUM_THREADS", "3,2")
    (three,) = sweep(cells, tmp_path)
    assert three.machine.device == one.machine.device.replace("1 thread", "3 threads")
    assert len(lines(tmp_path)) == 2
    assert len(read_measurements([tmp_path])[0]) == 2, "both are reported, in tables of their own"
    assert sweep(cells, tmp_path)[0].result == three.result, "recorded"
    for unset in ("", "0", "many"):
        monkeypatch.setenv("OMP_NUM_THREADS", unset)
        assert omp_threads() == host_cores()


def running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def ended(pids: Path) -> bool:
    """Whether the worker and its child have ended, which the system may take a moment for."""
    for _ in range(100):
        if not any(running(int(pid)) for pid in pids.read_text().split()):
            return True
        time.sleep(0.05)
    return False


def test_a_cell_that_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    slow = cell("sleep", pids=str(tmp_path / "pids"))
    found = sweep([slow, cell("measure", value=1)], tmp_path, cell_seconds=0.5)
    assert [m.outcome for m in found] == [CellOutcome.TIMED_OUT, CellOutcome.MEASURED]
    assert 0.5 <= found[0].seconds < 20
    assert found[0].message.startswith("took longer than ")
    assert ended(tmp_path / "pids")


def test_a_signal_loses_no_measurement(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    cells = [cell("measure", value=1), cell("sleep", pids=str(pids)), cell("measure", value=2)]

    def wait_and_interrupt() -> None:
        while not pids.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    waiting = threading.Thread(target=wait_and_interrupt, daemon=True)
    waiting.start()
    with pytest.raises(KeyboardInterrupt):
        sweep(cells, tmp_path)
    assert [line["settings"]["do"] for line in lines(tmp_path)] == ["measure"]
    assert ended(pids)

    cells[1] = cell("measure", value=3)
    found = sweep(cells, tmp_path)
    assert [m.result["value"] for m in found] == [1, 3, 2]
    assert [line["result"]["value"] for line in lines(tmp_path)] == [1, 3, 2]


def test_a_torn_line_is_measured_again_and_swallows_nothing(tmp_path: Path) -> None:
    cells = [cell("measure", value=i) for i in range(3)]
    sweep(cells, tmp_path)
    whole = (tmp_path / RECORDS).read_text()
    (tmp_path / RECORDS).write_text(whole[:-30])
    found = sweep(cells, tmp_path)
    assert [m.result["value"] for m in found] == [0, 1, 2]
    measurements, damaged = read_measurements([tmp_path / RECORDS])
    assert damaged == 1
    assert [m.result["value"] for m in measurements] == [0, 1, 2]


def test_a_worker_that_cannot_start_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13 is missing')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    (found,) = sweep([cell("measure")], tmp_path / "lab")
    assert found.outcome is CellOutcome.FAILED
    assert "ended with code 1" in found.message
    assert "libcudart" in (tmp_path / "lab" / LOG).read_text()


MACHINE = Machine("a CPU", {"torch": "2.13.0"})


def made(value: int, time: str = "2026-11-18T10:00:00+00:00", machine: Machine = MACHINE) -> Measurement:
    return Measurement(cell("measure"), CellOutcome.MEASURED, {"value": value}, "", 1.0, machine, "abc", time)


def test_of_several_files_the_latest_measurement_counts(tmp_path: Path) -> None:
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    old.write_text(json.dumps(made(1).to_dict()) + "\n")
    new.write_text(json.dumps(made(2, "2026-11-18T11:00:00+00:00").to_dict()) + "\n")
    for order in ([old, new], [new, old]):
        measurements, damaged = read_measurements(order)
        assert [m.result["value"] for m in measurements] == [2]
        assert damaged == 0
    other = made(3, machine=Machine("a CPU", {"torch": "2.11.0"}))
    old.write_text(json.dumps(other.to_dict()) + "\n")
    assert len(read_measurements([old, new])[0]) == 2


def test_damaged_lines_are_counted(tmp_path: Path) -> None:
    good = json.dumps(made(1).to_dict())
    bad = [
        "{",
        "[]",
        "null",
        '"text"',
        "{}",
        good.replace('"measured"', '"dreamt"'),
        good.replace('"seconds": 1.0', '"seconds": "long"'),
        good.replace('{"value": 1}', "7"),
        "[" * 100_000,
    ]
    path = tmp_path / RECORDS
    path.write_bytes("\n".join([*bad, "", good, "  "]).encode() + b"\xff\xfe\n")
    measurements, damaged = read_measurements([tmp_path])
    assert [m.result["value"] for m in measurements] == [1]
    assert damaged == len(bad) + 1


def test_paths_without_records_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Dear diary,\n")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"text\.txt has no measurements"):
        read_measurements([tmp_path / "text.txt"])
    with pytest.raises(DataError, match=r"empty has no records\.jsonl"):
        read_measurements([tmp_path / "empty"])
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_measurements([tmp_path / "missing"])


def test_a_folder_of_studies_has_all_their_records(tmp_path: Path) -> None:
    for i, name in enumerate(("step", "sizes")):
        (tmp_path / name).mkdir()
        record = {**made(i).to_dict(), "study": name}
        (tmp_path / name / RECORDS).write_text(json.dumps(record))
    assert [m.cell.study for m in read_measurements([tmp_path])[0]] == ["sizes", "step"]


def test_a_folder_of_studies_may_also_have_profiles_and_numerics(tmp_path: Path) -> None:
    """`trimtab profile` writes to lab/profile-NAME, next to the studies."""
    for name in ("step", "profile", "numerics bits"):
        (tmp_path / name).mkdir()
        record = made(1).to_dict() if name == "step" else {"value": "3.14"}
        (tmp_path / name / RECORDS).write_text(json.dumps({**record, "study": name}) + "\n")
    assert [m.cell.study for m in read_measurements([tmp_path])[0]] == ["step"]
    with pytest.raises(DataError, match="has no measurements"):
        read_measurements([tmp_path / "numerics bits"])


def test_a_worker_ends_with_its_parent(tmp_path: Path) -> None:
    """However the parent ends: `kill -9` leaves it no time to end the worker."""
    code = (
        "import sys; from pathlib import Path; import pytest; from sample_study import cell, make_known\n"
        "from trimtab.lab.sweep import run_sweep\n"
        "folder = Path(sys.argv[1]); make_known(pytest.MonkeyPatch(), folder / 'packages')\n"
        "run_sweep([cell('sleep', pids=str(folder / 'pids'))], folder, device='cpu')"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    while not (tmp_path / "pids").exists() and parent.poll() is None:
        time.sleep(0.02)
    time.sleep(0.1)
    worker_pid, child = map(int, (tmp_path / "pids").read_text().split())
    parent.kill()
    parent.wait()
    for _ in range(100):
        if not running(worker_pid):
            break
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    assert sys.platform != "linux" or not running(worker_pid)


def test_out_of_memory_is_recognized_in_torchs_own_words() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55, dtype=torch.uint8)
    assert worker.caused_by_out_of_memory(caught.value)
    place = (
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
    )
    assert worker._first_line(RuntimeError(f"{place}\nmore")) == (
        "DefaultCPUAllocator: can't allocate memory: you tried"
    )
    assert worker._first_line(RuntimeError("[a] b")) == "[a] b"
    assert worker.caused_by_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert worker.caused_by_out_of_memory(
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")
    )
    outer = ValueError("step failed")
    outer.__cause__ = MemoryError()
    assert worker.caused_by_out_of_memory(outer)
    assert not worker.caused_by_out_of_memory(ValueError("no such backend"))


def test_the_requested_gpu_is_the_workers_device(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []

    class Chosen(contextlib.nullcontext[None]):
        def __init__(self, index: int) -> None:
            super().__init__()
            chosen.append(index)

    said = io.StringIO()
    monkeypatch.setattr(torch.cuda, "device", Chosen)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(worker.os, "dup2", lambda *descriptors: None)
    monkeypatch.setattr(worker.os, "fdopen", lambda *words, **options: said)
    monkeypatch.setattr(
        worker.sys,
        "stdin",
        io.StringIO(json.dumps({"measure": "sample_study:measure", "settings": {"do": "refuse"}})),
    )
    monkeypatch.setattr(worker.sys, "argv", ["worker", "cuda:1"])
    assert worker.main() == 0
    assert chosen == [1]
    ready, answer = said.getvalue().splitlines(keepends=True)
    assert ready == worker.READY
    assert json.loads(answer)["outcome"] == "not supported"


def test_a_study_that_counts_needs_no_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = dataclasses.replace(STUDY, in_process=True)
    monkeypatch.setattr("trimtab.lab.sweep.find_study", lambda name: here)
    found = sweep([cell("measure", value=1), cell("fail"), cell("predict")], tmp_path)
    assert found[0].result["process"] == os.getpid()
    assert [m.outcome for m in found[1:]] == [CellOutcome.FAILED, CellOutcome.PREDICTED_OUT_OF_MEMORY]
    assert not (tmp_path / LOG).exists()
