"""Families that can be planned but not trained: their shapes against transformers, and invalid configs."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from trimtab.facts.blocks import AttentionShape, ExpertsShape, FeedForwardShape, LatentAttentionShape
from trimtab.facts.errors import ModelError
from trimtab.facts.shapes import ModelShape
from trimtab.model import build
from trimtab.model.families import FAMILIES, PLAN_ONLY, shape_for_planning, shape_from_config
from trimtab.model.families.plan_only.gguf import gguf_shape_for_planning
from trimtab.model.source import read_shape, read_shape_for_planning

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": None,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 10,
    "v_head_dim": 12,
}
CASES: dict[str, dict[str, Any]] = {
    "gemma": {},
    "gemma2": {"sliding_window": 16},
    "gemma3_text": {"sliding_window": 16},
    "phi3": {"head_dim": None, "pad_token_id": 0},
    "olmo2": {"head_dim": None},
    "olmo2 untied": {"head_dim": None, "tie_word_embeddings": False, "attention_bias": True},
    "olmo3": {"head_dim": None, "sliding_window": 16},
    "granite": {"head_dim": None, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "glm4": {"pad_token_id": 0},
    "smollm3": {"head_dim": None, "pad_token_id": 0},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "head_dim": None,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
    },
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
    "qwen3_moe with dense layers": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    },
    "deepseek_v2": {**LATENT, "q_lora_rank": None},
    "deepseek_v2 with a latent of queries": LATENT,
    "deepseek_v3": {**LATENT, "n_group": 2, "topk_group": 1},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 16},
}


def config_of(case: str) -> dict[str, Any]:
    return {"model_type": case.split()[0], **TINY, **CASES[case]}


def oracle(case: str) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {
        key: value for key, value in config_of(case).items() if key == "q_lora_rank" or value is not None
    }
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


def renamed(name: str) -> str:
    """trimtab's name of a parameter where one family's name differs from the others'."""
    return name.replace(".mlp.shared_expert.", ".mlp.shared_experts.").replace(".mlp.router.", ".mlp.gate.")


@pytest.mark.oracle
@pytest.mark.parametrize("case", CASES)
def test_a_shape_has_the_parameters_of_transformers_model(case: str) -> None:
    """All of them in number; and with the same sizes where the names are the same, as most are."""
    shape = shape_for_planning(config_of(case))
    theirs = {renamed(name): tuple(p.shape) for name, p in oracle(case).named_parameters()}
    ours = dict(shape.parameters())
    assert shape.num_parameters == sum(math.prod(dims) for dims in theirs.values())
    assert shape.num_parameters == sum(math.prod(dims) for dims in ours.values())
    same = ours.keys() & theirs.keys()
    assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}
    apart = {name for name in ours.keys() ^ theirs.keys() if ".mlp.experts." not in name}
    assert not {name for name in apart if "norm" not in name}, "names of all but the stacks of experts"
    assert not apart or case == "glm4", "which has names of its own for its norms"


@pytest.mark.parametrize("case", CASES)
def test_a_plan_only_family_raises_for_training(case: str) -> None:
    config = config_of(case)
    name = config["model_type"]
    with pytest.raises(ModelError, match=f"trimtab can plan {name} models but not train them yet"):
        shape_from_config(config)


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("phi3")])
def test_the_shape_of_a_plan_only_family_cannot_be_built(case: str) -> None:
    """For Phi-3 the decoder lacks only its family and LongRoPE."""
    with pytest.raises(ModelError, match=r"can be planned but not trained"):
        build(shape_for_planning(config_of(case)), dtype="fp32", device="meta")


def test_trainable_families_have_the_same_shape() -> None:
    config = {"model_type": "llama", **TINY}
    assert shape_for_planning(config) == shape_from_config(config)
    assert not FAMILIES.keys() & PLAN_ONLY.keys()


def blocks(case: str, **changes: Any) -> ModelShape:
    return shape_for_planning({**config_of(case), **changes})


def test_what_distinguishes_families() -> None:
    gemma = blocks("gemma2")
    assert [shape.mixer.window for shape in gemma.blocks[:4]] == [16, None, 16, None]
    assert gemma.blocks[0].norm_placement == "both"
    assert gemma.blocks[0].norm.unit_offset
    assert gemma.final_norm.unit_offset
    assert gemma.tie_embeddings
    assert gemma.blocks[0].attention.softcap == 50.0
    five = blocks("gemma3_text")
    assert [shape.mixer.window for shape in five.blocks] == [16] * 5 + [None] + [16] * 2
    assert [five.blocks[i].attention.rope.theta for i in (0, 5)] == [10_000.0, 1_000_000.0]  # type: ignore[union-attr]
    assert [block.attention.rope is None for block in blocks("smollm3").blocks] == [False] * 3 + [True] + [
        False
    ] * 3 + [True]
    assert [block.mixer.window for block in blocks("olmo3").blocks] == [16, 16, 16, None] * 2
    glm = blocks("glm4").blocks[0].attention
    assert glm.rope is not None
    assert (glm.rope.rotary_dim, glm.rope.interleaved, glm.qkv_bias, glm.o_bias) == (4, True, True, False)
    oss = blocks("gpt_oss")
    assert isinstance(oss.blocks[0].mixer, AttentionShape)
    assert oss.blocks[0].mixer.sinks
    assert [block.mixer.window for block in oss.blocks[:2]] == [16, None]
    deep = blocks("deepseek_v3")
    assert [type(block.feed_forward) for block in deep.blocks] == [FeedForwardShape] * 2 + [ExpertsShape] * 6
    assert isinstance(deep.blocks[0].mixer, LatentAttentionShape)
    assert deep.blocks[-1].feed_forward.score == "sigmoid"  # type: ignore[union-attr]


