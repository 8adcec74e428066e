"""Rows of a text file: JSONL, JSON, CSV or TSV, each also .gz."""

import csv
import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import field
from pathlib import Path
from typing import Any

from megatron_opsft.errors import UserError
from megatron_opsft.records import record

_NOT_UTF_8 = "not UTF-8; convert the file, for example with iconv"
_UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")  # the first two bytes of a file
# A file with so many rows that are not UTF-8, and such a share of them, is in another encoding: its
# rows in plain ASCII are not all of its data.
_MIN_BAD_ROWS = 10
_MIN_BAD_SHARE = 0.05
_MAX_CSV_FIELD = (
    2**31 - 1
)  # characters; Python's own limit is shorter than a long solution


@record
class Row:
    """One row of a source."""

    number: int
    """Its number, from 1; the line of a JSONL file. The header of a CSV file is no row."""
    fields: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    """The reason why it could not be read, if it could not."""


def read_text_file(path: Path, option: str) -> list[Row]:
    """Read all rows of a file by its ending; blank lines of a JSONL file are not rows.

    option: its config key, for errors. Errors: `UserError` for a file that cannot be read.
    """
    with _explaining(path, option):
        match path.name.removesuffix(".gz").rpartition(".")[2]:
            case "json":
                rows = _read_json(path, option)
            case "csv":
                rows = _read_csv(path, option, ",")
            case "tsv":
                rows = _read_csv(path, option, "\t")
            case _:
                rows = _read_jsonl(path)
        _check_encoding(rows, path, option)
    return rows


@contextmanager
def _explaining(path: Path, option: str) -> Iterator[None]:
    """Make a `UserError` of the error of a file that cannot be read to its end."""
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(
            f"{option}: {path} is damaged or not a gzip file ({error})"
        ) from error
    except UnicodeDecodeError:
        raise _other_encoding(path, option) from None
    except OSError as error:
        raise UserError(
            f"{option}: {path} cannot be read ({error.strerror or error})"
        ) from error


def _opener(path: Path) -> Any:
    """Return the function that opens a file as `open` does."""
    return gzip.open if path.suffix == ".gz" else open


def _check_encoding(rows: list[Row], path: Path, option: str) -> None:
    """Errors: `UserError` for a file in another encoding, see `_MIN_BAD_ROWS`; a few rows that are
    not UTF-8 are bad rows.
    """
    num_bad = sum(row.error == _NOT_UTF_8 for row in rows)
    if num_bad >= max(_MIN_BAD_ROWS, _MIN_BAD_SHARE * len(rows)):
        raise _other_encoding(path, option)


