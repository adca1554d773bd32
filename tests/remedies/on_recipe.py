"""Recipes: files, overrides, unknown keys, and keys that contradict each other."""

from __future__ import annotations

import json
import re
from pathlib import Path

from cases import World, case, in_turn, settings

from trimtab.facts.names import path_of
from trimtab.recipe import load, loads
from trimtab.recipe.keys import Recipe

REST = "\ndata: {train: starter:math}\n"
BASE = f"model: starter{REST}"


def recipe(*overrides: str, base: str = BASE) -> Recipe:
    return loads(base, overrides)


def rule(key: str, given: list[str], *rights: list[str], base: str = BASE) -> None:
    """Keys that contradict each other; then each way out, and everything that the remedy names as an override."""

    def follow(w: World, remedy: str) -> None:
        for right in rights:
            recipe(*right, base=base)
        for alternative in settings(remedy) if re.search(r"[a-z_](: |=)\S", remedy) else []:
            keys = {word.partition("=")[0] for word in alternative}
            kept = [word for word in given if word.partition("=")[0] not in keys]
            recipe(*kept, *alternative, base=base)

    case(f"recipe/rules.py:{key}", lambda w: recipe(*given, base=base), follow)


rule(
    "_num_steps: set a positive number of steps, or -1 to train for num_train_epochs",
    ["max_steps=0"],
    ["max_steps=5"],
    ["max_steps=-1"],
)
rule(
    "_num_steps: keep one of them: set max_steps=null or num_train_epochs=null",
    [],
    base=BASE + "max_steps: 5\nnum_train_epochs: 2\n",
)
rule(
    "_weights: set {}.{}.weight=1000 or less (1 is one pass)",
    [],
    base=BASE.replace("starter:math", "{source: starter:math, weight: 1e12}"),
)
rule("_num_steps: set max_steps", ["data.streaming=true"], ["data.streaming=true", "max_steps=5"])
rule(
    "_schedule: keep one of them: set warmup_steps=null or warmup_ratio=null",
    [],
    base=BASE + "warmup_steps: 5\nwarmup_ratio: 0.1\n",
)
CONSTANT = ["lr_scheduler_type=constant"]
rule(
    "_schedule: set lr_scheduler_type=constant_with_warmup, or {}",
    [*CONSTANT, "warmup_steps=5"],
    ["lr_scheduler_type=constant_with_warmup", "warmup_steps=5"],
    CONSTANT,
)
rule("_schedule: make it shorter", ["max_steps=5", "warmup_steps=5"], ["max_steps=5", "warmup_steps=4"])
rule(
    "_schedule: leave it out (min_lr_ratio=null), or set lr_scheduler_type=cosine",
    [*CONSTANT, "min_lr_ratio=0.1"],
    CONSTANT,
    ["lr_scheduler_type=cosine", "min_lr_ratio=0.1"],
)
rule("_precision: set dtype: bf16, or weights_dtype: fp32", ["dtype=fp32", "weights_dtype=bf16"])
rule(
    "_precision: set gradient_dtype: fp32, or weights_dtype: bf16 with dtype: bf16",
    ["dtype=fp32", "gradient_dtype=bf16"],
)
rule(
    "_optimizer: leave it out (optim_implementation=null), or set optim: adamw_8bit",
    ["optim=adamw_torch", "optim_implementation=reference"],
    ["optim=adamw_torch"],
)
IN_BACKWARD = ["optim_in_backward=true", "max_grad_norm=0", "gradient_accumulation_steps=1"]
rule(
    "_optimizer: set max_grad_norm: 0, or optim_in_backward: false",
    ["optim_in_backward=true", "max_grad_norm=1", "gradient_accumulation_steps=1"],
)
rule(
    "_optimizer: set gradient_accumulation_steps: 1 with a larger per_device_train_batch_size, or optim_in_backward: "
    "false",
    ["optim_in_backward=true", "max_grad_norm=0", "gradient_accumulation_steps=4"],
    [*IN_BACKWARD, "per_device_train_batch_size=8"],
)
rule("_optimizer: set dtype: bf16, or optim_in_backward: false", [*IN_BACKWARD, "dtype=fp16"])
rule(
    "_memory: set recompute: offload, or torch_compile: false",
    ["recompute=offload_half", "torch_compile=true"],
)
case(
    "recipe/rules.py:_not_a_limit: write it like 24GiB, 24GB or 80%",
    lambda w: recipe("memory_limit=much"),
    lambda w, remedy: in_turn(
        lambda size: recipe(f"memory_limit={size}"), re.findall(r"\d+(?:GiB|GB|%)", remedy)
    ),
)
rule(
    "_memory: keep one of them: set gradient_checkpointing=null or recompute=null",
    [],
    base=BASE + "gradient_checkpointing: true\nrecompute: none\n",
)
case(
    "recipe/rules.py:_tiles: give at most {}",
    lambda w: recipe("mlp_tiles=1000000"),
    lambda w, remedy: recipe(f"mlp_tiles={remedy.split()[-1]}"),
)
TAKEN = BASE.replace(
    "starter:math", "starter:math, chat_template_kwargs: {tools: none, enable_thinking: true}"
)
rule("_template: leave {} out ({})", [], base=TAKEN)
LORA = BASE + "lora: {r: 8}\n"
rule(
    "_lora: leave {} out ({}), or train a new adapter (lora.adapter=null)",
    [],
    base=BASE + "lora: {r: 8, adapter: a}\n",
)
rule(
    "_lora: list embed_tokens in lora.modules_to_save (and lm_head, if the model has an untied head)",
    ["model.added_tokens=[<|x|>]"],
    ["model.added_tokens=[<|x|>]", "lora.modules_to_save=[embed_tokens]"],
    ["model.added_tokens=[<|x|>]", "lora.modules_to_save=[embed_tokens, lm_head]"],
    base=LORA,
)
rule(
    "_quantized: keep one of them: set load_in_4bit=null or load_in_8bit=null",
    ["load_in_4bit=true", "load_in_8bit=true"],
    ["load_in_4bit=true"],
    ["load_in_8bit=true"],
    base=LORA,
)


