"""Evaluation: loss and perplexity, a likelihood probe of grammar and reasoning, exact-match answers.

    result = evaluate.loss(decoder, batches)              result.loss, result.perplexity, result.tokens
    items = evaluate.probe_items()                        minimal pairs of sentences, the correct one first
    scores = evaluate.probe(decoder, tokenizer, items)    {"agreement": 0.94, …}

Names are imported lazily (PEP 562), so that importing the package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.facts.lazy import lazy_attributes

if TYPE_CHECKING:
    from trimtab.evaluate.answers import AnswerResult, Example, exact_answers
    from trimtab.evaluate.likelihood import log_likelihoods, mean_losses, probe, probe_choices
    from trimtab.evaluate.minimal_pairs import ProbeItem, probe_items
    from trimtab.evaluate.perplexity import LossResult, UnitLosses, loss

# No module is called `loss`, `probe` or `probe_items`: importing it would put the module where the function belongs.
_MODULES = {
    "AnswerResult": "answers",
    "Example": "answers",
    "LossResult": "perplexity",
    "ProbeItem": "minimal_pairs",
    "exact_answers": "answers",
    "log_likelihoods": "likelihood",
    "mean_losses": "likelihood",
    "loss": "perplexity",
    "UnitLosses": "perplexity",
    "probe": "likelihood",
    "probe_choices": "likelihood",
    "probe_items": "minimal_pairs",
}

__all__ = [
    "AnswerResult",
    "Example",
    "LossResult",
    "ProbeItem",
    "UnitLosses",
    "exact_answers",
    "log_likelihoods",
    "loss",
    "mean_losses",
    "probe",
    "probe_choices",
    "probe_items",
]

__getattr__ = lazy_attributes(__name__, _MODULES)
