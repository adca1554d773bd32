"""The first phase of a sweep on a GPU: several processes at once, within their memory, before timed cells run alone."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from sample_study import cell, make_known

from trimtab.facts.devices import DeviceFacts
from trimtab.facts.errors import DataError
from trimtab.lab import cell_times, sharing, sweep
from trimtab.lab.cell_times import CellTimes, Speed
from trimtab.lab.preparing import without_tuning
from trimtab.lab.sharing import GIB, SharedWork, memory_budget, processes_at_once, shared_work, sweep_seconds
from trimtab.lab.studies.claims.cells import cells as claims
from trimtab.lab.studies.step.cells import cells as step
from trimtab.lab.study import Cell, CellOutcome, Measurement
from trimtab.lab.suite import suite_cells
from trimtab.lab.sweep import LOG, PREPARED, RECORDS, Sharing, TimeLimit, run_sweep
from trimtab.lab.worker_process import WorkerProcess

H200 = DeviceFacts("NVIDIA H200", "cuda", 139 * GIB, free_bytes=138 * GIB, capability=(9, 0))


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Cells of the sample study say themselves how they share: `shared` or `prepare` is their memory."""
    make_known(monkeypatch, tmp_path_factory.mktemp("worker") / "packages")

    def works(cells: Sequence[Cell]) -> list[SharedWork]:
        return [
            SharedWork(one, name == "prepare", one.settings[name])
            for one in cells
            for name in ("prepare", "shared")
            if name in one.settings
        ]

    monkeypatch.setattr(sweep, "shared_work", works)
    monkeypatch.setitem(
        cell_times._ESTIMATES, "sample", lambda settings, speed: settings.get("estimate", 0.01)
    )


def run(
    cells: list[Cell], folder: Path, at_once: int = 3, budget: int = 10, **options: Any
) -> list[Measurement]:
    told = options.pop("preparing", None)
    options = {"commit": "abc", **options}
    return run_sweep(cells, folder, device="cpu", sharing=Sharing(at_once, budget, told), **options)


def ended(files: Sequence[Path]) -> bool:
    """Whether the processes of these files end within ten seconds: a worker and its child for each."""
    pids = [int(pid) for file in files for pid in file.read_text().split()]
    assert len(pids) == 2 * len(files)
    end = time.monotonic() + 10
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(psutil.pid_exists, pids))


def times(measurement: Measurement) -> tuple[float, float]:
    return measurement.result["began"], measurement.result["ended"]


def overlap(one: Measurement, other: Measurement) -> bool:
    (begin, end), (other_begin, other_end) = times(one), times(other)
    return begin < other_end and other_begin < end


@pytest.mark.usefixtures("known")
def test_timed_cells_run_alone_after_all_others(tmp_path: Path) -> None:
    place = str(tmp_path / "meeting")
    cells = [
        cell("time", value=0),
        cell("time", value=1, shared=1, meet=3, place=place),
        cell("time", value=2),
        cell("time", value=3, shared=1, meet=3, place=place),
        cell("time", value=4, shared=1, meet=3, place=place),
    ]
    done: list[tuple[int, int]] = []
    found = run(cells, tmp_path, progress=lambda one, all_, c, m: m and done.append((one, all_)))
    assert [one.cell for one in found] == cells
    assert [one.result["value"] for one in found] == [0, 1, 2, 3, 4]
    alone, shared = [found[0], found[2]], [found[1], found[3], found[4]]
    assert len({one.result["process"] for one in shared}) == 3
    assert all(overlap(one, other) for one in shared for other in shared)
    assert len({one.result["process"] for one in alone}) == 1
    assert times(alone[0])[1] <= times(alone[1])[0]
    assert max(times(one)[1] for one in shared) <= times(alone[0])[0]
    assert done == [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]
    assert len((tmp_path / RECORDS).read_text().splitlines()) == 5
    assert [one.result for one in run(cells, tmp_path)] == [one.result for one in found]
    assert len((tmp_path / RECORDS).read_text().splitlines()) == 5, "nothing is measured twice"


