"""Evaluates a model during training: losses on held-out sets, the probe, exact answers, sample completions.

Losses and the probe are computed at every evaluation; completions and exact answers, which need generation, before the
first step and after the last. Records also have the result of every item (document, choice, problem), so that the
report can compare before and after by pairs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trimtab import evaluate
from trimtab.data import Batch
from trimtab.evaluate import ProbeItem, probe_items
from trimtab.facts.errors import RecipeError
from trimtab.facts.phases import During, RunPhase, no_phase
from trimtab.generate import SamplingOptions, generate_many
from trimtab.model import Decoder
from trimtab.plan.phases import PROBE_TOKENS, PROMPT_TOKENS, ROWS
from trimtab.recipe import Recipe
from trimtab.run.corpora import Watcher, open_for_eval
from trimtab.run.folder import RunFolder
from trimtab.run.inference_memory import predict_generation, predict_losses
from trimtab.run.memory_report import PredictedMemory
from trimtab.run.out_of_memory import explaining_memory
from trimtab.run.torch_setup import on_device_of
from trimtab.starter import FIELDS, Problem, check, math_problems
from trimtab.text import Tokenizer

if TYPE_CHECKING:
    from trimtab.run.models import OpenedModel

ANSWERS_SEED = 30_000
"""Seed of the held-out problems: the same for every run, so that runs can be compared."""
EVAL_TOKENS = 512
"""Default sequence length of `trimtab eval`, if the model supports it."""
ANSWER_TOKENS = 64
SAMPLE_TOKENS = 48


@dataclass
class Evaluator:
    """Evaluates a model: called with a step, it returns records."""

    decoder: Decoder
    tokenizer: Tokenizer
    total_steps: int
    sets: Mapping[str, Sequence[Batch]] = field(default_factory=dict)
    probe_items: Sequence[ProbeItem] = ()
    problems: Sequence[Problem] = ()
    prompts: Sequence[str] = ()
    autocast: Callable[[], Any] = torch.no_grad
    during: During = no_phase
    """Entered while text is generated."""

    def __call__(self, step: int) -> list[dict[str, Any]]:
        """Returns records for the metrics log; the decoder's training mode is restored."""
        training = self.decoder.training
        self.decoder.eval()
        try:
            with torch.no_grad(), self.autocast():
                records = [*self._losses(step), *self._probe(step)]
                if step == 0 or step >= self.total_steps:
                    records += self._generated(step)
        finally:
            self.decoder.train(training)
        return records

    def at_end(self, step: int) -> list[dict[str, Any]]:
        """The remaining evaluation of a run that ends before its last step: exact answers and completions."""
        training = self.decoder.training
        self.decoder.eval()
        try:
            with torch.no_grad(), self.autocast():
                return self._generated(step)
        finally:
            self.decoder.train(training)

    def _generated(self, step: int) -> list[dict[str, Any]]:
        with self.during(RunPhase.GENERATION):
            return [*self._answers(step), *self._samples(step)]

    def _losses(self, step: int) -> list[dict[str, Any]]:
        records = []
        for name, batches in self.sets.items():
            result = evaluate.loss(self.decoder, batches)
            records.append(
                {
                    "kind": "eval",
                    "step": step,
                    "name": name,
                    "loss": result.loss,
                    "perplexity": result.perplexity,
                    "tokens": result.tokens,
                    "units": {
                        "unit": result.units.unit,
                        "losses": [float(f"{loss:.6g}") for loss in result.units.losses],
                        "tokens": result.units.tokens,
                    },
                }
            )
        return records

    def _probe(self, step: int) -> list[dict[str, Any]]:
        if not self.probe_items:
            return []
        with self.during(RunPhase.PROBE):
            choices = evaluate.probe_choices(self.decoder, self.tokenizer, self.probe_items)
        texts = (text for item in self.probe_items for text in (item.kind, item.context, *item.alternatives))
        return [
            {
                "kind": "probe",
                "step": step,
                "scores": {kind: sum(right) / len(right) for kind, right in choices.items()},
                "items": {kind: len(right) for kind, right in choices.items()},
                "right": {kind: _digits(right) for kind, right in choices.items()},
                "digest": _digest(texts),
            }
        ]

    def _complete(self, prompts: Sequence[str], max_new_tokens: int, stop: list[str]) -> list[str]:
        found = generate_many(
            self.decoder,
            self.tokenizer,
            list(prompts),
            SamplingOptions(max_new_tokens=max_new_tokens, stop=stop),
        )
        return [completion.text for completion in found]

    def _answers(self, step: int) -> list[dict[str, Any]]:
        if not self.problems:
            return []
        result = evaluate.exact_answers(
            lambda prompts: self._complete(prompts, ANSWER_TOKENS, ["\n\n"]), self.problems, check
        )
        return [
            {
                "kind": "answers",
                "step": step,
                "exact": result.exact,
                "total": result.total,
                "by_topic": result.by_topic,
                "right": _digits(result.right),
                "digest": _digest(
                    text for problem in self.problems for text in (problem.prompt, problem.answer)
                ),
            }
        ]

    def _samples(self, step: int) -> list[dict[str, Any]]:
        if not self.prompts:
            return []
        texts = self._complete(self.prompts, SAMPLE_TOKENS, ["\n\n"])
        return [
            {"kind": "sample", "step": step, "prompt": prompt, "completion": text}
            for prompt, text in zip(self.prompts, texts, strict=True)
        ]


