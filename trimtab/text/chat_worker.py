"""The child process that renders chat templates: a request as JSON on stdin, the answer as JSON on stdout.

Run by `trimtab.text.chat` as a file, so it imports nothing of ours. The environment of a template is the one
Hugging Face documents: trimmed blocks, loop controls, `tojson` without HTML escapes, `raise_exception`,
`strftime_now`, and a `generation` tag, which here only marks.
"""

from __future__ import annotations

import datetime
import json
import sys
from typing import Any


def limit_process(seconds: float, memory_bytes: int) -> None:
    """Processor time and address space of this process, where the system has such limits."""
    try:
        import resource
    except ImportError:  # Windows has none; the parent's clock and the limits on values remain
        return
    whole = max(1, int(seconds) + (seconds > int(seconds)))
    resource.setrlimit(resource.RLIMIT_CPU, (whole, whole + 1))
    if sys.platform == "linux":  # elsewhere the call is refused or has no effect
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face's filter writes it: no HTML escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def strftime_now(form: str) -> str:
    """The time now, in a form such as "%d %b %Y"."""
    return datetime.datetime.now().strftime(form)


def raise_exception(message: str) -> None:
    """How a template says that a conversation has not the form it wants."""
    import jinja2

    raise jinja2.TemplateError(message)


def make_environment(max_chars: int) -> Any:
    """Jinja's immutable sandbox with Hugging Face's names in it."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(["*", "**"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            """`"a" * 10**9` and `9 ** 9 ** 9` are refused before they are built."""
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
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse_inner(name: str) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"the attribute {name!r} is not allowed in a chat template")

    class PlainNamespace(jinja2.utils.Namespace):
        """`namespace()` whose attributes cannot be Python's inner ones."""

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
        raise_exception=raise_exception, strftime_now=strftime_now, namespace=PlainNamespace
    )
    return environment


def render(request: dict[str, Any]) -> list[str]:
    """The rendered conversations."""
    import jinja2

    max_chars = request["limits"]["output_chars"]
    template = make_environment(max_chars).from_string(request["template"])
    texts = []
    for messages in request["conversations"]:
        pieces, size = [], 0
        for piece in template.generate(messages=messages, **request["variables"]):
            size += len(piece)
            if size > max_chars:
                raise jinja2.TemplateError(f"it writes more than {max_chars} characters")
            pieces.append(piece)
        texts.append("".join(pieces))
    return texts


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """{"texts": […]} or {"error": …, "remedy": …}; whatever a template does wrong is its author's to read."""
    import jinja2

    try:
        return {"texts": render(request)}
    except MemoryError:
        return {"error": "it needs more memory than it may have", "remedy": "use another template"}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"{error.message} (line {error.lineno})", "remedy": "correct chat_template.jinja"}
    except jinja2.TemplateError as error:  # raise_exception, undefined names, the sandbox
        return {
            "error": str(error),
            "remedy": "see what the model's card says about the form of a conversation",
        }
    except (
        TypeError,
        ValueError,
        KeyError,
        IndexError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        return {
            "error": f"{type(error).__name__}: {error}",
            "remedy": "check the roles and contents given to it",
        }


def main() -> None:
    """Read, limit, render, write."""
    request = json.loads(sys.stdin.buffer.read())
    sys.path[:] = request["path"]
    import jinja2  # noqa: F401 imported before the limits: its own needs are not the template's

    limit_process(request["limits"]["seconds"], request["limits"]["memory_bytes"])
    sys.stdout.write(json.dumps(answer(request)))


if __name__ == "__main__":
    main()
