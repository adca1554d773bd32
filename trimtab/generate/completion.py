"""Completions, and the state of a completion while it is generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from trimtab.generate.stopping import StopStrings
from trimtab.text.streaming import Detokenizer
from trimtab.text.tokenizer import Tokenizer

FinishReason = Literal["eos", "stop", "length"]
_CONTEXT = 8


@dataclass(frozen=True)
class Completion:
    """The text that a model generated after a prompt."""

    text: str
    """Without the prompt and without the stop string or end-of-text token."""
    ids: list[int]
    """Generated token ids, without the end-of-text token. After a stop string they may extend beyond `text`."""
    finish_reason: FinishReason
    """"eos": end-of-text token; "stop": stop string; "length": `max_new_tokens` reached."""
    tokens_per_second: float
    """New tokens per second over the whole call (all prompts), prefill time included."""


class GenerationState:
    """One row of the batch: prompt, generated tokens, finish reason."""

    def __init__(
        self,
        index: int,
        prompt: list[int],
        max_new_tokens: int,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        stream: Callable[[str], None] | None,
    ) -> None:
        self.index, self.prompt, self.max_new_tokens = index, prompt, max_new_tokens
        self.ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._pieces: list[str] = []
        self._stop_ids = tokenizer.stop_ids
        # Decode the end of the prompt too: some tokenizers drop the space before the first token.
        self._detokenizer = Detokenizer(tokenizer, context=prompt[-_CONTEXT:])
        self._stops = StopStrings(stop)
        self._stream = stream

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    def push(self, token_id: int) -> None:
        """Append the next token; set `finish_reason` if it is the last."""
        if token_id in self._stop_ids:
            self._finish("eos")
            return
        self.ids.append(token_id)
        if self._push_text(self._detokenizer.push(token_id)):
            self.finish_reason = "stop"
        elif len(self.ids) >= self.max_new_tokens:
            self._finish("length")

    def _finish(self, reason: FinishReason) -> None:
        stopped = self._push_text(self._detokenizer.finish())
        self.finish_reason = "stop" if stopped else reason
        if not stopped:
            self._emit(self._stops.finish())

    def _push_text(self, piece: str) -> bool:
        shown, stopped = self._stops.push(piece)
        self._emit(shown)
        return stopped

    def _emit(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)
            if self._stream is not None:
                self._stream(piece)
