"""Which change would have fit, judged by measured memory and not by the prediction alone."""

from __future__ import annotations

import dataclasses

from plan_jobs import H200, QWEN, planned, resolved_for

from trimtab.facts.phases import RunPhase
from trimtab.facts.units import format_bytes
from trimtab.plan import Plan, remedies
from trimtab.recipe import loads
from trimtab.run.memory_remedies import overrides_of, training_suggestions, would_fit
from trimtab.run.memory_report import MemoryReport
from trimtab.run.memory_state import MemoryState
from trimtab.run.out_of_memory import predicted_memory

GIB = 2**30


RECIPE = """
model: a
data: {train: x}
per_device_train_batch_size: 4
max_seq_length: 1024
recompute: none
probe: true
"""


def qwen() -> Plan:
    return planned(loads(RECIPE), QWEN, H200, resolved_for(QWEN))


def failed(plan: Plan, phase: RunPhase, *, beyond: int = 0, free: int = 0) -> MemoryReport:
    """A failed allocation of 1 GiB, with the phase's predicted memory and `beyond` more allocated."""
    predicted = predicted_memory(plan, phase)
    allocated = (predicted.phase_allocated or predicted.allocated) + beyond - GIB
    state = MemoryState(
        "NVIDIA A10",
        requested=GIB,
        allocated=allocated,
        reserved=allocated,
        free=free,
        total=allocated + free,
    )
    return MemoryReport(phase, state, "", predicted=predicted)


def test_every_remedy_can_be_given_on_the_command_line() -> None:
    plan = qwen()
    found = [overrides_of(remedy.change) for remedy in remedies(plan)]
    assert all(found)
    for overrides in found:
        loads(RECIPE, list(overrides))
    assert ("per_device_train_batch_size=2", "gradient_accumulation_steps=8") in found
    assert overrides_of("lora: {r: 16}, which trains adapters only") == ("lora={r: 16}",)
    assert overrides_of("dtype: bf16, weights_dtype: bf16") == ("dtype=bf16", "weights_dtype=bf16")


def test_the_first_sufficient_change_is_suggested_first() -> None:
    plan = qwen()
    report = failed(plan, RunPhase.BACKWARD)
    found = training_suggestions(report, plan, began=False)
    assert found[0].enough
    assert found[0].change == remedies(plan)[0].change


def test_memory_above_the_prediction_counts_for_every_change() -> None:
    plan = qwen()
    as_predicted = failed(plan, RunPhase.BACKWARD)
    assert any(map(would_fit(as_predicted, plan), remedies(plan)))
    # The same available memory, and 100 GiB above the prediction: no change saves as much.
    more = dataclasses.replace(as_predicted.state, requested=100 * GIB)
    starved = dataclasses.replace(as_predicted, state=more)
    assert not any(map(would_fit(starved, plan), remedies(plan)))
    first = training_suggestions(starved, plan, began=False)[0]
    assert not first.enough
    assert first.saving == max(remedy.saving for remedy in remedies(plan))
    assert "may not be enough" in first.describe()


def test_a_started_run_gets_only_suggestions_that_a_resume_allows() -> None:
    plan = qwen()
    for phase in (RunPhase.FORWARD, RunPhase.OPTIMIZER_STEP, RunPhase.EVALUATION, RunPhase.GENERATION):
        report = failed(plan, phase)
        keys = {
            word.partition("=")[0]
            for one in training_suggestions(report, plan, began=True)
            for word in one.overrides
        }
        assert keys <= {"recompute", "dequantized_layers", "probe", "answers", "prompts"}, phase


def test_without_numbers_the_savings_decide() -> None:
    plan = qwen()
    report = MemoryReport(RunPhase.LOSS, MemoryState("GPU", requested=GIB), "")
    for one in training_suggestions(report, plan, began=False):
        assert one.saving is not None
        assert one.enough is (one.saving >= GIB)
        assert format_bytes(one.saving) in one.describe()
