"""`trimtab generate --prompts` and `trimtab chat`."""

from __future__ import annotations

import fcntl
import io
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from cli_world import Call, CommandResult, World
from tiny_model import write_tiny_model

import trimtab
from trimtab.api.prompt_files import read_prompts
from trimtab.cli.chat import Session
from trimtab.facts.errors import DataError
from trimtab.generate import generate_many
from trimtab.report.plain import plain

TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
LINES = ["the cat", "a dog and a red house", "it was", "over the tree", "then a"]


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(LINES[:2]) + "\n\n" + "\n".join(LINES[2:]) + "\n")
    return path


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template, and weights large enough that the question changes the answer."""
    folder = write_tiny_model(tmp_path_factory.mktemp("chat") / "model", initializer_range=0.3)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_a_file_of_prompts(world: World, prompts: Path, tmp_path: Path, cli: Call) -> None:
    out = tmp_path / "out.jsonl"
    options = ("--max-new-tokens", 6, "--top-k", 40, "--seed", 3)
    result = cli("generate", world.run, "--prompts", prompts, "--output", out, "--batch-size", 2, *options)
    assert result.code == 0, result.err
    assert result.out == f"written: {out}, 5 rows (5 new)\n"
    assert "generating: 5 prompts" in result.err
    found = rows(out)
    assert [row["prompt"] for row in found] == LINES
    assert [row["index"] for row in found] == [0, 1, 2, 3, 4]
    assert set(found[0]) == {"index", "prompt", "completion", "finish_reason", "tokens", "settings"}
    other = tmp_path / "other.jsonl"
    assert cli("generate", world.run, "--prompts", prompts, "--output", other, *options).code == 0
    assert other.read_bytes() == out.read_bytes(), "the batch size changes nothing"
    # Repeated, it has nothing to do; truncated in the middle of a row, it continues.
    whole = out.read_bytes()
    assert "5 rows (0 new)" in cli("generate", world.run, "--prompts", prompts, "--output", out, *options).out
    out.write_bytes(whole[: whole.index(b"\n", whole.index(b"\n") + 1) + 30])
    result = cli("generate", world.run, "--prompts", prompts, "--output", out, *options)
    assert "already contains 2 of 5 rows" in result.err
    assert "5 rows (3 new)" in result.out
    assert out.read_bytes() == whole
    # A longer file of prompts continues after the existing rows.
    prompts.write_text(prompts.read_text() + "small\n")
    assert "6 rows (1 new)" in cli("generate", world.run, "--prompts", prompts, "--output", out, *options).out
    assert out.read_bytes().startswith(whole)


def test_rows_of_other_prompts_or_options_are_refused(
    world: World, prompts: Path, tmp_path: Path, cli: Call
) -> None:
    out = tmp_path / "out.jsonl"
    command = ("generate", world.run, "--prompts", prompts, "--output", out, "--max-new-tokens", 4)
    assert cli(*command).code == 0
    cli(*command, "--temperature", 1).refused(2, "another model or other options", "--overwrite")
    cli("generate", world.model, *command[2:]).refused(2, "another model or other options")
    text = prompts.read_text()
    prompts.write_text(text.replace("it was", "it is"))
    cli(*command).refused(2, "out.jsonl:3 is for another prompt than", "prompts.txt:4", "--overwrite")
    prompts.write_text("the cat\n")
    cli(*command).refused(2, "more rows than there are prompts")
    prompts.write_text(text)
    before = out.read_bytes()
    assert cli(*command, "--temperature", 1, "--overwrite").code == 0
    assert out.read_bytes() != before
    out.write_text("some notes\n")
    cli(*command).refused(2, "out.jsonl:1 was not written by `trimtab generate`")
    assert out.read_text() == "some notes\n"
    # A line without a newline is not always a row truncated by a kill.
    for notes in ("some notes", '{"index": 7, "of": "a book"}', '{"index": 0, "prompt": "of another'):
        out.write_text(notes)
        cli(*command).refused(2, "out.jsonl:1 was not written by `trimtab generate`", "--overwrite")
        assert out.read_text() == notes
    out.write_text('{"index": 0, "pro')  # a prefix of a valid row
    assert cli(*command).code == 0
    cli(*command[:4], "--output", prompts).refused(2, "is the file of prompts")
    cli(*command[:4], "--output", tmp_path / "absent" / "out.jsonl").refused(6, "cannot be written")


def test_json_lines_of_prompts_and_conversations(chat_model: Path, tmp_path: Path, cli: Call) -> None:
    path, out = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    talk = [{"role": "user", "content": "the cat"}]
    path.write_text(
        json.dumps({"prompt": "the cat", "id": 7, "tokens": "theirs"})
        + "\n\n"
        + json.dumps({"messages": talk})
    )
    command = ("generate", chat_model, "--prompts", path, "--output", out, "--max-new-tokens", 5)
    assert cli(*command).code == 0
    first, second = rows(out)
    assert (first["id"], second["messages"]) == (7, talk)
    assert first["tokens"] <= 5
    assert first["completion"] != second["completion"]
    assert cli(*command, "--chat", "--overwrite").code == 0
    assert [row["completion"] for row in rows(out)] == [second["completion"]] * 2
    cli(*command, "--system", "small", "--overwrite").refused(2, "--system", "p.jsonl:1", "--chat")
    assert cli(*command, "--chat", "--system", "small", "--overwrite").code == 0
    assert rows(out)[1]["completion"] != second["completion"]
    table = tmp_path / "p.csv"
    table.write_text('id,prompt\n1,"the\ncat"\n2,a dog\n')
    assert cli("generate", chat_model, "--prompts", table, "--output", tmp_path / "t.jsonl").code == 0
    assert [(row["id"], row["prompt"]) for row in rows(tmp_path / "t.jsonl")] == [
        ("1", "the\ncat"),
        ("2", "a dog"),
    ]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("p.jsonl", '{"prompt": "a"}\n\n{"prompt": \n', ["p.jsonl:3", "not JSON"]),
        ("p.jsonl", '{"prompt": "a"}\n["a"]\n', ["p.jsonl:2", "not a JSON object"]),
        ("p.jsonl", '{"text": "a"}\n', ["p.jsonl:1", "neither prompt nor messages"]),
        ("p.jsonl", '{"prompt": 3}\n', ["p.jsonl:1", "prompt is not a string"]),
        ("p.jsonl", '{"messages": [{"role": "user"}]}\n', ["p.jsonl:1", "not a list of messages"]),
        ("p.jsonl", '{"messages": []}\n', ["p.jsonl:1", "not a list of messages"]),
        ("p.csv", "text\na\n", ["no column `prompt`"]),
        ("p.csv", 'prompt,b\na,b\n"c\n', ["p.csv:3", "invalid CSV"]),
        ("p.csv", "prompt,b\na\n", ["p.csv:2", "fields"]),
        ("p.txt", " \n\n", ["contains no prompts"]),
        ("p.txt", b"a\n\xff\xfe\n", ["p.txt", "not UTF-8"]),
        ("p.pdf", "a", ["p.pdf", ".txt, .jsonl, .csv"]),
        ("p.txt", None, ["p.txt", "cannot be read"]),
    ],
)
def test_invalid_rows_are_named(
    tmp_path: Path, name: str, content: str | bytes | None, words: list[str]
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as found:
        read_prompts(path)
    assert all(word in str(found.value) for word in words), str(found.value)
    assert found.value.remedy


def test_prompts_that_do_not_fit_are_named_before_anything_is_written(
    world: World, chat_model: Path, tmp_path: Path, cli: Call
) -> None:
    path, out = tmp_path / "p.txt", tmp_path / "o.jsonl"
    path.write_text("the cat\n" + "the cat " * 200 + "\n")
    cli("generate", world.run, "--prompts", path, "--output", out).refused(4, "p.txt:2 has", "128 positions")
    picky = shutil.copytree(chat_model, tmp_path / "picky")
    (picky / "chat_template.jinja").write_text(
        TEMPLATE + "{% if 'dog' in messages[0].content %}{{ raise_exception('no dogs') }}{% endif %}"
    )
    path.write_text("the cat\na dog\n")
    cli("generate", picky, "--chat", "--prompts", path, "--output", out).refused(3, "p.txt:2", "no dogs")
    cli("generate", world.run, "--chat", "--prompts", path, "--output", out).refused(4, "no chat template")
    assert not out.exists()


def test_incompatible_options(world: World, prompts: Path, cli: Call) -> None:
    cli("generate", world.run, "--prompts", prompts).refused(2, "--output")
    cli("generate", world.run, "a", "--prompts", prompts, "--output", "o").refused(2, "leave one of them out")
    cli("generate", world.run, "a", "--output", "o").refused(2, "--prompts")
    cli("generate", world.run, "a", "--batch-size", 2).refused(2, "--batch-size is given without --prompts")
    for verb in ("generate", "chat"):
        cli(verb, world.run, "--top-p", 0.9, "--temperature", 0).refused(2, "--top-p", "--temperature 0.7")
    result = cli("generate", world.run, "the cat", "--top-p", 0.9, "--max-new-tokens", 4)
    assert result.code == 0


def test_out_of_memory_names_the_batch_size(
    world: World, prompts: Path, tmp_path: Path, cli: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def short(*words: object, **more: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate"
            )
        return generate_many(*words, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("trimtab.generate.generate_many", short, raising=False)
    out, run = tmp_path / "o.jsonl", shutil.copytree(world.run, tmp_path / "copy")
    command = ("generate", run, "--prompts", prompts, "--output", out, "--max-new-tokens", 3)
    cli(*command, "--batch-size", 2).refused(
        6, "out of memory while generating text", "a batch of 2 prompts", "contains 2 rows", "--batch-size"
    )
    assert json.loads((run / "oom.json").read_text())["phase"] == "generation"
    monkeypatch.undo()
    assert "5 rows (3 new)" in cli(*command, "--batch-size", 1).out


def test_ctrl_c_prints_that_the_command_can_be_repeated(
    world: World, prompts: Path, tmp_path: Path, cli: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*words: object, **more: object) -> object:
        if more["first_index"] == 2:
            raise KeyboardInterrupt
        return generate_many(*words, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("trimtab.generate.generate_many", interrupted, raising=False)
    out = tmp_path / "o.jsonl"
    command = ("generate", world.run, "--prompts", prompts, "--output", out, "--max-new-tokens", 3)
    result = cli(*command, "--batch-size", 2)
    assert result.code == 130
    assert "repeat the command to continue" in " ".join(result.err.split())
    assert len(rows(out)) == 2
    monkeypatch.undo()
    assert "5 rows (3 new)" in cli(*command).out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_names_the_file(world: World, prompts: Path, cli: Call) -> None:
    command = ("generate", world.run, "--prompts", prompts, "--max-new-tokens", 2, "--output")
    cli(*command, "/dev/full").refused(
        6, "/dev/full cannot be written (No space left on device); it contains 0 rows", "another --output"
    )
    assert cli(*command, "/dev/null").out == "written: /dev/null, 5 rows (5 new)\n"


def test_a_killed_command_continues(world: World, tmp_path: Path, cli: Call) -> None:
    path, out = tmp_path / "p.txt", tmp_path / "o.jsonl"
    path.write_text("".join(f"the cat sees {i} dogs\n" for i in range(2000)))
    words = ["generate", world.run, "--prompts", path, "--output", out, "--max-new-tokens", 2]
    process = subprocess.Popen([sys.executable, "-m", "trimtab", *map(str, words), "--batch-size", "4"])
    deadline = time.monotonic() + 120
    while not out.exists() or out.read_bytes().count(b"\n") < 8:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    before = out.read_bytes()
    count = before.count(b"\n")
    assert 8 <= count < 2000
    path.write_text("".join(f"the cat sees {i} dogs\n" for i in range(count + 6)))
    result = cli(*words)
    assert result.code == 0, result.err
    assert out.read_bytes().startswith(before[: before.rindex(b"\n") + 1])
    assert [row["index"] for row in rows(out)] == list(range(count + 6))


def talk(cli: Call, monkeypatch: pytest.MonkeyPatch, text: str, *words: object) -> CommandResult:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return cli("chat", *words)


def test_chat_from_a_pipe(
    chat_model: Path, tmp_path: Path, cli: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "talk.jsonl"
    lines = [
        "the cat",
        "",
        "and the dog?",
        f"/save {saved}",
        "/reset",
        "the cat",
        "//slash",
        "/nothing",
        "/help",
    ]
    result = talk(cli, monkeypatch, "\n".join([*lines, "/exit", "never"]), chat_model, "--max-new-tokens", 6)
    assert result.code == 0, result.err
    for words in ("128 tokens of context", "4 messages", "[a new conversation]"):
        assert words in result.err
    assert "there is no command /nothing; /help lists them" in result.err
    assert "/system TEXT" in result.err
    assert "[cut off after 6 tokens; raise --max-new-tokens for longer answers]" in result.err
    (row,) = rows(saved)
    assert [m["role"] for m in row["messages"]] == ["user", "assistant"] * 2
    first = row["messages"][1]["content"]
    assert result.out.startswith(first.split("\n")[0])
    assert result.out.count(first) == 2, "after /reset the same question has the same answer"
    again = talk(cli, monkeypatch, f"a\n/save {saved}\n", chat_model, "--max-new-tokens", 3)
    assert "exists already; name another file" in again.err


def test_chat_with_a_system_message(chat_model: Path, cli: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [
        talk(cli, monkeypatch, text, chat_model, "--max-new-tokens", 8, *words).out
        for text, words in (("it\n", ()), ("it\n", ("--system", "small")), ("/system small\nit\n", ()))
    ]
    assert answers[1] == answers[2] != answers[0]


def test_chat_reports_dropped_turns_and_refuses_long_messages(
    chat_model: Path, cli: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(f"the cat sees {i} dogs\n" for i in range(9))
    result = talk(cli, monkeypatch, text, chat_model, "--max-new-tokens", 8)
    assert result.code == 0
    assert "longer than the model's 128 tokens: its oldest 2 messages are left out; /reset" in result.err
    result = talk(cli, monkeypatch, "the cat " * 200 + "\n", chat_model)
    assert result.code == 4
    assert "error: the message has" in result.err
    assert "Traceback" not in result.err


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no pseudo-terminals here")
def own_terminal() -> None:
    """Ctrl-C signals only the child, even if this process runs in the background and ignores it."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_chat_at_a_terminal(chat_model: Path) -> None:
    """Ctrl-C at the prompt and errors do not end the session; Ctrl-D does."""
    ours, theirs = os.openpty()
    words = ["chat", str(chat_model), "--temperature", "1", "--max-new-tokens", "100"]
    process = subprocess.Popen(
        [sys.executable, "-m", "trimtab", *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=own_terminal,
        env={**os.environ, "TERM": "dumb"},
    )
    os.close(theirs)
    seen = ""

    def until(word: str, press: bytes = b"") -> None:
        """Types `press` and reads up to `word`; types it again after 5 seconds without output, as a user would.

        CPython's readline loses a Ctrl-C that arrives between its prompt and its wait for a key.
        """
        nonlocal seen
        deadline = time.monotonic() + 60
        os.write(ours, press)
        while word not in seen:
            assert time.monotonic() < deadline, seen
            if select.select([ours], [], [], 5)[0]:
                seen += os.read(ours, 4096).decode(errors="replace")
            else:
                os.write(ours, press)
        seen = seen[seen.index(word) + len(word) :]

    try:
        until("Ctrl-D ends")
        until("> ")
        until("/exit or Ctrl-D ends", press=b"\x03")
        until("> ")
        os.write(ours, b"the cat " * 60 + b"\n")
        until("error: the message has")
        until("> ")
        os.write(ours, b"the cat\n")
        until("> ")
        os.write(ours, b"and then?\n")
        until("> ")
        os.write(ours, b"\x04")
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_ctrl_c_keeps_the_partial_answer(
    chat_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = trimtab.load(chat_model, device="cpu")
    session = Session(model.chat(max_new_tokens=40, top_k=20), 128, at_terminal=True)
    lines = iter(["the cat", "and then?"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines, None) or (_ for _ in ()).throw(EOFError))
    write, shown = sys.stdout.write, []

    def stop_early(text: str) -> int:
        shown.append(text)
        if len(shown) == 2:
            raise KeyboardInterrupt
        return write(text)

    monkeypatch.setattr(sys.stdout, "write", stop_early)
    session.run()
    assert "[stopped; the conversation continues]" in capsys.readouterr().err
    assert [m["role"] for m in session.chat.messages] == ["user", "assistant"] * 2
    assert plain(session.chat.messages[1]["content"]) == "".join(shown[:2])


def test_chat_with_a_base_model_names_generate(world: World, cli: Call) -> None:
    cli("chat", world.run).refused(4, "no chat template", f"trimtab generate {world.run}")


def stdin_of(raw: bytes) -> io.TextIOWrapper:
    """Returns standard input as Python opens it in the locale en_US.UTF-8."""
    return io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8", errors="strict")


def test_prompts_that_are_not_utf8(
    chat_model: Path, tmp_path: Path, cli: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ("--max-new-tokens", 3)
    expected = cli("generate", chat_model, "Gr\ufffd\ufffde aus", *few)
    assert cli("generate", chat_model, os.fsdecode(b"Gr\xfc\xdfe aus"), *few).out == expected.out
    monkeypatch.setattr(sys, "stdin", stdin_of(b"Gr\xfc\xdfe aus"))
    assert cli("generate", chat_model, *few).out == expected.out

    asked, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    asked.write_text('{"prompt": "a\\ud800b c"}\n')
    result = cli("generate", chat_model, "--prompts", asked, "--output", out, "--stop", "\udcff", *few)
    assert (result.code, rows(out)[0]["prompt"]) == (0, "a\ud800b c"), result.err

    monkeypatch.setattr(sys, "stdin", stdin_of(b"caf\xe9 ?\nagain\n"))
    result = cli("chat", chat_model, *few)
    assert (result.code, len(result.out.splitlines()) >= 2) == (0, True), result.err

    model = trimtab.load(chat_model)
    assert model.loss("a b \ud800 c d") == model.loss("a b \ufffd c d")