def test_longrope_and_partial_rotation() -> None:
    factors = {"short_factor": [1.0] * 3, "long_factor": [2.0] * 3}
    shape = blocks(
        "phi3",
        rope_scaling={"type": "longrope", **factors},
        partial_rotary_factor=0.75,
        original_max_position_embeddings=32,
    )
    rope = shape.blocks[0].attention.rope
    assert rope is not None
    assert rope.scaling is not None
    assert (rope.rotary_dim, rope.scaling.kind, rope.scaling.original_max_positions) == (6, "longrope", 32)
    with pytest.raises(ModelError, match="LongRoPE can be planned"):
        build(blocks("phi3", rope_scaling={"type": "su", **factors}), dtype="fp32", device="meta")


def test_gemma3_is_planned_as_its_text_model_and_rotary_settings_differ_between_layers() -> None:
    text = config_of("gemma3_text")
    whole = shape_for_planning(
        {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 9}}
    )
    assert whole == shape_for_planning(text)
    rope: dict[str, dict[str, Any]] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    }
    new = blocks("gemma3_text", rope_parameters={**rope, "sliding_attention": {"rope_theta": 1e4}})
    old = blocks("gemma3_text", rope_scaling={"rope_type": "linear", "factor": 8.0}, rope_theta=1e6)
    assert new == old
    rope["full_attention"]["rope_theta"] = 1e4
    new = blocks("olmo3", rope_parameters={**rope, "sliding_attention": {"rope_theta": 1e4}})
    assert new == blocks("olmo3", rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert [block.attention.rope.scaling is None for block in new.blocks[2:4]] == [True, False]  # type: ignore[union-attr]


def test_weights_that_are_stored_quantized_can_be_planned() -> None:
    """DeepSeek-V3 is published in FP8 and gpt-oss in MXFP4."""
    changed = blocks("gpt_oss", quantization_config={"quant_method": "mxfp4"})
    assert changed == blocks("gpt_oss")


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 7}, "num_experts_per_tok is 7"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts is 0"),
        ("mixtral", {"hidden_size": None}, "no hidden_size"),
        ("mixtral", {"num_hidden_layers": 2**40}, "expected an integer"),
        ("mixtral", {"num_key_value_heads": 3}, "cannot share"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types"),
        ("gemma2", {"layer_types": ["linear_attention"] * 8}, "layer_types"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers"),
        ("phi3", {"partial_rotary_factor": 2.0}, "partial_rotary_factor is 2.0"),
        ("phi3", {"rope_scaling": "long"}, "expected an object"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ("gemma3_text", {"model_type": "gemma3"}, "no text_config"),
        ("mixtral", {"model_type": "mamba"}, "'mamba'.*use one of llama, .*mixtral"),
        ("mixtral", {"model_type": ["mixtral"]}, "which trimtab does not support"),
    ],
)
def test_configs_that_cannot_be_described(case: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        blocks(case, **changes)


HEADER = {
    "block_count": 8,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 8,
    "rope.freq_base": 10_000.0,
}
EXPERT_KEYS = {"expert_count": 6, "expert_used_count": 2}
LATENT_HEADER = {
    "attention.head_count_kv": 1,
    "attention.key_length": 24,
    "attention.value_length": 16,
    "attention.key_length_mla": 18,
    "attention.value_length_mla": 12,
    "attention.kv_lora_rank": 16,
    "attention.q_lora_rank": 24,
    "rope.dimension_count": 8,
    "expert_count": 8,
    "expert_used_count": 2,
    "expert_shared_count": 2,
    "expert_feed_forward_length": 20,
    "leading_dense_block_count": 2,
}
GGUF: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("gemma2", {"attention.sliding_window": 16, "attn_logit_softcapping": 50.0}),
    "gemma3_text": ("gemma3", {"attention.sliding_window": 16, "rope.freq_base": 1e6}),
    "phi3": ("phi3", {"rope.dimension_count": 8}),
    "glm4": ("glm4", {"rope.dimension_count": 4}),
    "mixtral": ("llama", EXPERT_KEYS),
    "qwen3_moe": ("qwen3moe", {**EXPERT_KEYS, "expert_feed_forward_length": 20}),
    "qwen2_moe": (
        "qwen2moe",
        {**EXPERT_KEYS, "expert_feed_forward_length": 20, "expert_shared_feed_forward_length": 28},
    ),
    "gpt_oss": ("gpt-oss", {**EXPERT_KEYS, "expert_feed_forward_length": 48, "attention.sliding_window": 16}),
    "deepseek_v3": ("deepseek2", {**LATENT_HEADER, "expert_gating_func": 2}),
    "deepseek_v2 with a latent of queries": ("deepseek2", LATENT_HEADER),
}
BIASED = ("glm4", "qwen2_moe", "gpt_oss")
TIED = ("gemma2", "gemma3_text")


def from_gguf(case: str, **changes: Any) -> ModelShape:
    arch, keys = GGUF[case]
    metadata = {f"{arch}.{key}": value for key, value in {**HEADER, **keys, **changes}.items()}
    names = ["token_embd.weight", *([] if case in TIED else ["output.weight"])]
    names += ["blk.0.attn_q.bias"] if case in BIASED else []
    return gguf_shape_for_planning({"general.architecture": arch, **metadata}, names, vocab_size=96)


@pytest.mark.parametrize("case", GGUF)
def test_a_gguf_header_describes_the_same_model(case: str) -> None:
    expected, found = blocks(case), from_gguf(case)
    assert found.num_parameters == expected.num_parameters
    assert [block.mixer for block in found.blocks] == [block.mixer for block in expected.blocks]
    assert [block.feed_forward for block in found.blocks] == [block.feed_forward for block in expected.blocks]


def test_gguf_headers_that_cannot_be_planned() -> None:
    with pytest.raises(ModelError, match=r"'mamba'.*use one of deepseek2, .*qwen3moe"):
        gguf_shape_for_planning({"general.architecture": "mamba"}, [], vocab_size=96)
    with pytest.raises(ModelError, match="one of 3 parts"):
        gguf_shape_for_planning({"general.architecture": "gemma2", "split.count": 3}, [], vocab_size=96)
    with pytest.raises(ModelError, match="8 are rotated"):
        from_gguf("deepseek_v3", **{"attention.key_length_mla": 8})
    with pytest.raises(ModelError, match=r"expected an integer"):
        from_gguf("mixtral", expert_count="many")


def test_folders_and_config_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("mixtral")))
    expected = blocks("mixtral")
    assert read_shape_for_planning(tmp_path) == expected
    assert read_shape_for_planning(tmp_path / "config.json") == expected
    with pytest.raises(ModelError, match="but not train them yet"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **TINY}))
    assert read_shape_for_planning(tmp_path) == read_shape(tmp_path)
    with pytest.raises(ModelError, match="does not exist"):
        read_shape_for_planning(tmp_path / "nothing.json")


VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 64, 3.5, -20.0, 1e-320, 1e308, 10**400, 2**63, 2**40, "", "abc", "silu"),
    *([], [1], [[]], ["full_attention"], ["sliding_attention"] * 8, {}, {"a": 1}, math.nan, math.inf),
    *({"rope_type": "yarn", "factor": 4.0}, {"rope_type": "longrope"}, {"type": "su", "rope_theta": "x"}),
    *({"full_attention": {"rope_type": "linear"}}, {"full_attention": 3, "sliding_attention": None}),
]  # fmt: skip
ROTARY = ("rope_scaling", "rope_parameters", "rope_theta", "partial_rotary_factor", "rope_local_base_freq")


@pytest.mark.parametrize("seed", range(3))
def test_a_mutated_config_gives_a_shape_or_a_model_error(seed: int) -> None:
    rng, shapes, refused = random.Random(seed), 0, 0
    for _ in range(600):
        config = config_of(rng.choice(list(CASES)))
        if rng.random() < 0.1:
            config = {"model_type": "gemma3", "text_config": config}
        for _ in range(rng.randint(1, 3)):
            names = [*config, *ROTARY, "layer_types", "sliding_window", "hidden_act", "no_rope_layers"]
            config[rng.choice(names)] = rng.choice(VALUES)
        try:
            assert shape_for_planning(config).num_parameters > 0
            shapes += 1
        except ModelError:
            refused += 1
    assert min(shapes, refused) > 50


@pytest.mark.parametrize("seed", range(3))
def test_a_mutated_header_gives_a_shape_or_a_model_error(seed: int) -> None:
    rng, shapes, refused = random.Random(seed), 0, 0
    values = [value for value in VALUES if value != 10**400]  # a header's numbers have at most 64 bits
    for _ in range(300):
        case = rng.choice(list(GGUF))
        keys = [*HEADER, *GGUF[case][1], "rope.dimension_count", "attention.sliding_window"]
        try:
            assert from_gguf(case, **{rng.choice(keys): rng.choice(values)}).num_parameters > 0
            shapes += 1
        except ModelError:
            refused += 1
    assert min(shapes, refused) > 20
