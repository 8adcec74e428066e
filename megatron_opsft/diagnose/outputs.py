"""What a diagnosis leaves: summary and page; and its table for a terminal."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tabulate import tabulate

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

_PAGE_RESPONSES = 20


def write_outputs(directory: Path) -> str:
    """All files of a finished diagnosis; returns the table for a terminal."""
    shown, summary = _read(directory)
    write_bytes(directory / PAGE, render_page(summary, shown))
    # Last: whoever finds it finds the rest.
    write_json(directory / SUMMARY, summary)
    return _table_of(summary)


def write_report(directory: Path, page: Path, *, max_mb: float) -> str:
    """The page of a diagnosis again, from its tokens.jsonl alone; returns the table for a terminal.

    max_mb: how large the file may be, in 10^6 bytes. Errors: `UserError` for a diagnosis that is
    not begun, or that cannot be read.
    """
    if page.is_dir():
        raise UserError(f"page {page}: is a directory; name a file")
    if not (directory / TOKENS).is_file():
        raise UserError(f"{directory}: diagnosis not finished; give its command again")
    shown, summary = _read(directory)
    page.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(page, render_page(summary, shown, max_bytes=1e6 * max_mb))
    return _table_of(summary)


def _read(directory: Path) -> tuple[list[DiagnosedResponse], dict[str, Any]]:
    """The responses that a page shows, and the summary of all. Errors: `UserError`."""
    responses = list(read_responses(directory))
    if not any(each.tokens for each in responses):
        raise UserError(f"{directory / TOKENS}: holds no response; diagnose again with --overwrite")
    original, efficient = labels_of(directory)
    summary = summarize(responses, original=original, efficient=efficient)
    return responses[:_PAGE_RESPONSES], summary


def _table_of(summary: Mapping[str, Any]) -> str:
    """D_t by kind of token, as plain text."""
    first = (
        f"{summary['original']} against {summary['efficient']}: {summary['num_tokens']:,} tokens "
        f"of {summary['num_responses']:,} responses, D_t {summary['mean_kl']:.4f} nats in the "
        f"mean, {summary['max_kl']:.3f} at most"
    )
    rows = [
        (
            row["kind"],
            f"{row['tokens']:,}",
            f"{row['mean_kl']:.4f}",
            f"{100 * row['share']:.1f} %",
            f"{row['num_high']:,}",
        )
        for row in sorted(summary["kinds"], key=lambda row: -row["mean_kl"])
    ]
    headings = ("kind of token", "tokens", "mean D_t", "share of D_t", "large D_t")
    alignment = ("left", *["right"] * 4)
    table = tabulate(rows, headings, disable_numparse=True, colalign=alignment)
    return f"{first}\n\n{table}\n"
