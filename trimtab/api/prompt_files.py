"""Reads files of prompts, and writes the resumable output file of their completions, with rows in order.

An output row contains the prompt, the completion and a digest of the settings (`settings`), so that a later call can
check that the existing rows match its prompts and settings, and continue after them.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from trimtab.facts.errors import DataError, RecipeError, ResourceError

if TYPE_CHECKING:
    from trimtab.api.prompts import Prompt
    from trimtab.generate import Completion

KINDS = (".txt", ".jsonl", ".csv")
OWN_KEYS = ("index", "prompt", "messages", "completion", "finish_reason", "tokens", "settings")
"""Keys that an output row sets; other keys of a prompt's row are copied."""


@dataclass(frozen=True)
class PromptRow:
    """One prompt of a file."""

    place: str
    """`file:line`, for error messages."""
    fields: Mapping[str, Any]
    """The row of the file: `prompt` (a text) or `messages`, and any other fields."""

    def prompt(self, *, chat: bool = False, system: str | None = None) -> Prompt:
        """Returns the prompt: a text, or a conversation, to which `chat` converts a text."""
        if "messages" in self.fields:
            messages = list(self.fields["messages"])
        elif chat:
            messages = [{"role": "user", "content": self.fields["prompt"]}]
        else:
            text: str = self.fields["prompt"]
            return text
        if system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        return messages


def read_prompts(path: str | Path) -> list[PromptRow]:
    """Reads prompts: `.txt` one per line, `.jsonl` {"prompt": …} or {"messages": […]}, `.csv` a column `prompt`.

    Empty lines are skipped. Raises a DataError with the line number for an invalid row.

    Example:
        >>> [row.prompt() for row in read_prompts("questions.txt")]        # doctest: +SKIP
        ['What is 2 + 2?', 'What is 3 + 3?']
    """
    path = Path(path)
    if path.suffix.lower() not in KINDS:
        raise DataError(f"{path} is not one of {', '.join(KINDS)}", "rename or convert the file of prompts")
    try:
        with path.open("r", encoding="utf-8-sig", newline="\n") as file:
            rows = list(_rows(path, file))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})", "name a file of prompts") from error
    if not rows:
        raise DataError(f"{path} contains no prompts", "write one prompt per line")
    return rows


def _rows(path: Path, file: IO[str]) -> Iterator[PromptRow]:
    if path.suffix.lower() == ".csv":
        yield from _csv_rows(path, file)
        return
    for number, line in _lines(path, file):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        if path.suffix.lower() == ".txt":
            yield PromptRow(place, {"prompt": line.rstrip("\r\n")})
        else:
            yield PromptRow(place, _json_fields(place, line))


def _lines(path: Path, file: IO[str]) -> Iterator[tuple[int, str]]:
    """Yields numbered lines; only "\\n" ends a line, so that numbers match those of an editor."""
    number = 0
    try:
        for number, line in enumerate(file, 1):
            yield number, line
    except UnicodeDecodeError:
        raise DataError(
            f"{path}: line {number + 1} or a later one is not UTF-8", "convert the file"
        ) from None


def _json_fields(place: str, line: str) -> dict[str, Any]:
    remedy = 'write {"prompt": "…"} or {"messages": [{"role": "user", "content": "…"}]}'
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: not JSON ({error.msg}, column {error.colno})", remedy) from None
    if not isinstance(row, dict):
        raise DataError(f"{place}: not a JSON object", remedy)
    if ("prompt" in row) == ("messages" in row):
        found = "both prompt and messages" if "prompt" in row else "neither prompt nor messages"
        raise DataError(f"{place}: the row has {found}", remedy)
    if isinstance(row.get("prompt"), list):  # as in the `prompt-completion` format of training data
        row["messages"] = row.pop("prompt")
    if "prompt" in row:
        if not isinstance(row["prompt"], str):
            raise DataError(f"{place}: prompt is not a string", remedy)
        return row
    messages = row["messages"]
    good = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in messages
    )
    if not good or not messages:
        raise DataError(f"{place}: messages is not a list of messages with role and content", remedy)
    return row


def _csv_rows(path: Path, file: IO[str]) -> Iterator[PromptRow]:
    reader = csv.DictReader((line for _, line in _lines(path, file)), strict=True)
    while True:
        before = max(reader.line_num, 1) + 1
        try:
            if "prompt" not in (reader.fieldnames or []):
                raise DataError(f"{path} has no column `prompt`", "name the column with the prompts `prompt`")
            row = next(reader, None)
        except csv.Error as error:
            raise DataError(
                f"{path}:{before}: invalid CSV ({error})", "quote fields that contain quotes"
            ) from None
        if row is None:
            return
        if None in row or None in row.values():
            raise DataError(
                f"{path}:{before}: the row has more or fewer fields than the header",
                "give the row as many fields as the header has",
            )
        if row["prompt"].strip():
            yield PromptRow(f"{path}:{before}", row)