def follow_adapters(w: World, remedy: str) -> None:
    section, off = re.findall(r"\((lora: .*?)\)|set (\w+: false)", remedy)
    loads(f"{BASE}{section[0]}\nload_in_4bit: true\n")
    loads(f"{BASE}{off[1]}\n")


case(
    "recipe/rules.py:_quantized: train adapters (lora: {r: 16}), or set {}: false",
    lambda w: recipe("load_in_4bit=true"),
    follow_adapters,
)
rule(
    "_quantized: leave it out (dequantized_layers=null), or set load_in_4bit: true or load_in_8bit: true",
    ["dequantized_layers=2"],
    [],
    base=LORA,
)
rule(
    "_quantized: leave it out (bnb_4bit_use_double_quant=null), or set load_in_4bit: true",
    ["bnb_4bit_use_double_quant=false"],
    [],
    base=LORA,
)


# Files.


def from_file(w: World, content: str | bytes = BASE, name: str = "recipe.yaml") -> Path:
    path = w.tmp / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def file_case(key: str, wrong: str | bytes, right: str = BASE) -> None:
    case(
        f"recipe/{key}",
        lambda w: load(from_file(w, wrong)),
        lambda w, remedy: load(from_file(w, right)),
    )


case(
    "recipe/loading.py:load: check the path, or name a recipe that ships with trimtab: {}",
    lambda w: load(w.tmp / "absent.yaml"),
    lambda w, remedy: (
        load(from_file(w)),
        in_turn(load, remedy.partition("trimtab: ")[2].split(", ")),
    ),
)
case(
    "recipe/loading.py:load: did you mean {}, which ships with trimtab? For a file check the path",
    lambda w: load("own-txt"),
    lambda w, remedy: (load(remedy.removeprefix("did you mean ").partition(",")[0]), load(from_file(w))),
)
case(
    "recipe/loading.py:load: continue that run with `trimtab train --resume {}`",
    lambda w: load(w.own("run") / "run"),
    lambda w, remedy: w.cli(*remedy.partition("`trimtab ")[2].removesuffix("`").split()),
)
case(
    "recipe/loading.py:load: give the recipe file inside it",
    lambda w: load(w.tmp),
    lambda w, remedy: load(from_file(w)),
)
file_case("loading.py:load: give a YAML file in UTF-8", b"\xff\xfe\x00")
case(
    "recipe/loading.py:loads: a recipe has at least `model:` and `data: {train: ...}`",
    lambda w: load(from_file(w, "")),
    lambda w, remedy: load(
        from_file(
            w,
            "\n".join(re.findall("`(.*?)`", remedy))
            .replace("model:", "model: starter")
            .replace("...", "starter:math"),
        )
    ),
)
file_case("loading.py:loads: start with a line such as `model: ...`", "- a\n- b\n")
file_case("yaml_text.py:read: give a recipe: a YAML file of a few lines", "#" * 1_000_001)
file_case("yaml_text.py:_reject_unsupported: delete it; recipes are YAML 1.2", "%YAML 1.1\n---\n" + BASE)
file_case(
    "yaml_text.py:_reject_unsupported: write the value out; put a text that begins with * or & in quotes",
    BASE.replace("train: starter:math", "train: *.txt"),
    BASE.replace("train: starter:math", 'train: "*.txt"'),
)
file_case("yaml_text.py:read: indent with spaces", "model: starter\ndata:\n\ttrain: starter:math\n")
file_case(
    "yaml_text.py:_reject_unsupported: recipes are plain data: remove it",
    BASE.replace("starter\n", "!!str starter\n"),
)
file_case("yaml_text.py:_reject_unsupported: write it flat", BASE + "lora: " + "[" * 13 + "]" * 13)
file_case(
    "yaml_text.py:_plain: write keys as words, such as `optim: adamw_8bit`",
    BASE + "? [a]\n: 5\n",
    BASE + "optim: adamw_8bit\n",
)
file_case("yaml_text.py:_plain: keep one of them", BASE + "model: other\n")


