"""Loads a model to generate, chat, evaluate, save and merge, and to use adapters."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from trimtab.api.notices import print_notice
from trimtab.api.prompts import (
    Messages,
    Prompt,
    as_batch,
    check_stream,
    encode_prompts,
    encode_scored,
    texts_of,
)
from trimtab.facts.arguments import check_int, check_optional_str
from trimtab.facts.base_weights import BaseWeights
from trimtab.facts.dtypes import dtype_alias
from trimtab.facts.errors import RecipeError
from trimtab.facts.names import path_of
from trimtab.facts.phases import RunPhase

if TYPE_CHECKING:
    from typing import Unpack

    import torch

    from trimtab.api.chat import Chat
    from trimtab.generate import Completion, SamplingKeywords
    from trimtab.run import OpenedModel
    from trimtab.run.memory_report import PredictedMemory

BATCH_SIZE = 16
"""Default number of prompts per batch."""
DTYPES = ("fp32", "bf16", "fp16")


@dataclass(repr=False)
class Model:
    """A loaded model with its tokenizer.

    Example:
        >>> model = trimtab.load("starter")                        # doctest: +SKIP
        >>> model.generate("Once upon a time", max_new_tokens=20)  # doctest: +SKIP
        ' there was a little girl named Mia …'
    """

    opened: OpenedModel

    def __repr__(self) -> str:
        from trimtab.facts.units import format_count

        opened = self.opened
        shape, weight = opened.decoder.shape, opened.decoder.head_weight
        step = "" if opened.step is None else f" at step {opened.step}"
        adapters = f", adapters: {', '.join(self.adapters)}" if self.adapters else ""
        dtype = dtype_alias(weight.dtype)
        return (
            f"Model({opened.name!r}{step}, {shape.family}, {format_count(shape.num_parameters)} parameters, "
            f"{dtype}, {weight.device}{adapters})"
        )

    @overload
    def generate(self, prompt: Prompt, **options: Any) -> str: ...
    @overload
    def generate(self, prompt: list[str] | list[Messages], **options: Any) -> list[str]: ...

    def generate(self, prompt: Any, **options: Any) -> str | list[str]:
        """Returns the continuation of a prompt or the answer to chat messages; for a list of prompts a list of texts.

        Takes the options of `complete`.

        Example:
            >>> model.generate("2 + 2 =", max_new_tokens=2)              # doctest: +SKIP
            ' 4'
            >>> model.generate(["2 + 2 =", "3 + 3 ="], max_new_tokens=2) # doctest: +SKIP
            [' 4', ' 6']
        """
        return texts_of(self.complete(prompt, **options))

    @overload
    def complete(self, prompt: Prompt, **options: Any) -> Completion: ...
    @overload
    def complete(self, prompt: list[str] | list[Messages], **options: Any) -> list[Completion]: ...

    def complete(  # type: ignore[misc]  # the options are listed only here, not in the overloads
        self,
        prompt: Any,
        *,
        stream: Callable[[str], None] | None = None,
        batch_size: int = BATCH_SIZE,
        first_index: int = 0,
        **sampling: Unpack[SamplingKeywords],
    ) -> Completion | list[Completion]:
        """Like `generate`, but also returns token ids, finish reason and tokens per second.

        Args:
            prompt: text to continue, or chat messages (`[{"role": "user", "content": "…"}]`); or a list of texts or
                conversations, which are generated in batches with the same result as one by one.
            stream: called with each piece of text as it is generated; only for a single prompt.
            batch_size: number of prompts per batch. It does not change the sampled text.
            first_index: index of the first prompt: samples depend on the seed and the prompt's index, so a long list
                can be generated in parts.
            sampling: the fields of `trimtab.generate.SamplingOptions` as keyword arguments: `max_new_tokens` (by
                default 128, or what fits into the model's context), `temperature` (0 is greedy decoding; by default
                0, or 1 if top_p or top_k is given), `top_p` (sample from the most likely tokens with this cumulative
                probability), `top_k` (sample from this many of the most likely tokens; 0 for all), `stop` (one or
                several texts before which generation stops), `seed` (the same seed samples the same text).

        Example:
            >>> done = model.complete("2 + 2 =", max_new_tokens=2, temperature=0.7, seed=7)  # doctest: +SKIP
            >>> done.text, done.finish_reason                                                # doctest: +SKIP
            (' 4', 'length')
        """
        from trimtab.generate import SamplingOptions, generate, generate_many
        from trimtab.run.inference_memory import predict_prompts

        options = SamplingOptions.of(sampling)
        first_index = check_int(first_index, "first_index")
        batch_size = check_int(batch_size, "batch_size", least=1)
        prompts, is_batch = as_batch(prompt, "the prompt")
        check_stream(stream)
        if is_batch and stream is not None:
            raise RecipeError("stream is given with a list of prompts", "give one prompt, or omit stream")
        decoder, tokenizer = self.opened.decoder, self.opened.tokenizer
        ids = encode_prompts(tokenizer, prompts)
        predict = partial(predict_prompts, decoder, ids, options.max_new_tokens, batch_size)
        with self._explained(RunPhase.GENERATION, predict), self._on_device():
            self._prepare()
            if not is_batch:
                return generate(decoder, tokenizer, ids[0], options, stream=stream, index=first_index)
            return generate_many(
                decoder, tokenizer, ids, options, batch_size=batch_size, first_index=first_index
            )

    def generate_file(
        self,
        prompts: str | Path,
        output: str | Path,
        *,
        chat: bool = False,
        system: str | None = None,
        batch_size: int = BATCH_SIZE,
        overwrite: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> int:
        """Generates for every prompt of a file and writes JSON lines in order; returns the number of rows.

        Rows are written batch by batch. If `output` already contains rows of the same prompts, model and options, it
        continues after them: repeat an interrupted call to finish it.

        Args:
            prompts: `.txt` with one prompt per line, `.jsonl` with {"prompt": …} or {"messages": […]}, or `.csv` with
                a column `prompt`.
            output: the file to write, with index, prompt or messages, completion, finish_reason, tokens, settings.
            chat: whether to send text prompts as user messages in the chat template.
            system: the system message of conversations without one.
            batch_size: number of prompts per batch.
            overwrite: whether to replace the contents of `output`.
            on_progress: called with (prompts done, total prompts) after each batch.
            sampling: as in `complete`.

        Example:
            >>> model.generate_file("questions.txt", "answers.jsonl", max_new_tokens=64)  # doctest: +SKIP
            120
        """
        from trimtab.api.batches import generate_file
        from trimtab.generate import SamplingOptions

        return generate_file(
            self.opened,
            prompts,
            output,
            SamplingOptions.of(sampling),
            chat=chat,
            system=system,
            batch_size=batch_size,
            overwrite=overwrite,
            on_progress=on_progress,
        )

    def chat(
        self,
        *,
        system: str | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> Chat:
        """Starts a conversation; each answer sees the previous messages.

        Args:
            system: the system message.
            sampling: as in `complete`; `max_new_tokens` is per answer, by default 512 or what fits into the context.

        Example:
            >>> chat = model.chat(system="Answer in one word.")     # doctest: +SKIP
            >>> chat.send("What is the capital of France?").text    # doctest: +SKIP
            'Paris'
            >>> chat.send("And of Italy?").text                     # doctest: +SKIP
            'Rome'
        """
        from trimtab.api.chat import Chat
        from trimtab.generate import SamplingOptions

        options = SamplingOptions.of(sampling)
        self._prepare()
        return Chat(self.opened, options, system=check_optional_str(system, "system"))

    @overload
    def loss(self, text: Prompt, *, batch_size: int = 8) -> float: ...
    @overload
    def loss(self, text: list[str] | list[Messages], *, batch_size: int = 8) -> list[float]: ...

    def loss(self, text: Any, *, batch_size: int = 8) -> float | list[float]:
        """Returns the mean loss per token (nats) of a text; for a list of texts a list of losses.

        For a text, every token except the first counts, as in transformers with `labels=input_ids`; no end token is
        added. For a conversation, only the answers count, as in training with `train_on: completions`.

        Example:
            >>> model.loss("Once upon a time")                           # doctest: +SKIP
            2.31
            >>> model.loss(["Once upon a time", "time a upon Once"])     # doctest: +SKIP
            [2.31, 8.4]
        """
        from trimtab.evaluate import mean_losses
        from trimtab.run.inference_memory import predict_losses

        texts, is_batch = as_batch(text, "the text")
        batch_size = check_int(batch_size, "batch_size", least=1)
        rows = encode_scored(self.opened.tokenizer, texts)
        longest, together = max(len(ids) for ids, _ in rows), min(batch_size, len(rows))
        predict = partial(predict_losses, self.opened.decoder, together, longest, packed=True)
        with self._explained(RunPhase.EVALUATION, predict), self._on_device():
            losses = mean_losses(self.opened.decoder, rows, batch_size=batch_size)
        return losses if is_batch else losses[0]

    def _prepare(self) -> None:
        """Dequantizes packed weights once if the model is on the CPU, which makes generation faster."""
        from trimtab.run.quantizing import dequantize_for_cpu

        dequantize_for_cpu(self.opened.decoder, print_notice)

    def save(self, folder: str | Path, *, dtype: str = "bf16", overwrite: bool = False) -> Path:
        """Writes a folder that transformers loads, checks it, and returns the receipt's path."""
        from trimtab.export import export_hf

        if self.adapters:
            raise RecipeError(
                f"{self.opened.name} is a model with adapters",
                "merge them with model.merge(folder) (`trimtab merge`), or save only the adapter with "
                "model.save_adapter(folder) (`trimtab export peft`)",
            )
        with self._explained(RunPhase.EXPORT), self._exporting(folder, "hf", dtype) as (target, receipt):
            options = self._folder_options(dtype, receipt, overwrite)
            export_hf(self.opened.decoder, self.opened.tokenizer, target, **options)
        return receipt

    @property
    def adapters(self) -> list[str]:
        """Names of the model's adapters."""
        from trimtab.adapt import adapter_names

        return adapter_names(self.opened.decoder)

    def add_adapter(self, folder: str | Path, name: str) -> None:
        """Loads an adapter from a folder written by peft or `save_adapter`, adds it to the model and activates it."""
        from trimtab.run.adapter_tokens import check_known
        from trimtab.run.models import load_adapter_into

        place = path_of(folder, "the adapter")
        check_known(place, self.opened.tokenizer)
        with self._explained(RunPhase.LOAD), self._on_device():
            load_adapter_into(self.opened, place, print_notice, name=name)

    def use_adapters(self, *names: str) -> None:
        """Activates these adapters and deactivates all others; without names, the base model is used.

        Example:
            >>> model.use_adapters("french")  # doctest: +SKIP
            >>> model.use_adapters()          # doctest: +SKIP
        """
        from trimtab.adapt import use_adapters

        use_adapters(self.opened.decoder, names)

    def save_adapter(
        self,
        folder: str | Path,
        *,
        adapter: str | None = None,
        base_name: str | None = None,
        overwrite: bool = False,
    ) -> Path:
        """Writes an adapter as a folder that peft loads, checks it, and returns the receipt's path.

        Args:
            folder: the folder to write; it must not exist yet.
            adapter: name of the adapter; the active adapter if None.
            base_name: the hub id or Hugging Face folder from which peft loads the base, if peft cannot load the run's
                base (a GGUF file).
            overwrite: whether to replace a folder that contains an adapter.
        """
        from trimtab.export import export_peft
        from trimtab.run.base_weights import check_base_name, unloadable_by_peft

        opened = self.opened
        adapter = check_optional_str(adapter, "adapter") or self._used_adapter()
        base = opened.base or BaseWeights(opened.name)
        if base_name is not None:
            base_name = check_base_name(base_name, opened.decoder.shape)
        elif (problem := unloadable_by_peft(base, opened.folder)) is not None:
            print_notice(problem)
        with self._explained(RunPhase.EXPORT), self._exporting(folder, "peft") as (target, receipt):
            export_peft(
                opened.decoder,
                target,
                base=base,
                base_name=base_name,
                adapter=adapter,
                receipt=receipt,
                source={"model": opened.name, "step": opened.step},
                overwrite=overwrite,
                tokenizer=opened.tokenizer if adapter in opened.adapters_with_tokenizer else None,
            )
        return receipt

    def _used_adapter(self) -> str:
        from trimtab.adapt import active_adapters

        if not self.adapters:
            raise RecipeError(
                f"{self.opened.name} has no adapter", "train one with a `lora` section in the recipe"
            )
        used = active_adapters(self.opened.decoder)
        if len(used) != 1:
            raise RecipeError(
                f"of the adapters {', '.join(sorted(self.adapters))}, {len(used) or 'none'} are active",
                "name the adapter to save: save_adapter(folder, adapter=NAME)",
            )
        return used[0]

    def merge(self, folder: str | Path, *, dtype: str = "bf16", overwrite: bool = False) -> Path:
        """Merges the active adapters into the weights and writes a folder that transformers loads.

        The model must be loaded in fp32: in 16 bits a merge would round twice. This model is merged in place and has
        no adapters afterwards. Returns the receipt's path.
        """
        from trimtab.export import export_merged

        with self._explained(RunPhase.MERGE), self._exporting(folder, "merge", dtype) as (target, receipt):
            options = self._folder_options(dtype, receipt, overwrite)
            export_merged(self.opened.decoder, self.opened.tokenizer, target, **options)
        return receipt

    def _explained(
        self, phase: RunPhase, predict: Callable[[], PredictedMemory] | None = None
    ) -> AbstractContextManager[None]:
        """Adds current and predicted memory use to an out-of-memory error raised inside."""
        from trimtab.run.folder import RunFolder
        from trimtab.run.out_of_memory import explaining_memory

        return explaining_memory(
            phase, self.opened.decoder, run=RunFolder(Path(self.opened.name)), predict=predict
        )

    def _on_device(self) -> AbstractContextManager[Any]:
        """Makes the model's GPU torch's current device."""
        from trimtab.run.torch_setup import on_device_of

        return on_device_of(self.opened.decoder)

    @contextmanager
    def _exporting(self, folder: str | Path, kind: str, dtype: str = "fp32") -> Iterator[tuple[Path, Path]]:
        """Yields the validated (folder, receipt) to write; the body runs on the model's device."""
        target = path_of(folder, "the folder")
        _check_dtype(dtype_alias(dtype))
        places = [
            self.opened.folder,
            Path(self.opened.base.source) if self.opened.base else self.opened.folder,
        ]
        if any(place.resolve().is_relative_to(target.resolve()) for place in places):
            raise RecipeError(
                f"{target} contains the loaded model itself and would be replaced", "name another folder"
            )
        with self._on_device():
            yield target, self._receipt(target, kind)

    def _receipt(self, folder: Path, kind: str) -> Path:
        from trimtab.export.receipt import receipt_path
        from trimtab.run import RunFolder

        run = RunFolder(Path(self.opened.name))
        receipts = run.receipts if RunFolder.is_run(run.path) else None
        receipt = receipt_path(folder, receipts, kind)
        if receipts is not None and receipt.parent != receipts:
            print_notice(f"{receipts} cannot be written: the receipt is written to {receipt}")
        return receipt

    def _folder_options(self, dtype: str, receipt: Path, overwrite: bool) -> dict[str, Any]:
        """Returns the arguments for writing a Hugging Face folder."""
        from trimtab.model import read_generation_config, read_token_ids

        opened = self.opened
        return {
            "dtype": dtype_alias(dtype),
            "receipt": receipt,
            "config_extra": read_token_ids(opened.folder),
            "generation_config": read_generation_config(opened.folder),
            "source": {
                "model": opened.name,
                "step": opened.step,
                **({"base": opened.base.to_dict()} if opened.base else {}),
            },
            "overwrite": overwrite,
        }


