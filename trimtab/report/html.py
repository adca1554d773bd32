"""Shared code of the HTML pages: templates, Content-Security-Policy, writing the file."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.facts.errors import ResourceError
from trimtab.facts.files import write_atomic
from trimtab.report.plain import plain

if TYPE_CHECKING:
    import jinja2

TEMPLATES = Path(__file__).parent / "templates"


def write_html(text: str, target: Path, *, option: str) -> None:
    """Writes a page atomically; raises a ResourceError that names the option if it cannot be written.

    Example:
        >>> write_html("<!doctype html>", Path("plan.html"), option="--page")  # doctest: +SKIP
    """
    try:
        # Newlines are not converted: the policy contains hashes of the scripts as a browser reads them.
        write_atomic(target, text)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # the command line shortens the name in the message
            raise
        raise ResourceError(
            f"{target} cannot be written: {error.strerror}", f"give another path with {option}"
        ) from error


def script_json(value: Any) -> str:
    """Returns JSON that is safe inside a script element: data cannot produce `</script>` or `<!--`.

    Example:
        >>> script_json({"a": "</script>"})
        '{"a":"\\\\u003c/script\\\\u003e"}'
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def read_templates(*names: str) -> str:
    """Returns the concatenated style sheets or scripts."""
    return "".join((TEMPLATES / name).read_text(encoding="utf-8") for name in names)


def figure_script(figures: dict[str, Any], *names: str) -> str:
    """Returns the page's script: the data of the charts by id, and the code for hovering and zooming."""
    return f"const figures = {script_json(figures)};\n{read_templates(*names)}"


def policy(scripts: list[str], styles: str) -> str:
    """Returns the page's Content-Security-Policy, which allows only these inline scripts and styles by hash.

    Data that ended up in a script or style element because of a bug would have no effect.
    """
    script_hashes = " ".join(map(_hash, scripts)) or "'none'"
    return (
        f"default-src 'none'; script-src {script_hashes}; style-src {_hash(styles)}; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def page_environment() -> jinja2.Environment:
    """Returns the template environment; every printed text is escaped and passed through `plain`."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    # Applied to every printed value, so that no template can forget it; `safe` marks values that are not text.
    environment.finalize = lambda value: plain(value) if type(value) is str else value
    return environment
