"""What a finished diagnosis leaves: summary and page; and its table for a terminal."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megatron_opsft.diagnose.directory import PAGE
from megatron_opsft.diagnose.summary import summarize
from megatron_opsft.errors import UserError
from megatron_opsft.report.diagnosis import (
    SUMMARY,
    TOKENS,
    DiagnosedResponse,
    labels_of,
    read_responses,
    render_page,
)
from megatron_opsft.runtime.durable import write_bytes, write_json

_ROWS = 12  # of the table of tokens
_WIDTH = 100
_PAGE_RESPONSES = 20


def write_outputs(directory: Path) -> str:
    """All files of a finished diagnosis; returns the table for a terminal."""
    responses, summary = _read(directory)
    write_bytes(directory / PAGE, render_page(summary, responses[:_PAGE_RESPONSES]))
    # Last: whoever finds it finds the rest.
    write_json(directory / SUMMARY, summary)
    return table_of(summary)


def write_report(directory: Path, page: Path, *, max_mb: float) -> str:
    """The page of a diagnosis again, from its tokens.jsonl alone; returns the table for a terminal.

    max_mb: how large the file may be, in 10^6 bytes. Errors: `UserError` for a diagnosis that is
    not begun, or that cannot be read.
    """
    if page.is_dir():
        raise UserError(f"page {page}: is a directory; name a file")
    if not (directory / TOKENS).is_file():
        raise UserError(f"{directory}: diagnosis not finished; give its command again")
    responses, summary = _read(directory)
    page.parent.mkdir(parents=True, exist_ok=True)
    shown = responses[:_PAGE_RESPONSES]
    write_bytes(page, render_page(summary, shown, max_bytes=1e6 * max_mb))
    return table_of(summary)


def _read(directory: Path) -> tuple[list[DiagnosedResponse], dict[str, Any]]:
    """What tokens.jsonl holds, and its summary. Errors: `UserError`."""
    responses = list(read_responses(directory))
    if not any(each.tokens for each in responses):
        raise UserError(f"{directory / TOKENS}: holds no response; diagnose again with --overwrite")
    original, efficient = labels_of(directory)
    return responses, summarize(responses, original=original, efficient=efficient)


def table_of(summary: Mapping[str, Any]) -> str:
    """D_t by kind of token, and the tokens where it is largest, as plain text."""
    kinds = _table("kind of token", "tokens", "mean D_t", "share of D_t", "large D_t")
    for row in sorted(summary["kinds"], key=lambda row: -row["mean_kl"]):
        kinds.add_row(
            row["kind"],
            f"{row['tokens']:,}",
            f"{row['mean_kl']:.4f}",
            f"{100 * row['share']:.1f} %",
            f"{row['num_high']:,}",
        )
    largest = _table("D_t", "after", "original wrote", "efficient prefers")
    for row in summary["largest"][:_ROWS]:
        text, p = row["preferred"][0]
        largest.add_row(
            f"{row['kl']:.2f}",
            _quoted(row["before"][-24:]),
            f"{_quoted(row['text'])} {100 * row['p_original']:.0f} %",
            f"{_quoted(text)} {100 * p:.0f} %",
        )
    console = Console(width=_WIDTH, color_system=None, markup=False, highlight=False)
    with console.capture() as captured:
        console.print(
            f"{summary['original']} against {summary['efficient']}: {summary['num_tokens']:,} "
            f"tokens of {summary['num_responses']:,} responses, D_t {summary['mean_kl']:.4f} nats "
            f"in the mean, {summary['max_kl']:.3f} at most",
            soft_wrap=True,
        )
        console.print(kinds)
        if largest.row_count:
            console.print(largest)
    return captured.get()


def _table(first: str, *others: str) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False)
    table.add_column(first)
    for heading in others:
        table.add_column(heading, justify="left" if "prefers" in heading else "right")
    return table


def _quoted(text: str) -> str:
    return repr(text)[1:-1]
