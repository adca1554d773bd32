"""Predicts the memory, time and disk space of a run, and whether it fits. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.facts.lazy import lazy_attributes

if TYPE_CHECKING:
    from trimtab.plan.attention import AttentionRow, attention_table
    from trimtab.plan.data import DataFacts, steps_per_epoch, total_steps
    from trimtab.plan.disk import check_disk
    from trimtab.plan.fit import check_fits, fits, remedies
    from trimtab.plan.make import Plan, make_plan
    from trimtab.plan.max_seq_length import MaxSeqLength, find_max_seq_length
    from trimtab.plan.memory import Buckets, Memory
    from trimtab.plan.policies import PolicyCost, policy_costs
    from trimtab.plan.solve import (
        Answer,
        solve_batch_size,
        solve_cheapest,
        solve_fastest,
        solve_max_seq_length,
        solve_smallest_gpu,
    )
    from trimtab.plan.table import Cell, make_table
    from trimtab.plan.what_if import Effect, list_effects

_MODULES = {
    "AttentionRow": "attention",
    "attention_table": "attention",
    "DataFacts": "data",
    "steps_per_epoch": "data",
    "total_steps": "data",
    "check_disk": "disk",
    "check_fits": "fit",
    "fits": "fit",
    "remedies": "fit",
    "MaxSeqLength": "max_seq_length",
    "find_max_seq_length": "max_seq_length",
    "Plan": "make",
    "make_plan": "make",
    "Buckets": "memory",
    "Memory": "memory",
    "PolicyCost": "policies",
    "policy_costs": "policies",
    "Answer": "solve",
    "solve_batch_size": "solve",
    "solve_cheapest": "solve",
    "solve_fastest": "solve",
    "solve_max_seq_length": "solve",
    "solve_smallest_gpu": "solve",
    "Cell": "table",
    "make_table": "table",
    "Effect": "what_if",
    "list_effects": "what_if",
}

__all__ = [  # noqa: RUF022 (in the order of the dictionary above)
    "AttentionRow",
    "attention_table",
    "DataFacts",
    "steps_per_epoch",
    "total_steps",
    "check_disk",
    "check_fits",
    "fits",
    "remedies",
    "MaxSeqLength",
    "find_max_seq_length",
    "Plan",
    "make_plan",
    "Buckets",
    "Memory",
    "PolicyCost",
    "policy_costs",
    "Answer",
    "solve_batch_size",
    "solve_cheapest",
    "solve_fastest",
    "solve_max_seq_length",
    "solve_smallest_gpu",
    "Cell",
    "make_table",
    "Effect",
    "list_effects",
]

__getattr__ = lazy_attributes(
    __name__, _MODULES, {"Longest": "MaxSeqLength", "longest_context": "find_max_seq_length"}
)
