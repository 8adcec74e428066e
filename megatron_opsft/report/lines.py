"""The JSON lines of a run: metrics.jsonl and evals.jsonl whole, responses one by one."""

import gzip
import json
import logging
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_opsft.errors import UserError

log = logging.getLogger("megatron_opsft")


def read_json_lines(
    path: Path, *, numbers: Sequence[str] = (), required: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """The objects of a file, in order; none where there is no file.

    A last line without its line break is what a killed run left: it is left out, with a warning.
    numbers: keys whose values are numbers, or null or absent where a step has none. required: keys
    that every line has, with numbers. Errors: `UserError` naming file and line for any other that
    is no object, has no whole `step`, or a value of another kind.
    """
    if not path.is_file():
        return []
    *lines, torn = path.read_bytes().split(b"\n")
    if torn:
        log.warning("%s: the last line is torn, as by a kill; it is left out", path)
    return list(_checked(path, lines, numbers, required))


def _checked(
    path: Path, lines: Sequence[bytes], numbers: Sequence[str], required: Sequence[str]
) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number}"
        fix = "restore the file, or delete that line"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise UserError(f"{where}: not a line of JSON; {fix}") from None
        if not isinstance(record, dict):
            raise UserError(f"{where}: not a JSON object but {_short(record)}; {fix}")
        if type(record.get("step")) is not int:
            raise UserError(f"{where}: step is {_short(record.get('step'))}, no number; {fix}")
        for key in (*numbers, *required):
            if key in required and record.get(key) is None:
                raise UserError(f"{where}: no {key}; {fix}")
            if type(record.get(key)) not in (int, float, type(None)):
                raise UserError(f"{where}: {key} is {_short(record[key])}, no number; {fix}")
        yield record


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def response_lines(path: Path, *, is_whole: bool = False) -> Iterator[tuple[int, bytes]]:
    """(number, line) of a file of responses, .jsonl or .jsonl.gz, without holding more than one.

    What a killed process or a full disk left at the end, a line without its line break or a torn
    archive, is left out with a warning. Errors: `UserError` for it with is_whole, of files that
    appear only when they are whole.
    """
    reason = ""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    yield number, line
                else:
                    reason = "the last line is torn"
    except (OSError, EOFError, zlib.error) as error:
        reason = str(error)
    if reason and is_whole:
        raise UserError(f"{path} cannot be read: {reason}; restore it")
    if reason:
        log.warning("%s: %s; its other responses are left out", path, reason)
