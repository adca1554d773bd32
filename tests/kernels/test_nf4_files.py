"""NF4 weights in bitsandbytes' own entries of a state dict, read and written byte for byte."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from trimtab.facts.errors import ModelError
from trimtab.kernels import nf4
from trimtab.kernels.nf4 import NF4Weight


@pytest.mark.oracle
@pytest.mark.parametrize("double", [False, True])
def test_a_saved_layer_of_bitsandbytes_is_read_and_written(double: bool) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    # 128: its CPU code uses wrong scales where a block spans rows (96 columns, say); its CUDA code does not
    layer = bnb.nn.Linear4bit(128, 40, bias=False, compress_statistics=double, quant_type="nf4").to("cpu")
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    weight = NF4Weight.from_bitsandbytes(state)
    assert weight.shape == (40, 128)
    assert weight.double == double
    written = weight.to_bitsandbytes()
    assert list(written) == list(state)
    assert all(torch.equal(written[name], state[name]) for name in state)
    back = bnb.functional.QuantState.from_dict(
        {name.removeprefix("weight."): value for name, value in written.items() if name != "weight"}, "cpu"
    )
    with torch._dynamo.config.patch(disable=True):
        expected = bnb.functional.dequantize_4bit(written["weight"], back)
    assert torch.equal(nf4.dequantize(weight), expected)


def test_bytes_under_another_name_are_read_and_tensors_are_not_shared() -> None:
    weight = nf4.quantize(torch.randn(16, 64, dtype=torch.bfloat16))
    entries = weight.to_bitsandbytes("layer.weight")
    entries["layer.weight"] = entries["layer.weight"].view(-1).view(torch.bfloat16)  # quant_storage
    read = NF4Weight.from_bitsandbytes(entries, "layer.weight").tensors()
    assert all(torch.equal(read[key], tensor) for key, tensor in weight.tensors().items())
    other = nf4.quantize(torch.randn(16, 64)).to_bitsandbytes("other")
    places = [tensor.untyped_storage().data_ptr() for tensor in (*entries.values(), *other.values())]
    assert len(set(places)) == len(places), "safetensors rejects tensors that share memory"


def changed(entries: dict[str, torch.Tensor], **facts: Any) -> dict[str, torch.Tensor]:
    key = "w.quant_state.bitsandbytes__nf4"
    text = {**json.loads(bytes(entries[key].tolist())), **facts}
    return {**entries, key: torch.tensor(list(json.dumps(text).encode()), dtype=torch.uint8)}


def test_incomplete_files_raise() -> None:
    entries = nf4.quantize(torch.randn(16, 64)).to_bitsandbytes("w")
    key = "w.quant_state.bitsandbytes__nf4"
    for missing in entries:
        if (
            missing != "w.nested_absmax"
        ):  # without it the rest describes single quantization, with the wrong sizes
            with pytest.raises(ModelError, match="missing"):
                NF4Weight.from_bitsandbytes({k: v for k, v in entries.items() if k != missing}, "w")
    broken = {
        "requires 16 of uint8": {**entries, "w.absmax": entries["w.absmax"][:-1]},
        "requires 1024 of uint8": changed(entries, shape=[32, 64]),
        "requires 16 of float32": {k: v for k, v in entries.items() if k != "w.nested_absmax"},
        "other values than NF4": {**entries, "w.quant_map": torch.linspace(-1, 1, 16)},
        "not valid JSON": {**entries, key: entries[key][:-3]},
        "no shape": changed(entries, shape=[-4, 4]),
        "quant_type": changed(entries, quant_type="fp4"),
        "blocks of 48": changed(entries, blocksize=48),
        "was quantized from dtype 'float8'": changed(entries, dtype="float8"),
        "power of two": changed(entries, nested_blocksize=100),
        "no numeric nested_offset": changed(entries, nested_offset=None),
        "in FP4": {**entries, "w.quant_state.bitsandbytes__fp4": entries[key]},
    }
    for message, state in broken.items():
        with pytest.raises(ModelError, match=message):
            NF4Weight.from_bitsandbytes(state, "w")
