"""The benchmark of whole steps: equal inputs for all, cases that resume, tables, a run on a CPU."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.end_to_end import __main__ as runner
from benchmarks.end_to_end import child, commits, jobs, ours, world
from benchmarks.end_to_end.child import FEWEST
from benchmarks.end_to_end.jobs import Case, Job
from benchmarks.end_to_end.picture import losses
from benchmarks.end_to_end.table import floor_s, markdown, page, problems, read, summary
from tests.plan.plan_jobs import H200
from trimtab.run import prepare as preparing

TINY = Job("tiny-llama-8b", "qlora", 2, 64)
LLAMA = jobs.LLAMA_SHORT


def record(
    case: Case, ms: float, gib: float, losses: tuple[float, ...] = (9.0, 8.0), **more: Any
) -> dict[str, Any]:
    return {
        "name": case.name,
        "case": asdict(case),
        "median_ms": ms,
        "peak_bytes": int(gib * 2**30),
        "load_peak_bytes": 2**30,
        "load_s": 3.0,
        "first_step_s": 20.0,
        "losses": list(losses),
        **more,
    }


def records(*found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in found}


@pytest.mark.parametrize("packed", [False, True])
def test_labels_are_equal_with_and_without_shift(packed: bool) -> None:
    tokens = world.make_tokens(replace(TINY, packed=packed))
    theirs = tokens.for_peers("cpu", packed)["labels"]
    shifted_BT = torch.full_like(theirs, world.IGNORED)
    shifted_BT[:, :-1] = theirs[:, 1:]
    assert torch.equal(shifted_BT, tokens.labels_BT)
    ends_BT = tokens.documents_BT[:, 1:] != tokens.documents_BT[:, :-1]
    assert bool(ends_BT.any()) is packed
    assert bool((tokens.labels_BT[:, :-1][ends_BT] == world.IGNORED).all())
    assert bool((tokens.positions_BT[:, 1:][ends_BT] == 0).all())
    assert tokens.num_targets == int((tokens.positions_BT > 0).sum())


def test_packed_sequences_in_one_row_are_the_same_documents() -> None:
    tokens = world.make_tokens(replace(TINY, packed=True))
    flat, rows = tokens.in_one_row("cpu"), tokens.for_peers("cpu", packed=True)
    assert all(torch.equal(flat[name].view_as(rows[name]), rows[name]) for name in rows)
    lengths = flat["packed_seq_lengths"].tolist()
    assert sum(lengths) == flat["input_ids"].numel()
    positions = torch.cat([torch.arange(length) for length in lengths])
    assert torch.equal(positions, flat["position_ids"][0])


def test_names_are_distinct_and_every_job_of_the_table_is_there() -> None:
    found = jobs.cases()
    assert len({case.name for case in found}) == len(found)
    for job in jobs.JOBS:
        mine = {case.contestant for case in found if case.job == job}
        assert {*jobs.OURS[:2], "unsloth recompute", "hf recompute", "liger"} <= mine
        assert Case(replace(job, packed=True), "trimtab", limit_s=0).name in {case.name for case in found}
    assert [case.cap_gb for case in found if case.cap_gb] == [8, 12, 16, 24, 40, 48, 80]


def test_layers_of_a_part_run_as_in_the_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "detect", lambda *_: H200)
    names = ("llama-8b", "llama-8b/8")
    places = [
        [made(tmp_path, name) for name in names] for made in (world.config_folder, world.adapter_folder)
    ]
    case = Case(Job("llama-8b/8", "qlora", 1, 400_000), "trimtab", cap_gb=48)
    cap_gb, more = ours.part_of(case, tuple(places[0]), tuple(places[1]), "cuda")
    whole = ours.prepared_for(case, places[0][0], places[1][0], "cuda", None).plan
    part = ours.prepared_for(
        replace(case, cap_gb=cap_gb), places[0][1], places[1][1], "cuda", None, more
    ).plan
    assert set(part.job.layer_policies) == set(whole.job.layer_policies)
    assert part.job.mlp_tiles == whole.job.mlp_tiles
    room = [
        jobs.memory_limit_bytes(gb, "cuda") - plan.memory.needed for gb, plan in ((48, whole), (cap_gb, part))
    ]
    assert room[0] == pytest.approx(room[1], abs=10)
    assert cap_gb < 48 - 2, "three quarters of the weights are left out"


def test_the_limit_is_the_lowest_memory_peers() -> None:
    seen = records(
        record(Case(LLAMA, "unsloth recompute"), 386, 6.5),
        record(Case(LLAMA, "hf"), 500, 48.6),
        record(Case(LLAMA, "trimtab"), 230, 4.0),
    )
    limits = runner.limits_of(seen)
    assert limits[LLAMA.name] == pytest.approx(6.5, abs=1e-6)
    assert limits[jobs.QWEN_SHORT.name] == 3.7


def test_shared_processes_load_a_model_once() -> None:
    wanted = [case for case in jobs.cases() if case.job.model == "llama-8b"]
    batches = list(runner.processes(wanted, share=True))
    assert sorted(c.name for b in batches for c in b) == sorted(c.name for c in wanted)
    assert any(len(batch) > 1 for batch in batches)
    for batch in batches:
        assert len({jobs.model_of(case) for case in batch}) == 1
        assert len(batch) == 1 or not any(case.cap_gb or case.start for case in batch)
    assert all(len(batch) == 1 for batch in runner.processes(wanted, share=False))


def cells_of(seen: dict[str, dict[str, Any]]) -> list[str]:
    """The cells of the row of the job with 2×2048 tokens."""
    row = next(line for line in markdown(seen).splitlines() if line.startswith(f"| {LLAMA.name}"))
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_tables_have_ratios_and_say_why_a_cell_is_empty() -> None:
    seen = records(
        {"name": "device", "matmul_flops_per_s": 780e12},
        record(Case(LLAMA, "unsloth recompute"), 386, 6.8),
        {"name": Case(LLAMA, "hf").name, "case": asdict(Case(LLAMA, "hf")), "failed": "out of memory"},
        record(
            Case(LLAMA, "trimtab"), 193, 40.0, compilations=2, compile_s=9.0, chosen={"compile": {"on": True}}
        ),
        record(Case(LLAMA, "trimtab tight"), 300, 6.7, chosen={"compile": {"on": False}}),
        record(
            Case(Job("llama-8b", "qlora", 1, 0), "trimtab", cap_gb=24),
            1.0,
            21.0,
            proposed=180_224,
            confirmed=180_224,
            chosen={"host_bytes": 2**36, "memory": "offload in all 32 layers"},
        ),
    )
    assert cells_of(seen)[9] == "–", "the fastest peer is not known before all have run"
    seen |= records(record(Case(LLAMA, "hf recompute"), 681, 13.5), record(Case(LLAMA, "liger"), 681, 7.9))
    text, cells = markdown(seen), cells_of(seen)
    assert cells[1] == "out of memory"
    assert cells[5:11] == ["386 @ 6.8", "193 @ 40.0", "300 @ 6.7", "–", "2.00", "1.29"]
    assert cells[11] == f"{1e3 * floor_s(LLAMA, 780e12):.0f}"
    assert "| 24 | 219,904       | 52.0     | 180,224       | 180,224   | 32 " in text
    assert "offload in all 32 layers" in text
    short = summary(seen)
    assert (
        "| Llama 3.1 8B, QLoRA, 2 × 2,048 | 386 @ 6.8 Unsloth recompute | **193 @ 40.0** | 2.00 × |" in short
    )
    assert "| tokens         | 180,224 |" in short
    assert problems(seen) == []
    seen["device"]["device"] = "Some GPU"
    for one in seen.values():
        one |= {"commit": "abc", "versions": {"torch": "2.11.0"}, "time": "2026-11-15T12:00:00"}
    assert page(seen).startswith("Some GPU, commit abc, 2026-11-15; torch 2.11.0; bf16 matmul 780 TFLOP/s.")


def test_differing_losses_and_own_failures_are_problems() -> None:
    ours, theirs = Case(LLAMA, "trimtab"), Case(LLAMA, "liger")
    apart = records(record(ours, 1, 1, (9.0, 8.0)), record(theirs, 1, 1, (9.01, 8.0)))
    assert len(problems(apart)) == 1
    late = records(record(ours, 1, 1, (9.0, 8.0)), record(theirs, 1, 1, (9.0, 8.1, 7.0)))
    assert len(problems(late)) == 1
    failed = records({"name": ours.name, "case": asdict(ours), "failed": "ValueError: no"})
    assert problems(failed) == [f"{ours.name}: ValueError: no"]


def test_losses_are_drawn_where_there_is_something_to_compare() -> None:
    steps = (9.0, 8.5, 8.0, 7.5, 7.0)
    alone = record(Case(jobs.LLAMA_8K, "trimtab"), 1, 1, steps)
    both = [record(Case(LLAMA, name), 1, 1, steps) for name in ("trimtab", "liger")]
    short = [record(Case(jobs.LLAMA_32K, name), 1, 1, steps[:3]) for name in ("trimtab", "liger")]
    drawn = losses(records(alone, *both, *short))
    assert drawn.count("<polyline") == 2
    assert LLAMA.name in drawn
    assert jobs.LLAMA_8K.name not in drawn
    assert jobs.LLAMA_32K.name not in drawn


def test_peers_that_round_weights_to_the_nearest_are_compared_with_ours_that_do() -> None:
    def of(contestant: str, *losses: float) -> dict[str, Any]:
        return record(Case(jobs.QWEN_SHORT, contestant), 1, 1, losses)

    seen = [of("hf", 9.0, 8.5), of("trimtab", 9.0, 7.0)]
    assert len(problems(records(*seen))) == 1
    assert problems(records(*seen, of(jobs.NEAREST, 9.0, 8.51))) == []
    assert len(problems(records(*seen, of(jobs.NEAREST, 9.0, 8.0)))) == 1
    assert len(problems(records(*seen, of(jobs.NEAREST, 9.1, 8.51)))) == 1, "first losses are all compared"


@pytest.mark.oracle
def test_rounding_to_nearest_loses_updates_that_stochastic_rounding_keeps(tmp_path: Path) -> None:
    """Ours in bf16, stochastic rounding and to nearest, vs. transformers in fp32 and bf16; one optimizer."""
    import bitsandbytes
    from transformers import AutoModelForCausalLM

    job, steps = Job("tiny-qwen3-0.6b", "full", 2, 64), FEWEST + 3
    folder = world.model_folder(tmp_path, job.model, "cpu")
    arguments = world.make_tokens(job).for_peers("cpu", packed=False)
    fallen = {}
    for contestant, dtype in (("trimtab", torch.float32), (jobs.NEAREST, torch.bfloat16)):
        order = {"weights": str(tmp_path), "limits": {}, "cases": []}
        ours = child.run(Case(job, contestant), order, "cpu", {})["losses"]
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        lr = jobs.LEARNING_RATE["full"]
        optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=lr, weight_decay=0.0)
        theirs = []
        for _ in range(steps):
            loss = model(**arguments, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            theirs.append(float(loss.detach()))
        assert ours[:steps] == pytest.approx(theirs, abs=1e-3), contestant
        fallen[contestant] = ours[steps - 1] - ours[0]
    assert fallen["trimtab"] < 3 * fallen[jobs.NEAREST] < 0


def test_a_command_resumes_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def process(batch: list[Case], order: dict[str, Any], cold: bool) -> tuple[list[dict[str, Any]], bool]:
        ran.extend(case.name for case in batch)
        if "hf recompute" in batch[0].contestant:
            failed = {"name": batch[0].name, "case": asdict(batch[0]), "failed": "stopped after 1 s: "}
            return [failed], False
        return [record(batch[0], 2.0, 1.0, chosen={"compile": {"on": False}})], False

    monkeypatch.setattr(runner, "run_process", process)
    path = tmp_path / "out.jsonl"
    words = ["--tiny", "--only", "tiny-llama-8b qlora 2×64/", "--out", str(path), "--commit", "abc"]
    assert runner.main(words) == 0
    assert len(ran) == 4
    with path.open("a") as file:
        file.write('{"name": "torn')
    ran.clear()
    assert runner.main(words) == 0
    assert ran == ["tiny-llama-8b qlora 2×64/hf recompute"], "what failed is tried again"
    ran.clear()
    runner.main([*words[:-1], "def", "--missing"])
    assert ran == ["tiny-llama-8b qlora 2×64/hf recompute"], "what another commit measured stays"
    ran.clear()
    runner.main([*words[:-1], "def"])
    assert len(ran) == 4
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    assert {"commit", "versions", "time", "losses"} <= lines[0].keys()


def test_ctrl_c_keeps_finished_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = jobs.tiny_cases()[:2]
    done = json.dumps(record(one, 2.0, 1.0, chosen={"compile": {"on": False}}))

    def interrupted(words: list[str], **options: Any) -> None:
        Path(words[-1]).write_text(done + "\n")
        raise KeyboardInterrupt

    monkeypatch.setattr(runner.subprocess, "run", interrupted)
    records, stopped = runner.run_process([one, two], {"cases": []}, cold=False)
    assert stopped
    assert [found["name"] for found in records] == [one.name], "what was not begun has not failed"


def test_missing_gpus_and_unknown_cases_are_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert runner.main(["--only", "nonsense"]) == 2
    assert "--list names them" in capsys.readouterr().err
    monkeypatch.setattr(runner, "_gpu", lambda: None)
    assert runner.main([]) == 2
    assert "--tiny" in capsys.readouterr().err


def test_only_is_a_name_or_a_part_of_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["--list", "--only", "qwen3-0.6b full 4×4096/unsloth"]) == 0
    assert capsys.readouterr().out.split("\n")[:-1] == ["qwen3-0.6b full 4×4096/unsloth"]
    assert runner.main(["--list", "--only", "4×4096/unsloth"]) == 0
    assert len(capsys.readouterr().out.split("\n")[:-1]) == 2


@pytest.mark.slow
@pytest.mark.oracle
def test_a_tiny_run_agrees_with_transformers_and_peft(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    words = ["--tiny", "--weights", str(tmp_path / "weights"), "--out", str(path), "--commit", "abc"]
    only = [f"tiny-llama-8b {job}" for job in ("qlora 2×64/", "longest 3 GB", "qlora 2×64 packed/")]
    for text in (*only, "tiny-llama-8b/1 longest"):
        words += ["--only", text]
    assert runner.main(words) == 0
    found = read(path)
    losses = {name: one["losses"] for name, one in found.items() if "qlora" in name}
    for kind in ("2×64", "2×64 packed"):
        ours, theirs = (losses[f"tiny-llama-8b qlora {kind}/{who}"] for who in ("trimtab", "hf"))
        both = min(len(ours), len(theirs))  # as many steps as the time allowed
        assert both > FEWEST
        assert ours[:both] == pytest.approx(theirs[:both], abs=2e-3)
        assert ours[-1] < ours[0]
    for name in ("tiny-llama-8b longest 3 GB/trimtab", "tiny-llama-8b/1 longest 2 GB/trimtab"):
        assert found[name]["confirmed"] == 4096, "as long as the model's positions"
        assert found[name]["proposed"] > 4096


def _turn(
    side: str, turn: int, ms: float, gib: float, losses: tuple[float, ...] = (9.0, 8.0)
) -> dict[str, Any]:
    return record(Case(LLAMA, "trimtab"), ms, gib, losses) | {"side": side, "round": turn}


@pytest.mark.parametrize(
    ("head_ms", "head_gib", "verdict"),
    [(103.9, 6.0, "equal"), (106.2, 6.0, "slower"), (90.0, 6.07, "larger"), (110.0, 7.0, "slower, larger")],
)
def test_a_row_is_slower_beyond_the_parent_s_own_spread(
    head_ms: float, head_gib: float, verdict: str
) -> None:
    rows = [_turn("parent", 0, 100.0, 6.0), _turn("parent", 1, 104.0, 6.0)]
    rows += [_turn("head", turn, head_ms, head_gib) for turn in (0, 1)]
    (found,) = commits.comparisons(rows)
    assert (found.verdict, found.losses_equal) == (verdict, True)
    assert f"{head_ms / 102:.3f}" in commits.markdown([found])


def test_commits_with_different_losses_are_reported_so() -> None:
    rows = [_turn("parent", 0, 100.0, 6.0), _turn("head", 0, 100.0, 6.0, (9.0, 8.1))]
    assert not commits.comparisons(rows)[0].losses_equal


def test_a_row_of_one_commit_is_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results.jsonl"
    out.write_text(json.dumps(_turn("parent", 0, 100.0, 6.0)) + "\n")
    assert commits.main(["--table", "--out", str(out), "--only", f"{LLAMA.name}/trimtab"]) == 1
    assert f"not measured: {LLAMA.name}/trimtab" in capsys.readouterr().err
    assert commits.main(["--out", str(out), "--parent", str(tmp_path)]) == 2
