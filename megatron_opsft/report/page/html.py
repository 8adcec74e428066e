"""HTML files that need nothing else and ask nobody, made from templates and assets."""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

_ASSETS = Path(__file__).with_name("assets")


def render(
    template: str, *, styles: Sequence[str], scripts: Sequence[str], **values: object
) -> bytes:
    """A page in UTF-8; a policy lets a browser run and fetch what is in the file, and nothing else.

    template, styles, scripts: names in assets/; values: what else the template has.
    """
    style, script = (
        "".join((_ASSETS / name).read_text(encoding="utf-8") for name in names)
        for names in (styles, scripts)
    )
    environment = Environment(
        loader=FileSystemLoader(_ASSETS), autoescape=True, undefined=StrictUndefined
    )
    page = environment.get_template(template).render(
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        **values,
    )
    return page.encode("utf-8", "replace")  # a lone surrogate is a ? to a reader


def _hash(text: str) -> str:
    """As a content security policy names an inline script or style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