@pytest.mark.usefixtures("known")
def test_work_waits_for_memory_and_large_work_runs_alone(tmp_path: Path) -> None:
    meet = {"meet": 2, "place": str(tmp_path / "meeting")}
    cells = [
        cell("time", value=0, shared=6, **meet),
        cell("time", value=1, shared=6, seconds=0.2),
        cell("time", value=2, shared=3, **meet),
        cell("time", value=3, shared=99, seconds=0.2),
    ]
    first, second, small, large = run(cells, tmp_path, at_once=4, budget=10)
    assert not overlap(first, second)
    assert overlap(first, small)
    assert not any(overlap(large, other) for other in (first, second, small))


@pytest.mark.usefixtures("known")
def test_what_fails_in_company_is_measured_again_alone(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    cells = [
        cell("fail first", marker=str(marker), shared=1),
        cell("refuse", shared=1),
        cell("raise as torch", shared=1),
    ]
    found = run(cells, tmp_path)
    outcomes = [CellOutcome.MEASURED, CellOutcome.NOT_SUPPORTED, CellOutcome.OUT_OF_MEMORY]
    assert [one.outcome for one in found] == outcomes
    assert found[0].result["tries"] == 2
    assert len((tmp_path / RECORDS).read_text().splitlines()) == 3


@pytest.mark.usefixtures("known")
def test_preparations_come_first_and_their_findings_are_in_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [
        cell("time", value=0, prepare=1, seconds_compiled=2.5),
        cell("time", value=1),
        cell("time", value=2, prepare=1, seconds_compiled=4.5, breaks=True),
    ]
    told: list[tuple[int, int, str]] = []
    found = run(
        cells, tmp_path, preparing=lambda done, total, c: told.append((done, total, c.name if c else ""))
    )
    assert found[0].result["compile_seconds"] == 2.5
    assert found[0].result["compiled_alongside"] == 1
    assert "compile_seconds" not in found[1].result
    assert found[2].outcome is CellOutcome.MEASURED, "what cannot be prepared compiles by itself"
    assert "compile_seconds" not in found[2].result
    assert [one[:2] for one in told] == [(0, 2), (1, 2), (2, 2)]
    assert "cannot be compiled" in (tmp_path / LOG).read_text()

    # The same machine keeps its caches; a new start may have lost them, and finds the code in a cache that remains.
    again: list[Any] = []
    (tmp_path / RECORDS).unlink()
    second = run(cells[:1], tmp_path, preparing=lambda *words: again.append(words))
    assert (again, second[0].result["compile_seconds"]) == ([], 2.5)
    (tmp_path / RECORDS).unlink()
    monkeypatch.setenv("SAMPLE_CACHED", "1")
    for number, boot in enumerate(("another", "", ""), start=1):  # empty: the system does not tell
        monkeypatch.setattr(sweep, "_boot", lambda boot=boot: boot)
        third = run(cells[:1], tmp_path, preparing=lambda *words: again.append(words))
        assert [words[:2] for words in again] == [(0, 1), (1, 1)] * number
        assert third[0].result["compile_seconds"] == 2.5, "the seconds with an empty cache remain"
        assert len((tmp_path / PREPARED).read_text().splitlines()) == 1 + number
        (tmp_path / RECORDS).unlink()


@pytest.mark.usefixtures("known")
def test_other_code_has_its_own_preparations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    again: list[Any] = []
    one = cell("time", value=0, prepare=1, seconds_compiled=2.5)
    for commit, seconds in (("abc", 2.5), ("def", 3.5)):
        (tmp_path / RECORDS).unlink(missing_ok=True)
        monkeypatch.setenv("SAMPLE_COMPILE_SECONDS", str(seconds))
        (found,) = run([one], tmp_path, commit=commit, preparing=lambda *words: again.append(words[:2]))
        assert found.result["compile_seconds"] == seconds
    assert again == [(0, 1), (1, 1)] * 2


@pytest.mark.usefixtures("known")
def test_the_time_limit_ends_the_phase_and_the_next_command_continues(tmp_path: Path) -> None:
    cells = [cell("time", value=0, shared=1), cell("sleep", pids=str(tmp_path / "pids"), shared=1)]
    limit = TimeLimit(4.0, CellTimes(Speed("cpu", {"fp32": 1e11}, 1e10)))
    start = time.monotonic()
    (one,) = run(cells, tmp_path, limit=limit)
    assert time.monotonic() - start < 20
    assert one.cell == cells[0]
    assert ended([tmp_path / "pids"])
    late = [cell("time", value=1, shared=1), cell("time", value=2, shared=1, estimate=1000.0)]
    limit = TimeLimit(60.0, CellTimes(Speed("cpu", {"fp32": 1e11}, 1e10)))
    assert [m.result["value"] for m in run(late, tmp_path, limit=limit)] == [1]


@pytest.mark.usefixtures("known")
def test_an_interrupt_ends_all_processes(tmp_path: Path) -> None:
    files = [tmp_path / "one", tmp_path / "two"]
    cells = [cell("sleep", pids=str(file), shared=1) for file in files]

    def wait_and_interrupt() -> None:
        end = time.monotonic() + 60
        while not all(file.exists() for file in files) and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=wait_and_interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        run(cells, tmp_path)
    assert ended(files)
    assert not (tmp_path / RECORDS).exists()


@pytest.mark.usefixtures("known")
def test_a_process_that_is_ready_as_its_worker_is_closed_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = WorkerProcess("cpu", tmp_path / LOG)
    start_next, began = worker._next, time.monotonic()

    def start_and_close(*arguments: Any) -> Any:
        started = start_next(*arguments)
        worker.close()
        return started

    monkeypatch.setattr(worker, "_next", start_and_close)
    sleeping = cell("sleep", pids=str(tmp_path / "pids"))
    answer, _ = worker.measure("sample_study:measure", sleeping, 30.0, math.inf)
    assert answer["outcome"] == CellOutcome.FAILED.value
    assert time.monotonic() - began < 25


@pytest.mark.usefixtures("known")
def test_an_error_of_the_sweep_itself_is_raised(tmp_path: Path) -> None:
    def broken(*words: Any) -> None:
        raise DataError("the disk is full")

    with pytest.raises(DataError, match="the disk is full"):
        run([cell("time", value=0, shared=1)], tmp_path, progress=broken)


@pytest.mark.usefixtures("known")
def test_processes_of_fresh_cells_start_before_the_first_is_timed(tmp_path: Path) -> None:
    cells = [cell("time", value=n, fresh=True) for n in range(3)]
    found = run_sweep(cells, tmp_path, device="cpu", commit="abc")
    assert len({one.result["process"] for one in found}) == 3
    assert max(one.result["started"] for one in found) <= times(found[0])[0]


@pytest.mark.usefixtures("known")
def test_the_compiler_starts_no_processes_while_a_cell_is_timed(tmp_path: Path) -> None:
    cells = [cell("environment", name="TORCH_WARM_POOL", fresh=fresh) for fresh in (False, True)]
    lasting, fresh = run_sweep(cells, tmp_path, device="cpu", commit="abc")
    assert (lasting.result["value"], fresh.result["value"]) == ("0", os.environ.get("TORCH_WARM_POOL"))


def test_tuning_in_company_is_forgotten_and_earlier_tuning_is_not(tmp_path: Path) -> None:
    earlier, code = tmp_path / "ab" / "one.best_config", tmp_path / "ab" / "one.py"
    earlier.parent.mkdir()
    earlier.write_text("{}")
    os.utime(earlier, (time.time() - 100,) * 2)
    with without_tuning(tmp_path):
        code.write_text("")
        (tmp_path / "ab" / "two.best_config").write_text("{}")
    assert sorted(path.name for path in earlier.parent.iterdir()) == ["one.best_config", "one.py"]


def test_preparations_end_while_others_change_the_cache(tmp_path: Path) -> None:
    ended = threading.Event()

    def compile_kernels(number: int) -> None:
        count = 0
        while not ended.is_set():
            count += 1
            temporary = tmp_path / f"{number}{count % 9}" / f"tmp.{count}"  # as Triton writes its cache
            temporary.mkdir(parents=True)
            temporary.with_name("kernel.best_config").write_text("{}")
            temporary.rmdir()

    def prepare_several() -> None:
        for _ in range(50):
            with without_tuning(tmp_path):
                pass

    with ThreadPoolExecutor(4) as pool:
        compiling = [pool.submit(compile_kernels, number) for number in range(2)]
        preparing = [pool.submit(prepare_several) for _ in range(2)]
        try:
            for one in preparing:
                one.result()
        finally:
            ended.set()
        for one in compiling:
            one.result()


def test_what_is_timed_is_never_shared() -> None:
    found = suite_cells("study", device="cuda", memory_bytes=H200.memory_bytes)
    works = shared_work(found)
    measured = {work.cell.study for work in works if not work.prepares}
    assert measured == {"memory"}
    prepared = [work.cell for work in works if work.prepares]
    assert {one.study for one in prepared} == {"step", "attention"}
    assert not any(one.fresh for one in prepared), "a fresh process measures what its first steps cost"
    compiled = {one.key for one in found if one.settings.get("mode") == "compiled"}
    assert compiled == {one.key for one in prepared if one.settings["mode"] == "compiled"}
    assert not [work for work in works if work.cell.settings.get("memory_bytes")], "never tried"


def test_runs_of_claims_are_shared_except_where_speed_is_the_claim() -> None:
    works = shared_work(claims(device="cuda", models=["starter"]))
    assert {work.cell.settings["claim"] for work in works} == {
        "weight_decay", "replay", "learning_rate", "optimizer_states", "rounding", "gradient_dtype",
    }  # fmt: skip
    assert not shared_work(claims(device="cuda", models=["some/model"])), "of unknown size"


def test_larger_models_and_eager_steps_need_more_memory() -> None:
    small, large = (
        shared_work(step(device="cuda", sizes=[size], contexts=[512], modes=["compiled"], parts=["both"]))[0]
        for size in ("small", "2.7B")
    )
    assert 3 * GIB < small.nbytes < large.nbytes < 80 * GIB
    kernels = shared_work(
        step(device="cuda", sizes=["2.7B"], contexts=[512], kernels=["fast"], parts=["both"])
    )
    assert kernels[0].nbytes < 10 * GIB, "one layer has all kernels"


def test_processes_at_once() -> None:
    assert processes_at_once(DeviceFacts("a CPU", "cpu", 64 * GIB), cores=32, host_bytes=256 * GIB) == 1
    assert processes_at_once(H200, cores=16, host_bytes=120 * GIB) == sharing.MOST_PROCESSES
    assert processes_at_once(H200, cores=8, host_bytes=120 * GIB) == 6
    assert processes_at_once(H200, cores=16, host_bytes=12 * GIB) == 3
    assert processes_at_once(H200, cores=2, host_bytes=12 * GIB) == 1
    assert memory_budget(H200, 12) < 0.9 * 138 * GIB


def test_the_study_takes_about_twenty_minutes_of_an_h200() -> None:
    found = suite_cells("study", device="cuda", memory_bytes=H200.memory_bytes)
    estimates = CellTimes(Speed.of(H200))
    alone, shared = (sweep_seconds(found, estimates, H200, n) for n in (1, 12))
    assert alone == estimates.total(found)
    assert shared < min(0.7 * alone, 21 * 60)


def test_damaged_lines_of_preparations_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / PREPARED).write_text('{"cell": "torn\n' + json.dumps({"cell": "x"}) + "\n")
    machine = sweep._machine("cpu", {"device": "a CPU", "versions": {}})
    assert sweep._read_prepared(tmp_path / PREPARED, machine, "abc") == ({}, set())
