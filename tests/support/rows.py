"""Files of rows."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_rows(path: Path, rows: Iterable[Any]) -> str:
    """JSON lines; what is text already stands as it is. Returns: the path."""
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return str(path)