# Overrides and keys.
case(
    "recipe/loading.py:_parse: write key=value, for example learning_rate=1e-4",
    lambda w: recipe("learning_rate"),
    lambda w, remedy: recipe(remedy.split()[-1]),
)
case(
    "recipe/loading.py:_conflict: give one of them",
    lambda w: recipe("max_steps=5", "num_train_epochs=2"),
    lambda w, remedy: (recipe("max_steps=5"), recipe("num_train_epochs=2")),
)
case(
    "recipe/loading.py:_check_conflicts: give one of them",
    lambda w: recipe("max_steps=5", "max_steps=6"),
    lambda w, remedy: (recipe("max_steps=5"), recipe("max_steps=6")),
)
case(
    "recipe/loading.py:_check_conflicts: give '{}' after it, or leave it out",
    lambda w: recipe("lora.r=4", "lora={lora_alpha: 8}"),
    lambda w, remedy: (
        recipe("lora={lora_alpha: 8}", re.findall("'(.*?)'", remedy)[0]),
        recipe("lora={lora_alpha: 8}"),
    ),
)
TWO = "model: starter\ndata: {train: [{source: starter:math}, {source: starter:general}]}\n"
case(
    "recipe/loading.py:_index: count from 0 to {}",
    lambda w: recipe("data.train.7.first=3", base=TWO),
    lambda w, remedy: [
        recipe(f"data.train.{place}.first=3", base=TWO) for place in range(int(remedy.split()[-1]) + 1)
    ],
)
case(
    "recipe/loading.py:_index: give the whole list",
    lambda w: recipe("data.train.0.first=3", base=TWO.partition("[")[0] + "[]}"),
    lambda w, remedy: recipe(
        "data.train=[{source: starter:math, first: 3}]", base=TWO.partition("[")[0] + "[]}"
    ),
)


def meant(remedy: str) -> str:
    return re.findall("'(.*?)'", remedy)[0]


case(
    "recipe/problems.py:unknown_key: did you mean '{}'?",
    lambda w: recipe("learning_rat=1e-4"),
    lambda w, remedy: recipe(f"{meant(remedy)}=1e-4"),
)
case(
    "recipe/problems.py:unknown_key: did you mean '{}'{}?",
    lambda w: recipe("lora.learning_rate=1e-4", base=LORA),
    lambda w, remedy: recipe(f"{meant(remedy)}=1e-4", base=LORA),
)
case(
    "recipe/problems.py:unknown_key: write `{}`",
    lambda w: loads(f"{BASE}base_model: starter\n"),
    lambda w, remedy: loads(remedy.removeprefix("write `").removesuffix("`").replace("…", "starter") + REST),
)
case(
    "recipe/problems.py:unknown_key: write `{}`; dots are for the command line",
    lambda w: loads(f"model.name: starter{REST}"),
    lambda w, remedy: loads(remedy.removeprefix("write `").partition("`")[0].replace("…", "starter") + REST),
)
case(
    "recipe/problems.py:unknown_key: known keys here are {}",
    lambda w: recipe("model.zzz=1"),
    lambda w, remedy: in_turn(known_key, remedy.partition("are ")[2].split(", ")),
)
case(
    "recipe/problems.py:unknown_key: `trimtab schema` prints every key",
    lambda w: recipe("neftune=1"),
    lambda w, remedy: recipe(f"{next(iter(json.loads(w.cli(*command_in(remedy)))['properties']))}=starter"),
)


