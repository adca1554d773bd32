"""Loading a model and using it: generate, save, merge, adapters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.facts.errors import RecipeError

if TYPE_CHECKING:
    from trimtab.generate import Completion
    from trimtab.run import OpenedModel

Messages = Sequence[dict[str, str]]

DEFAULT_NEW_TOKENS = 128
DTYPES = ("fp32", "bf16", "fp16")


@dataclass
class Model:
    """A loaded model with its tokenizer.

    Example:
        >>> model = trimtab.load("starter")                        # doctest: +SKIP
        >>> model.generate("Once upon a time", max_new_tokens=20)  # doctest: +SKIP
        ' there was a little girl named Mia …'
    """

    opened: OpenedModel

    def generate(self, prompt: str | Messages, **options: Any) -> str:
        """The text that follows a prompt, or the answer to chat messages; options as in `complete`."""
        return self.complete(prompt, **options).text

    def complete(
        self,
        prompt: str | Messages,
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        stop: str | Sequence[str] = (),
        seed: int = 0,
        stream: Callable[[str], None] | None = None,
    ) -> Completion:
        """Like `generate`, with token ids, why it ended, and tokens a second.

        Args:
            prompt: text to continue, or chat messages (`[{"role": "user", "content": "…"}]`).
            max_new_tokens: at most so many; by default 128, or what the model has room for.
            temperature: 0 always takes the likeliest token.
            top_p: draw from the likeliest tokens of this mass.
            top_k: draw from the so many likeliest tokens; 0 for all.
            stop: a text, or several, before which it ends.
            seed: the same seed draws the same text.
            stream: called with each piece of text as it comes.
        """
        from trimtab.generate import generate

        tokenizer = self.opened.tokenizer
        ids = tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else tokenizer.encode_chat(prompt)
        if max_new_tokens is None:
            room = self.opened.decoder.shape.max_positions - len(ids)
            max_new_tokens = max(1, min(DEFAULT_NEW_TOKENS, room))
        with self._on_device():
            return generate(
                self.opened.decoder,
                tokenizer,
                ids,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                stop=[stop] if isinstance(stop, str) else list(stop),
                seed=seed,
                stream=stream,
            )

    def save(self, folder: str | Path, *, dtype: str = "bf16", overwrite: bool = False) -> Path:
        """Writes a folder that transformers loads, checks it, and returns the receipt's path."""
        from trimtab.export import export_hf

        folder = Path(folder)
        self._check_target(folder, dtype)
        if self.adapters:
            raise RecipeError(
                f"{self.opened.name} is a model with adapters",
                "use `trimtab merge`, or `trimtab export peft`",
            )
        receipt = self._receipt(folder, "hf")
        with self._on_device():
            export_hf(
                self.opened.decoder,
                self.opened.tokenizer,
                folder,
                **self._folder_options(dtype, receipt, overwrite),
            )
        return receipt

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters on the model."""
        from trimtab.adapt import adapter_names

        return adapter_names(self.opened.decoder)

    def add_adapter(self, folder: str | Path, name: str) -> None:
        """Puts one more adapter on the model, from a folder of peft's or of `save_adapter`, and uses it."""
        from trimtab.run.adapter_tokens import check_known
        from trimtab.run.sources import put_adapter

        check_known(Path(folder), self.opened.tokenizer)
        with self._on_device():
            put_adapter(self.opened, Path(folder), _tell, name=name)

    def use_adapters(self, *names: str) -> None:
        """Which adapters take part from now on; none at all gives the base model.

        Example:
            >>> model.use_adapters("french")  # doctest: +SKIP
            >>> model.use_adapters()          # doctest: +SKIP
        """
        from trimtab.adapt import use_adapters

        use_adapters(self.opened.decoder, names)

    def save_adapter(
        self, folder: str | Path, *, adapter: str | None = None, overwrite: bool = False
    ) -> Path:
        """Writes an adapter, the one in use unless another is named, as a folder that peft loads, checks it, and
        returns the receipt's path."""
        from trimtab.export import export_peft

        opened, folder = self.opened, Path(folder)
        self._check_target(folder, "fp32")
        adapter = adapter or self._used_adapter()
        receipt = self._receipt(folder, "peft")
        with self._on_device():
            export_peft(
                opened.decoder,
                folder,
                base=opened.base or {"source": opened.name},
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

        folder = Path(folder)
        self._check_target(folder, dtype)
        receipt = self._receipt(folder, "merge")
        with self._on_device():
            export_merged(
                self.opened.decoder,
                self.opened.tokenizer,
                folder,
                **self._folder_options(dtype, receipt, overwrite),
            )
        return receipt

    def _on_device(self) -> AbstractContextManager[Any]:
        """The GPU that the model is on as torch's current one."""
        from trimtab.run.torch_setup import on_device_of

        return on_device_of(self.opened.decoder)

    def _check_target(self, folder: Path, dtype: str) -> None:
        _check_dtype(dtype)
        places = [self.opened.folder, Path((self.opened.base or {}).get("source", self.opened.folder))]
        if any(place.resolve().is_relative_to(folder.resolve()) for place in places):
            raise RecipeError(
                f"{folder} is where the model itself comes from, and would be replaced", "name another folder"
            )

    def _receipt(self, folder: Path, kind: str) -> Path:
        from trimtab.export.receipt import receipt_path
        from trimtab.run import RunFolder

        run = RunFolder(Path(self.opened.name))
        receipts = run.receipts if RunFolder.is_run(run.path) else None
        receipt = receipt_path(folder, receipts, kind)
        if receipts is not None and receipt.parent != receipts:
            _tell(f"{receipts} cannot be written: the receipt goes to {receipt}")
        return receipt

    def _folder_options(self, dtype: str, receipt: Path, overwrite: bool) -> dict[str, Any]:
        """What a Hugging Face folder is written with."""
        from trimtab.model import read_generation_config, read_token_ids

        opened = self.opened
        return {
            "dtype": dtype,
            "receipt": receipt,
            "config_extra": read_token_ids(opened.folder),
            "generation_config": read_generation_config(opened.folder),
            "source": {
                "model": opened.name,
                "step": opened.step,
                **({"base": opened.base} if opened.base else {}),
            },
            "overwrite": overwrite,
        }


def load(
    name: str | Path,
    *,
    revision: str | None = None,
    checkpoint: str | int = "latest",
    adapter: str | Path | None = None,
    dtype: str = "auto",
    device: str = "auto",
) -> Model:
    """Loads a model for use.

    Args:
        name: a hub id, a folder, a GGUF file, a run folder, or `starter` for the one that ships with trimtab.
        revision: branch, tag or commit of a hub id.
        checkpoint: of a run folder: `latest`, `best` or a step number.
        adapter: a folder with a LoRA adapter, of peft's or of `trimtab export peft`, to put on the model.
        dtype: `fp32`, `bf16`, `fp16`, or `auto` for what the device computes well.
        device: `auto`, `cpu`, `cuda`, or `cuda:1` for the second of the visible GPUs.
    """
    from trimtab.launch import detect
    from trimtab.launch.device import current_gpu, need_torch

    need_torch()
    import torch

    from trimtab.run import open_model

    facts = detect(device)
    if dtype == "auto":
        dtype = "bf16" if facts.bf16 and facts.kind == "cuda" else "fp32"
    if dtype not in DTYPES:
        raise RecipeError(f"dtype {dtype!r} is not known", f"use auto, {', '.join(DTYPES)}")
    with current_gpu(device):
        opened = open_model(
            str(name),
            revision=revision,
            checkpoint=checkpoint,
            adapter=adapter,
            device=torch.device(facts.kind),
            capability=facts.capability,
            dtype=dtype,
            on_event=_tell,
        )
    return Model(opened)


def check_saving(folder: str | Path, *, dtype: str, overwrite: bool) -> None:
    """What can be refused before a model is read, which may take long: another format, a folder that stays."""
    from trimtab.model.save import check_replaceable

    _check_dtype(dtype)
    check_replaceable(Path(folder), overwrite)


def _check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise RecipeError(f"dtype {dtype!r} is not known", f"use one of {', '.join(DTYPES)}")


def _tell(message: str) -> None:
    """A line for the person, on standard error: what a program reads from standard output stays as it was."""
    from trimtab.report.plain import plain

    print(plain(message), file=sys.stderr)
