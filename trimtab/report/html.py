"""What all pages have in common: templates, a policy that allows nothing but their own scripts, one writer."""

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
    """Writes a page as a whole; ResourceError with the command line's option where it cannot be written.

    Example:
        >>> write_html("<!doctype html>", Path("plan.html"), option="--page")  # doctest: +SKIP
    """
    try:
        # Newlines as they are: the policy's hashes are of the scripts as a browser reads them.
        write_atomic(target, text)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # the command line shortens it
            raise
        raise ResourceError(
            f"{target} cannot be written: {error.strerror}", f"give another place with {option}"
        ) from error


def script_json(value: Any) -> str:
    """JSON that may stand inside a script element: no `</script>`, no `<!--` can arise from data.

    Example:
        >>> script_json({"a": "</script>"})
        '{"a":"\\\\u003c/script\\\\u003e"}'
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def read_templates(*names: str) -> str:
    """Style sheets or scripts, one after another."""
    return "".join((TEMPLATES / name).read_text(encoding="utf-8") for name in names)


def figure_script(figures: dict[str, Any], *names: str) -> str:
    """The page's script: the charts' data by id, and what follows the pointer on them."""
    return f"const figures = {script_json(figures)};\n{read_templates(*names)}"


def policy(scripts: list[str], styles: str) -> str:
    """The page's Content-Security-Policy: these inline scripts and styles by their hash, and nothing else.

    Text that became a script or style element by a mistake of ours would still have no effect.
    """
    script_hashes = " ".join(map(_hash, scripts)) or "'none'"
    return (
        f"default-src 'none'; script-src {script_hashes}; style-src {_hash(styles)}; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def page_environment() -> jinja2.Environment:
    """The templates, every printed text escaped and made plain."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    # Whatever is printed is plain, without the template having to remember it; `safe` marks what is not text.
    environment.finalize = lambda value: plain(value) if type(value) is str else value
    return environment
