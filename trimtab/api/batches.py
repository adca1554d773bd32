"""Generating for a whole file of prompts."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.api.prompt_files import OutputFile, PromptRow, read_prompts, settings_digest
from trimtab.api.prompts import Prompt, encode_prompts
from trimtab.facts.errors import DataError, ModelError, RecipeError, ResourceError

if TYPE_CHECKING:
    from trimtab.run import OpenedModel

_ENCODED_AT_ONCE = 64

Progress = Callable[[int, int], None]
"""Called with (prompts done, prompts in all)."""


def generate_file(
    opened: OpenedModel,
    prompts: str | Path,
    output: str | Path,
    *,
    chat: bool,
    system: str | None,
    batch_size: int,
    overwrite: bool,
    on_progress: Progress | None,
    options: dict[str, Any],
) -> int:
    """See `trimtab.Model.generate_file`."""
    from trimtab.generate import Sampling, generate_many

    if batch_size < 1:
        raise RecipeError(f"batch_size is {batch_size}", "give at least 1")
    sampled = {key: options[key] for key in ("temperature", "top_k", "top_p", "seed")}
    sampling = Sampling.resolve(**sampled)
    source = Path(prompts)
    rows = read_prompts(source)
    if system is not None and not chat:
        for row in rows:
            if "prompt" in row.fields:
                raise RecipeError(
                    f"--system is given, and {row.place} is no conversation",
                    "add --chat, or put it into the prompt",
                )
    if Path(output).exists() and Path(output).samefile(source):
        raise RecipeError(f"--output {output} is the file of prompts itself", "name another --output")
    encoded = _encoded(opened, [row.prompt(chat=chat, system=system) for row in rows], rows, options)
    settings = {
        **options,
        "temperature": sampling.temperature,
        "model": str(Path(opened.name).resolve()) if Path(opened.name).exists() else opened.name,
        "step": opened.step,
        "adapters": _adapters(opened),
        "chat": chat,
        "system": system,
    }
    with OutputFile(output, rows, settings_digest(settings), overwrite=overwrite) as written:
        if on_progress is not None:
            on_progress(written.done, len(rows))
        while written.done < len(rows):
            begin = written.done
            batch = [ids.tolist() for ids in encoded[begin : begin + batch_size]]
            try:
                done = generate_many(
                    opened.decoder,
                    opened.tokenizer,
                    batch,
                    batch_size=batch_size,
                    first_index=begin,
                    **options,
                )
            except (MemoryError, RuntimeError) as error:
                if not _lacks_memory(error):
                    raise
                raise ResourceError(
                    f"there is no memory for {len(batch)} prompts at once; {begin} rows are in {output}",
                    "give the same command with a smaller --batch-size: it goes on from there",
                ) from error
            written.write(done)
            if on_progress is not None:
                on_progress(written.done, len(rows))
        return written.done


def _encoded(
    opened: OpenedModel, prompts: list[Prompt], rows: Sequence[PromptRow], options: dict[str, Any]
) -> list[array[int]]:
    """Tokens of all prompts (4 bytes each), every one checked before the first is generated."""
    from trimtab.generate.loop import check_prompt, prompt_ids

    encoded: list[array[int]] = []
    for begin in range(0, len(prompts), _ENCODED_AT_ONCE):
        chunk = prompts[begin : begin + _ENCODED_AT_ONCE]
        try:
            found = encode_prompts(opened.tokenizer, chunk)
        except ModelError:
            found = [_encoded_alone(opened, prompt, rows[begin + i]) for i, prompt in enumerate(chunk)]
        for row, ids in zip(rows[begin:], found, strict=False):
            with _named(row):
                ids = prompt_ids(opened.tokenizer, ids)
            check_prompt(opened.decoder, ids, options["max_new_tokens"], row.place)
            encoded.append(array("i", ids))
    return encoded


def _encoded_alone(opened: OpenedModel, prompt: Prompt, row: PromptRow) -> list[int]:
    """Finds the row that a chat template does not take."""
    if opened.tokenizer.chat_template is None:  # not the row's fault
        return encode_prompts(opened.tokenizer, [prompt])[0]
    with _named(row):
        return encode_prompts(opened.tokenizer, [prompt])[0]


@contextmanager
def _named(row: PromptRow) -> Iterator[None]:
    """An error about one prompt, said of its line."""
    try:
        yield
    except ModelError as error:
        raise DataError(f"{row.place}: {error.cause}", error.remedy) from None


def _adapters(opened: OpenedModel) -> list[str]:
    from trimtab.adapt import active_adapters

    return active_adapters(opened.decoder)


def _lacks_memory(error: Exception) -> bool:
    """Whether torch or Python found no memory; torch's CPU allocator has no exception type of its own."""
    import torch

    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
