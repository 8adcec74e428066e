"""A page of runs, evaluations or a study: one HTML file that needs nothing else and asks nobody."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup

from megatron_opsft.errors import UserError
from megatron_opsft.report.page.evaluation_data import (
    EvaluationData,
    blocks_of,
    read_evaluation,
    samples_of,
)
from megatron_opsft.report.page.evaluation_plots import plots_of_block
from megatron_opsft.report.page.html import MAX_MB, encoded_size, render, script_json
from megatron_opsft.report.page.result import (
    BigFigure,
    Table,
    curves_of,
    example_of,
    figures_of_rows,
    figures_of_run,
    table_of_runs,
)
from megatron_opsft.report.page.run_data import RunData, differing, run_data
from megatron_opsft.report.page.sampling import rollouts_of, sample_responses
from megatron_opsft.report.table import (
    COLUMNS,
    MORE_COLUMNS,
    OVERALL,
    TableRow,
    cells,
    title_of,
    used_columns,
)
from megatron_opsft.runtime.durable import write_bytes

_SCRIPTS = ("elements.js", "theme.js", "histogram.js", "response.js", "reader.js")


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A table with its pictures: a benchmark of evaluations, or a section of a study. folded: a
    table that is opened by a click.
    """

    title: str
    text: str
    table: Table
    plots: Sequence[Markup]
    folded: Table | None = None


def write_page(
    out: Path,
    runs: Sequence[Path],
    evaluations: Sequence[Path] = (),
    *,
    max_mb: float = MAX_MB,
    title: str = "",
    text: str = "",
    figures: Sequence[BigFigure] = (),
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
        raise UserError(f"page {out}: is a directory; name a file")
    if not max_mb > 0:
        raise UserError(f"--max-mb {max_mb:g}: must be above 0")
    shown_runs = [run_data(run, name) for run, name in zip(runs, distinct(runs), strict=True)]
    shown_evaluations = _named(evaluations)
    rows = [shown.row for shown in shown_evaluations]
    names = [run.name for run in shown_runs] or [row.label for row in rows]
    top, others = curves_of(shown_runs)
    if sections is None:
        sizes = {name: size for one in shown_evaluations for name, size in one.sizes.items()}
        sections = sections_of(rows, sizes)
    values: dict[str, Any] = {
        "title": title or ", ".join(names),
        "text": text,
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "runs": shown_runs,
        "figures": figures or _figures(shown_runs, rows),
        "table": table_of_runs(shown_runs) if len(shown_runs) > 1 else None,
        "plots_at_top": top,
        "curves": others,
        "sections": sections,
        "settings": _settings(shown_runs),
    }
    names = [run.name for run in shown_runs] + [f"evaluation of {row.label}" for row in rows]
    files: list[Mapping[Any, Sequence[Path]]] = [
        *map(rollouts_of, runs),
        *map(samples_of, evaluations),
    ]
    room = int(1e6 * max_mb) - len(_rendered(values, []))
    responses = _responses(names, files, room)
    if runs or len(responses) > 1:
        before, after = (0, 0) if runs else compared
        values["example"] = example_of(responses[before]["rollouts"], responses[after]["rollouts"])
    out.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(out, _rendered(values, [one for one in responses if one["rollouts"]["rows"]]))


def _rendered(values: Mapping[str, Any], responses: Sequence[dict[str, Any]]) -> bytes:
    return render(
        "page.html.j2",
        styles=["page.css"],
        scripts=_SCRIPTS,
        data=script_json({"runs": responses}),
        has_responses=bool(responses),
        **({"example": []} | dict(values)),
    )


def _responses(
    names: Sequence[str], files: Sequence[Mapping[Any, Sequence[Path]]], room: int
) -> list[dict[str, Any]]:
    """name, and rollouts: as of `sample_responses`; all together of about `room` bytes."""
    found = []
    for place, (name, own) in enumerate(zip(names, files, strict=True)):
        rollouts = sample_responses(own, room // (len(files) - place))
        room -= encoded_size(rollouts)
        found.append({"name": name, "rollouts": rollouts})
    return found


def _named(evaluations: Sequence[Path]) -> list[EvaluationData]:
    """Evaluations of the same model are told apart by their directories."""
    found = [read_evaluation(path) for path in evaluations]
    if len({one.row.label for one in found}) == len(found):
        return found
    return [
        replace(one, row=replace(one.row, label=f"{one.row.label} ({name})"))
        for one, name in zip(found, distinct(evaluations), strict=True)
    ]


def _figures(runs: Sequence[RunData], rows: Sequence[TableRow]) -> list[BigFigure]:
    """Of one run, or of the first and the last evaluation; several runs have a table."""
    if runs:
        return figures_of_run(runs[0]) if len(runs) == 1 else []
    shared = len(rows) > 1 and set(rows[0].blocks) == set(rows[-1].blocks)
    return figures_of_rows(rows[0], rows[-1], OVERALL) if shared else []


def sections_of(rows: Sequence[TableRow], sizes: Mapping[str, str]) -> list[Section]:
    """A section a block. sizes: benchmark -> its problems and samples, as text."""
    found = []
    for block, heading, own in blocks_of(rows):
        told = [sizes[block]] if block in sizes else []
        told += [
            f"CR of {row.label}: to the tokens of {row.reference}" for row in own if row.reference
        ]
        found.append(
            Section(
                title=title_of(heading),
                text=". ".join([*told, "In brackets: intervals by bootstrap over problems."]),
                table=table_of(own, block, title_of(heading)),
                plots=plots_of_block(own, block),
            )
        )
    return found


def table_of(rows: Sequence[TableRow], block: str, caption: str) -> Table:
    """The metrics of a block, with intervals."""
    only = [replace(row, blocks={block: row.blocks.get(block, {})}) for row in rows]
    columns = used_columns(only, (*COLUMNS, *MORE_COLUMNS))
    lines = zip(rows, cells(rows, block, columns), strict=True)
    return Table(
        caption=caption,
        headings=["", *(column.heading for column in columns)],
        rows=[[row.label, *line] for row, line in lines],
    )


def _settings(runs: Sequence[RunData]) -> list[Table]:
    """Settings in which runs differ, and all of them."""

    def table(caption: str, keys: Sequence[str]) -> Table:
        rows = [[key, *(str(run.settings.get(key, "(not set)")) for run in runs)] for key in keys]
        return Table(caption=caption, headings=["setting", *(r.name for r in runs)], rows=rows)

    every = list(dict.fromkeys(key for run in runs for key in run.settings))
    if not every:
        return []
    differ = [table("Settings that differ", differing(runs))] if len(runs) > 1 else []
    return [*differ, table("All settings", every)]


def distinct(paths: Sequence[Path]) -> list[str]:
    """Names of directories that tell them apart: the last folder, and more where it is not enough.

    A directory that is there twice has the same name twice.
    """
    parts = [path.resolve().parts for path in paths]
    names: list[str] = []
    for depth in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(set(parts)):
            break
    return names
