"""Rows of a data source: JSONL, JSON, CSV or TSV (each also .gz), Parquet, a saved data set or a
Hugging Face name.
"""

from pathlib import Path
from typing import Any

from megatron_opsft.data.text_files import Row, read_text_file
from megatron_opsft.errors import UserError, first_line, looked_in
from megatron_opsft.runtime.libraries import (
    asking_hub,
    check_cached,
    check_fetched,
    hub_error,
)

# A name with one of these is no data set of the hub. Those of text may be followed by .gz.
_TEXT_ENDINGS = (".jsonl", ".json", ".csv", ".tsv")
FILE_ENDINGS = (*_TEXT_ENDINGS, *(f"{end}.gz" for end in _TEXT_ENDINGS), ".parquet")


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
    return read_text_file(path, option)


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
