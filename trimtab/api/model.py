"""Loading a model and using it: generate, save, merge, adapters."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from trimtab.api.notices import tell
from trimtab.api.prompts import (
    Messages,
    Prompt,
    as_batch,
    check_stream,
    encode_prompts,
    encode_scored,
    texts_of,
)
from trimtab.facts.arguments import text_or_none, whole_number
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
"""Prompts that are generated together, unless another number is given."""
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
        """The text that follows a prompt, or the answer to chat messages; for a list of prompts the list of texts.

        Options as in `complete`.

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

    def complete(  # type: ignore[misc]  # its own options are listed once, here
        self,
        prompt: Any,
        *,
        stream: Callable[[str], None] | None = None,
        batch_size: int = BATCH_SIZE,
        first_index: int = 0,
        **sampling: Unpack[SamplingKeywords],
    ) -> Completion | list[Completion]:
        """Like `generate`, with token ids, why it ended, and tokens per second.

        Args:
            prompt: text to continue, or chat messages (`[{"role": "user", "content": "…"}]`); or a list of texts
                or of conversations, which are generated in batches, each as it would be alone.
            stream: called with each piece of text as it comes; for a single prompt.
            batch_size: prompts that are generated together. It does not change what is drawn.
            first_index: number of the first prompt: what is drawn depends on the seed and the prompt's number, so a
                long list may be given in parts.
            sampling: the fields of `trimtab.generate.SamplingOptions` by name: `max_new_tokens` (at most so many; by
                default 128, or what the model has room for), `temperature` (0 always takes the likeliest token; by
                default 0, or 1 if top_p or top_k is given), `top_p` (draw from the likeliest tokens of this mass),
                `top_k` (draw from the so many likeliest tokens; 0 for all), `stop` (a text, or several, before which
                it ends), `seed` (the same seed draws the same text).

        Example:
            >>> done = model.complete("2 + 2 =", max_new_tokens=2, temperature=0.7, seed=7)  # doctest: +SKIP
            >>> done.text, done.finish_reason                                                # doctest: +SKIP
            (' 4', 'length')
        """
        from trimtab.generate import SamplingOptions, generate, generate_many
        from trimtab.run.inference_memory import predict_prompts

        options = SamplingOptions.of(sampling)
        first_index = whole_number(first_index, "first_index")
        batch_size = whole_number(batch_size, "batch_size", least=1)
        prompts, is_batch = as_batch(prompt, "the prompt")
        check_stream(stream)
        if is_batch and stream is not None:
            raise RecipeError("stream is given with a list of prompts", "give one prompt, or no stream")
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
        """Generates for every prompt of a file and writes JSON lines, in order; returns how many rows there are.

        Rows are written batch by batch. If `output` holds rows already, of the same prompts, model and options, it goes
        on behind them: a call that was killed can be repeated as it is.

        Args:
            prompts: `.txt` with one prompt per line, `.jsonl` with {"prompt": …} or {"messages": […]}, or `.csv` with
                a column `prompt`.
            output: the file to write: index, prompt or messages, completion, finish_reason, tokens, settings.
            chat: prompts that are texts are user messages for the chat template.
            system: the system message of conversations that have none.
            batch_size: prompts that are generated together.
            overwrite: begin anew, whatever `output` holds.
            on_progress: called with (prompts done, prompts in all) after each batch.
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
        """A conversation that remembers: each message is answered with those before it in view.

        Args:
            system: the system message.
            sampling: as in `complete`; `max_new_tokens` of an answer, by default 512, or what the model has room for.

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
        return Chat(self.opened, options, system=text_or_none(system, "system"))

    @overload
    def loss(self, text: Prompt, *, batch_size: int = 8) -> float: ...
    @overload
    def loss(self, text: list[str] | list[Messages], *, batch_size: int = 8) -> list[float]: ...

    def loss(self, text: Any, *, batch_size: int = 8) -> float | list[float]:
        """Mean loss per token (nats) of a text, given what stands before each token; of a list the list of losses.

        Of a text every token counts but the first, as in transformers with `labels=input_ids`; no end token is
        added. Of a conversation the answers count, as in training with `train_on: completions`.

        Example:
            >>> model.loss("Once upon a time")                           # doctest: +SKIP
            2.31
            >>> model.loss(["Once upon a time", "time a upon Once"])     # doctest: +SKIP
            [2.31, 8.4]
        """
        from trimtab.evaluate import mean_losses
        from trimtab.run.inference_memory import predict_losses

        texts, is_batch = as_batch(text, "the text")
        batch_size = whole_number(batch_size, "batch_size", least=1)
        rows = encode_scored(self.opened.tokenizer, texts)
        longest, together = max(len(ids) for ids, _ in rows), min(batch_size, len(rows))
        predict = partial(predict_losses, self.opened.decoder, together, longest, packed=True)
        with self._explained(RunPhase.EVALUATION, predict), self._on_device():
            losses = mean_losses(self.opened.decoder, rows, batch_size=batch_size)
        return losses if is_batch else losses[0]

    def _prepare(self) -> None:
        """Dequantizes packed weights for the CPU, once: generating is faster then."""
        from trimtab.run.quantizing import dequantize_for_cpu

        dequantize_for_cpu(self.opened.decoder, tell)

    def save(self, folder: str | Path, *, dtype: str = "bf16", overwrite: bool = False) -> Path:
        """Writes a folder that transformers loads, checks it, and returns the receipt's path."""
        from trimtab.export import export_hf

        if self.adapters:
            raise RecipeError(
                f"{self.opened.name} is a model with adapters",
                "merge them with model.merge(folder) (`trimtab merge`), or write the adapter alone with "
                "model.save_adapter(folder) (`trimtab export peft`)",
            )
        with self._explained(RunPhase.EXPORT), self._exporting(folder, "hf", dtype) as (target, receipt):
            options = self._folder_options(dtype, receipt, overwrite)
            export_hf(self.opened.decoder, self.opened.tokenizer, target, **options)
        return receipt

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters on the model."""
        from trimtab.adapt import adapter_names

        return adapter_names(self.opened.decoder)

    def add_adapter(self, folder: str | Path, name: str) -> None:
        """Puts one more adapter on the model, from a folder of peft's or of `save_adapter`, and uses it."""
        from trimtab.run.adapter_tokens import check_known
        from trimtab.run.models import put_adapter

        place = path_of(folder, "the adapter")
        check_known(place, self.opened.tokenizer)
        with self._explained(RunPhase.LOAD), self._on_device():
            put_adapter(self.opened, place, tell, name=name)

    def use_adapters(self, *names: str) -> None:
        """Which adapters take part from now on; none at all gives the base model.

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
            folder: where to; it must not exist yet.
            adapter: which one; the one in use if None.
            base_name: the hub id or Hugging Face folder that peft is to load the base from, where the run's own base
                is nothing that peft can load (a GGUF file).
            overwrite: replace a folder that holds an adapter.
        """
        from trimtab.export import export_peft
        from trimtab.run.base_weights import check_base_name, unloadable_by_peft

        opened = self.opened
        adapter = text_or_none(adapter, "adapter") or self._used_adapter()
        base = opened.base or BaseWeights(opened.name)
        if base_name is not None:
            base_name = check_base_name(base_name, opened.decoder.shape)
        elif (problem := unloadable_by_peft(base, opened.folder)) is not None:
            tell(problem)
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
                tokenizer=opened.tokenizer if adapter in opened.with_tokens else None,
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
                f"of the adapters {', '.join(sorted(self.adapters))}, {len(used) or 'none'} are in use",
                "name the one to write: save_adapter(folder, adapter=NAME)",
            )
        return used[0]

    def merge(self, folder: str | Path, *, dtype: str = "bf16", overwrite: bool = False) -> Path:
        """Merges the adapters in use into the weights and writes a folder that transformers loads.

        It must be loaded in fp32: in 16 bits a merge would round twice. The model itself is merged from then on: it has
        no adapters any more. Returns the receipt's path.
        """
        from trimtab.export import export_merged

        with self._explained(RunPhase.MERGE), self._exporting(folder, "merge", dtype) as (target, receipt):
            options = self._folder_options(dtype, receipt, overwrite)
            export_merged(self.opened.decoder, self.opened.tokenizer, target, **options)
        return receipt

    def _explained(
        self, phase: RunPhase, predict: Callable[[], PredictedMemory] | None = None
    ) -> AbstractContextManager[None]:
        """Says what fills the memory where it runs out inside, and what was predicted."""
        from trimtab.run.folder import RunFolder
        from trimtab.run.out_of_memory import explaining_memory

        return explaining_memory(
            phase, self.opened.decoder, run=RunFolder(Path(self.opened.name)), predict=predict
        )

    def _on_device(self) -> AbstractContextManager[Any]:
        """The GPU that the model is on as torch's current one."""
        from trimtab.run.torch_setup import on_device_of

        return on_device_of(self.opened.decoder)

    @contextmanager
    def _exporting(self, folder: str | Path, kind: str, dtype: str = "fp32") -> Iterator[tuple[Path, Path]]:
        """(folder, receipt) to write, checked; the body runs on the model's device."""
        target = path_of(folder, "the folder")
        _check_dtype(dtype_alias(dtype))
        places = [
            self.opened.folder,
            Path(self.opened.base.source) if self.opened.base else self.opened.folder,
        ]
        if any(place.resolve().is_relative_to(target.resolve()) for place in places):
            raise RecipeError(
                f"{target} is where the model itself comes from, and would be replaced", "name another folder"
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
            tell(f"{receipts} cannot be written: the receipt goes to {receipt}")
        return receipt

    def _folder_options(self, dtype: str, receipt: Path, overwrite: bool) -> dict[str, Any]:
        """What a Hugging Face folder is written with."""
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
        name: a hub id, a folder, a GGUF file, a run folder, or `starter` for the one that ships with trimtab.
        revision: branch, tag or commit of a hub id.
        checkpoint: of a run folder: `latest`, `best` or a step number.
        adapter: a folder with a LoRA adapter, of peft's or of `trimtab export peft`, to put on the model.
        dtype: `fp32`, `bf16`, `fp16`, or `auto` for what the device computes well; torch's dtypes are accepted too.
        device: `auto`, `cpu`, `cuda`, or `cuda:1` for the second of the visible GPUs, as text or a torch.device.

    Example:
        >>> trimtab.load("starter")                                # doctest: +SKIP
        Model('starter', llama, 4.69 M parameters, fp32, cpu)
    """
    from trimtab.run.device import current_gpu, detect, need_torch

    need_torch()
    import torch

    from trimtab.run import RunFolder, open_model
    from trimtab.run.out_of_memory import explaining_memory

    place = path_of(name, "the model")
    device = str(device) if isinstance(device, torch.device) else device
    if revision is not None and not isinstance(revision, str):
        raise RecipeError(f"revision is {revision!r}", "give a branch, a tag or a commit as text")
    facts = detect(device)
    dtype = dtype_alias(dtype)
    if dtype == "auto":
        dtype = "bf16" if facts.bf16 and facts.kind == "cuda" else "fp32"
    if dtype not in DTYPES:
        raise RecipeError(f"dtype {dtype!r} is not known", f"use auto, {', '.join(DTYPES)}")
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
            on_event=tell,
        )
    return Model(opened)


def check_saving(
    folder: str | Path, *, dtype: str = "fp32", overwrite: bool, holds: str = "config.json"
) -> None:
    """For the command line, before a model is read, which may take long: refuses another dtype and a folder that may
    not be replaced."""
    from trimtab.model.save import check_replaceable

    _check_dtype(dtype_alias(dtype))
    check_replaceable(path_of(folder, "the folder"), overwrite, holds, spelled="--overwrite")


def _check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise RecipeError(f"dtype {dtype!r} is not known", f"use one of {', '.join(DTYPES)}")
