"""Generates completions for a file of prompts."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.api.notices import print_notice
from trimtab.api.prompt_files import OutputFile, PromptRow, keyword, read_prompts, settings_digest
from trimtab.api.prompts import Prompt, encode_prompts
from trimtab.facts.arguments import check_int, check_optional_str
from trimtab.facts.errors import DataError, ModelError, RecipeError
from trimtab.facts.names import described, path_of
from trimtab.facts.phases import RunPhase

if TYPE_CHECKING:
    from trimtab.generate import Completion, SamplingOptions
    from trimtab.run import OpenedModel

_ENCODED_AT_ONCE = 64

Progress = Callable[[int, int], None]
"""Called with (prompts done, total prompts)."""


def generate_file(
    opened: OpenedModel,
    prompts: str | Path,
    output: str | Path,
    options: SamplingOptions,
    *,
    chat: bool,
    system: str | None,
    batch_size: int,
    overwrite: bool,
    on_progress: Progress | None,
    argument_name: Callable[[str], str] = keyword,
) -> int:
    """See `trimtab.Model.generate_file`; `argument_name` returns the name of an argument in error messages."""
    from trimtab.run.out_of_memory import ExplainedOutOfMemory
    from trimtab.run.quantizing import dequantize_for_cpu
    from trimtab.run.torch_setup import on_device_of

    batch_size = check_int(batch_size, "batch_size", least=1)
    system = check_optional_str(system, "system")
    if on_progress is not None and not callable(on_progress):
        raise RecipeError(
            f"on_progress is {described(on_progress)}", "give a function of (done, total), or None"
        )
    source = path_of(prompts, argument_name("prompts"), is_text_file=True)
    output = path_of(output, argument_name("output"))
    rows = _read_rows(source, output, chat=chat, system=system, argument_name=argument_name)
    asked = [row.prompt(chat=chat, system=system) for row in rows]
    encoded = _encoded(opened, asked, rows, options.max_new_tokens)
    digest = settings_digest(_settings(opened, options, chat=chat, system=system))
    dequantize_for_cpu(opened.decoder, print_notice)
    with (
        OutputFile(output, rows, digest, overwrite=overwrite, argument_name=argument_name) as written,
        on_device_of(opened.decoder),
    ):
        if on_progress is not None:
            on_progress(written.done, len(rows))
        while written.done < len(rows):
            begin = written.done
            batch = [ids.tolist() for ids in encoded[begin : begin + batch_size]]
            try:
                done = _generate_batch(opened, batch, options, batch_size=batch_size, first_index=begin)
            except ExplainedOutOfMemory as error:
                raise ExplainedOutOfMemory(
                    error.report,
                    f"repeat the call with a smaller {argument_name('batch_size')}; it continues after these rows",
                    error.details,
                    cause=f"{error.cause}, for a batch of {len(batch)} prompts; {output} contains {begin} rows",
                ) from error.__cause__
            written.write(done)
            if on_progress is not None:
                on_progress(written.done, len(rows))
        return written.done


def _generate_batch(
    opened: OpenedModel,
    batch: list[list[int]],
    options: SamplingOptions,
    *,
    batch_size: int,
    first_index: int,
) -> list[Completion]:
    """Generates the completions of one batch; an out-of-memory error explains itself."""
    from trimtab.generate import generate_many
    from trimtab.run.folder import RunFolder
    from trimtab.run.inference_memory import predict_prompts
    from trimtab.run.out_of_memory import explaining_memory

    predict = partial(predict_prompts, opened.decoder, batch, options.max_new_tokens, batch_size)
    with explaining_memory(
        RunPhase.GENERATION, opened.decoder, run=RunFolder(Path(opened.name)), predict=predict
    ):
        return generate_many(
            opened.decoder,
            opened.tokenizer,
            batch,
            options,
            batch_size=batch_size,
            first_index=first_index,
        )


def _read_rows(
    source: Path, output: Path, *, chat: bool, system: str | None, argument_name: Callable[[str], str]
) -> list[PromptRow]:
    """Reads the prompts; raises a RecipeError if `system` or the output file conflicts with them."""
    rows = read_prompts(source)
    if system is not None and not chat:
        for row in rows:
            if "prompt" in row.fields:
                raise RecipeError(
                    f"{argument_name('system')} is given, but {row.place} is not a conversation",
                    f"add {argument_name('chat')}, or put it into the prompt",
                )
    if output.exists() and output.samefile(source):
        raise RecipeError(
            f"{argument_name('output')} {output} is the file of prompts",
            f"name another {argument_name('output')}",
        )
    return rows


def _settings(
    opened: OpenedModel, options: SamplingOptions, *, chat: bool, system: str | None
) -> dict[str, object]:
    """Returns the settings that determine the completions."""
    from trimtab.adapt import active_adapters

    return {
        **options.keywords(),
        "temperature": options.sampling_temperature,
        "model": str(Path(opened.name).resolve()) if Path(opened.name).exists() else opened.name,
        "step": opened.step,
        "adapters": active_adapters(opened.decoder),
        "chat": chat,
        "system": system,
    }


def _encoded(
    opened: OpenedModel, prompts: list[Prompt], rows: Sequence[PromptRow], max_new_tokens: int | None
) -> list[array[int]]:
    """Tokenizes all prompts (4 bytes per token) and checks each of them before the first is generated."""
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
            check_prompt(opened.decoder, ids, max_new_tokens, row.place)
            encoded.append(array("i", ids))
    return encoded


def _encoded_alone(opened: OpenedModel, prompt: Prompt, row: PromptRow) -> list[int]:
    """Encodes a single prompt, to find the row that the chat template rejects."""
    if opened.tokenizer.chat_template is None:  # an error of the model, not of the row
        return encode_prompts(opened.tokenizer, [prompt])[0]
    with _named(row):
        return encode_prompts(opened.tokenizer, [prompt])[0]


@contextmanager
def _named(row: PromptRow) -> Iterator[None]:
    """Adds the line number to an error about one prompt."""
    try:
        yield
    except ModelError as error:
        raise DataError(f"{row.place}: {error.cause}", error.remedy) from None
