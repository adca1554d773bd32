"""Folders shared by several cases: runs, adapters, quantized models, GGUF files."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from lora_cases import scatter
from safetensors.torch import save_file
from tiny_model import write_recipe, write_tiny_model

from trimtab.adapt import LoraSettings, add_adapters, init_adapters, quantize_layout, save_adapter
from trimtab.adapt.quantized import int8_tensor, packed_state, quantized_layers
from trimtab.cli.main import main
from trimtab.model import build, load_weights, read_shape
from trimtab.model.decoder import Decoder

Made = Callable[[str], Path]


def decoder_of(folder: Path, dtype: str = "fp32") -> Decoder:
    """Load a model from its folder."""
    decoder = build(read_shape(folder), dtype=dtype, device="cpu", attention="reference")
    load_weights(decoder, folder)
    return decoder


def adapted_of(folder: Path, adapter: str = "default", **settings: object) -> Decoder:
    """Load a model and add an adapter with nonzero weights."""
    decoder = add_adapters(decoder_of(folder), LoraSettings(**{"r": 2, **settings}), adapter=adapter)  # type: ignore[arg-type]
    init_adapters(decoder, seed=3, adapter=adapter)
    return scatter(decoder, adapter)


def _adapter(folder: Path, made: Made) -> None:
    folder.mkdir()
    save_adapter(adapted_of(made("model")), folder, base_name=str(made("model")))


def _untied(folder: Path, made: Made) -> None:
    write_tiny_model(folder, tie_embeddings=False)


def _wide(folder: Path, made: Made) -> None:
    """Rows of whole blocks of 64."""
    write_tiny_model(folder, hidden_size=64, head_dim=16, intermediate_size=128)


def _head_adapter(folder: Path, made: Made) -> None:
    folder.mkdir()
    decoder = adapted_of(made("untied"), target_modules=("q_proj", "lm_head"))
    save_adapter(decoder, folder, base_name=str(made("untied")))


def _trained(folder: Path, made: Made, **changes: object) -> None:
    folder.mkdir()
    (folder / "model").symlink_to(made("model"))
    recipe = write_recipe(
        folder,
        **{
            "num_train_epochs": None,
            "max_steps": 4,
            "lr_scheduler_type": "constant",
            "eval_steps": None,
            "eval_on_start": False,
            **changes,
        },
    )
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["train", str(recipe)]) == 0


def _run(folder: Path, made: Made) -> None:
    _trained(folder, made)


def _lora_run(folder: Path, made: Made) -> None:
    _trained(folder, made, lora={"r": 4})


def _chat(folder: Path, made: Made) -> None:
    """The tiny model with a chat template."""
    shutil.copytree(made("model"), folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|end|>\n{% endfor %}"
    )


def _stored(folder: Path, made: Made, kind: str, config: dict[str, object]) -> None:
    """The wide model as transformers saves it through bitsandbytes."""
    shutil.copytree(made("wide"), folder)
    decoder = quantize_layout(decoder_of(made("wide")), kind)
    named = dict(decoder.named_parameters())
    tensors = {name: named[name].detach().clone() for name, _ in decoder.shape.parameters() if name in named}
    for name, layer in quantized_layers(decoder):
        if kind == "nf4":
            tensors |= packed_state(layer, f"{name}.weight")
        else:
            packed = int8_tensor(layer)
            tensors |= {f"{name}.weight": packed.codes, f"{name}.SCB": packed.scale * 127}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    stored = {"quantization_config": {"quant_method": "bitsandbytes", **config}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **stored}))


def _nf4(folder: Path, made: Made) -> None:
    _stored(folder, made, "nf4", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"})


def _int8(folder: Path, made: Made) -> None:
    _stored(folder, made, "int8", {"load_in_8bit": True})


MAKERS: dict[str, Callable[[Path, Made], None]] = {
    "adapter": _adapter,
    "untied": _untied,
    "wide": _wide,
    "head adapter": _head_adapter,
    "chat": _chat,
    "nf4": _nf4,
    "int8": _int8,
    "run": _run,
    "lora run": _lora_run,
}
