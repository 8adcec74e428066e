"""HTML files that need nothing else and ask nobody, made from the template and its assets."""

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

from markupsafe import Markup

from megatron_opsft.commands.report.plot import place

MAX_MB = 20.0  # how large a page may be, in 10^6 bytes
_ASSETS = Path(__file__).with_name("assets")
_SCRIPTS = ("elements", "theme", "histogram", "response", "reader")


def render(template: str, data: Any, **values: object) -> bytes:
    """A page in UTF-8; a policy lets a browser run and fetch what is in the file, and nothing else.

    template: a name in assets/; data: JSON for its scripts; values: what the template has.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # not for --help

    style = (_ASSETS / "page.css").read_text(encoding="utf-8")
    script = "".join(
        (_ASSETS / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS
    )
    environment = Environment(
        loader=FileSystemLoader(_ASSETS), autoescape=True, undefined=StrictUndefined
    )
    environment.filters["placed"] = place
    page = environment.get_template(template).render(
        style=Markup(style),
        script=Markup(script),
        style_hash=_hash(style),
        script_hash=_hash(script),
        data=_script_json(data),
        **values,
    )
    return page.encode("utf-8", "replace")  # a lone surrogate is a ? to a reader


def _hash(text: str) -> str:
    """As a content security policy names an inline script or style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _script_json(data: Any) -> Markup:
    """JSON for a `<script type="application/json">`: no text can end the script."""
    from jinja2.utils import htmlsafe_json_dumps

    return htmlsafe_json_dumps(
        data, json.dumps, ensure_ascii=False, separators=(",", ":")
    )


def encoded_size(data: Any) -> int:
    """Bytes that data take in a page."""
    return len(_script_json(data).encode("utf-8", "replace"))
