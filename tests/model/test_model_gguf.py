"""GGUF files written with the gguf package, read by trimtab: every quantization, row orders, real weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import _type_traits, dequantize, quantize
from model_cases import token_ids
from smollm2 import smollm2_path

from trimtab.facts.errors import ModelError
from trimtab.facts.shapes import ModelShape, uniform_shape
from trimtab.model import build, init_weights, load_weights, read_shape, read_token_ids
from trimtab.model.decoder import Decoder
from trimtab.model.families import family
from trimtab.model.families.gguf_metadata import llama3_divisors

TINY = uniform_shape(
    "llama",
    64,
    256,
    256,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    norm_eps=1e-5,
    tie_embeddings=True,
)
QWEN2 = uniform_shape(
    "qwen2", 64, 32, 64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, qkv_bias=True
)
QWEN3 = uniform_shape(
    "qwen3", 64, 32, 64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, qk_norm=True
)
TYPES = [GGMLQuantizationType.F32, GGMLQuantizationType.F16, *_type_traits]


def random_decoder(shape: ModelShape, dtype: str = "fp32") -> Decoder:
    decoder = init_weights(build(shape, dtype=dtype, device="cpu", attention="reference"), seed=3)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.linspace(0.5, 1.5, parameter.numel()))
            elif "embed" not in name:
                parameter.mul_(5)
    return decoder


def pair_rows(array: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's permutation, as its converter writes it (convert_hf_to_gguf.py, LlamaModel.permute)."""
    return (
        array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
        .swapaxes(1, 2)
        .reshape(array.shape)
    )