def _other_encoding(path: Path, option: str) -> UserError:
    """Return the error that says where a file is not UTF-8, which encoding it may have, and how to
    convert it.
    """
    fault = _NOT_UTF_8
    with _opener(path)(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                encoding, name = "WINDOWS-1252", "Latin-1 or Windows-1252"
                if number == 1 and line.startswith(_UTF_16_MARKS):
                    encoding = name = "UTF-16"
                fault = (
                    f"not UTF-8: line {number} has the byte 0x{line[error.start]:02x}, perhaps of "
                    f"{name}; convert the file, for example with iconv -f {encoding} -t UTF-8"
                )
                break
    return UserError(f"{option}: {path} is {fault}")


def _read_jsonl(path: Path) -> list[Row]:
    """Read the lines of a file. Errors: `OSError` and those of gzip."""
    rows = []
    with _opener(path)(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                rows.append(_parse_line(number, line))
    return rows


def _parse_line(number: int, line: bytes) -> Row:
    """Read a line of a JSONL file; one that cannot be read is a row with an error.

    Errors: `UnicodeDecodeError` for the beginning of a file in UTF-16.
    """
    try:
        return _row_of(number, json.loads(line.decode("utf-8-sig")))
    except UnicodeDecodeError:
        if number == 1 and line.startswith(_UTF_16_MARKS):
            raise
        fault = _NOT_UTF_8
    except ValueError as error:
        fault = f"not JSON: {error}"
    except RecursionError:
        fault = "not JSON: nested too deeply"
    return Row(number=number, error=fault)


def _row_of(number: int, value: Any) -> Row:
    """Make a row of a JSON value; one that is not an object is a row with an error."""
    if isinstance(value, dict):
        return Row(number=number, fields=value)
    return Row(number=number, error=f"a JSON {type(value).__name__}, not an object")


def _read_json(path: Path, option: str) -> list[Row]:
    """Read a file that holds a list of objects, or an object with such a list as its only list.

    Errors: `UserError` for a file that holds anything else, `OSError` and those of gzip.
    """
    with _opener(path)(path, "rb") as file:
        content = file.read()
    text = content.decode("utf-8-sig")
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UserError(
            f"{option}: {path} is not JSON: {error}; a file with an object in each line is "
            "named .jsonl"
        ) from None
    except RecursionError:
        raise UserError(f"{option}: {path} is not JSON: nested too deeply") from None
    if isinstance(value, dict):
        lists = {key: item for key, item in value.items() if isinstance(item, list)}
        items = next(iter(lists.values()), [])
        if len(lists) != 1 or not all(isinstance(item, dict) for item in items):
            raise UserError(
                f"{option}: {path} is an object with {', '.join(value) or 'nothing'}, and which "
                "of these are the rows is not clear; write a list of objects"
            )
        value = items
    if not isinstance(value, list):
        raise UserError(
            f"{option}: {path} is a JSON {type(value).__name__}; write a list of objects"
        )
    return [_row_of(number, item) for number, item in enumerate(value, start=1)]


def _read_csv(path: Path, option: str, delimiter: str) -> list[Row]:
    """Read a table with a header. All values are text; a column without a name is left out, and
    blank lines are not rows. delimiter: what its ending means, see `_delimiter_of`.

    Errors: `UserError` for a header that cannot be read and for a quote out of place, behind which
    nobody knows where rows begin; `OSError` and those of gzip.
    """
    rows: list[Row] = []
    header: list[str] = []
    first_line_of_row = 1
    limit = csv.field_size_limit(_MAX_CSV_FIELD)  # of this process
    try:
        # A byte that is not UTF-8 becomes a surrogate, so that its row alone is bad.
        with _opener(path)(
            path, "rt", encoding="utf-8-sig", errors="surrogateescape", newline=""
        ) as text:
            first_line = next((line for line in text if line.strip()), "")
            delimiter = _delimiter_of(first_line, delimiter)
            text.seek(0)
            table = csv.reader(text, delimiter=delimiter, strict=True)
            for values in table:
                if not header:
                    header = values
                    if not _is_utf_8(header):
                        raise _other_encoding(path, option)
                    _check_header(header, f"{option}: {path}")
                elif values:
                    rows.append(_row_of_values(len(rows) + 1, header, values))
                first_line_of_row = table.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"{option}: {path}: the row that begins in line {first_line_of_row} has a quote out of "
            f"place ({error}); put a text with quotes in quotes, and write each of its own twice"
        ) from None
    finally:
        csv.field_size_limit(limit)
    return rows


def _delimiter_of(first_line: str, delimiter: str) -> str:
    """Return a semicolon for a table of commas whose first line has no comma outside of quotes, as
    spreadsheets write it where commas are decimal points; else the delimiter itself.
    """
    if delimiter != ",":
        return delimiter
    num_columns = {",": 0, ";": 0}  # 0: quotes are out of place with this delimiter
    for mark in num_columns:
        with suppress(csv.Error):
            table = csv.reader([first_line], delimiter=mark, strict=True)
            num_columns[mark] = len(next(table, []))
    return ";" if num_columns[","] <= 1 < num_columns[";"] else ","


def _check_header(header: list[str], where: str) -> None:
    """Errors: `UserError` for a header of one column that holds the separator of another format,
    or with a name twice. where: the beginning of the message.
    """
    if len(header) == 1 and any(mark in header[0] for mark in ",;\t"):
        raise UserError(
            f"{where}: the header {header[0]!r} is one column; .csv means commas or semicolons "
            "between values, .tsv tabs"
        )
    for name in header:
        if name and header.count(name) > 1:
            raise UserError(
                f"{where}: the header has {name!r} {header.count(name)} times; rename one"
            )


def _row_of_values(number: int, header: list[str], values: list[str]) -> Row:
    """Make a row of a line's values; it has an error if there are not as many as names."""
    if not _is_utf_8(values):
        return Row(number=number, error=_NOT_UTF_8)
    if len(values) != len(header):
        return Row(
            number=number,
            error=f"it has {len(values)} values, and the header {len(header)} names; put "
            "quotes around a value with separators in it",
        )
    fields = {name: value for name, value in zip(header, values, strict=True) if name}
    return Row(number=number, fields=fields)


def _is_utf_8(texts: list[str]) -> bool:
    """False if bytes of the texts were read as surrogates."""
    try:
        "".join(texts).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
