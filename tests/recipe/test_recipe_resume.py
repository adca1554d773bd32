"""Which keys may change on resume."""

from __future__ import annotations

import pytest

from trimtab.facts.errors import RecipeError
from trimtab.recipe import CHANGEABLE_ON_RESUME, check_resume, loads
from trimtab.recipe.problems import all_keys, dotted

TEXT = (
    "model: a\ndata: {train: [x, y], eval: {general: [g]}}\nlr_scheduler_type: cosine\nmax_steps: 10\neval_steps: 2\n"
    "early_stopping_patience: 2\n"
)

ALLOWED = [
    "logging_steps=3",
    "eval_steps=3",
    "eval_on_start=false",
    "save_steps=3",
    "save_total_limit=7",
    "max_steps=20",
    "num_train_epochs=1",
    "report_to=[wandb]",
    "device=cpu",
    "output_dir=elsewhere",
    "data.num_proc=3",
    "data.cache_dir=elsewhere",
    "prompts=[a, b]",
    "probe=false",
    "answers=3",
    "answers_field=calculus",
    "gradient_checkpointing=true",
    "recompute=block",
    "memory_limit=8GiB",
    "cuda_graphs=false",
    "dequantized_layers=0",
    "early_stopping_patience=3",
    "early_stopping_threshold=0.1",
    "num_threads=3",
]


@pytest.mark.parametrize("override", ALLOWED)
def test_keys_that_may_change_on_resume(override: str) -> None:
    assert loads(TEXT, [override]) != loads(TEXT)
    check_resume(loads(TEXT), loads(TEXT, [override]))
    check_resume(loads(TEXT, [override]), loads(TEXT))


def test_every_changeable_key_exists_and_is_tested() -> None:
    assert set(CHANGEABLE_ON_RESUME) <= {dotted(path) for path in all_keys()}
    assert {override.split("=")[0] for override in ALLOWED} == set(CHANGEABLE_ON_RESUME)


@pytest.mark.parametrize(
    "override",
    [
        "seed=1",
        "learning_rate=1",
        "data.train.1.weight=2",
        "data.train=[x]",
        "packing=false",
        "max_seq_length=64",
        "per_device_train_batch_size=1",
        "model=b",
        "model.revision=c",
        "dtype=bf16",
        "model.attn_implementation=reference",
        "optim=adamw_8bit",
        "deterministic=true",
        "data.eval_share=0.2",
        "data.replay.sources=[z]",
        "data.eval.general=[h]",
        "weight_decay=0",
        "gradient_dtype=bf16",
    ],
)
def test_other_changes_on_resume_raise(override: str) -> None:
    with pytest.raises(RecipeError) as caught:
        check_resume(loads(TEXT), loads(TEXT, [override]))
    assert override.split("=")[0] in str(caught.value)


def test_all_changes_are_listed() -> None:
    with pytest.raises(RecipeError) as caught:
        check_resume(loads(TEXT), loads(TEXT, ["seed=1", "packing=false", "logging_steps=1"]))
    assert str(caught.value) == (
        "a resumed run may not change seed (42 → 1), packing (True → False); "
        "set them back, or start a new run from this one's weights: "
        "`trimtab train RUN/recipe.yaml output_dir=RUN-2 model.name=RUN`"
    )


def test_implementations_may_change_with_the_device() -> None:
    check_resume(loads(TEXT), loads(TEXT, ["device=cpu", "model.attn_implementation=reference"]))