def write_gguf(
    decoder: Decoder,
    path: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    raw: dict[str, np.ndarray] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    drop: str | None = None,
    tokenizer: tokenizers.Tokenizer | None = None,
    claims: dict[str, int] | None = None,
) -> None:
    """As llama.cpp's converter does. `tokenizer`: byte-level, its end token the first; `claims`: wrong sizes for the
    header."""
    shape = decoder.shape
    arch = "llama" if shape.family == "mistral" else shape.family
    writer = gguf.GGUFWriter(path, arch)
    claimed = {"num_layers": shape.num_layers, "hidden_size": shape.hidden_size}
    claimed |= {"intermediate_size": shape.intermediate_size, **(claims or {})}
    writer.add_block_count(claimed["num_layers"])
    writer.add_context_length(shape.max_positions)
    writer.add_embedding_length(claimed["hidden_size"])
    writer.add_feed_forward_length(claimed["intermediate_size"])
    writer.add_head_count(shape.attention.num_heads)
    writer.add_head_count_kv(shape.attention.num_kv_heads)
    writer.add_key_length(shape.attention.head_dim)
    writer.add_value_length(shape.attention.head_dim)
    writer.add_rope_freq_base(shape.attention.rope.theta)
    writer.add_layer_norm_rms_eps(shape.block.norm.eps)
    if tokenizer is None:
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
    else:
        vocabulary = tokenizer.get_vocab()
        tokens = sorted(vocabulary, key=vocabulary.__getitem__)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types([3, *[1] * (len(tokens) - 1)])
        merges = json.loads(tokenizer.to_str())["model"]["merges"]
        writer.add_token_merges([" ".join(pair) for pair in merges])
        writer.add_eos_token_id(0)
    if shape.window(0):
        writer.add_sliding_window(shape.window(0))
    maps = family(shape.family)
    for name, parameter in decoder.named_parameters():
        array = parameter.detach().float().numpy()
        if arch == "llama" and "q_proj" in name:
            array = pair_rows(array, shape.attention.num_heads)
        if arch == "llama" and "k_proj" in name:
            array = pair_rows(array, shape.attention.num_kv_heads)
        stored = maps.gguf_name(name)
        if stored == drop:
            continue
        if array.ndim == 1:
            writer.add_tensor(stored, array)
        elif raw is not None:
            writer.add_tensor(stored, raw[stored], raw_dtype=kind)
        else:
            writer.add_tensor(stored, quantize(array, kind), raw_dtype=kind)
    for stored, array in (extra or {}).items():
        writer.add_tensor(stored, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_blocks(kind: GGMLQuantizationType, rows: int, columns: int, seed: int) -> np.ndarray:
    """Random bytes of a quantization that the package can only dequantize; with small, finite fp16 scales."""
    block, size = GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(seed).integers(0, 256, (rows, columns // block * size), dtype=np.uint8)
    for attempt in range(200):
        with np.errstate(invalid="ignore"):
            values = dequantize(blocks, kind)
        bad = ~np.isfinite(values) | (np.abs(values) > 1e3)
        if not bad.any():
            return blocks
        shape = (rows, columns // block, size)
        again = np.random.default_rng(seed + attempt + 1).integers(0, 256, shape, dtype=np.uint8)
        redo = bad.reshape(rows, columns // block, block).any(-1)
        blocks = np.where(redo[..., None], again, blocks.reshape(shape)).reshape(rows, -1)
    raise AssertionError(f"no finite blocks of {kind.name} found")


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_every_quantization_is_read(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    source = random_decoder(TINY)
    raw: dict[str, np.ndarray] = {}
    for index, (name, parameter) in enumerate(source.named_parameters()):
        if parameter.ndim == 2:
            stored = family("llama").gguf_name(name)
            try:
                raw[stored] = quantize(parameter.detach().numpy(), kind)
            except NotImplementedError:
                raw[stored] = random_blocks(kind, *parameter.shape, seed=index)
    write_gguf(source, tmp_path / "m.gguf", kind, raw)
    shape = read_shape(tmp_path / "m.gguf")
    assert shape == TINY
    decoder = build(shape, dtype="fp32", device="cpu", attention="reference")
    provenance = load_weights(decoder, tmp_path / "m.gguf")
    assert provenance.formats[kind.name] >= 8
    for name, parameter in decoder.named_parameters():
        if "proj" not in name or "v_proj" in name or "o_proj" in name or "mlp" in name:
            stored = family("llama").gguf_name(name)
            expected = (
                dequantize(raw[stored], kind) if stored in raw else dict(source.named_parameters())[name]
            )
            assert np.array_equal(parameter.detach().numpy(), np.asarray(torch.as_tensor(expected).detach()))


@pytest.mark.parametrize("shape", [TINY, QWEN2, QWEN3], ids=lambda shape: shape.family)
def test_a_file_round_trips(shape: ModelShape, tmp_path: Path) -> None:
    source = random_decoder(shape)
    write_gguf(source, tmp_path / "m.gguf")
    assert read_shape(tmp_path / "m.gguf") == shape
    decoder = build(shape, dtype="fp32", device="cpu", attention="reference")
    seen: list[tuple[int, int, str]] = []
    load_weights(decoder, tmp_path / "m.gguf", progress=lambda *args: seen.append(args))
    for (name, a), (_, b) in zip(source.named_parameters(), decoder.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert len(seen) == seen[-1][0] == seen[-1][1] == len(list(shape.parameters()))
    assert read_token_ids(tmp_path / "m.gguf") == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}


def test_a_gguf_file_with_a_sliding_window_is_a_mistral_model(tmp_path: Path) -> None:
    shape = uniform_shape(
        "mistral", 64, 32, 64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8, sliding_window=5
    )
    write_gguf(random_decoder(shape), tmp_path / "m.gguf")
    assert read_shape(tmp_path / "m.gguf") == shape


def test_llama3_scaling_is_recognized_in_its_divisors(tmp_path: Path) -> None:
    divisors = np.array(llama3_divisors(10_000.0, 64, 32.0), dtype=np.float32)
    write_gguf(random_decoder(TINY), tmp_path / "m.gguf", extra={"rope_freqs.weight": divisors})
    shape = read_shape(tmp_path / "m.gguf")
    assert shape.attention.rope.scaling is not None
    assert (shape.attention.rope.scaling.kind, shape.attention.rope.scaling.factor) == ("llama3", 32.0)
    provenance = load_weights(
        build(shape, dtype="fp32", device="cpu", attention="reference"), tmp_path / "m.gguf"
    )
    assert provenance.ignored == ["rope_freqs.weight"]
    write_gguf(
        random_decoder(TINY), tmp_path / "odd.gguf", extra={"rope_freqs.weight": divisors[::-1].copy()}
    )
    with pytest.raises(ModelError, match="not Llama 3's"):
        read_shape(tmp_path / "odd.gguf")


@pytest.mark.oracle
@pytest.mark.parametrize("shape", [TINY, QWEN2, QWEN3], ids=lambda shape: shape.family)
def test_row_order_agrees_with_transformers(shape: ModelShape, tmp_path: Path) -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    write_gguf(random_decoder(shape), tmp_path / "m.gguf")
    decoder = build(shape, dtype="fp32", device="cpu", attention="reference")
    load_weights(decoder, tmp_path / "m.gguf")
    import transformers

    name = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}[shape.family]
    config = getattr(transformers, name)(
        vocab_size=64,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=shape.attention.head_dim,
        tie_word_embeddings=shape.tie_embeddings,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    theirs = load_gguf_checkpoint(str(tmp_path / "m.gguf"), return_tensors=True, model_to_load=model)[
        "tensors"
    ]
    for parameter_name, parameter in decoder.named_parameters():
        assert torch.equal(parameter.detach(), torch.as_tensor(theirs[parameter_name])), parameter_name


def test_missing_extra_and_misshaped_tensors(tmp_path: Path) -> None:
    source = random_decoder(QWEN2)
    decoder = build(QWEN2, dtype="fp32", device="cpu", attention="reference")
    write_gguf(source, tmp_path / "missing.gguf", drop="blk.1.ffn_up.weight")
    with pytest.raises(ModelError, match=r"is missing 1 of .*blk\.1\.ffn_up\.weight"):
        load_weights(decoder, tmp_path / "missing.gguf")
    write_gguf(source, tmp_path / "extra.gguf", extra={"blk.0.surprise": np.ones(4, np.float32)})
    with pytest.raises(ModelError, match=r"unexpected tensors: blk\.0\.surprise"):
        load_weights(decoder, tmp_path / "extra.gguf")
    other = build(
        uniform_shape(
            "qwen2", 65, 32, 64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, qkv_bias=True
        ),
        dtype="fp32",
        device="cpu",
        attention="reference",
    )
    write_gguf(source, tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=r"\[64, 32\], but the model has \[65, 32\]"):
        load_weights(other, tmp_path / "m.gguf")


def test_nan_and_unknown_formats(tmp_path: Path) -> None:
    source = random_decoder(QWEN2)
    with torch.no_grad():
        source.model.norm.weight[3] = float("nan")
    write_gguf(source, tmp_path / "nan.gguf")
    with pytest.raises(ModelError, match=r"model\.norm\.weight contains NaN"):
        load_weights(build(QWEN2, dtype="fp32", device="cpu", attention="reference"), tmp_path / "nan.gguf")
    write_gguf(random_decoder(QWEN2), tmp_path / "i8.gguf", drop="output_norm.weight", extra={
        "output_norm.weight": np.ones(32, np.int8)
    })  # fmt: skip
    with pytest.raises(ModelError, match="stored as I8"):
        load_weights(build(QWEN2, dtype="fp32", device="cpu", attention="reference"), tmp_path / "i8.gguf")


def test_fp16_overflow_is_named(tmp_path: Path) -> None:
    source = random_decoder(QWEN2)
    with torch.no_grad():
        source.model.norm.weight[3] = 1e6
    write_gguf(source, tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=r"overflows in float16; load it in bf16"):
        load_weights(build(QWEN2, dtype="fp16", device="cpu", attention="reference"), tmp_path / "m.gguf")


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return smollm2_path()


@pytest.mark.oracle
@pytest.mark.slow
def test_smollm2_is_no_further_from_fp64_than_transformers(smollm2: Path) -> None:
    from transformers import AutoModelForCausalLM

    ids_BT = token_ids(vocab=49152, batch=1, tokens=24)
    shape = read_shape(smollm2)
    assert (shape.num_layers, shape.attention.num_kv_heads, shape.block.norm.eps, shape.tie_embeddings) == (
        30,
        3,
        1e-5,
        True,
    )
    logits: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        decoder = build(shape, dtype="fp32", device="cpu", attention="sdpa_flash")
        provenance = load_weights(decoder, smollm2)
        assert provenance.formats == {"Q8_0": 1, "F32": 61, "Q4_1": 210}
        logits["ours"] = decoder.logits(decoder(ids_BT))
        oracle: Any = AutoModelForCausalLM.from_pretrained(
            smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32
        ).eval()
        for name, parameter in oracle.named_parameters():
            assert torch.equal(parameter, dict(decoder.named_parameters())[name]), name
        logits["theirs"] = oracle(input_ids=ids_BT).logits
        del oracle
        truth = build(shape, dtype="fp64", device="cpu", attention="reference")
        truth.load_state_dict(decoder.state_dict())
        truth_BTV = truth.logits(truth(ids_BT))
    error = {name: float((value - truth_BTV).square().mean().sqrt()) for name, value in logits.items()}
    assert error["theirs"] < 1e-3, error
    assert error["ours"] <= 1.05 * error["theirs"], error
