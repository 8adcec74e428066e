"""The directory of `--figures`: every chart as PDF and SVG, and table.md and table.tex."""

import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from megatron_opsft.commands.report.chart import Picture
from megatron_opsft.commands.report.latex import write_latex
from megatron_opsft.commands.report.page_sections import PageSection
from megatron_opsft.commands.report.table import Table
from megatron_opsft.errors import UserError
from megatron_opsft.runtime.durable import write_bytes

_ENDINGS = ("pdf", "svg")


def check_library() -> None:
    """Check that the drawing library is installed. Errors: `UserError` if not."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            "report --figures needs the matplotlib package: pip install '.[figures]'"
        )


def name_pictures(sections: Sequence[PageSection]) -> dict[str, Picture]:
    """Return base name of the files -> picture.

    A name joins the picture's and the section's (say, the benchmark's). It consists of letters,
    digits and _, and differs from all others even where upper and lower case are the same.
    """
    pictures: dict[str, Picture] = {}
    used_names: set[str] = set()
    for section in sections:
        for picture in section.plots:
            if isinstance(picture, Markup):
                continue
            name = _plain_name(f"{picture.name}_{section.name}")
            number = 1
            free_name = name
            while free_name.lower() in used_names:
                number += 1
                free_name = f"{name}_{number}"
            used_names.add(free_name.lower())
            pictures[free_name] = picture
    return pictures


def check_free(directory: Path, pictures: Mapping[str, Picture]) -> None:
    """Check that no file would be replaced. Errors: `UserError`, also if `directory` is a file."""
    if directory.exists() and not directory.is_dir():
        raise UserError(f"report: --figures {directory} is a file; name a directory")
    names = [f"{name}.{ending}" for name in pictures for ending in _ENDINGS]
    files = [directory / name for name in (*names, "table.md", "table.tex")]
    existing = list(filter(Path.exists, files))
    if not existing:
        return
    which = f"{existing[0]} exists"
    if len(existing) > 1:
        which = f"{existing[0]} and {len(existing) - 1} more exist"
    raise UserError(
        f"report: {which}; name another directory with --figures, or give --overwrite"
    )


def write_figures(
    directory: Path, pictures: Mapping[str, Picture], tables: Sequence[Table]
) -> str:
    """Write all files. Returns one line that says what was written."""
    from megatron_opsft.commands.report.paper import draw  # heavy

    directory.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        for ending, data in draw(picture).items():
            write_bytes(directory / f"{name}.{ending}", data)
    markdown = "\n".join(table.markdown() for table in tables)
    for name, text in (("table.md", markdown), ("table.tex", write_latex(tables))):
        write_bytes(directory / name, text.encode("utf-8", "replace"))
    count = len(pictures)
    charts = "1 chart" if count == 1 else f"{count} charts"
    return f"figures: {charts} as PDF and SVG, table.tex and table.md: {directory}"


def _plain_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_")[:120] or "chart"