def load(
    name: str | Path,
    *,
    revision: str | None = None,
    checkpoint: str | int = "latest",
    adapter: str | Path | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
) -> Model:
    """Loads a model for use.

    Args:
        name: a hub id, a folder, a GGUF file, a run folder, or `starter` for the model that ships with trimtab.
        revision: branch, tag or commit of a hub id.
        checkpoint: checkpoint of a run folder: `latest`, `best` or a step number.
        adapter: a folder with a LoRA adapter, written by peft or `trimtab export peft`, to apply to the model.
        dtype: `fp32`, `bf16`, `fp16`, or `auto` for the best dtype on this device; torch dtypes are accepted too.
        device: `auto`, `cpu`, `cuda`, or `cuda:1` for the second visible GPU, as a string or a torch.device.

    Example:
        >>> trimtab.load("starter")                                # doctest: +SKIP
        Model('starter', llama, 4.69 M parameters, fp32, cpu)
    """
    from trimtab.run.device import current_gpu, detect, require_torch

    require_torch()
    import torch

    from trimtab.run import RunFolder, open_model
    from trimtab.run.out_of_memory import explaining_memory

    place = path_of(name, "the model")
    device = str(device) if isinstance(device, torch.device) else device
    if revision is not None and not isinstance(revision, str):
        raise RecipeError(f"revision is {revision!r}", "give a branch, a tag or a commit as a string")
    facts = detect(device)
    dtype = dtype_alias(dtype)
    if dtype == "auto":
        dtype = "bf16" if facts.bf16 and facts.kind == "cuda" else "fp32"
    if dtype not in DTYPES:
        raise RecipeError(f"dtype {dtype!r} is not supported", f"use auto, {', '.join(DTYPES)}")
    written = os.fsdecode(name)
    with explaining_memory(RunPhase.LOAD, run=RunFolder(place)), current_gpu(device):
        opened = open_model(
            str(place) if written.startswith("~") else written,
            revision=revision,
            checkpoint=checkpoint,
            adapter=None if adapter is None else path_of(adapter, "the adapter"),
            device=torch.device(facts.kind),
            capability=facts.capability,
            dtype=dtype,
            on_event=print_notice,
        )
    return Model(opened)


def check_saving(
    folder: str | Path, *, dtype: str = "fp32", overwrite: bool, holds: str = "config.json"
) -> None:
    """Checks dtype and target folder for the command line before the model is loaded, which may take long."""
    from trimtab.model.save import check_replaceable

    _check_dtype(dtype_alias(dtype))
    check_replaceable(path_of(folder, "the folder"), overwrite, holds, spelled="--overwrite")


def _check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise RecipeError(f"dtype {dtype!r} is not supported", f"use one of {', '.join(DTYPES)}")
