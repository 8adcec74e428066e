"""JSON lines that a run left behind, as its reports read them."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_opsft.errors import UserError


def read_json_lines(path: Path, *, numbers: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The objects of a file, in order; none where there is no file.

    A last line without its line break is what a killed run left, and is left out. numbers: keys
    whose values are numbers, or null or absent where a step has none. Errors: `UserError` naming
    file and line for any other that is no object, has no whole `step`, or a value of another kind.
    """
    if not path.is_file():
        return []
    return list(_checked(path, numbers))


def _checked(path: Path, numbers: Sequence[str]) -> Iterator[dict[str, Any]]:
    for place, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        where = f"{path}:{place}"
        fix = "restore the file, or delete that line"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise UserError(f"{where}: not a line of JSON; {fix}") from None
        if not isinstance(record, dict):
            raise UserError(f"{where}: not a JSON object but {_short(record)}; {fix}")
        if type(record.get("step")) is not int:
            raise UserError(f"{where}: step is {_short(record.get('step'))}, no number; {fix}")
        for key in numbers:
            if type(record.get(key)) not in (int, float, type(None)):
                raise UserError(f"{where}: {key} is {_short(record[key])}, no number; {fix}")
        yield record


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
