"""A conversation with a model: history, context length, and a key/value cache that is reused between turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from trimtab.api.prompts import check_stream
from trimtab.facts.errors import ModelError, RecipeError
from trimtab.facts.names import described
from trimtab.facts.phases import RunPhase

if TYPE_CHECKING:
    from trimtab.generate import Completion, SamplingOptions
    from trimtab.run import OpenedModel

ANSWER_TOKENS = 512
"""Default maximum number of tokens of an answer."""


class Chat:
    """A conversation, created by `Model.chat`.

    The key/value cache of the common prefix of two prompts is reused, so each turn processes only new tokens; after
    `Model.use_adapters` or another change of the weights the whole conversation is processed again. When the
    conversation exceeds the model's context length, its oldest turns are dropped from the prompt (`left_out`);
    `messages` contains all of them.

    Args:
        opened: a model with a chat template; raises a ModelError without one.
        options: sampling options of every answer.
        system: the system message, or None.
    """

    def __init__(
        self,
        opened: OpenedModel,
        options: SamplingOptions,
        *,
        system: str | None = None,
    ) -> None:
        from trimtab.generate import PromptCache

        if opened.tokenizer.chat_template is None:
            raise ModelError(
                f"{opened.name} has no chat template, so it cannot chat",
                f'continue text with `trimtab generate {opened.name} "…"`, or use a model tuned for chat',
            )
        self._opened, self._options, self.system = opened, options, system
        self.messages: list[dict[str, str]] = []
        """All user messages and answers."""
        self.left_out = 0
        """Number of oldest messages that no longer fit into the model's context."""
        self._turn = 0
        self._cache = PromptCache()
        self._adapters: list[str] = []

    def send(self, text: str, *, stream: Callable[[str], None] | None = None) -> Completion:
        """Returns the answer to a message, and adds both to the conversation.

        If the answer is interrupted (KeyboardInterrupt), the part streamed so far is added. A message that fails
        otherwise, or that got no answer, is not added.

        Args:
            text: the user's message.
            stream: called with each piece of the answer as it is generated.

        Raises:
            ModelError: the message alone exceeds the model's context length, or the template rejects it.
        """
        from trimtab.adapt import active_adapters
        from trimtab.generate import PromptCache, generate
        from trimtab.run.inference_memory import predict_prompts
        from trimtab.run.out_of_memory import explaining_memory
        from trimtab.run.torch_setup import on_device_of

        if not isinstance(text, str):
            raise RecipeError(f"the message is {described(text)}", "give a text")
        check_stream(stream)
        pieces: list[str] = []

        def show(piece: str) -> None:
            pieces.append(piece)
            if stream is not None:
                stream(piece)

        used = active_adapters(self._opened.decoder)
        if used != self._adapters:  # the cache was computed with other adapters
            self._cache, self._adapters = PromptCache(), used
        question = {"role": "user", "content": text}
        before = self.left_out
        ids, self.left_out, count = self._fitted([*self.messages, question])
        predict = partial(predict_prompts, self._opened.decoder, [ids], count, 1)
        try:
            with (
                explaining_memory(RunPhase.GENERATION, self._opened.decoder, predict=predict),
                on_device_of(self._opened.decoder),
            ):
                done = generate(
                    self._opened.decoder,
                    self._opened.tokenizer,
                    ids,
                    replace(self._options, max_new_tokens=count),
                    index=self._turn,
                    stream=show,
                    cache=self._cache,
                )
        except BaseException as stopped:
            if isinstance(stopped, KeyboardInterrupt) and pieces:
                self._add(question, "".join(pieces))
            else:
                self.left_out = before
            raise
        self._add(question, done.text)
        return done

    def reset(self) -> None:
        """Starts a new conversation with the same system message."""
        self.messages, self.left_out = [], 0

    def transcript(self) -> list[dict[str, str]]:
        """Returns all messages including the system message, as `messages` of training data."""
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*first, *self.messages]

    def _add(self, question: dict[str, str], answer: str) -> None:
        self.messages += [question, {"role": "assistant", "content": answer}]
        self._turn += 1

    def _fitted(self, messages: list[dict[str, str]]) -> tuple[list[int], int, int]:
        """Returns (prompt, messages dropped, max new tokens), dropping as few of the oldest turns as possible."""
        positions = self._opened.decoder.shape.max_positions
        # Reserve max_new_tokens for the answer, or by default at most a quarter of the context.
        wanted = self._options.max_new_tokens or min(ANSWER_TOKENS, max(1, positions // 4))
        start = self.left_out
        while True:
            ids = self._encode(messages[start:])
            if len(ids) + wanted <= positions:
                room = positions - len(ids)
                return ids, start, self._options.max_new_tokens or min(ANSWER_TOKENS, room)
            if start >= len(messages) - 1:
                raise ModelError(
                    f"the message has {len(ids)} tokens including the template, which with {wanted} for the answer "
                    f"exceeds the model's context of {positions} tokens",
                    "shorten it, or lower max_new_tokens",
                )
            start += 2  # a question and its answer

    def _encode(self, messages: list[dict[str, str]]) -> list[int]:
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return self._opened.tokenizer.encode_chat([*first, *messages])
