"""Files of prompts, and the file of what was generated for them: rows in order, resumable after a kill.

An output row holds the prompt, the completion and a digest of the settings (`settings`), so that a later call can
check that the existing rows are the beginning of what it would write, and continue after them.
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
"""What an output row says itself; other keys of a prompt's row are copied."""


@dataclass(frozen=True)
class PromptRow:
    """One prompt of a file."""

    place: str
    """`file:line`, for messages."""
    fields: Mapping[str, Any]
    """The row as it stands in the file: `prompt` (a text) or `messages`, and whatever else it has."""

    def prompt(self, *, chat: bool = False, system: str | None = None) -> Prompt:
        """What the model is asked: a text, or a conversation, which a text is turned into with `chat`."""
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
    """Prompts of a file: `.txt` one per line, `.jsonl` {"prompt": …} or {"messages": […]}, `.csv` a column `prompt`.

    Empty lines are skipped. DataError with the line for a row that cannot be used.

    Example:
        >>> [row.prompt() for row in read_prompts("questions.txt")]        # doctest: +SKIP
        ['What is 2 + 2?', 'What is 3 + 3?']
    """
    path = Path(path)
    if path.suffix.lower() not in KINDS:
        raise DataError(f"{path} is none of {', '.join(KINDS)}", "rename or convert the file of prompts")
    try:
        with path.open("r", encoding="utf-8-sig", newline="\n") as file:
            rows = list(_rows(path, file))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})", "name a file of prompts") from error
    if not rows:
        raise DataError(f"{path} holds no prompts", "write one prompt per line")
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
    """Lines by number; only "\\n" ends one, so that numbers are those of an editor."""
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
            raise DataError(f"{place}: prompt is no text", remedy)
        return row
    messages = row["messages"]
    good = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in messages
    )
    if not good or not messages:
        raise DataError(f"{place}: messages is no list of messages with role and content", remedy)
    return row


def _csv_rows(path: Path, file: IO[str]) -> Iterator[PromptRow]:
    reader = csv.DictReader((line for _, line in _lines(path, file)), strict=True)
    while True:
        before = max(reader.line_num, 1) + 1
        try:
            if "prompt" not in (reader.fieldnames or []):
                raise DataError(f"{path} has no column prompt", "call the column with the prompts `prompt`")
            row = next(reader, None)
        except csv.Error as error:
            raise DataError(f"{path}:{before}: not CSV ({error})", "quote fields that hold quotes") from None
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
    """What decides the completions besides the prompts, in 12 characters."""
    plain = json.dumps(settings, sort_keys=True, default=str, ensure_ascii=False)
    return hashlib.sha256(plain.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def keyword(name: str) -> str:
    """How Python writes an argument of `Model.generate_file` in messages; the command line has its flags.

    Example:
        >>> keyword("output"), keyword("overwrite")
        ('output', 'overwrite=True')
    """
    return f"{name}=True" if name in ("chat", "overwrite") else name


class OutputFile:
    """The rows written so far, and appending to them; a row half written by a killed process is taken off.

    Args:
        path: made if it does not exist. A device or a pipe is written to, and never read.
        rows: the prompts, in order.
        digest: of the settings.
        overwrite: begin anew whatever is there.
        spelled: how error messages write an argument's name.
    """

    def __init__(
        self,
        path: str | Path,
        rows: Sequence[PromptRow],
        digest: str,
        *,
        overwrite: bool,
        spelled: Callable[[str], str] = keyword,
    ) -> None:
        self.path, self._rows, self._digest, self._spelled = Path(path), rows, digest, spelled
        self._is_regular = self.path.is_file() or not self.path.exists()
        try:
            self._file = self.path.open(
                "wb" if not self._is_regular else "r+b" if self.path.exists() and not overwrite else "w+b"
            )
        except OSError as error:
            raise ResourceError(
                f"{self.path} cannot be written ({error.strerror})", f"name another {spelled('output')}"
            ) from error
        self.done = 0
        """Rows that are there."""
        if self._is_regular:
            self._find_end()

    def _find_end(self) -> None:
        """Checks the rows that are there and cuts off one that is incomplete."""
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
        """Appends the next rows and hands them to the disk."""
        lines = [
            self._line(self.done + i, self._rows[self.done + i], one) for i, one in enumerate(completions)
        ]
        try:
            self._file.write("".join(lines).encode())
            self._file.flush()
            if self._is_regular:
                os.fsync(self._file.fileno())
        except BrokenPipeError:
            raise
        except OSError as error:
            with contextlib.suppress(OSError):  # closing writes what is buffered once more
                self._file.close()
            raise ResourceError(
                f"{self.path} cannot be written ({error.strerror}); {self.done} rows are in it",
                f"free some space and do the same again, which goes on from there, or name another "
                f"{self._spelled('output')}",
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

    def _line(self, index: int, row: PromptRow, one: Completion) -> str:
        made = {"completion": one.text, "finish_reason": one.finish_reason, "tokens": len(one.ids)}
        # Escaped: a text may hold half of a Unicode pair, which UTF-8 cannot.
        return json.dumps({**self._beginning(index, row), **made, "settings": self._digest}) + "\n"

    def _is_cut(self, line: bytes) -> bool:
        """Whether a line without its end is the beginning of the next row, as a killed process leaves it."""
        if self.done >= len(self._rows):
            return False
        begins = self._beginning(self.done, self._rows[self.done])
        written = json.dumps(begins).removesuffix("}").encode()
        return line.startswith(written) or written.startswith(line)

    def _check(self, line: bytes) -> None:
        """RecipeError unless a row that is there is the one that would be written."""
        remedy = f"name another {self._spelled('output')}, or start anew with {self._spelled('overwrite')}"
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
                f"{self.path}:{self.done + 1} answers another prompt than {self._rows[self.done].place}",
                remedy,
            )
