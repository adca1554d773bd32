"""Loading recipes, and the error messages for invalid ones."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from trimtab.facts.errors import RecipeError
from trimtab.recipe import build, dump, load, loads
from trimtab.recipe.other_names import OTHER_VALUES, PEFT_NAMES, UNSUPPORTED_NAMES
from trimtab.recipe.rules import TEMPLATE_NAMES

MINIMAL = "model: starter\ndata:\n  train: [notes.txt]\n"


def message(text: str, overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(RecipeError) as caught:
        loads(text, overrides)
    return str(caught.value)


def test_minimal_recipe_has_complete_defaults() -> None:
    recipe = loads(MINIMAL, name="job.yaml")
    assert recipe.model.name == "starter"
    assert recipe.data.train[0].source == "notes.txt"
    assert recipe.num_train_epochs == 1.0
    assert recipe.output_dir == "runs/job"
    assert recipe.gradient_dtype == "fp32"


def test_yaml_one_point_two() -> None:
    recipe = loads(MINIMAL + "learning_rate: 2e-5\nprompts: [on, yes, 2024-01-01, '3']\nmax_grad_norm: 1\n")
    assert recipe.learning_rate == 2e-5
    assert recipe.prompts == ["on", "yes", "2024-01-01", "3"]
    assert isinstance(recipe.max_grad_norm, float)


def test_shorthands() -> None:
    recipe = loads(
        "model: {name: a, revision: main}\ndata: {train: x, eval: {general: y}}\nreport_to: none\n"
    )
    assert [s.source for s in recipe.data.train] == ["x"]
    assert [s.source for s in recipe.data.eval.general] == ["y"]
    assert recipe.report_to == []
    assert loads(MINIMAL, ["report_to=wandb"]).report_to == ["wandb"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            MINIMAL + "\n\nlerning_rate: 1\n",
            "unknown key 'lerning_rate' (line 6); did you mean 'learning_rate'?",
        ),
        (
            "model: {nmae: a}\ndata: {train: x}\n",
            "unknown key 'nmae' in model (line 1); did you mean 'name'?",
        ),
        (
            "model: a\ndata:\n  train:\n  - x\n  - source: y\n    wieght: 2\n",
            "unknown key 'wieght' in data.train.1 (line 6); did you mean 'weight'?",
        ),
        (
            "model: a\ndata: {train: x, replay: {shar: 0.1, sources: y}}\n",
            "unknown key 'shar' in data.replay (line 2); did you mean 'share'?",
        ),
        (
            "model: a\ndata: {train: x, eval: {genral: y}}\n",
            "unknown key 'genral' in data.eval (line 2); did you mean 'general'?",
        ),
        (MINIMAL + "streaming: true\n", "unknown key 'streaming' (line 4); write `data: {streaming: …}`"),
        (MINIMAL + "lr: 1e-4\n", "unknown key 'lr' (line 4); did you mean 'learning_rate'?"),
        (
            MINIMAL + "packing: yes\n",
            "packing must be true or false, not 'yes' (line 4); write `packing: true`",
        ),
        (
            MINIMAL + "learning_rate: '2e-4'\n",
            "learning_rate must be a number, not '2e-4' (line 4); write it without quotes: `learning_rate: 2e-4`",
        ),
        (
            MINIMAL + "lora: true\n",
            "lora must be a mapping of keys to values, not true (line 4); "
            "write it like `lora: {r: 16, lora_alpha: 32}`",
        ),
        (
            "model: a\ndata: {train: x, replay: 0.1}\n",
            "data.replay must be a mapping of keys to values, not 0.1 (line 2); "
            "write it like `replay: {share: 0.1, sources: [./general-text]}`",
        ),
        (
            "model: a\ndata: {train: x, eval: held-out.txt}\n",
            "data.eval must be a mapping of keys to values, not 'held-out.txt' (line 2); "
            "write it like `eval: {domain: [./heldout], general: [starter:general]}`",
        ),
        (
            MINIMAL + "gradient_checkpointing: unsloth\n",
            "gradient_checkpointing must be true or false, not 'unsloth' (line 4); write recompute: offload instead",
        ),
        (
            MINIMAL + "dtype:\n",
            "dtype has no value (line 4); give one, for example `dtype: bf16`, or leave it out",
        ),
        (MINIMAL + "learning_rate: abc\n", "learning_rate must be a number, not 'abc' (line 4)"),
        (MINIMAL + "learning_rate: true\n", "learning_rate must be a number, not true (line 4)"),
        (MINIMAL + "learning_rate: .nan\n", "learning_rate must be a finite number, not nan (line 4)"),
        (MINIMAL + "learning_rate: -1\n", "learning_rate must be greater than 0, not -1 (line 4)"),
        (MINIMAL + "max_steps: 1.5\n", "max_steps must be a whole number, not 1.5 (line 4)"),
        (
            MINIMAL + "gradient_accumulation_steps: 0\n",
            "gradient_accumulation_steps must be greater than or equal to 1, not 0 (line 4)",
        ),
        (
            MINIMAL + "output_dir: 12\n",
            "output_dir must be text (in quotes if it looks like a number), not 12 (line 4)",
        ),
        ("model: a\ndata: {train: []}\n", "data.train must not be empty, not [] (line 2)"),
        (
            MINIMAL + "model: b\n",
            "key 'model' is given twice (lines 1 and 4); keep one of them",
        ),
        ("model: a\n", "missing key 'data'"),
    ],
)
def test_messages(text: str, expected: str) -> None:
    assert message(text) == expected


def test_unknown_choice_suggests_the_nearest() -> None:
    text = message(MINIMAL + "optim: adamw_8bits\n")
    assert text.startswith("optim: 'adamw_8bits' is not one of adamw_torch, ")
    assert text.endswith("(line 4); did you mean 'adamw_8bit'?")


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("optim: adamw", "adamw_torch"),
        ("optim: adamw_torch_8bit", "adamw_8bit"),
        ("optim: paged_adamw_32bit", "adamw_torch"),
        ("lr_scheduler_type: cosine_with_restarts", "cosine"),
    ],
)
def test_other_tools_choices_suggest_the_closest(line: str, value: str) -> None:
    assert message(f"{MINIMAL}{line}\n").endswith(f"(line 4); did you mean '{value}'?")


def test_choices_of_other_tools_are_no_choices_here() -> None:
    for key, values in OTHER_VALUES.items():
        for other, ours in values.items():
            assert f"'{other}' is not one of" in message(MINIMAL, (f"{key}={other}",))
            loads(MINIMAL, [f"{key}={ours}"])


AXOLOTL = """
base_model: NousResearch/Meta-Llama-3.1-8B
model_type: LlamaForCausalLM
tokenizer_type: AutoTokenizer
datasets: [{path: tatsu-lab/alpaca, type: alpaca}]
adapter: qlora
lora_model_dir:
lora_target_modules:
lora_target_linear: true
pad_to_sequence_len: true
train_on_inputs: false
fp16:
bf16: auto
tf32: false
deepspeed:
resume_from_checkpoint:
eval_table_size:
special_tokens: {pad_token: <|end_of_text|>}
"""


def test_keys_that_are_off_in_another_tools_recipe_are_to_be_left_out() -> None:
    remedies = dict(re.findall(r"unknown key '(\w+)' \(line \d+\); (.*)", message(AXOLOTL)))
    leave = {key for key, remedy in remedies.items() if remedy.startswith("leave it out")}
    assert set(remedies) - leave == {"base_model", "datasets", "adapter", "bf16"}
    assert remedies["fp16"] == remedies["lora_model_dir"] == "leave it out: it has no value"
    assert "unknown key 'fp16' (line 4); leave it out: it is false" in message(MINIMAL + "fp16: false\n")
    assert "write dtype: fp16" in message(MINIMAL + "fp16: true\n")
    assert "did you mean 'learning_rate'?" in message(MINIMAL + "lerning_rate:\n")


def test_keys_of_pefts_config_in_the_lora_section() -> None:
    assert "'bias' in lora (line 4); leave it out" in message(MINIMAL + "lora: {r: 8, bias: none}\n")
    assert set(PEFT_NAMES) <= set(UNSUPPORTED_NAMES)


def test_all_problems_at_once() -> None:
    text = message("model: {nam: a}\nlerning_rate: 1\ndata: {trane: x, replay: {}}\npacking: 'no'\n")
    assert text.startswith("5 problems in recipe.yaml:")
    for part in (
        "missing key 'data.replay.sources' (line 3)",
        "'trane' in data",
        "'lerning_rate' (line 2)",
        "'nam' in model",
        "packing must be",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "is empty"),
        ("- a\n- b\n", "must be a mapping"),
        ("just words", "must be a mapping"),
        ("a: [1,\n", "is not YAML"),
        ("\tmodel: a", "is indented with a tab (line 1); indent with spaces"),
        ("model: a\ndata:\n\ttrain: x\n", "is indented with a tab (line 3); indent with spaces"),
        ("model: a\ndata: {train: *.txt}\n", "put a text that begins with * or & in quotes"),
        ("model: a\x00", "is not YAML"),
        ("model: &x a\ndata: {train: *x}\n", "anchor or alias (line 1)"),
        ("model: !!python/object:os.system a\n", "YAML tag"),
        ("model: !!str a\n", "YAML tag"),
        ("%YAML 1.1\n---\nmodel: on\n", "directive"),
        ("a: 1\n---\nb: 2\n", "is not YAML"),
        ("? [a]\n: 1\n", "a key that is not a string"),
        ("a: " + "[" * 50 + "]" * 50, "nested more than"),
        ("x: " + "y" * 1_000_001, "1,000,004 characters"),
        ("<<: {model: a}\n", "unknown key '<<'"),
    ],
)
def test_text_that_is_not_a_recipe_raises(text: str, part: str) -> None:
    assert part in message(text)


def test_deeply_nested_yaml_is_rejected_quickly() -> None:
    assert "nested more than" in message("[" * 200_000)


def test_rejected_keys_have_a_remedy() -> None:
    for text in (
        MINIMAL + "trust_remote_code: true\n",
        "model: {name: a, trust_remote_code: false}\ndata: {train: x}\n",
    ):
        assert "never run; delete the line" in message(text)
    assert "hf auth login" in message("model: {name: a, token: hf_x}\ndata: {train: x}\n")
    assert "dtype: bf16" in message(MINIMAL + "bf16: true\n")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "recompute=foo",
            "recompute cannot be foo (from 'recompute=foo'); write it like `recompute: auto` or",
        ),
        ("recompute={block: -1}", "recompute cannot be {block: -1}"),
        ("recompute=[none, foo]", "recompute cannot be [none, foo]"),
        ("mlp_tiles=0", "mlp_tiles cannot be 0"),
        ("device=gpu", "device cannot be gpu (from 'device=gpu'); write it like `device: auto` or"),
        ("device=cuda:x", "device cannot be cuda:x"),
        ("device=cuda:-1", "device cannot be cuda:-1"),
        ("label_smoothing_factor=1", "label_smoothing_factor must be less than 1, not 1"),
        ("z_loss=-1e-4", "z_loss must be greater than or equal to 0, not -0.0001"),
        ("num_threads=0", "num_threads must be greater than or equal to 1, not 0"),
        ("early_stopping_patience=0", "early_stopping_patience must be greater than or equal to 1, not 0"),
        ("dequantized_layers=x", "dequantized_layers cannot be x"),
        ("recompute=[none, null]", "recompute cannot be [none, null] (from"),
        ("data.chat_template_kwargs={a: [1]}", "data.chat_template_kwargs.a cannot be [1]"),
        ("torch_compile=yes", "torch_compile: 'yes' is not one of auto, true, false"),
    ],
)
def test_a_value_of_no_type_of_a_union_is_reported_once(override: str, said: str) -> None:
    found = message(MINIMAL, (override,))
    assert found.startswith(said), found
    assert "\n" not in found


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("max_steps: 10\nnum_train_epochs: 2", "are both given; keep one"),
        ("max_steps: 0", "max_steps is 0"),
        ("warmup_steps: 10\nwarmup_ratio: 0.1", "are both given; keep one"),
        ("optim_in_backward: true\ngradient_accumulation_steps: 1", "set max_grad_norm: 0"),
        ("optim_in_backward: true\nmax_grad_norm: 0", "set gradient_accumulation_steps: 1"),
        ("optim_in_backward: true\ndtype: fp16", "overflow, as loss scaling with dtype: fp16 requires"),
        (
            "torch_compile: true\nrecompute: {offload_attention: 2}",
            "set recompute: offload, or torch_compile",
        ),
        ("optim_implementation: triton", "set optim: adamw_8bit"),
        ("warmup_steps: 10\nmax_steps: 10", "as long as the whole run"),
        ("warmup_steps: 10\nlr_scheduler_type: constant", "constant_with_warmup"),
        ("min_lr_ratio: 0.1\nlr_scheduler_type: constant", "has no meaning"),
        ("load_in_4bit: true", "which cannot be trained; train adapters (lora: {r: 16})"),
        ("load_in_8bit: true", "quantizes the weights to 8 bits"),
        ("load_in_4bit: true\nload_in_8bit: true\nlora: {}", "are both given; keep one"),
        ("bnb_4bit_use_double_quant: false\nlora: {}", "has no effect without load_in_4bit: true"),
        ("dtype: fp32\nweights_dtype: bf16", "cannot be used with bf16 weights"),
        ("dtype: fp16\nweights_dtype: bf16", "cannot be used with bf16 weights"),
        ("dtype: fp32\ngradient_dtype: bf16", "requires bf16 weights"),
        ("dtype: bf16\nweights_dtype: fp32\ngradient_dtype: bf16", "requires bf16 weights"),
        ("group_by_length: true", "set packing: false, or leave group_by_length out"),
        ("early_stopping_patience: 2", "none take place during training; set eval_steps"),
        (
            "early_stopping_threshold: 0.1",
            "no effect without early_stopping_patience; set early_stopping_pat",
        ),
    ],
)
def test_keys_that_contradict_each_other(line: str, part: str) -> None:
    assert part in message(MINIMAL + line + "\n")


NO_VALUE = {
    "learning_rate": "give one, for example `learning_rate: 2e-05`, or leave it out (learning_rate=null)",
    "packing": "give one, for example `packing: true`, or leave it out (packing=null)",
    "optim": "give one, for example `optim: adamw_8bit`, or leave it out (optim=null)",
    "output_dir": "give one, for example `output_dir: runs/my-run`, or leave it out (output_dir=null)",
    "mlp_tiles": "give one, for example `mlp_tiles: auto`, or leave it out (mlp_tiles=null)",
    "recompute": "give one, for example `recompute: auto`, or leave it out (recompute=null)",
    "prompts": "give one, for example `prompts: [The derivative of x^2 is]`, or leave it out (prompts=null)",
    "lora.target_modules": "give one, for example `target_modules: all-linear`, or leave it out "
    "(lora.target_modules=null)",
    "lora.rank_pattern.q_proj": "give one, or leave it out (lora.rank_pattern.q_proj=null)",
    "data.chat_template_kwargs.a": "give one, or leave it out (data.chat_template_kwargs.a=null)",
    "data.eval": "give one, for example `eval: {domain: [./heldout], general: [starter:general]}`, or leave it out "
    "(data.eval=null)",
}
"""Numbers, strings, lists, mappings and optional sections."""
NEEDED = {
    "data.train": "give one, for example `train: [./notes, data/*.jsonl]`",
    "model.name": "give one, for example `name: Qwen/Qwen3-0.6B-Base`",
    "model": "give one, for example `model: Qwen/Qwen3-0.6B-Base`",
}
"""Required keys."""


@pytest.mark.parametrize("key", NO_VALUE)
def test_an_override_without_a_value_raises(key: str) -> None:
    assert message(MINIMAL, (f"{key}=",)) == f"{key} has no value (from '{key}='); {NO_VALUE[key]}"
    assert loads(MINIMAL, [f"{key}=null"]) == loads(MINIMAL, [f"{key}=~"]) == loads(MINIMAL)


@pytest.mark.parametrize("key", NEEDED)
@pytest.mark.parametrize("written", ["", "null", "~"])
def test_a_required_key_without_a_value_raises(key: str, written: str) -> None:
    override = f"{key}={written}"
    assert message(MINIMAL, (override,)) == f"{key} has no value (from '{override}'); {NEEDED[key]}"


def test_keys_without_a_value_are_listed_with_their_lines() -> None:
    said = message("model:\ndata: {train: [a, null]}\nlearning_rate:\nmlp_tiles: null\n")
    assert "model has no value (line 1); " in said
    assert "data.train.1 has no value (line 2); give one, or leave it out" in said
    assert "learning_rate has no value (line 3); " in said
    assert "mlp_tiles has no value (line 4); " in said
    assert "None" not in said


@pytest.mark.parametrize("limit", ["0B", "0.0GiB", "0 GB", "0.1B", "0%", "0.0 %"])
def test_a_memory_limit_of_zero_raises(limit: str) -> None:
    assert message(MINIMAL, (f"memory_limit={limit}",)) == (
        f"memory_limit: {limit} is neither a size nor a share above 0; write it like 24GiB, 24GB or 80%"
    )
    assert loads(MINIMAL, ["memory_limit=0.5GiB"]).memory_limit == "0.5GiB"


def test_more_tiles_than_tokens_raise() -> None:
    keys = "per_device_train_batch_size: 2\nmax_seq_length: 16\nmlp_tiles: "
    assert loads(f"{MINIMAL}{keys}32\n").mlp_tiles == 32
    assert message(f"{MINIMAL}{keys}33\n") == (
        "mlp_tiles: 33 is more than the tokens of a microbatch (per_device_train_batch_size: 2 × max_seq_length: 16); "
        "give at most 32"
    )


@pytest.mark.parametrize("share", ["0", "1", "-0.1", "1.5"])
def test_a_replay_share_outside_zero_to_one_raises(share: str) -> None:
    assert "data.replay.share must be" in message(
        f"model: a\ndata: {{train: x, replay: {{share: {share}, sources: y}}}}\n"
    )


@pytest.mark.parametrize(
    ("key", "data"),
    [
        ("data.train.1.weight", "{train: [x, {source: y, weight: 1e12}]}"),
        ("data.replay.sources.0.weight", "{train: x, replay: {sources: {source: y, weight: 1e12}}}"),
    ],
)
def test_a_source_weight_above_the_maximum_raises(key: str, data: str) -> None:
    """An earlier version accepted it, and failed after the first evaluation with an error about device memory."""
    assert message(f"model: a\ndata: {data}\n") == (
        f"{key}: 1e+12 is above 1000, the maximum number of passes over a source per epoch; "
        f"set {key}=1000 or less (1 is one pass)"
    )
    loads(f"model: a\ndata: {data.replace('1e12', '1000')}\n")


def test_streaming_needs_a_number_of_steps() -> None:
    text = "model: a\ndata: {train: x, streaming: true}\n"
    assert "set max_steps" in message(text)
    assert loads(text, ["max_steps=5"]).data.streaming


def test_eval_steps_without_anything_to_evaluate_raise() -> None:
    text = "model: a\nprobe: false\neval_steps: 5\ndata: {train: x, eval_share: 0}\n"
    assert "nothing to evaluate" in message(text)
    assert loads(text, ["probe=true"]).eval_steps == 5


def test_missing_and_unreadable_recipe_files_raise(tmp_path) -> None:
    with pytest.raises(RecipeError, match="there is no recipe at"):
        load(tmp_path / "no.yaml")
    with pytest.raises(RecipeError, match="is a folder"):
        load(tmp_path)
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="not UTF-8"):
        load(tmp_path / "b.yaml")


@pytest.mark.parametrize(
    ("override", "what", "text"),
    [
        ('model.added_tokens=["\\ud800"]', "model.added_tokens.0", r"'\ud800'"),
        ('prompts=[a, "\\udfff x"]', "prompts.1", r"'\udfff x'"),
        ("output_dir=runs/\udcff", "output_dir", r"'runs/\udcff'"),
        ("model.chat_template=\udcff", "model.chat_template", r"'\udcff'"),
        ('data.chat_template_kwargs={"\\ud800": 1}', "a name in data.chat_template_kwargs", r"'\ud800'"),
        ("lora.rank_pattern.\udcff=1", "a name in lora.rank_pattern", r"'\udcff'"),
        ('"\ud800"=1', "a name in the recipe", r"""'"\ud800"'"""),
    ],
)
def test_text_that_utf8_cannot_encode_raises(override: str, what: str, text: str) -> None:
    said = override.encode(errors="backslashreplace").decode()
    cause = f"{what} contains a character that UTF-8 cannot encode: {text} (from '{said}')"
    assert message(MINIMAL, (override,)) == f"{cause}; correct it, or leave it out"


def test_values_that_utf8_cannot_encode_raise_in_recipes_from_python() -> None:
    with pytest.raises(
        RecipeError, match=r"output_dir contains a character that UTF-8 cannot encode: 'runs/\\udcff'"
    ):
        loads(MINIMAL, name="\udcff.yaml")
    with pytest.raises(
        RecipeError, match=r"2 problems in the recipe:\n  - prompts.0 contains .*\n  - prompts.1 contains"
    ):
        build({"model": "a", "data": {"train": "x"}, "prompts": ["\ud800", "\ud801"]})
    assert "prompts.0 contains a character that UTF-8 cannot encode: '\\ud800' (line 4)" in message(
        MINIMAL + 'prompts: ["\\ud800"]\n'
    )


def test_a_character_may_be_a_json_escape() -> None:
    given = json.dumps(["a \U0001f600"])
    recipe = loads(MINIMAL, [f"prompts={given}", 'lora.rank_pattern={"\\ud83d\\ude00": 1}'])
    assert recipe.prompts == ["a \U0001f600"]
    assert recipe.lora is not None
    assert recipe.lora.rank_pattern == {"\U0001f600": 1}


@pytest.mark.parametrize("name", TEMPLATE_NAMES)
def test_builtin_template_variables_are_not_keys(name: str) -> None:
    assert message(MINIMAL, (f"data.chat_template_kwargs={{{name}: x}}",)) == (
        f"data.chat_template_kwargs sets {name}, which every chat template receives anyway; leave it out "
        f"(data.chat_template_kwargs.{name}=null)"
    )


def test_several_builtin_template_variables() -> None:
    said = message(MINIMAL, ("data.chat_template_kwargs={tools: x, messages: y, enable_thinking: true}",))
    assert "sets messages, tools, which every chat template receives anyway; leave them out" in said
    assert loads(MINIMAL, ["data.chat_template_kwargs={eos_token: x}"]).data.chat_template_kwargs


def test_build_gives_the_same_messages() -> None:
    with pytest.raises(RecipeError, match="did you mean 'learning_rate'"):
        build({"model": "a", "data": {"train": "x"}, "lerning_rate": 1})


def test_a_recipe_does_not_change_after_loading() -> None:
    recipe = loads(MINIMAL)
    with pytest.raises(ValueError):
        recipe.seed = 3  # type: ignore[misc]


def test_a_shipped_recipe_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load("own-text", ["data.train=./my-texts"]).output_dir == "runs/own-text"
    with pytest.raises(RecipeError) as raised:
        load("own-texts")
    assert "did you mean own-text, which ships with trimtab?" in str(raised.value)
    with pytest.raises(RecipeError) as raised:
        load("nothing-like-it")
    assert "own-text, qwen3-0.6b-math, qwen3-0.6b-qlora" in str(raised.value)
    Path("own-text").write_text("model: starter\ndata: {train: a.txt}\noutput_dir: mine\n")
    assert load("own-text").output_dir == "mine", "the user's file has precedence"


def test_lora_defaults_are_not_dumped_with_an_initial_adapter() -> None:
    recipe = build({"model": "starter", "data": {"train": ["notes.txt"]}, "lora": {"adapter": "./mine"}})
    text = dump(recipe)
    assert "adapter: ./mine" in text
    assert not any(word in text for word in ("target_modules", "lora_alpha", "rank_pattern"))
    assert loads(text) == recipe


def test_early_stopping_needs_a_domain_set() -> None:
    text = "model: a\ndata: {train: x, eval: {general: g}, eval_share: 0}\neval_steps: 2\nearly_stopping_patience: 2\n"
    assert "name data.eval.domain or set data.eval_share" in message(text)
    loads(text, ["data.eval_share=0.1"])
    loads(text, ["data.eval.domain=heldout.jsonl"])


def test_grouping_by_length_needs_lengths() -> None:
    text = (
        "model: a\ndata: {train: x, streaming: true}\nmax_steps: 3\npacking: false\ngroup_by_length: true\n"
    )
    assert "set data.streaming: false" in message(text)
    assert loads(text, ["data.streaming=false"]).group_by_length
