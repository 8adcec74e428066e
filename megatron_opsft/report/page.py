"""A page of runs, evaluations or a study: one HTML file that needs nothing else and asks nobody."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_opsft.errors import UserError
from megatron_opsft.report.html import MAX_MB, encoded_size, render
from megatron_opsft.report.runs import Change, Run, change_of, changes_of, read_run
from megatron_opsft.report.sampling import rollouts_of, sample_responses, samples_of
from megatron_opsft.report.table import OVERALL, TableRow, read_evaluation
from megatron_opsft.report.tables import (
    Section,
    Table,
    curves_of,
    example_of,
    sections_of,
    table_of_runs,
)
from megatron_opsft.runtime.durable import write_bytes


def write_page(
    out: Path,
    runs: Sequence[Path],
    evaluations: Sequence[Path] = (),
    *,
    max_mb: float = MAX_MB,
    title: str = "",
    text: str = "",
    figures: Sequence[Change] = (),
    sections: Sequence[Section] | None = None,
    compared: tuple[int, int] = (0, -1),
) -> None:
    """Write the page of run directories, finished or not, and of evaluation directories.

    max_mb: about how large the file may be, in 10^6 bytes; responses are sampled to fit. title,
    text, figures, sections: what a study says of itself, in place of what its evaluations say.
    compared: the evaluations that answer one problem at the top, where no run is shown.
    Errors: `UserError` for a directory that holds neither, or where there is nothing to show.
    """
    if not runs and not evaluations and not sections:
        raise UserError("page: there is no run and no evaluation to show")
    if out.is_dir():
        raise UserError(f"page {out} is a directory; name a file")
    shown = [read_run(run, name) for run, name in zip(runs, distinct(runs), strict=True)]
    rows = [read_evaluation(path) for path in evaluations]
    if len({row.label for row in rows}) < len(rows):  # the same model: told apart by directories
        names = zip(rows, distinct(evaluations), strict=True)
        rows = [replace(row, label=f"{row.label} ({name})") for row, name in names]
    top, others = curves_of(shown)
    if sections is None:
        sizes = {name: size for row in rows for name, size in row.sizes.items()}
        sections = sections_of(rows, sizes)
    values: dict[str, Any] = {
        "title": title or ", ".join([run.name for run in shown] or [row.label for row in rows]),
        "text": text,
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "runs": shown,
        "figures": figures or _figures(shown, rows),
        "table": table_of_runs(shown) if len(shown) > 1 else None,
        "plots_at_top": top,
        "curves": others,
        "sections": sections,
        "settings": _settings(shown),
    }
    sources: list[tuple[str, Mapping[Any, Sequence[Path]]]] = [
        *((run.name, rollouts_of(path)) for run, path in zip(shown, runs, strict=True)),
        *(
            (f"evaluation of {row.label}", samples_of(path))
            for row, path in zip(rows, evaluations, strict=True)
        ),
    ]
    room = int(1e6 * max_mb) - len(_rendered(values, []))
    responses = _responses(sources, room)
    if runs or len(responses) > 1:
        before, after = (0, 0) if runs else compared
        values["example"] = example_of(responses[before]["rollouts"], responses[after]["rollouts"])
    out.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(out, _rendered(values, [one for one in responses if one["rollouts"]["rows"]]))


def _rendered(values: Mapping[str, Any], responses: Sequence[dict[str, Any]]) -> bytes:
    more = {"example": [], "has_responses": bool(responses)}
    return render("page.html.j2", {"runs": responses}, **(more | dict(values)))


def _responses(
    sources: Sequence[tuple[str, Mapping[Any, Sequence[Path]]]], room: int
) -> list[dict[str, Any]]:
    """name, and rollouts: as of `sample_responses`; all together of about `room` bytes."""
    found = []
    for place, (name, files) in enumerate(sources):
        rollouts = sample_responses(files, room // (len(sources) - place))
        room -= encoded_size(rollouts)
        found.append({"name": name, "rollouts": rollouts})
    return found


def _figures(runs: Sequence[Run], rows: Sequence[TableRow]) -> list[Change]:
    """Of one run, or of the first and the last evaluation; several runs have a table."""
    if runs:
        return changes_of(runs[0]) if len(runs) == 1 else []
    shared = len(rows) > 1 and set(rows[0].blocks) == set(rows[-1].blocks)
    return figures_of_rows(rows[0], rows[-1], OVERALL) if shared else []


def figures_of_rows(before: TableRow, after: TableRow, block: str) -> list[Change]:
    """Two rows of a table: a model and what it was made of."""
    ends = before.blocks[block], after.blocks[block]
    name = f", {before.label} to {after.label}"
    return [
        change_of(
            f"{title}{name}", *(metrics[key].value for metrics in ends), is_share=key == "accuracy"
        )
        for title, key in (("Mean response tokens", "mean_tokens"), ("Accuracy", "accuracy"))
    ]


def _settings(runs: Sequence[Run]) -> list[Table]:
    """Settings in which runs differ (where a run lives is none), and all of them."""
    values = {
        key: [str(run.settings.get(key, "(not set)")) for run in runs]
        for key in dict.fromkeys(key for run in runs for key in run.settings)
    }
    differ = [key for key in sorted(values) if len({*values[key]}) > 1 and key != "run.dir"]
    tables = [("Settings that differ", differ)] if len(runs) > 1 else []
    return [
        Table(
            caption=caption,
            headings=["setting", *(run.name for run in runs)],
            rows=[[key, *values[key]] for key in keys],
        )
        for caption, keys in (*tables, ("All settings", values))
        if values
    ]


def distinct(paths: Sequence[Path]) -> list[str]:
    """Names of directories that tell them apart: from the last folder that they share."""
    whole = [path.resolve() for path in paths]
    shared = os.path.commonpath([path.parent for path in whole] or [Path("/")])
    return [str(path.relative_to(shared)) for path in whole]
