"""The directory of `--figures`: every chart as PDF and SVG, and table.md and table.tex."""

import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_opsft.commands.report.chart import Bars, Chart, Cloud, Picture
from megatron_opsft.commands.report.latex import write_latex
from megatron_opsft.commands.report.table import Table
from megatron_opsft.commands.report.tables import Section
from megatron_opsft.errors import UserError
from megatron_opsft.runtime.durable import write_bytes

_ENDINGS = ("pdf", "svg")
_TABLES = ("table.md", "table.tex")


def check_library() -> None:
    """Errors: `UserError` where the library that draws is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            "report --figures needs the matplotlib package: pip install '.[figures]'"
        )


def name_pictures(sections: Sequence[Section]) -> dict[str, Picture]:
    """Name of its files -> picture. Names are plain and told apart on any file system; that of a
    section, such as a benchmark, ends those of its pictures.
    """
    found: dict[str, Picture] = {}
    taken: set[str] = set()
    for section in sections:
        for picture in section.plots:
            if isinstance(picture, Chart | Bars | Cloud):
                name = _plain_name("_".join(filter(None, (picture.name, section.name))))
                number, free = 1, name
                while free.lower() in taken:
                    number += 1
                    free = f"{name}_{number}"
                taken.add(free.lower())
                found[free] = picture
    return found


def check_free(directory: Path, pictures: Mapping[str, Picture]) -> None:
    """Errors: `UserError` for a file that would be replaced, or a place that is no directory."""
    if directory.exists() and not directory.is_dir():
        raise UserError(f"report: --figures {directory} is a file; name a directory")
    files = [directory / name for name in _file_names(pictures)]
    if there := [file for file in files if file.exists()]:
        more = f" and {len(there) - 1} more" if len(there) > 1 else ""
        verb = "exist" if more else "exists"
        raise UserError(
            f"report: {there[0]}{more} {verb}; name another directory with --figures, or give "
            "--overwrite"
        )


def write_figures(
    directory: Path, pictures: Mapping[str, Picture], tables: Sequence[Table]
) -> str:
    """Write all files. Returns what was written, in one line."""
    from megatron_opsft.commands.report.paper import draw  # heavy

    directory.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        for ending, data in draw(picture).items():
            write_bytes(directory / f"{name}.{ending}", data)
    texts = "\n".join(table.markdown() for table in tables), write_latex(tables)
    for name, text in zip(_TABLES, texts, strict=True):
        write_bytes(directory / name, text.encode("utf-8", "replace"))
    count = len(pictures)
    charts = "1 chart" if count == 1 else f"{count} charts"
    return f"figures: {charts} as PDF and SVG, table.tex and table.md: {directory}"


def _file_names(pictures: Mapping[str, Picture]) -> list[str]:
    return [*(f"{name}.{ending}" for name in pictures for ending in _ENDINGS), *_TABLES]


def _plain_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_")[:120] or "chart"
