"""HTML files that need nothing else and ask nobody, made from templates and assets."""

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MAX_MB = 20.0  # how large a page may be, in 10^6 bytes
_ASSETS = Path(__file__).with_name("assets")


def render(
    template: str, *, styles: Sequence[str], scripts: Sequence[str], **values: object
) -> bytes:
    """A page in UTF-8; a policy lets a browser run and fetch what is in the file, and nothing else.

    template, styles, scripts: names in assets/; values: what else the template has.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # not for --help

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


def script_json(data: Any) -> str:
    """JSON for a `<script type="application/json">`: no text can end the script or open a comment.

    Numbers that JSON does not have (NaN, infinities) become null.
    """
    text = _dump(data)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def encoded_size(data: Any) -> int:
    """Bytes of `script_json(data)`."""
    return len(script_json(data).encode("utf-8", "replace"))


def _dump(data: Any) -> str:
    try:
        return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return _dump(_finite(data))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
