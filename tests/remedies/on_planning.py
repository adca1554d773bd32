"""`trimtab plan`: targets, methods, questions and pages that cannot be, and what is advised instead."""

from __future__ import annotations

import re
from pathlib import Path

from cases import World, case, in_turn

from trimtab.facts.prices import SHIPPED

MODEL = "Qwen/Qwen3-0.6B"
GPU = ("--gpu", "rtx4090")


def plan(w: World, *words: object) -> str:
    return w.cli("plan", *words)


def choices(remedy: str) -> list[str]:
    return remedy.removeprefix("choose one of ").split(", ")


case(
    "cli/plan.py:plan: add the answer's lines to the command and repeat it without --solve",
    lambda w: w.cli(
        "plan", "starter", "--gpu", "24GB", "--solve", "batch_size", "--page", w.tmp / "plan.html"
    ),
    lambda w, remedy: w.cli("plan", "starter", "--gpu", "24GB", "--page", w.tmp / "plan.html"),
)
case(
    "cli/plan.py:plan: give a recipe or a model: `trimtab plan Qwen/Qwen3-8B --gpu 24GB --method qlora`; "
    "see `trimtab plan --help`",
    lambda w: plan(w),
    lambda w, remedy: (
        w.cli(*re.findall("`trimtab (.*?)`", remedy)[0].split()),
        plan(w, w.recipe()),
        plan(w, "--help"),
    ),
)
case(
    "cli/plan_questions.py:print_answer: choose a smaller model or a larger GPU, or list ways to save memory with "
    "--what-if",
    lambda w: plan(w, "Qwen/Qwen3-8B", "--gpu", "12GB", "--solve", "batch_size"),
    lambda w, remedy: (
        plan(w, MODEL, "--gpu", "12GB", "--solve", "batch_size"),
        plan(w, "Qwen/Qwen3-8B", "--gpu", "h200", "--solve", "batch_size"),
        plan(w, "Qwen/Qwen3-8B", "--gpu", "h200", "--what-if"),
    ),
)
case(
    "plan/solve.py:check_question: choose one of {}",
    lambda w: plan(w, MODEL, *GPU, "--solve", "longest"),
    lambda w, remedy: in_turn(lambda word: plan(w, MODEL, *GPU, "--solve", word), choices(remedy)[:3]),
)
case(
    "plan/solve.py:_require_rates: measure it with `trimtab plan --calibrate`, or select a GPU with a data sheet with "
    "--gpu",
    lambda w: plan(w, MODEL, "--gpu", "24GB", "--solve", "fastest"),
    lambda w, remedy: plan(w, MODEL, *GPU, "--solve", "fastest"),
)
case(
    "recipe/rules.py:_batch_size: reduce the product to {} or less",
    lambda w: plan(w, MODEL, *GPU, "per_device_train_batch_size=1000000000000"),
    lambda w, remedy: plan(w, MODEL, *GPU, "per_device_train_batch_size=1"),
)
case(
    "run/target.py:model_shape: check the path",
    lambda w: plan(w, "./nothing.json", *GPU),
    lambda w, remedy: plan(w, w.model / "config.json", *GPU, "max_seq_length=64"),
)
case(
    "run/target.py:model_shape: {}plan it from its config.json: `trimtab plan path/to/config.json`; or name it "
    "in a recipe: its config.json is then downloaded from the hub",
    lambda w: plan(w, "unknown/nothing", *GPU),
    lambda w, remedy: plan(w, w.model / "config.json", *GPU, "max_seq_length=64"),
)
TABLE = ("--table", "--models", MODEL, "--gpus", "rtx4090", "--methods", "lora")
case(
    "cli/plan_questions.py:check_options: add --table",
    lambda w: plan(w, *TABLE[1:]),
    lambda w, remedy: plan(w, *TABLE),
)
case(
    "cli/plan_questions.py:check_options: use --solve max_seq_length, or no --table",
    lambda w: plan(w, *TABLE, "--solve", "fastest"),
    lambda w, remedy: (
        plan(w, *TABLE, "--solve", "max_seq_length"),
        plan(w, MODEL, *GPU, "--solve", "fastest"),
    ),
)
case(
    "cli/plan_questions.py:check_options: leave {} or --table out",
    lambda w: plan(w, *TABLE, "--what-if"),
    lambda w, remedy: (plan(w, *TABLE), plan(w, MODEL, *GPU, "--what-if")),
)
case(
    "cli/plan_questions.py:check_options: add --solve cheapest",
    lambda w: plan(w, MODEL, *GPU, "--prices", SHIPPED),
    lambda w, remedy: plan(w, MODEL, *GPU, "--prices", SHIPPED, "--solve", "cheapest"),
)
case(
    "run/target.py:check_method: choose one of {}",
    lambda w: plan(w, MODEL, *GPU, "--method", "quick"),
    lambda w, remedy: in_turn(lambda word: plan(w, MODEL, *GPU, "--method", word), choices(remedy)),
)
case(
    "run/target.py:_host_bytes: write it like 64GB or 64GiB",
    lambda w: plan(w, MODEL, *GPU, "--host-memory", "lots"),
    lambda w, remedy: in_turn(
        lambda word: plan(w, MODEL, *GPU, "--host-memory", word), re.findall(r"\d+\w+", remedy)
    ),
)
case(
    "report/html.py:write_html: give another path with {}",
    lambda w: plan(w, MODEL, *GPU, "--page", w.model / "config.json" / "plan.html"),
    lambda w, remedy: [plan(w, MODEL, *GPU, "--page", w.tmp / "plan.html"), Path(w.tmp / "plan.html").stat()],
)
