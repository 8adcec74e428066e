"""Data inside an HTML file, whatever texts it holds."""

import json
import math
from typing import Any

MAX_MB = 20.0  # how large a page may be, in 10^6 bytes


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
