"""What a report says of runs, evaluations, a study, a scaling experiment or a diagnosis."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_opsft.commands.report.table import Table
from megatron_opsft.commands.report.tables import Section
from megatron_opsft.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What is printed, the page, and what `--figures` writes."""

    told: str
    """What a terminal shows."""
    write_page: Callable[[Path], None]
    """Write the page of it."""
    sections: Sequence[Section]
    """Their charts are the figures."""
    tables: Sequence[Table]
    """In table.md and table.tex: the rows that a terminal shows, or those of the sections."""
    error: UserError | None = None
    """What could not be read, where all else is reported."""
