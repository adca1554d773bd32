"""Loading a tokenizer from a folder or a GGUF file."""

from __future__ import annotations

from pathlib import Path

from trimtab.facts.errors import ModelError
from trimtab.facts.gguf_header import is_gguf
from trimtab.facts.run_layout import config_folder
from trimtab.text.tokenizer import Tokenizer


def load(path: str | Path) -> Tokenizer:
    """Load the tokenizer of a Hugging Face folder (tokenizer.json …) or of a .gguf file.

    Example:
        >>> load("models/SmolLM2-135M").vocab_size     # doctest: +SKIP
        49152
    """
    path = Path(path)
    if path.is_dir():
        from trimtab.text.from_folder import load_folder

        return load_folder(config_folder(path))
    if is_gguf(path):
        from trimtab.text.from_gguf import load_gguf

        return load_gguf(path)
    if path.name == "tokenizer.json" and path.is_file():
        return load(path.parent)
    if path.exists():
        raise ModelError(
            f"{path} is neither a folder nor a GGUF file", "name the folder with tokenizer.json in it"
        )
    raise ModelError(f"{path} does not exist", "check the path")
