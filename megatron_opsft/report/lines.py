"""metrics.jsonl and evals.jsonl of a run, checked."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_opsft.errors import UserError
from megatron_opsft.runtime.durable import whole_lines


def read_json_lines(path: Path, *, required: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The objects of a file, in order; none where there is no file. A torn last line is left out.

    required: keys that every line has, with numbers. Errors: `UserError` naming file and line for
    one that is no object, has no whole `step`, or lacks one of these numbers.
    """
    records = []
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            record = json.loads(line)
            wrong = _wrong_with(record, required)
        except (ValueError, RecursionError):
            wrong = "not a line of JSON"
        if wrong:
            raise UserError(f"{path}:{number}: {wrong}; restore the file, or delete that line")
        records.append(record)
    return records


def _wrong_with(record: Any, required: Sequence[str]) -> str:
    if not isinstance(record, dict):
        return f"not a JSON object but {json.dumps(record):.40}"
    if type(record.get("step")) is not int:
        return f"step is {json.dumps(record.get('step')):.40}, no number"
    for key in required:
        if type(record.get(key)) not in (int, float):
            return f"{key} is {json.dumps(record.get(key)):.40}, no number"
    return ""
