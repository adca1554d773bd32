"""The benchmark of settings that trimtab chooses under memory limits: which others are measured, and its verdicts."""

from __future__ import annotations

import json
import os
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import chosen_settings
from tests.plan.plan_jobs import H200, QLORA
from trimtab.lab.records import read_records
from trimtab.plan.memory import predict
from trimtab.plan.memory_search import find_setting, usable_bytes
from trimtab.plan.resolved import MemoryPlan

JOB = QLORA.changed(tokens=8192)


def test_limits_range_from_the_least_that_fits_to_everything() -> None:
    most = predict(JOB).needed
    found = chosen_settings.limits(JOB, H200, most)
    assert len(found) == chosen_settings.LIMITS
    assert found == sorted(found)
    assert find_setting(JOB, H200, found[0])[1]
    assert not find_setting(JOB, H200, int(0.98 * found[0]))[1]
    assert usable_bytes(JOB, found[-1]) >= most


def test_other_settings_fit_with_no_layer_to_spare() -> None:
    limit = chosen_settings.limits(JOB, H200, predict(JOB).needed)[2]
    chosen = find_setting(JOB, H200, limit)[0]
    plan = MemoryPlan(chosen.policies, chosen.mlp_tiles, chosen.loss_memory)
    found = chosen_settings.fitting(JOB, H200, limit, plan)
    assert len(found) > 10
    assert all(setting.needed <= limit for setting in found)
    for setting in found:
        counts = {policy: setting.policies.count(policy) for policy in setting.policies}
        assert len(counts) <= 2
        if len(counts) == 2:
            slower, faster = counts  # the lowest-memory policies come first
            more = chosen_settings.sort_policies({slower: counts[slower] - 1, faster: counts[faster] + 1})
            job = JOB.changed(policies=more, mlp_tiles=setting.mlp_tiles, loss_memory=setting.loss_memory)
            assert predict(job).needed > limit, counts


def record(ms: float | None, *, chosen: bool = False, limit: int = 2**30) -> dict[str, Any]:
    time = {"failed": "out of memory"} if ms is None else {"median_ms": ms}
    return {"job": "job", "limit": limit, "setting": str(ms), "chosen": chosen, **time}


def test_the_chosen_setting_is_compared_with_the_fastest_that_ran() -> None:
    records = [record(105.0, chosen=True), record(None), record(120.0), record(100.0)]
    (found,) = chosen_settings.verdicts(records)
    assert found["ratio"] == 1.05
    assert found["best"]["median_ms"] == 100.0
    assert found["others"] == 2
    (found,) = chosen_settings.verdicts([record(None, chosen=True), record(100.0)])
    assert found["ratio"] is None


def test_a_tiny_model_is_measured_and_a_second_call_repeats_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("LIMITS", 2), ("BUDGET_S", 0.0), ("BEATEN", 1e9)):
        monkeypatch.setattr(chosen_settings, name, value)
    out = tmp_path / "found.jsonl"
    words = ["--tiny", "--out", str(out), "--weights", str(tmp_path), "--commit", "abc", "--others", "1"]
    assert chosen_settings.main([*words, "--seconds", "0"]) == 1
    assert "4 settings remain; the same command continues" in capsys.readouterr().err
    assert chosen_settings.main(words) == 0
    assert "2 limits, 0 with a setting that is more than 5 % faster, 0 unmeasured" in capsys.readouterr().out
    lines = out.read_text().splitlines()
    records = read_records(out, "job", "limit", "setting").values()
    assert len(lines) == len(records) == 4
    assert all(one["predicted_added_ms"] >= 0 for one in records)
    assert any(one["predicted_added_ms"] > 0 for one in records if one["chosen"])
    assert chosen_settings.main(words) == 0
    assert out.read_text().splitlines() == lines

    # What another commit chose or measured does not count.
    earlier = [{**one, "commit": "old", "time": "2000-01-01", "setting": "old"} for one in records]
    out.write_text("".join(json.dumps(one) + "\n" for one in (*earlier, *records)))
    capsys.readouterr()
    assert chosen_settings.main(["--table", str(out)]) == 0
    assert "old" not in capsys.readouterr().out


def end_process(*words: Any) -> list[chosen_settings.Candidate]:
    os._exit(1)


def test_a_killed_process_ends_the_planning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen_settings.plan_jobs([], tmp_path, "cpu", 1) == []
    monkeypatch.setattr(chosen_settings, "LIMITS", 2)
    monkeypatch.setattr(chosen_settings, "candidates", end_process)
    with pytest.raises(BrokenProcessPool):
        chosen_settings.plan_jobs(list(chosen_settings.TINY), tmp_path, "cpu", 1)


def test_the_peak_is_that_of_the_measured_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that is not there: its allocator counts only these steps."""
    monkeypatch.setattr(chosen_settings, "LIMITS", 2)
    (job,) = chosen_settings.plan_jobs(list(chosen_settings.TINY), tmp_path, "cpu", 1)
    loaded = chosen_settings.Loaded(job.model, job.unlimited, job.folder)
    loaded.cuda, peaks = True, [0]

    def time_once(step: Any, device: str) -> float:
        peaks[0] = 123
        return 0.1

    monkeypatch.setattr(chosen_settings, "time_once", time_once)
    for name in ("synchronize", "empty_cache", "set_per_process_memory_fraction"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 2**30))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: peaks.__setitem__(0, 1))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peaks[0])
    assert loaded.measure(job.candidates[0])["peak_bytes"] == 123
