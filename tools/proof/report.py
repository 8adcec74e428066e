"""How a stage of our own says what it found."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn


def publish(
    figures: Mapping[str, float], problems: Sequence[str], details: Mapping[str, Any]
) -> NoReturn:
    """Print the JSON line that `readings.read_report` reads, and end: with 1 for any problem."""
    print(json.dumps({"figures": figures, "problems": problems, "details": details}), flush=True)
    sys.exit(bool(problems))
