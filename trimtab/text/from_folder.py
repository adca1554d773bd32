"""A tokenizer from a Hugging Face folder: tokenizer.json and its configuration files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers

from trimtab.facts.errors import ModelError
from trimtab.facts.files import read_json_object
from trimtab.facts.names import shortened
from trimtab.text.from_gguf import set_affixes
from trimtab.text.tokenizer import Tokenizer

MAX_TOKEN_ID = 2**31 - 1
_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def load_folder(folder: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder; raises ModelError if files are missing or invalid."""
    folder = Path(folder)
    backend = _read_backend(folder)
    config = _read_json(folder / "tokenizer_config.json")
    special = _special_tokens(config, _read_json(folder / "special_tokens_map.json"))
    model, generation = _read_json(folder / "config.json"), _read_json(folder / "generation_config.json")
    bos, _ = _ids(backend, special.get("bos_token"), model, generation, "bos_token_id", folder)
    eos, stops = _ids(backend, special.get("eos_token"), model, generation, "eos_token_id", folder)
    for name, token_id in (("bos_token", bos), ("eos_token", eos)):
        if token_id is not None and (token := backend.id_to_token(token_id)) is not None:
            special.setdefault(name, token)
    # As in transformers, these two keys replace the post-processor if they are present.
    if isinstance(config.get("add_bos_token"), bool) or isinstance(config.get("add_eos_token"), bool):
        backend.post_processor = tokenizers.processors.Sequence([])
        set_affixes(
            backend,
            special.get("bos_token") if config.get("add_bos_token") else None,
            special.get("eos_token") if config.get("add_eos_token") else None,
        )
    return Tokenizer(
        backend=backend,
        bos_id=bos,
        eos_id=eos,
        stop_ids=frozenset(stops),
        special_tokens=special,
        chat_template=_chat_template(folder, config),
        config=config,
        source=str(folder),
    )


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        if (folder / "tokenizer.model").is_file():
            raise ModelError(
                f"{folder} has its tokenizer only as a SentencePiece tokenizer.model",
                "convert it once: python -c \"from transformers import AutoTokenizer as T; p='FOLDER'; "
                'T.from_pretrained(p).save_pretrained(p)" (needs transformers and sentencepiece)',
            )
        raise ModelError(f"{folder} has no tokenizer.json", "download it too, or name another tokenizer")
    _read_json(path)  # for invalid JSON, an error message with the position
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 the tokenizers library raises plain Exception
        raise ModelError(f"{path} is not a tokenizer ({error})", "download it again") from None
    # Some files were saved with truncation enabled, which would silently shorten documents.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        return read_json_object(path)
    except ValueError as error:
        raise ModelError(f"{path} is not a JSON object ({error})", "download it again") from None


def _special_tokens(config: dict[str, Any], mapped: dict[str, Any]) -> dict[str, str]:
    """Special tokens by name; files have them as a string or as {"content": …}."""
    found = {}
    for name in _NAMES:
        value = config.get(name) or mapped.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str) and value:
            found[name] = value
    return found


def _ids(
    backend: tokenizers.Tokenizer,
    token: str | None,
    model: dict[str, Any],
    generation: dict[str, Any],
    key: str,
    folder: Path,
) -> tuple[int | None, set[int]]:
    """The id of BOS or EOS, and all ids that the files list for it (chat models end turns with a second one)."""
    first = None
    if token is not None:
        first = backend.token_to_id(token)
        if first is None:
            raise ModelError(
                f"{folder}: the token {token!r} is not in tokenizer.json", "download both files again"
            )
    stated: list[int] = []
    for source in (model, model.get("text_config"), generation):
        value = source.get(key) if isinstance(source, dict) else None
        values = value if isinstance(value, list) else [value]
        # -1 means none in some configs.
        stated += [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0]
    if stated and max(stated) > MAX_TOKEN_ID:
        raise ModelError(f"{folder}: {key} is {shortened(str(max(stated)))}", "download config.json again")
    if first is None and stated:
        first = stated[0]
    return first, {*stated} if first is None else {first, *stated}


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates; use the default one
        named = {
            t["name"]: t["template"]
            for t in template
            if isinstance(t, dict) and {"name", "template"} <= set(t)
        }
        template = named.get("default", next(iter(named.values()), None))
    return template if isinstance(template, str) and template else None
