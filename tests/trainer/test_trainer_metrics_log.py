"""The metrics log: complete lines, valid JSON, atomic truncation to a checkpoint."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from trimtab.facts.errors import CheckpointError, ResourceError
from trimtab.trainer.metrics_log import MetricsLog


def records(path: Path) -> list[dict[str, object]]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_append_and_read(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.append({"kind": "train", "step": 1, "loss": 0.1 + 0.2})
        assert len(records(path)) == 1  # there before the file is closed
        log.append({"kind": "sample", "step": 1, "completion": "a\nb\u2028c </script> π"})
        log.sync()
    with MetricsLog(path) as log:
        log.append({"kind": "event"})
    assert records(path) == [
        {"kind": "train", "step": 1, "loss": 0.1 + 0.2},
        {"kind": "sample", "step": 1, "completion": "a\nb\u2028c </script> π"},
        {"kind": "event"},
    ]


def test_non_finite_values_are_valid_json_and_visible(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.append({"loss": float("nan"), "norms": [float("inf"), {"low": float("-inf")}], "by": (1, 2)})
    assert records(path) == [{"loss": "NaN", "norms": ["Infinity", {"low": "-Infinity"}], "by": [1, 2]}]


def test_truncation_drops_records_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.append({"kind": "memory", "when": "before"})
        for step in range(1, 6):
            log.append({"kind": "train", "step": step})
        log.append({"kind": "memory", "when": "after"})
        with path.open("ab") as stream:
            stream.write(b'{"kind": "train", "step": 3, "lo')
        cut = log.truncate_after(3)
        assert (cut.removed, cut.damaged, cut.steps) == (3, (8,), {1, 2, 3})
        log.append({"kind": "train", "step": 4, "again": True})
        assert log.truncate_after(4).removed == 0
    assert [record.get("step", record.get("when")) for record in records(path)] == ["before", 1, 2, 3, 4]
    assert sorted(os.listdir(tmp_path)) == ["metrics.jsonl"]


def test_truncation_to_the_start_and_of_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        assert log.truncate_after(0).removed == 0
        log.append({"step": 1})
        assert log.truncate_after(0).removed == 1
        assert path.read_bytes() == b""


def test_zeros_and_torn_lines_of_a_power_failure_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\x00\x00\x00\n\xff\xfe\n[1]\n{"step": 2}\n')
    with MetricsLog(path) as log:
        cut = log.truncate_after(5)
        assert (cut.removed, cut.damaged) == (0, (2, 3, 4))
    assert records(path) == [{"step": 1}, {"step": 2}]


def test_opening_drops_a_torn_last_line_so_that_the_next_record_survives(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "loss": 1.')
    with MetricsLog(path) as log:
        assert log.truncate_after(5).damaged == (2,)
        log.append({"step": 2})
        assert log.truncate_after(5).damaged == ()
    assert records(path) == [{"step": 1}, {"step": 2}]


def test_a_killed_truncation_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in range(5):
        log.append({"step": step})

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            log.truncate_after(2)
    assert len(records(path)) == 5
    with MetricsLog(path) as again:
        assert again.truncate_after(2).removed == 2


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        threads = [
            threading.Thread(
                target=lambda n=n: [log.append({"step": n, "text": "x" * 5000}) for _ in range(50)]
            )
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(records(path)) == 200


def test_a_killed_process_loses_no_record(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from trimtab.trainer.metrics_log import MetricsLog\n"
        "log = MetricsLog(sys.argv[1])\n"
        "for step in range(100): log.append({'step': step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    path = tmp_path / "metrics.jsonl"
    done = subprocess.run([sys.executable, "-c", code, str(path)], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [record["step"] for record in records(path)] == list(range(100))


def test_a_full_disk_is_an_error_and_leaves_complete_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricsLog(path) as log:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
            for step in range(7):
                log.append({"step": step})  # 12 bytes each
            with pytest.raises(ResourceError, match="no space left"):
                log.append({"step": 100, "text": "longer than the rest"})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        log.append({"step": "after"})
    assert [record["step"] for record in records(path)] == [*range(7), "after"]


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write"):
        MetricsLog(tmp_path / "file" / "metrics.jsonl")
