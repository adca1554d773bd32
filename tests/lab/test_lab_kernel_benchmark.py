"""The runner of the kernel benchmark: verified before timed, resumable, no failure stops the other cases."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.kernels import __main__ as runner
from benchmarks.kernels.table import markdown
from trimtab.lab import contests
from trimtab.lab.contests import Candidates, Contest, Implementation, disagreement, floor
from trimtab.lab.timing import Ceilings, Timing

CEILINGS = Ceilings(1e12, 1e14, "Some GPU", 90, "bfloat16")


def right() -> None:
    return None


def wrong() -> str:
    return "y: rms error 1 (allowed 0)"


def broken() -> None:
    raise RuntimeError("out of memory\nmore lines")


def case(name: str, log: list[str], **contestants: Implementation) -> Contest:
    def build() -> Candidates:
        log.append(name)
        return Candidates(contestants, {"unsloth": "unsloth is not installed"})

    return Contest("op", name, build, floor(bytes_moved=2e9))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device on which runs take 4 ms, and those named slow 8 ms."""

    def together(runs: dict, *, device: str, rounds: int, budget_ms: float) -> dict[str, Timing]:
        return {name: Timing(8.0 if "slow" in name else 4.0, 3.9, 8.1, rounds, 0.1) for name in runs}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Some GPU")
    monkeypatch.setattr(runner, "ceilings", lambda: CEILINGS)
    monkeypatch.setattr(contests, "peak_bytes", lambda run, device: 3 * 2**20)
    monkeypatch.setattr(contests, "time_together", together)
    monkeypatch.setattr(runner, "clean_up", lambda: None)


def run(monkeypatch: pytest.MonkeyPatch, path: Path, cases: list[Contest], *words: str) -> int:
    monkeypatch.setattr(runner, "all_cases", lambda only: cases)
    return runner.main(["--out", str(path), "--commit", "abc", *words])


def test_verified_timed_and_resumed(gpu, monkeypatch, tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    log: list[str] = []
    ours, peer = Implementation(right, right, ours=True), Implementation(right, right)
    path = tmp_path / "deep" / "data.jsonl"
    first = case("a", log, triton=ours, slow_peer=peer)
    assert run(monkeypatch, path, [first]) == 0
    (record,) = map(json.loads, path.read_text().splitlines())
    assert (record["commit"], record["device"], record["floor_ms"]) == ("abc", "Some GPU", 2.0)
    assert record["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    assert record["contestants"]["triton"]["median_ms"] == 4.0
    assert record["contestants"]["triton"]["peak_bytes"] == 3 * 2**20
    table = capsys.readouterr().out
    assert "| **triton** " in table
    assert "| 2.00 " in table
    assert "| 50% " in table
    assert "absent: unsloth is not installed" in table
    # cut short in the middle of a line: the finished case is not measured again, the other one is
    path.write_text(path.read_text() + '{"op": "op", "ca')
    path.write_text(path.read_text() + "\n")
    assert run(monkeypatch, path, [first, case("b", log, triton=ours)]) == 0
    assert log == ["a", "b"]
    assert run(monkeypatch, path, [first], "--fresh") == 0
    assert run(monkeypatch, path, [first], "--commit", "def") == 0
    assert log == ["a", "b", "a", "a"]


def test_wrong_results_are_not_timed(gpu, monkeypatch, tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    log: list[str] = []
    path = tmp_path / "data.jsonl"
    contestants = {
        "triton": Implementation(right, wrong, ours=True),
        "peer": Implementation(right, right),
        "broken": Implementation(right, broken),
    }
    assert run(monkeypatch, path, [case("a", log, **contestants)]) == 1
    record = json.loads(path.read_text())
    assert "median_ms" not in record["contestants"]["triton"]
    assert "median_ms" in record["contestants"]["peer"]
    table = capsys.readouterr().out
    assert "wrong: y: rms error 1" in table
    assert "raised RuntimeError: out of memory |" in " ".join(table.split())
    # a failed case is tried again; one that approximates is timed, and passes
    inexact = case(
        "a",
        log,
        triton=Implementation(right, right, ours=True),
        cce=Implementation(right, wrong, exact=False),
    )
    assert run(monkeypatch, path, [inexact]) == 0
    assert "approximate: " in capsys.readouterr().out
    assert log == ["a", "a"]


def test_a_failing_case_does_not_stop_the_others(gpu, monkeypatch, tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    log: list[str] = []
    bad = Contest("op", "bad", broken, floor(bytes_moved=1))  # type: ignore[arg-type]
    good = case("good", log, triton=Implementation(right, right, ours=True))
    assert run(monkeypatch, tmp_path / "data.jsonl", [bad, good]) == 1
    out = capsys.readouterr().out
    assert "failed: RuntimeError: out of memory" in out
    assert log == ["good"]
    assert runner.main(["--table", str(tmp_path / "data.jsonl")]) == 0
    assert capsys.readouterr().out == out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one here")
def test_without_a_gpu_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["--only", "weighted_sum"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert runner.main(["--only", "nothing"]) == 2
    assert "no case nothing" in capsys.readouterr().err


def test_the_list_has_every_operation(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["--list"]) == 0
    listed = {line.split("/")[0] for line in capsys.readouterr().out.splitlines()}
    assert {"gated_mlp", "rms_norm", "rope", "weighted_sum"} <= listed


def test_floor_and_disagreement() -> None:
    assert floor(bytes_moved=1e12, flops=3e14)(CEILINGS) == 3.0
    x = torch.ones(3, dtype=torch.float64)
    assert disagreement(["y"], [x.float()], [x], [x.float()], "fp32") is None
    assert "y: rms error 0.01" in str(disagreement(["y"], [x.float() * 1.01], [x], [x.float()], "fp32"))


def test_table_without_records() -> None:
    assert markdown([]).count("\n") == 2


def test_two_passes_check_and_run_on_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and every gradient are compared, in-place contestants get copies, and runs repeat."""
    pytest.importorskip("triton")
    from benchmarks.kernels.passes import Entry, two_passes
    from tests.kernels.triton_tools import interpreted
    from trimtab.kernels.weighted_sum import impl_triton, spec, weighted_sum

    inputs = dict(zip(("x", "w"), spec.make_inputs(spec.CASES[0], "fp32"), strict=True))

    def in_place(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return weighted_sum(x.mul_(1.0), w)

    entries = {
        "reference": Entry(lambda x, w: weighted_sum(x, w)),
        "triton": Entry(lambda x, w: weighted_sum(x, w, impl="triton"), ours=True),
        "off": Entry(lambda x, w: weighted_sum(x, w) * 1.01),
        "in place": Entry(in_place, in_place=True),
    }
    made = two_passes(
        "op",
        "a",
        make=lambda: inputs,
        entries=lambda: (entries, {}),
        bytes_moved=lambda back: 1,
        dtype="fp32",
    )
    assert [one.name for one in made] == ["a, forward", "a, backward"]
    for one in made:
        contestants = one.build().contestants
        with interpreted(impl_triton):
            assert [contestants[name].check() is None for name in entries] == [True, True, False, True]
            for contestant in contestants.values():
                contestant.run()
                contestant.run()