def build_evaluation(
    recipe: Recipe,
    decoder: Decoder,
    tokenizer: Tokenizer,
    total_steps: int,
    *,
    sets: Mapping[str, Sequence[Batch]],
    autocast: Callable[[], Any],
    during: During,
) -> Evaluator:
    """The evaluation that a recipe describes; arguments as the fields of `Evaluator`."""
    asked = recipe.answers
    return Evaluator(
        decoder,
        tokenizer,
        total_steps,
        sets=sets,
        probe_items=probe_items() if recipe.probe else (),
        problems=math_problems(ANSWERS_SEED, asked, FIELDS[recipe.answers_field]) if asked else (),
        prompts=recipe.prompts,
        autocast=autocast,
        during=during,
    )


def _digits(right: Iterable[bool]) -> str:
    """Results of items in their order, one character per item: "1" for right.

    Example:
        >>> _digits([True, False, True])
        '101'
    """
    return "".join(str(int(item)) for item in right)


def _digest(texts: Iterable[str]) -> str:
    """Identifies a set of items: results with the same digest can be compared item by item.

    Example:
        >>> _digest(["a", "b"]) == _digest(["ab"])
        False
    """
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def evaluate_model(
    opened: OpenedModel,
    texts: Sequence[str],
    watcher: Watcher,
    *,
    probe: bool,
    answers: int,
    max_seq_length: int | None,
    max_sequences: int,
    batch_size: int,
    cache_dir: Path | None = None,
) -> list[dict[str, Any]]:
    """Evaluates a model outside of training; returns the same records as in a run's log."""
    positions = opened.decoder.shape.max_positions
    length = min(EVAL_TOKENS, positions) if max_seq_length is None else max_seq_length
    if length > positions:
        raise RecipeError(
            f"max_seq_length {length} is beyond the model's {positions} positions",
            f"give at most {positions}",
        )
    run = RunFolder(Path(opened.name))
    sets = {
        text: open_for_eval(text, opened.tokenizer, watcher, length, max_sequences, batch_size, cache_dir)
        for text in texts
    }
    evaluation = Evaluator(
        opened.decoder,
        opened.tokenizer,
        total_steps=0,
        sets=sets,
        probe_items=probe_items() if probe else (),
        problems=math_problems(ANSWERS_SEED, answers) if answers else (),
    )
    predictions: dict[RunPhase, Callable[[], PredictedMemory]] = {
        RunPhase.EVALUATION: partial(predict_losses, opened.decoder, batch_size, length, packed=True),
        RunPhase.GENERATION: partial(
            predict_generation, opened.decoder, min(answers, ROWS), PROMPT_TOKENS, ANSWER_TOKENS
        ),
        RunPhase.PROBE: partial(
            predict_losses, opened.decoder, ROWS, min(PROBE_TOKENS, positions), packed=True
        ),
    }
    evaluation.during = lambda phase: explaining_memory(
        phase, opened.decoder, run=run, predict=predictions.get(phase)
    )
    with evaluation.during(RunPhase.EVALUATION), on_device_of(opened.decoder):
        return evaluation(opened.step or 0)
