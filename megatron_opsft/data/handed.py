"""Rows that a script hands over in Python, written as JSONL: from there on they are a file like any
other, which a resumed run and every other command reads.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_opsft.errors import UserError, first_line
from megatron_opsft.runtime.durable import write_bytes
from megatron_opsft.runtime.launched import launched_rank


def split_benchmarks(data: Any) -> tuple[Any, dict[str, object]]:
    """Split what a script gives as `data` of an evaluation: (what names files, benchmark -> rows).

    data: {name: file or rows}, rows alone, or what the command line takes. Nothing is checked.
    """
    if isinstance(data, Mapping):
        files = {
            name: str(value)
            for name, value in data.items()
            if isinstance(value, str | os.PathLike)
        }
        return files, {name: data[name] for name in data if name not in files}
    is_text = isinstance(data, list | tuple) and any(isinstance(d, str) for d in data)
    if is_text or isinstance(data, str | os.PathLike | None):
        return data, {}
    return {}, {"data": data}


def write_rows(data: object, directory: Path, *, where: str) -> Path:
    """Write rows to `data_<hash of the rows>.jsonl` in the directory, if it is not there yet.

    data: mappings from column to value in a list or a `datasets.Dataset`, or a pandas DataFrame,
    whose missing values become null. where: the argument, for errors. Returns the file. Every rank
    may call it at the same time. Errors: `UserError` for anything else, for no rows, and for a
    value that JSON cannot hold.
    """
    lines = []
    for number, row in enumerate(_rows_of(data, where), start=1):
        lines.append(_as_line(row, f"{where}: row {number}"))
    if not lines:
        raise UserError(f"{where} is empty: it has no rows")
    content = "".join(lines).encode()
    digest = hashlib.sha256(content).hexdigest()[:16]
    return write_once(directory / f"data_{digest}.jsonl", content)


def write_once(path: Path, content: bytes) -> Path:
    """Write a file whose name has a hash of what it holds, if it is not there yet; return the path.

    Every rank may call it at the same time, with the same content. Errors: `UserError` for a place
    that cannot be written.
    """
    if path.exists():
        return path
    own = path.with_name(f".{path.name}.rank_{launched_rank()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(own, content)
        os.replace(own, path)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}); name another directory"
        ) from None
    return path


def _rows_of(data: Any, where: str) -> Iterator[object]:
    """Return the rows of what a script hands over. Errors: `UserError` for what has none."""
    if hasattr(data, "to_dict") and hasattr(data, "notna"):  # a pandas DataFrame
        missing_as_none = data.astype(object).where(data.notna(), None)
        return iter(missing_as_none.to_dict("records"))
    no_rows = isinstance(data, Mapping | str | os.PathLike)
    if no_rows or not hasattr(data, "__iter__"):
        raise UserError(
            f"{where} is of type {type(data).__name__}, not rows: give a list of dicts, a "
            "datasets.Dataset (of a DatasetDict one split) or a pandas DataFrame; a file is named "
            "by a key of the configuration"
        )
    return iter(data)


def _as_line(row: object, where: str) -> str:
    """Return a row as a line of JSON. Errors: `UserError` naming what JSON cannot hold."""
    if not isinstance(row, Mapping):
        raise UserError(f"{where} is of type {type(row).__name__}, not a dict")
    values = {}
    for name, value in row.items():
        try:
            values[str(name)] = json.dumps(value, default=_plain)
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(
                f"{where}: column {name} cannot be written as JSON ({first_line(error)}); make it "
                "text or a number, or leave it out"
            ) from None
    fields = ", ".join(f"{json.dumps(name)}: {text}" for name, text in values.items())
    return f"{{{fields}}}\n"


def _plain(value: Any) -> object:
    """Return a number or an array of NumPy or torch as Python's. Errors: `TypeError`."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__}")
