"""What a report shows of runs, evaluations, a study, a scaling experiment or a diagnosis."""

from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_opsft.commands.report.page_sections import PageSection
from megatron_opsft.commands.report.table import Table
from megatron_opsft.errors import UserError
from megatron_opsft.records import record


@record
class Contents:
    """All outputs of one report: text, page and figures."""

    text: str
    """Printed on the terminal."""
    write_page: Callable[[Path], None]
    """Writes the HTML page to a file."""
    sections: Sequence[PageSection]
    """Their charts become the files of `--figures`."""
    tables: Sequence[Table]
    """Tables of table.md and table.tex, which `--figures` writes."""
    error: UserError | None = None
    """What could not be read; raised after everything else is reported."""
