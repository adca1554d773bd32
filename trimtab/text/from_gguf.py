"""Rebuilds a tokenizer from a GGUF file's metadata.

The supported model families use two kinds: `gpt2`, byte-level BPE with merges (Llama 3, Qwen, SmolLM), and
`llama`, SentencePiece BPE whose merges follow from the tokens' scores (Llama 2, Mistral).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from trimtab.facts.errors import ModelError
from trimtab.facts.gguf_header import read_gguf_header
from trimtab.text.pretokenizers import SPLIT_RULES, SplitRule
from trimtab.text.tokenizer import Tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_REMEDY = "use the model's Hugging Face folder, or set model.tokenizer to a folder with its tokenizer.json"
_SPACE = "▁"


def load_gguf(path: str | Path) -> Tokenizer:
    """The tokenizer inside a .gguf file."""
    return tokenizer_from_metadata(read_gguf_header(path).metadata, str(path))


def tokenizer_from_metadata(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """The tokenizer that GGUF metadata (`tokenizer.ggml.*`) describe."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _strings(metadata, "tokens", source)
    if len(set(tokens)) != len(tokens):
        raise ModelError(f"{source}: the vocabulary contains a token twice", _REMEDY)
    if kind == "gpt2":
        rule = _split_rule(metadata, source)
        backend, adds_bos = (
            _byte_level(tokens, _strings(metadata, "merges", source), rule, source),
            rule.adds_bos,
        )
    elif kind == "llama":
        backend, adds_bos = _sentencepiece(metadata, tokens, source), True
    else:
        raise ModelError(
            f"{source}: a tokenizer of kind {kind!r} cannot be rebuilt from a GGUF file", _REMEDY
        )
    _add_tokens(backend, tokens, metadata, source)
    ids = {name: _token_id(metadata, name, tokens, source) for name in ("bos", "eos", "eot", "eom")}
    special = {f"{name}_token": tokens[i] for name in ("bos", "eos") if (i := ids[name]) is not None}
    for ours, theirs in (("unk_token", "unknown"), ("pad_token", "padding")):
        if (token_id := _token_id(metadata, theirs, tokens, source)) is not None:
            special[ours] = tokens[token_id]
    bos = special.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token", adds_bos) else None
    eos = special.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    set_affixes(backend, bos, eos)
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend=backend,
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        stop_ids=frozenset(i for name, i in ids.items() if i is not None and name != "bos"),
        special_tokens=special,
        chat_template=template if isinstance(template, str) and template else None,
        source=source,
    )


def set_affixes(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Set a post-processor that adds these tokens before and after a text."""
    if bos is None and eos is None:
        return
    single = " ".join([*([bos] if bos else []), "$A", *([eos] if eos else [])])
    known = {token: backend.token_to_id(token) for token in (bos, eos) if token}
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(known.items()))


def _split_rule(metadata: Mapping[str, Any], source: str) -> SplitRule:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in SPLIT_RULES:
        known = ", ".join(sorted(SPLIT_RULES))
        raise ModelError(f"{source}: the pre-tokenizer {name!r} is not one of {known}", _REMEDY)
    return SPLIT_RULES[name]


def _byte_level(tokens: list[str], merges: list[str], rule: SplitRule, source: str) -> tokenizers.Tokenizer:
    pairs = []
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not (left and space and right) or " " in right:
            raise ModelError(f"{source}: {merge!r} is not a merge of two tokens", _REMEDY)
        pairs.append((left, right))
    model = _bpe(tokens, pairs, source, ignore_merges=rule.ignore_merges)
    backend = tokenizers.Tokenizer(model)
    if (normalizer := rule.normalizer()) is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = rule.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], source: str) -> tokenizers.Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelError(f"{source}: the SentencePiece vocabulary has no score for each token", _REMEDY)
    unknown = _token_id(metadata, "unknown", tokens, source)
    backend = tokenizers.Tokenizer(
        _bpe(
            tokens,
            merges_from_scores(tokens, scores, _plain(tokens, metadata, source)),
            source,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback="<0x00>" in tokens,
        )
    )
    prefixed = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(_SPACE)] if prefixed else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def merges_from_scores(
    tokens: Sequence[str], scores: Sequence[float], plain: Sequence[bool]
) -> list[tuple[str, str]]:
    """All merges of two plain tokens into a third, ordered by the merged token's score, then its id.

    SentencePiece merges the neighbours whose merged token has the highest score; BPE with these merges does the same.
    Control and byte tokens are never produced by merges.
    """
    ids = {token: i for i, token in enumerate(tokens) if plain[i]}
    found: list[tuple[float, int, int, int]] = []
    for token, joined in ids.items():
        for at in range(1, len(token)):
            left, right = ids.get(token[:at]), ids.get(token[at:])
            if left is not None and right is not None:
                found.append((-scores[joined], joined, left, right))
    found.sort()
    return [(tokens[left], tokens[right]) for _, _, left, right in found]


def _bpe(tokens: list[str], merges: list[tuple[str, str]], source: str, **options: Any) -> models.BPE:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    for left, right in merges:
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise ModelError(
                f"{source}: the merge of {left!r} and {right!r} is not in the vocabulary", _REMEDY
            )
    return models.BPE(vocab=vocabulary, merges=merges, **options)


def _add_tokens(
    backend: tokenizers.Tokenizer, tokens: list[str], metadata: Mapping[str, Any], source: str
) -> None:
    """Add control tokens as special tokens and user-defined tokens as added tokens; ids do not change."""
    types = _types(tokens, metadata, source)
    by_kind = {
        kind: [t for t, k in zip(tokens, types, strict=True) if k == kind and t]
        for kind in (_CONTROL, _USER_DEFINED)
    }
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in by_kind[_CONTROL]])
    backend.add_tokens([AddedToken(t, normalized=False, special=False) for t in by_kind[_USER_DEFINED]])


def _types(tokens: list[str], metadata: Mapping[str, Any], source: str) -> list[int]:
    types = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ModelError(f"{source}: the vocabulary has no type for each token", _REMEDY)
    return types


def _plain(tokens: list[str], metadata: Mapping[str, Any], source: str) -> list[bool]:
    return [kind not in (_UNKNOWN, _CONTROL, _BYTE) for kind in _types(tokens, metadata, source)]


def _strings(metadata: Mapping[str, Any], name: str, source: str) -> list[str]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or not values or not all(isinstance(v, str) for v in values):
        raise ModelError(f"{source} has no tokenizer (tokenizer.ggml.{name} is missing)", _REMEDY)
    # Surrogates stand for bytes that are not UTF-8, which the tokenizers library cannot represent.
    return [v.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for v in values]


def _token_id(metadata: Mapping[str, Any], name: str, tokens: list[str], source: str) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is None or value == 0xFFFFFFFF:  # GGUF's value for "none"
        return None
    if not isinstance(value, int) or not 0 <= value < len(tokens):
        raise ModelError(f"{source}: the {name} token {value!r} is not one of {len(tokens)} tokens", _REMEDY)
    return value
