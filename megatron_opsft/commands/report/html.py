"""Self-contained HTML files: template, style, scripts and data in one file that fetches nothing."""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from megatron_opsft.commands.report.plot import place
from megatron_opsft.commands.report.token_use import pieces_of

MAX_MB = 20.0  # how large a page may be by default, in 10^6 bytes
_ASSETS = Path(__file__).with_name("assets")
_SCRIPTS = ("elements", "theme", "histogram", "response", "reader")


def render(values: Mapping[str, Any], responses: Sequence[Any]) -> bytes:
    """Return a page in UTF-8. Its content security policy lets a browser run and load only what is
    in the file.

    values: variables of the template; responses: JSON that the page's scripts read.
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
    environment.filters["pieces"] = pieces_of
    page = environment.get_template("page.html.j2").render(
        values,
        style=Markup(style),
        script=Markup(script),
        style_hash=_policy_hash(style),
        script_hash=_policy_hash(script),
        has_responses=bool(responses),
        data=_script_json({"runs": responses}),
    )
    return page.encode("utf-8", "replace")  # a reader sees a lone surrogate as ?


def _policy_hash(text: str) -> str:
    """Return the hash by which a content security policy allows an inline script or style."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _script_json(data: Any) -> Markup:
    """Return JSON for `<script type="application/json">`, which no text in it can end."""
    from jinja2.utils import htmlsafe_json_dumps

    return htmlsafe_json_dumps(
        data, json.dumps, ensure_ascii=False, separators=(",", ":")
    )


def encoded_size(data: Any) -> int:
    """Return how many bytes the data take in a page."""
    return len(_script_json(data).encode("utf-8", "replace"))
