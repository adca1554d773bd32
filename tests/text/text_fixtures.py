"""Small tokenizers that the tests build."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It isn't the first time!",
    "Numbers: 1 22 333 4444, 3.14159 and 1,000,000; dates 2024-01-31.",
    "Whitespace:  two   three\ttab\n\nnew lines \n and trailing   ",
    "Unicode: naïve café, Grüße, Привет мир, 你好世界, こんにちは, 🙂🚀 ﬁ ½ e\u0301.",
    "def f(x):\n    return x ** 2  # code\n",
    "<|im_start|>user\nHello<|im_end|>\n",
    "",
    " leading space",
    "\n",
]


def byte_level_backend(vocab_size: int = 400, *, pattern: str | None = None) -> tokenizers.Tokenizer:
    """A trained byte-level BPE with the special tokens <s>, </s>, <|end|>."""
    backend = tokenizers.Tokenizer(models.BPE())
    steps: list[pre_tokenizers.PreTokenizer] = []
    if pattern is not None:
        steps.append(pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(t, special=True) for t in ("<s>", "</s>", "<|end|>")],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def write_folder(folder: Path, backend: tokenizers.Tokenizer | None = None, **files: dict) -> Path:
    """A Hugging Face folder: tokenizer.json, and JSON files by their name without the ending."""
    folder.mkdir(parents=True, exist_ok=True)
    (backend or byte_level_backend()).save(str(folder / "tokenizer.json"))
    files.setdefault("tokenizer_config", {"bos_token": "<s>", "eos_token": "</s>"})
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder
