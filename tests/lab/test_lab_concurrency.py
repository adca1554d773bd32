"""Ways to generate one file: all return the same completions; the report follows from the measurements."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import torch
from tiny_model import write_tiny_model

from trimtab.facts.errors import DataError, RecipeError
from trimtab.lab.studies.concurrency import measure as measuring
from trimtab.lab.studies.concurrency.cells import ConcurrencySettings, cells, prompts
from trimtab.lab.studies.concurrency.generated import Generated
from trimtab.lab.studies.concurrency.measure import measure
from trimtab.lab.studies.concurrency.process import digest, prepare
from trimtab.lab.studies.concurrency.report import sections
from trimtab.lab.studies.concurrency.ways import Way, generate_all
from trimtab.lab.study import Cell, CellOutcome, Machine, Measurement
from trimtab.report.document import Table, Text

TEXTS = [f"prompt {number}" for number in range(7)]


class Model:
    """Counts how many of its calls run at the same time."""

    def __init__(self) -> None:
        self.lock, self.now, self.most = threading.Lock(), 0, 0

    def one(self, text: str) -> str:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(0.01)
        with self.lock:
            self.now -= 1
        return text.upper()

    def many(self, texts: list[str]) -> list[str]:
        return [text.upper() for text in texts]


@pytest.mark.parametrize("way", Way)
def test_every_way_keeps_the_order(way: Way) -> None:
    model = Model()
    assert generate_all(way, TEXTS, 3, model.one, model.many) == [text.upper() for text in TEXTS]
    at_once = {Way.BATCH: 0, Way.THREADS: 3, Way.ASYNCIO_THREADS: 3}
    assert model.most == at_once.get(way, 1)


def test_workers_divide_the_cores() -> None:
    assert [way.torch_threads(8, 3) for way in (Way.ONE_BY_ONE, Way.BATCH, Way.ASYNCIO)] == [8, 8, 8]
    assert [way.torch_threads(8, 3) for way in (Way.THREADS, Way.ASYNCIO_THREADS, Way.PROCESSES)] == [2] * 3
    assert Way.PROCESSES.torch_threads(2, 16) == 1
    assert (Way.PROCESSES.processes(5), Way.THREADS.processes(5)) == (5, 1)


class TestCells:
    def test_all_ways_by_default(self) -> None:
        found = cells()
        assert [cell.settings["way"] for cell in found] == [way.value for way in Way]
        assert 2 <= found[0].settings["workers"] <= 4

    def test_changed_prompts_are_another_measurement(self, tmp_path: Path) -> None:
        file = tmp_path / "prompts.txt"
        file.write_text("one\ntwo\n")
        first = cells(["batch"], file=file)[0].key
        file.write_text("one\nthree\n")
        assert cells(["batch"], file=file)[0].key != first
        assert prompts(file) == ["one", "three"]

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"ways": ["thread"]}, "did you mean threads"),
            ({"ways": ["xyz"]}, "the ways are one-by-one, batch"),
            ({"workers": 0}, "use 1 to"),
            ({"workers": 1000}, "use 1 to"),
            ({"max_new_tokens": 0}, "at least 1"),
        ],
    )
    def test_bad_options_are_rejected(self, options: dict, said: str) -> None:
        with pytest.raises(RecipeError, match=said):
            cells(**options)

    def test_files_that_cannot_be_used(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="cannot be read"):
            cells(file=tmp_path / "missing.txt")
        chat = tmp_path / "chat.jsonl"
        chat.write_text(json.dumps({"messages": [{"role": "user", "content": "Hello"}]}) + "\n")
        with pytest.raises(DataError, match=r"chat\.jsonl:1 is a conversation"):
            cells(file=chat)


def test_all_ways_return_the_same_completions(tmp_path: Path) -> None:
    """Runs real processes, and the other ways in this process through the same function."""
    model = write_tiny_model(tmp_path / "model")
    file = tmp_path / "prompts.txt"
    file.write_text("the cat\nthe dog sees\na\n")
    cell = cells(["processes"], file=file, model=str(model), max_new_tokens=6, workers=2)[0]
    found = Generated(**json.loads(json.dumps(measure(dict(cell.settings)))))
    assert found.processes == 2
    assert min(found.seconds, found.start_seconds) > 0
    assert found.device_bytes is None
    order = {**cell.settings, "threads": 1, "prompts": prompts(file)}
    threads = torch.get_num_threads()
    try:
        for way in (Way.ONE_BY_ONE, Way.BATCH, Way.THREADS, Way.ASYNCIO, Way.ASYNCIO_THREADS):
            answer = prepare({**order, "way": way.value})()
            assert answer["digests"] == found.digests, way
            assert answer["tokens"] == found.tokens
            assert answer["bytes"] > 2**20
    finally:
        torch.set_num_threads(threads)
    assert digest("") not in found.digests


def test_a_failing_process_reports_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "PROGRAM", "trimtab.no_such_program")
    with pytest.raises(RuntimeError, match="no_such_program"):
        measure(dict(cells(["batch"])[0].settings))


def measured(
    way: Way, seconds: float, host: int = 100, texts: str = "ab", device: int | None = None
) -> Measurement:
    result = Generated(
        seconds,
        1.0,
        200,
        2 if way is Way.PROCESSES else 1,
        1,
        host * 2**20,
        device,
        [digest(t) for t in texts],
    )
    return made(way, CellOutcome.MEASURED, vars(result))


def made(way: Way, outcome: CellOutcome, result: dict) -> Measurement:
    job = ConcurrencySettings(way.value, "starter", None, "abc", 48, 2, 2, "cpu")
    return Measurement(
        Cell("concurrency", job.settings()), outcome, result, "", 1.0, Machine("a CPU", {}), "c", "2026"
    )


class TestReport:
    def text(self, measurements: list[Measurement]) -> str:
        (section,) = sections(measurements)
        return "\n".join(block.text for block in section.blocks if isinstance(block, Text))

    def table(self, measurements: list[Measurement]) -> Table:
        (section,) = sections(measurements)
        return next(block for block in section.blocks if isinstance(block, Table))

    def test_speed_and_memory_against_one_by_one(self) -> None:
        found = [
            measured(Way.ONE_BY_ONE, 4.0),
            measured(Way.BATCH, 1.0),
            measured(Way.PROCESSES, 2.5, host=190),
        ]
        table = self.table(found)
        assert table.rows[1][:4] == ("batch", "1.00", "200", "4.00×")
        assert table.rows[2][0] == "processes"
        text = self.text(found)
        assert "All ways returned the same completions" in text
        assert "Processes: 1.60× the speed of one by one, with 1.9× the memory." in text
        assert "Fastest here: batch, 1.00 s." in text
        assert "Threads:" not in text  # not measured

    def test_where_a_batch_does_not_win(self) -> None:
        text = self.text([measured(Way.BATCH, 3.0), measured(Way.PROCESSES, 2.0)])
        assert "Fastest here: processes, 2.00 s. A batch took 1.50× as long, in one process." in text

    def test_other_completions_are_counted(self) -> None:
        found = [measured(Way.ONE_BY_ONE, 4.0), measured(Way.BATCH, 1.0, texts="ax")]
        assert self.table(found).rows[1][-1] == "1 of 2"
        assert "differ from those of one-by-one: batch 1." in self.text(found)

    def test_ways_without_a_result(self) -> None:
        found = [measured(Way.ONE_BY_ONE, 4.0), made(Way.PROCESSES, CellOutcome.OUT_OF_MEMORY, {})]
        assert self.table(found).rows[1][:3] == ("processes", "out of memory", "–")
        alone = [made(Way.PROCESSES, CellOutcome.FAILED, {})]
        assert self.table(alone).rows[0][1] == "failed"

    def test_gpu_memory_has_a_column_on_a_gpu(self) -> None:
        assert "GPU memory" not in self.table([measured(Way.BATCH, 1.0)]).head
        assert "GPU memory" in self.table([measured(Way.BATCH, 1.0, device=2**30)]).head
