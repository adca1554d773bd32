"""Pre-tokenizers of byte-level BPE tokenizers, by the names that GGUF files use.

A GGUF file contains tokens and merges but only the *name* of the pre-tokenizer (`tokenizer.ggml.pre`); the regular
expressions are those of the models' tokenizer.json files. A wrong pre-tokenizer yields slightly different ids, so an
unknown name is an error.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
)
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_WORD[0]}|{_WORD[1]}|\p{{N}}|{_MARKS}|{_TAIL}"
_GPT4O = rf"{_WORD[0]}{_CONTRACTIONS}?|{_WORD[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_MARKS}|{_TAIL}"


@dataclass(frozen=True)
class SplitRule:
    """Pre-tokenization of a byte-level BPE; GPT-2's regular expression if `pattern` is None."""

    pattern: str | None = None
    digits: bool = False
    """Split digits individually, before anything else."""
    nfc: bool = False
    """Normalize text to NFC (composed characters) first."""
    ignore_merges: bool = False
    """A word in the vocabulary is one token, whatever the merges (`ignore_merges` of BPE)."""
    adds_bos: bool = False
    """Whether texts begin with the BOS token if the file does not specify it."""

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """The pipeline for the `tokenizers` library."""
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.pattern is not None:
            steps.append(pre_tokenizers.Split(Regex(self.pattern), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None))
        return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)

    def normalizer(self) -> normalizers.Normalizer | None:
        """The normalizer for the `tokenizers` library."""
        return normalizers.NFC() if self.nfc else None


_GPT2 = SplitRule()
_DIGITS = SplitRule(digits=True)
_LLAMA_BPE = SplitRule(_LLAMA3, ignore_merges=True, adds_bos=True)
_QWEN = SplitRule(_QWEN2, nfc=True)

SPLIT_RULES: dict[str, SplitRule] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "mpt": _GPT2,
    "olmo": _GPT2,
    "phi-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "codeshell": _DIGITS,
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "dbrx": SplitRule(_LLAMA3),
    "smaug-bpe": SplitRule(_LLAMA3),
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "tekken": SplitRule(_TEKKEN, ignore_merges=True, adds_bos=True),
    "gpt-4o": SplitRule(_GPT4O),
    "llama4": SplitRule(_GPT4O, adds_bos=True),
}
