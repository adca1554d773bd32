"""The tokenizer: a `tokenizers` pipeline with conventions for BOS, EOS, stop ids and chat templates.

**BOS and EOS.** A BOS token is added only if the tokenizer's post-processor adds one (Llama's does, Qwen's and SmolLM's
do not). Every document ends with the EOS token, even if the post-processor adds none: a model that never sees it never
learns to stop.

**Special tokens in the text.** A special token in the text ("<|im_end|>") is encoded as that token, as in Hugging
Face's tokenizers; chat prompts depend on it.

**Text that is not valid Unicode.** Lone surrogates become U+FFFD, in prompts as in training data.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from trimtab.facts.errors import ModelError
from trimtab.facts.files import write_atomic
from trimtab.text.chat import DEFAULT_LIMITS, Limits, render_chats
from trimtab.text.long_text import PIECE_CHARS, LongText
from trimtab.text.surrogates import replace_surrogates

_PIECES_PER_BATCH = 8
"""Of 64 K characters each: about 100 MB of working memory, and work for eight cores."""

Message = Mapping[str, Any]
"""One turn of a conversation: {"role": "user", "content": "…"}."""


@dataclass(frozen=True, eq=False, repr=False)
class Tokenizer:
    """A tokenizer with its chat template; `trimtab.text.load` creates it.

    Example:
        >>> from trimtab import text
        >>> tokenizer = text.load("starter/base")                    # doctest: +SKIP
        >>> tokenizer.decode(tokenizer.encode("Hello, world"))       # doctest: +SKIP
        'Hello, world'
    """

    backend: tokenizers.Tokenizer
    bos_id: int | None
    eos_id: int | None
    stop_ids: frozenset[int]
    """Ids that end a generation: EOS and, for chat models, the end of a turn."""
    special_tokens: dict[str, str] = field(default_factory=dict)
    """By Hugging Face's names: {"bos_token": "<s>", …}; also variables of the chat template."""
    chat_template: str | None = None
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """Default template variables, as in training."""
    config: dict[str, Any] = field(default_factory=dict)
    """The content of tokenizer_config.json, for `save`."""
    source: str = "tokenizer"
    """Path or name, for error messages."""

    def __repr__(self) -> str:
        return f"Tokenizer({self.source!r}, {self.vocab_size} tokens)"

    @cached_property
    def _affixes(self) -> tuple[list[int], list[int]]:
        """Ids that the post-processor adds before and after a text."""
        bare = self.backend.encode("a", add_special_tokens=False).ids
        full = self.backend.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start], full[start + len(bare) :]
        raise ModelError(
            f"the post-processor of {self.source} changes the text's own tokens",
            "set add_bos_token and add_eos_token in tokenizer_config.json, which replace it",
        )

    @property
    def prefix_ids(self) -> list[int]:
        """Ids that the post-processor adds before a text; often empty."""
        return list(self._affixes[0])

    @property
    def adds_bos(self) -> bool:
        """Whether the post-processor adds a BOS token."""
        return self.bos_id is not None and self.bos_id in self._affixes[0]

    @cached_property
    def vocab_size(self) -> int:
        """The largest id plus one: the minimum number of embedding rows."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of everything that determines the ids of a text, chat template included."""
        rest = json.dumps([self.bos_id, self.eos_id, self._affixes, self.chat_template], sort_keys=True)
        digest = hashlib.sha256(self.backend.to_str(pretty=False).encode())
        digest.update(rest.encode())
        return digest.hexdigest()

    @cached_property
    def _long_text(self) -> LongText:
        return LongText(self.backend)

    def encode(self, text: str) -> list[int]:
        """Ids of a text without added special tokens; memory is bounded for texts of any length."""
        text = replace_surrogates(text)
        if len(text) > PIECE_CHARS:
            return self._encode_long(text)
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` for many texts, on all cores; the caller bounds the size of a batch."""
        texts = [replace_surrogates(text) for text in texts]
        long = {i for i, text in enumerate(texts) if len(text) > PIECE_CHARS}
        short = [text for i, text in enumerate(texts) if i not in long]
        encoded = iter(self.backend.encode_batch_fast(short, add_special_tokens=False))
        return [self._encode_long(t) if i in long else next(encoded).ids for i, t in enumerate(texts)]

    def _encode_long(self, text: str) -> list[int]:
        ids: list[int] = []
        pieces = self._long_text.pieces(text)
        while group := list(itertools.islice(pieces, _PIECES_PER_BATCH)):
            # At most the first piece has another pipeline, so a group needs one or two calls.
            for backend, parts in itertools.groupby(group, key=lambda piece: piece[0]):
                encoded = backend.encode_batch_fast([part for _, part in parts], add_special_tokens=False)
                ids.extend(itertools.chain.from_iterable(e.ids for e in encoded))
        return ids

    def wrap_document(self, ids: Sequence[int]) -> list[int]:
        """Add the post-processor's prefix and the EOS token to the ids of a text."""
        prefix, suffix = self._affixes
        end = suffix if suffix and suffix[-1] == self.eos_id else [*suffix, self._end()]
        return [*prefix, *ids, *end]

    def encode_document(self, text: str) -> list[int]:
        """Ids of a document for training, with BOS and EOS as described in the module docstring."""
        return self.wrap_document(self.encode(text))

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a prompt: like a document, but without the EOS token.

        A text that already begins with the BOS token (chat templates do) gets no second one.
        """
        ids = self.encode(text)
        prefix = self._affixes[0]
        return ids if ids[: len(prefix)] == prefix else [*prefix, *ids]

    def encode_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Ids of a rendered conversation; the template itself adds BOS."""
        return self.encode(self.render_chat(messages, add_generation_prompt=add_generation_prompt))

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of the ids; bytes that are not UTF-8 become U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special)

    def render_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = False,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> str:
        """Render a conversation with the model's chat template.

        `variables` are additional template variables (`enable_thinking` for Qwen3).
        """
        return self.render_chats(
            [messages], add_generation_prompt, tools=tools, variables=variables, limits=limits
        )[0]

    def render_chats(
        self,
        conversations: Sequence[Sequence[Message]],
        add_generation_prompt: bool = False,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> list[str]:
        """`render_chat` for many conversations in one sandbox process (which takes about 0.1 s to start)."""
        if self.chat_template is None:
            raise ModelError(
                f"{self.source} has no chat template",
                "use plain text or a model tuned for chat, or put a chat_template.jinja next to it",
            )
        known = {**self.special_tokens, "tools": list(tools) if tools else None, "documents": None}
        return render_chats(
            self.chat_template,
            conversations,
            {
                **known,
                **self.template_variables,
                **(variables or {}),
                "add_generation_prompt": add_generation_prompt,
            },
            limits=limits,
        )

    def save(self, folder: str | Path) -> list[Path]:
        """Write tokenizer.json, tokenizer_config.json and the chat template, as transformers reads them."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self.config, **self.special_tokens}
        config.pop("chat_template", None)
        contents = {
            "tokenizer.json": self.backend.to_str(pretty=True),
            "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False, sort_keys=True) + "\n",
        }
        if self.chat_template is not None:
            contents["chat_template.jinja"] = self.chat_template
        written = []
        for name, content in contents.items():
            write_atomic(folder / name, content)
            written.append(folder / name)
        return written

    def _end(self) -> int:
        if self.eos_id is None:
            raise ModelError(
                f"{self.source} has no EOS token, which must end each document",
                "set eos_token in tokenizer_config.json",
            )
        return self.eos_id


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise ModelError if the tokenizer has ids without an embedding in the model.

    More embeddings than ids are valid: models pad their vocabulary.
    """
    if tokenizer.vocab_size > vocab_size:
        raise ModelError(
            f"the tokenizer {tokenizer.source} has {tokenizer.vocab_size} tokens, "
            f"the model's embedding only {vocab_size}",
            "use the tokenizer that belongs to the model",
        )
