"""Rows of a data source: JSONL, JSON, CSV or TSV (each also .gz), Parquet, a saved data set or a
Hugging Face name.
"""

import csv
import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import field
from pathlib import Path
from typing import Any

from megatron_opsft.errors import UserError, first_line, looked_in
from megatron_opsft.records import record
from megatron_opsft.runtime.libraries import (
    asking_hub,
    check_cached,
    check_fetched,
    hub_error,
)

# A name with one of these is no data set of the hub. Those of text may be followed by .gz.
_TEXT_ENDINGS = (".jsonl", ".json", ".csv", ".tsv")
FILE_ENDINGS = (*_TEXT_ENDINGS, *(f"{end}.gz" for end in _TEXT_ENDINGS), ".parquet")
_UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")  # the first two bytes of a file
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


def read_rows(
    source: str, *, split: str, subset: str | None, section: str = "data."
) -> list[Row]:
    """Read all rows of a source; blank lines of a JSONL file are not rows.

    section: the prefix of config keys, for errors. Errors: `UserError` for a source that is
    missing, cannot be read, or has no such split.
    """
    path = Path(source)
    option = source_option(section)
    check_source(source, option=option)
    if path.is_dir():
        return _number(_open_saved(path, split, section))
    if not path.is_file():
        return _number(_open_hub(source, split, subset, section))
    if path.name.endswith(".parquet"):
        return _read_parquet(path, option)
    with _explaining(path, option):
        match path.name.removesuffix(".gz").rpartition(".")[2]:
            case "json":
                return _read_json(path, option)
            case "csv":
                return _read_csv(path, option, ",")
            case "tsv":
                return _read_csv(path, option, "\t")
        return _read_jsonl(path)


def source_option(section: str) -> str:
    """Return the config key that names a source, for errors. section: the prefix of its keys."""
    return "data.train" if section == "data." else f"{section}data"


def check_source(source: str, *, option: str = "data") -> None:
    """Check that a source may exist, without reading it. option: its config key, for errors.

    Errors: `UserError` for a file that is missing, empty or of another kind, and for a data set
    that cannot be fetched.
    """
    path = Path(source)
    check_fetched([path, *path.glob("*"), *path.glob("*/*")])
    if path.is_dir():
        return
    if path.is_file():
        if not path.name.endswith(FILE_ENDINGS):
            raise UserError(
                f"{option}: {source} is not a file type that can be read; use "
                f"{', '.join(FILE_ENDINGS)}"
            )
        if path.stat().st_size == 0:
            raise UserError(f"{option}: {source} is empty: it has no rows")
    elif source.endswith(FILE_ENDINGS) or source.startswith(("/", ".", "~")):
        raise UserError(f"{option}: there is no file {source}{looked_in(source)}")
    else:
        check_cached("datasets", source, option)


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
        raise UserError(f"{option}: {path} is not UTF-8{_encoding_of(path)}") from None
    except OSError as error:
        raise UserError(
            f"{option}: {path} cannot be read ({error.strerror or error})"
        ) from error


def _opener(path: Path) -> Any:
    """Return the function that opens a file as `open` does."""
    return gzip.open if path.suffix == ".gz" else open


def _encoding_of(path: Path) -> str:
    """Say where a file is not UTF-8, which encoding it may have, and how to convert it."""
    with _opener(path)(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                encoding, name = "WINDOWS-1252", "Latin-1 or Windows-1252"
                if number == 1 and line.startswith(_UTF_16_MARKS):
                    encoding = name = "UTF-16"
                return (
                    f": line {number} has the byte 0x{line[error.start]:02x}, perhaps of {name}; "
                    f"convert the file, for example with iconv -f {encoding} -t UTF-8"
                )
    return "; convert the file, for example with iconv"


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

    Errors: `UnicodeDecodeError`: a file in another encoding is refused whole, since its rows in
    plain ASCII are not all of its data.
    """
    text = line.decode("utf-8-sig")
    try:
        return _row_of(number, json.loads(text))
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
        with _opener(path)(path, "rt", encoding="utf-8-sig", newline="") as text:
            first_line = next((line for line in text if line.strip()), "")
            delimiter = _delimiter_of(first_line, delimiter)
            text.seek(0)
            table = csv.reader(text, delimiter=delimiter, strict=True)
            for values in table:
                if not header:
                    header = values
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
    if len(values) != len(header):
        return Row(
            number=number,
            error=f"it has {len(values)} values, and the header {len(header)} names; put "
            "quotes around a value with separators in it",
        )
    fields = {name: value for name, value in zip(header, values, strict=True) if name}
    return Row(number=number, fields=fields)


def _read_parquet(path: Path, option: str) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        return _number(pyarrow.parquet.read_table(path).to_pylist())
    # ValueError: text that is not UTF-8. OverflowError: a date that Python cannot hold.
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise UserError(
            f"{option}: {path} cannot be read as Parquet ({first_line(error)})"
        ) from error


def _open_saved(path: Path, split: str, section: str) -> Any:
    """Open a directory written by `save_to_disk`: its Dataset, or the split of its DatasetDict."""
    import datasets

    option = source_option(section)
    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{option}: {path} is not a data set saved by save_to_disk ({first_line(error)}); "
            f"name a {', '.join(FILE_ENDINGS)} file in it instead"
        ) from error
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if split not in loaded:
        raise UserError(
            f"{section}split: {path} has no split {split!r}; it has {', '.join(loaded)}"
        )
    return loaded[split]


def _open_hub(source: str, split: str, subset: str | None, section: str) -> Any:
    """Load a data set of the Hugging Face hub, or of its cache. Errors: `UserError`."""
    import datasets

    option = source_option(section)
    try:
        with asking_hub(source):
            return datasets.load_dataset(source, subset, split=split)
    except Exception as error:  # several libraries for network and formats may raise
        name = f"{source} ({subset})" if subset else source
        raise hub_error(
            error,
            f"{option}: {name} is not a file here, and could not be loaded as a Hugging Face data "
            f"set: {first_line(error)} (check the name, {section}split and {section}subset, and "
            f"the network; or give a file; it was looked for{looked_in(source)})",
        ) from error


def _number(rows: Any) -> list[Row]:
    """Make rows of mappings from column to value, numbered from 1."""
    return [Row(number=number, fields=row) for number, row in enumerate(rows, start=1)]