def command_in(remedy: str) -> list[str]:
    """The words behind `trimtab` in a remedy."""
    return re.findall("`trimtab (.*?)`", remedy)[0].split()


def known_key(name: str) -> None:
    """A key of `model`, with its own default, or a value that it takes."""
    values = {"name": "starter", "revision": "main", "tokenizer": "starter", "init": "random"}
    field = type(recipe().model).model_fields[name]
    default = field.default if field.default_factory is None else field.default_factory()  # type: ignore[call-arg]
    recipe(f"model.{name}={values.get(name, default)}".replace("None", "null"))


def elsewhere(w: World, remedy: str) -> None:
    """What other tools' keys are called here."""
    recipe(re.findall(r"write (\w+: \w+)", remedy)[0].replace(": ", "="))


case("recipe/problems.py:unknown_key: {}", lambda w: recipe("bf16=true"), elsewhere)
case(
    "recipe/problems.py:unknown_key: leave it out: it is false",
    lambda w: loads(f"{BASE}fp16: false\n"),
    lambda w, remedy: loads(BASE),
)
for key in ("fp16", "lora_model_dir"):
    case(
        "recipe/problems.py:unknown_key: leave it out: it has no value",
        lambda w, key=key: loads(f"{BASE}{key}:\n"),  # type: ignore[misc]
        lambda w, remedy: loads(BASE),
    )


def write(w: World, remedy: str) -> None:
    """What the remedy writes, as a line of the recipe."""
    line = re.search("`(.*)`|write (.*) instead", remedy)
    assert line is not None
    loads(f"{BASE}{line[1] or line[2]}\n")


case(
    "recipe/problems.py:_wrong_type: write recompute: offload instead",
    lambda w: loads(f"{BASE}gradient_checkpointing: unsloth\n"),
    write,
)
case("recipe/problems.py:_wrong_type: write `{}: {}`", lambda w: loads(f"{BASE}packing: yes\n"), write)
case(
    "recipe/problems.py:_wrong_type: write it without quotes: `{}: {}`",
    lambda w: loads(f"{BASE}learning_rate: '2e-4'\n"),
    write,
)
case("recipe/problems.py:_wrong_type: write it like `{}: {}`", lambda w: loads(f"{BASE}lora: true\n"), write)
case(
    "recipe/problems.py:_problem: did you mean '{}'?",
    lambda w: recipe("optim=adamw_9bit"),
    lambda w, remedy: recipe(f"optim={meant(remedy)}"),
)
for _ in range(2):
    case(
        "recipe/problems.py:_problem: for example `{}: {}`",
        lambda w: loads("data: {train: starter:math}\n"),
        lambda w, remedy: loads(re.findall("`(.*?)`", remedy)[0] + "\ndata: {train: starter:math}\n"),
    )


def like(w: World, remedy: str) -> None:
    for example in re.findall("`(.*?)`", remedy):
        loads(f"{BASE}{example}\n")


case("recipe/problems.py:_no_matching_type: write it like {}", lambda w: recipe("recompute=5"), like)
case(
    "recipe/problems.py:_missing_value: give one{}{}",
    lambda w: loads("model:\ndata: {train: starter:math}\n"),
    lambda w, remedy: loads(re.findall("`(.*?)`", remedy)[0] + "\ndata: {train: starter:math}\n"),
)