def settings_digest(settings: Mapping[str, Any]) -> str:
    """Returns a digest of 12 characters of the settings that determine the completions."""
    plain = json.dumps(settings, sort_keys=True, default=str, ensure_ascii=False)
    return hashlib.sha256(plain.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def keyword(name: str) -> str:
    """Returns the name of an argument of `Model.generate_file` in error messages; the command line uses its flags.

    Example:
        >>> keyword("output"), keyword("overwrite")
        ('output', 'overwrite=True')
    """
    return f"{name}=True" if name in ("chat", "overwrite") else name


class OutputFile:
    """Validates existing rows and appends to them; removes a partial row that a killed process left.

    Args:
        path: the file, created if it does not exist. A device or a pipe is only written.
        rows: the prompts, in order.
        digest: digest of the settings.
        overwrite: whether to discard existing rows.
        argument_name: returns the name of an argument in error messages.
    """

    def __init__(
        self,
        path: str | Path,
        rows: Sequence[PromptRow],
        digest: str,
        *,
        overwrite: bool,
        argument_name: Callable[[str], str] = keyword,
    ) -> None:
        self.path, self._rows, self._digest, self._argument_name = Path(path), rows, digest, argument_name
        self._is_regular = self.path.is_file() or not self.path.exists()
        try:
            self._file = self.path.open(
                "wb" if not self._is_regular else "r+b" if self.path.exists() and not overwrite else "w+b"
            )
        except OSError as error:
            raise ResourceError(
                f"{self.path} cannot be written ({error.strerror})", f"name another {argument_name('output')}"
            ) from error
        self.done = 0
        """Number of complete rows in the file."""
        if self._is_regular:
            self._find_end()

    def _find_end(self) -> None:
        """Checks the existing rows and truncates an incomplete one."""
        end = 0
        try:
            for line in self._file:
                if not line.endswith(b"\n"):
                    if not self._is_cut(line):
                        self._check(line)
                    break  # it is written again
                self._check(line)
                self.done += 1
                end += len(line)
            self._file.seek(end)
            self._file.truncate()
        except BaseException:
            self._file.close()
            raise

    def write(self, completions: Sequence[Completion]) -> None:
        """Appends the next rows and syncs them to disk."""
        lines = [
            self._line(self.done + i, self._rows[self.done + i], completion)
            for i, completion in enumerate(completions)
        ]
        try:
            self._file.write("".join(lines).encode())
            self._file.flush()
            if self._is_regular:
                os.fsync(self._file.fileno())
        except BrokenPipeError:
            raise
        except OSError as error:
            with contextlib.suppress(OSError):  # closing flushes the buffer again
                self._file.close()
            raise ResourceError(
                f"{self.path} cannot be written ({error.strerror}); it contains {self.done} rows",
                f"free some space and repeat the call, which continues after these rows, or name another "
                f"{self._argument_name('output')}",
            ) from error
        self.done += len(lines)

    def close(self) -> None:
        """Closes the file; idempotent."""
        self._file.close()

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _beginning(self, index: int, row: PromptRow) -> dict[str, Any]:
        asked = {key: row.fields[key] for key in ("prompt", "messages") if key in row.fields}
        more = {key: value for key, value in row.fields.items() if key not in OWN_KEYS}
        return {"index": index, **asked, **more}

    def _line(self, index: int, row: PromptRow, completion: Completion) -> str:
        made = {
            "completion": completion.text,
            "finish_reason": completion.finish_reason,
            "tokens": len(completion.ids),
        }
        # Escaped because a text may contain a lone surrogate, which UTF-8 cannot encode.
        return json.dumps({**self._beginning(index, row), **made, "settings": self._digest}) + "\n"

    def _is_cut(self, line: bytes) -> bool:
        """Whether a line without a newline is a prefix of the next row, as a killed process leaves it."""
        if self.done >= len(self._rows):
            return False
        begins = self._beginning(self.done, self._rows[self.done])
        written = json.dumps(begins).removesuffix("}").encode()
        return line.startswith(written) or written.startswith(line)

    def _check(self, line: bytes) -> None:
        """Raises a RecipeError unless an existing row belongs to the next prompt and the same settings."""
        output, overwrite = self._argument_name("output"), self._argument_name("overwrite")
        remedy = f"name another {output}, or replace the file with {overwrite}"
        try:
            row = json.loads(line)
            index, digest = row["index"], row["settings"]
        except (ValueError, TypeError, KeyError):
            raise RecipeError(
                f"{self.path}:{self.done + 1} was not written by `trimtab generate`", remedy
            ) from None
        if digest != self._digest:
            raise RecipeError(f"{self.path} was written with another model or other options", remedy)
        if self.done >= len(self._rows):
            raise RecipeError(f"{self.path} has more rows than there are prompts", remedy)
        asked = self._rows[self.done].fields
        same = all(row.get(key) == asked.get(key) for key in ("prompt", "messages"))
        if index != self.done or not same:
            raise RecipeError(
                f"{self.path}:{self.done + 1} is for another prompt than {self._rows[self.done].place}",
                remedy,
            )
