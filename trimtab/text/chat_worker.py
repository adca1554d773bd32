"""The child process that renders chat templates: JSON requests on stdin, JSON responses on stdout.

`trimtab.text.chat` runs it as a script, so that it starts in a tenth of a second; it exits when stdin is closed. A
frame is the length in eight bytes, little-endian, and JSON. The first frame configures the process; the others are
requests, each with the full CPU time limit. Templates get the environment that Hugging Face documents: trimmed blocks,
loop controls, `tojson` without HTML escapes, `raise_exception`, `strftime_now`, and a `generation` tag around the
assistant's answers.
"""

from __future__ import annotations

import datetime
import json
import sys
from typing import IO, Any

OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Temporary marks around the content of a `generation` tag: noncharacters, which no real text contains."""


def limit_host_memory(memory_bytes: int) -> None:
    """Limit the address space of this process, if the system supports it."""
    if sys.platform == "linux":  # elsewhere the call fails or has no effect
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def limit_cpu_time(seconds: float) -> None:
    """Limit the CPU time from now on; the system kills a process that exceeds it."""
    try:
        import resource
    except ImportError:  # not on Windows; the parent's timeout and the limits on values remain
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    whole = max(1, int(used.ru_utime + used.ru_stime + seconds + 0.999))
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (whole if hard < 0 else min(whole, hard), hard))


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Hugging Face's `tojson` filter: no HTML escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def make_strftime_now(now: str | None) -> Any:
    """Return `strftime_now`, which formats the current or a fixed time ("%d %b %Y")."""

    def strftime_now(form: str) -> str:
        return (datetime.datetime.fromisoformat(now) if now else datetime.datetime.now()).strftime(form)

    return strftime_now


def raise_exception(message: str) -> None:
    """Raise an error from a template, for conversations that it does not support."""
    import jinja2

    raise jinja2.TemplateError(message)


def make_environment(max_chars: int, now: str | None = None) -> Any:
    """Jinja's immutable sandbox with Hugging Face's functions and filters."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(["*", "**"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            """Reject `"a" * 10**9` and `9 ** 9 ** 9` before they are computed."""
            if operator == "**" and (abs(left) > 1e6 or abs(right) > 64):
                raise SecurityError("a power with such large numbers is not allowed in a chat template")
            for sized, count in ((left, right), (right, left)):
                if hasattr(sized, "__len__") and isinstance(count, int) and len(sized) * count > max_chars:
                    raise SecurityError(
                        f"a value of {len(sized) * count} items is not allowed in a chat template"
                    )
            return super().call_binop(context, operator, left, right)

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 jinja2 reads a plain class attribute

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            self.environment.marks = True  # type: ignore[attr-defined]
            return jinja2.nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

        def mark(self, caller: Any) -> str:
            return f"{OPEN}{caller()}{CLOSE}"

    def refuse_inner(name: str) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"the attribute {name!r} is not allowed in a chat template")

    class PlainNamespace(jinja2.utils.Namespace):
        """`namespace()` that rejects private Python attributes."""

        def __init__(*args: Any, **kwargs: Any) -> None:  # no named self: `namespace(self=…)` is allowed
            values = dict(*args[1:], **kwargs)
            for name in values:
                refuse_inner(name)
            jinja2.utils.Namespace.__init__(args[0], values)

        def __setitem__(self, name: str, value: Any) -> None:
            refuse_inner(name)
            super().__setitem__(name, value)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals.update(
        raise_exception=raise_exception, strftime_now=make_strftime_now(now), namespace=PlainNamespace
    )
    environment.marks = False  # type: ignore[attr-defined]
    return environment


class TemplateRenderer:
    """A template, compiled on first use."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.setup = setup
        self.max_chars: int = setup["limits"]["output_chars"]
        self._template: Any = None

    def render(
        self, messages: list[Any], variables: dict[str, Any]
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """Returns (text, spans of `generation` tags; None if the template has no such tag)."""
        import jinja2

        if self._template is None:
            environment = make_environment(self.max_chars, self.setup["now"])
            self._template = environment.from_string(self.setup["template"])
        pieces, size = [], 0
        for piece in self._template.generate(messages=messages, **variables):
            size += len(piece)
            if size > self.max_chars:
                raise jinja2.TemplateError(f"it writes more than {self.max_chars} characters")
            pieces.append(piece)
        text = "".join(pieces)
        return unmark(text) if self._template.environment.marks else (text, None)

    def texts(self, request: dict[str, Any]) -> list[str]:
        """The rendered conversations."""
        return [self.render(messages, request["variables"])[0] for messages in request["conversations"]]

    def example(self, example: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
        """Render one conversation as {"text", "spans", "rewritten"}; spans are the trained characters."""
        from trimtab.text import chat_spans

        variables = {**request["variables"], "tools": example["tools"]}
        messages, which = example["messages"], request["train_on"]

        rendered: dict[tuple[int, bool], str] = {}

        def prefix(part: list[Any], prompt: bool) -> str:
            key = (len(part), prompt)
            if any(given is not original for given, original in zip(part, messages, strict=False)):
                return self.render(part, {**variables, "add_generation_prompt": prompt})[0]
            if key not in rendered:
                rendered[key] = self.render(part, {**variables, "add_generation_prompt": prompt})[0]
            return rendered[key]

        text, marks = self.render(messages, {**variables, "add_generation_prompt": False})
        chosen, rewritten = chat_spans.answer_indices(messages, example["skipped"]), False
        if which == "all":
            spans: list[Any] = [(0, len(text))]
        elif marks is not None:
            spans = chat_spans.select_marks(
                marks, chat_spans.answer_indices(messages), chosen, which == "last"
            )
        else:
            specials = self.setup["specials"]
            asked = chosen[-1:] if which == "last" else chosen
            spans, rewritten = chat_spans.find_answer_spans(
                prefix, text, messages, asked, specials, template_errors()
            )
        return {"text": text, "spans": spans, "rewritten": rewritten}


def unmark(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Remove the marks from a text and return their positions.

    Example:
        >>> unmark(f"a{OPEN}bc{CLOSE}d")
        ('abcd', [(1, 3)])
    """
    plain, spans, size = [], [], 0
    for i, part in enumerate(text.split(OPEN)):
        inside, closed, rest = part.partition(CLOSE) if i else ("", "", part)
        if closed:
            spans.append((size, size + len(inside)))
        plain += [inside, rest.replace(CLOSE, "")]
        size += len(plain[-2]) + len(plain[-1])
    return "".join(plain), spans


def template_errors() -> tuple[type[Exception], ...]:
    """The exceptions that a template may raise for a conversation that it does not support."""
    import jinja2

    return (
        jinja2.TemplateError,
        TypeError,
        ValueError,
        KeyError,
        IndexError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    )


def describe_error(error: Exception) -> dict[str, Any]:
    """Describe a template's error as {"error": …, "remedy": …}."""
    import jinja2

    from trimtab.text.chat_spans import NotFound

    if isinstance(error, MemoryError):
        return {"error": "it exceeds the memory limit", "remedy": "use another template"}
    if isinstance(error, jinja2.TemplateSyntaxError):
        message = f"{error.message} (line {error.lineno})"
        return {"error": message, "remedy": "correct the chat template"}
    if isinstance(error, jinja2.TemplateError):  # raise_exception, undefined names, the sandbox
        return {
            "error": str(error),
            "remedy": "see the model's card for the required form of a conversation",
        }
    if isinstance(error, NotFound):
        return {
            "error": f"the assistant turns cannot be located in the text that it renders: {error}",
            "remedy": "set train_on: all, or put {% generation %} … {% endgeneration %} around the answers in the "
            "template",
        }
    return {
        "error": f"{type(error).__name__}: {error}",
        "remedy": "check the roles and contents of the messages",
    }


def respond(renderer: TemplateRenderer, request: dict[str, Any]) -> dict[str, Any]:
    """Respond with {"texts": […]}, {"examples": […]} (each of which may be an error) or {"error": …, "remedy": …}."""
    import jinja2

    from trimtab.text.chat_spans import NotFound

    expected: tuple[type[Exception], ...] = (MemoryError, NotFound, *template_errors())
    try:
        if "conversations" in request:
            return {"texts": renderer.texts(request)}
        done = []
        for example in request["examples"]:
            try:
                done.append(renderer.example(example, request))
            except jinja2.TemplateSyntaxError:
                raise
            except expected as error:
                done.append(describe_error(error))
        return {"examples": done}
    except expected as error:
        return describe_error(error)


def read_frame(stream: IO[bytes]) -> Any:
    """Read one JSON value; None at the end of the stream."""
    head = stream.read(8)
    if len(head) < 8:
        return None
    return json.loads(stream.read(int.from_bytes(head, "little")))


def encode_frame(value: Any) -> bytes:
    """Encode one JSON value as a frame."""
    data = json.dumps(value).encode()
    return len(data).to_bytes(8, "little") + data


def main() -> None:
    """Configure the process, then serve requests until stdin is closed."""
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    setup = read_frame(stdin)
    if setup is None:
        return
    sys.path[:] = setup["path"]
    import jinja2  # noqa: F401 imported before the limits apply

    limit_host_memory(setup["limits"]["memory_bytes"])
    renderer = TemplateRenderer(setup)
    while (request := read_frame(stdin)) is not None:
        limit_cpu_time(setup["limits"]["seconds"])
        stdout.write(encode_frame(respond(renderer, request)))
        stdout.flush()


if __name__ == "__main__":
    main()