case(
    "recipe/problems.py:_not_utf8: correct it, or leave it out",
    lambda w: loads(BASE + 'prompts: ["\\ud800"]\n'),
    lambda w, remedy: (loads(BASE + 'prompts: ["x"]\n'), loads(BASE)),
)
case(
    "recipe/loading.py:_expand: write {}=value",
    lambda w: recipe("optim.name=adamw_8bit"),
    lambda w, remedy: recipe(remedy.removeprefix("write ").replace("value", "adamw_8bit")),
)
case(
    "recipe/loading.py:_expand: write {} as a mapping of keys to values",
    lambda w: loads("model: starter\ndata: 5\n", ["data.train=starter:math"]),
    lambda w, remedy: loads("model: starter\ndata: {eval_share: 0}\n", ["data.train=starter:math"]),
)
case(
    "recipe/loading.py:_descend: {}",
    lambda w: recipe("modle.name=x"),
    lambda w, remedy: recipe(f"{meant(remedy)}.name=x"),
)
file_case(
    "yaml_text.py:read: correct that line; put text that contains : or # or begins with a sign in quotes",
    BASE + "prompts: [a: b: c]\n",
    BASE + 'prompts: ["a: b: c"]\n',
)
file_case("yaml_text.py:read: remove that character", BASE + "# \x01\n", BASE + "# \n")


# Grouping, early stopping, measuring.
rule(
    "_grouping: set packing: false, or leave group_by_length out (group_by_length=null)",
    ["group_by_length=true", "packing=true"],
    [],
)
rule(
    "_grouping: set data.streaming: false, or leave group_by_length out (group_by_length=null)",
    ["group_by_length=true", "packing=false", "data.streaming=true", "max_steps=5"],
    ["packing=false", "data.streaming=true", "max_steps=5"],
)
rule(
    "_early_stopping: set early_stopping_patience, or leave it out (early_stopping_threshold=null)",
    ["early_stopping_threshold=0.1"],
    ["early_stopping_threshold=0.1", "early_stopping_patience=2", "eval_steps=5"],
    [],
)
rule(
    "_early_stopping: set eval_steps",
    ["early_stopping_patience=2", "eval_steps=null"],
    ["early_stopping_patience=2", "eval_steps=5"],
)
PATIENT = ["early_stopping_patience=2", "eval_steps=5"]
rule(
    "_early_stopping: {}",
    [*PATIENT, "data.eval_share=0"],
    [*PATIENT, "data.eval_share=0", "data.eval.domain=[starter:math-heldout]"],
    [*PATIENT, "data.eval_share=0.1"],
)
NOTHING = ["data.eval_share=0", "probe=false"]
rule(
    "_evaluation: name a set under data.eval, set data.eval_share, or leave eval_steps out (eval_steps=null)",
    [*NOTHING, "eval_steps=5"],
    [*NOTHING, "eval_steps=5", "data.eval.general=[starter:general]"],
    ["probe=false", "data.eval_share=0.1", "eval_steps=5"],
    NOTHING,
)


# Names that cannot be files, and words that are no verbs.
case(
    "recipe/problems.py:_problem: {}",
    lambda w: recipe(f"output_dir={'word ' * 80}"),
    lambda w, remedy: recipe("output_dir=runs/short"),
)
case(
    "facts/names.py:path_of: give a name or a path, as text or a pathlib.Path",
    lambda w: path_of(5, "the model"),
    lambda w, remedy: (path_of("runs/a", "the model"), path_of(Path("runs/a"), "the model")),
)
case(
    "facts/names.py:path_of: give a name or a path",
    lambda w: path_of(" ", "the model"),
    lambda w, remedy: path_of("runs/a", "the model"),
)
for wrong in ("a\0b", "word " * 80, "~no-such-user-name/a"):
    case(
        "facts/names.py:path_of: {}",
        lambda w, wrong=wrong: path_of(wrong, "the model"),
        lambda w, remedy: path_of(Path.home() / "a", "the model"),
    )
case(
    "cli/commands.py:_unknown_verb: did you mean `trimtab {}`?",
    lambda w: w.cli("docter"),
    lambda w, remedy: w.cli(*re.findall("`trimtab (.*?)`", remedy)[0].split(), "--help"),
)
case(
    "cli/commands.py:_unknown_verb: did you mean `trimtab train {}`?",
    lambda w: w.cli(str(w.recipe())),
    lambda w, remedy: w.cli("train", w.recipe(), "max_steps=1"),
)
case(
    "cli/commands.py:_unknown_verb: the commands are {}",
    lambda w: w.cli("zzzzzz"),
    lambda w, remedy: in_turn(lambda verb: w.cli(verb, "--help"), remedy.partition("are ")[2].split(", ")),
)
case(
    "recipe/renamed.py:rename_keys: leave {} out",
    lambda w: loads(f"{BASE}unpacked_layers: auto\ndequantized_layers: auto\n"),
    lambda w, remedy: loads(f"{BASE}dequantized_layers: auto\n"),
)
