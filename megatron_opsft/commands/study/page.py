"""Writes tables and page of a study: table.md and report.html beside its results."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev

from megatron_opsft.commands.report.chart import describe
from megatron_opsft.commands.report.contents import Contents
from megatron_opsft.commands.report.html import MAX_MB
from megatron_opsft.commands.report.page import changes_between_rows, write_page
from megatron_opsft.commands.report.page_sections import (
    OVER_PROBLEMS,
    PageSection,
    page_section_of,
    warn_of_limit,
)
from megatron_opsft.commands.report.table import (
    DIFFERENCES,
    OVERALL,
    Estimate,
    MeanOverSeeds,
    Metrics,
    TableRow,
    escape_markdown,
    markdown_table,
    paper_table,
    text_table,
)
from megatron_opsft.commands.study.results import (
    StudyRow,
    read_written,
    subject_of,
    write_results,
)
from megatron_opsft.commands.study.study_file import Study, run_label
from megatron_opsft.runtime.durable import write_text
from megatron_opsft.runtime.formatting import count_of


def write_outputs(out: Path, study: Study, rows: Sequence[StudyRow]) -> None:
    """Write all files of the study, from the finished runs."""
    write_results(out, study, rows)
    tables = []
    for key, section in study.sections.items():
        table = markdown_table(table_rows(study, rows, key), [OVERALL])
        tables.append(f"## {escape_markdown(section.title)}\n\n{table}")
    write_text(out / "table.md", "\n".join(tables))
    describe_study(out, study, rows).write_page(out / "report.html")


def read_study_report(out: Path, *, max_mb: float) -> Contents:
    """Read tables, charts and page of the study whose results are in `out`. Errors: `UserError`."""
    return describe_study(out, *read_written(out), max_mb=max_mb)


def describe_study(
    out: Path, study: Study, rows: Sequence[StudyRow], *, max_mb: float = MAX_MB
) -> Contents:
    """Return tables, charts and page of the finished runs.

    max_mb: as of `report.page.write_page`.
    """
    lines = {key: table_rows(study, rows, key) for key in study.sections}
    subject = subject_of(study, rows)
    legend = _legend(study, rows, lines)
    sections = []
    tables = []
    texts = []
    for key, section in study.sections.items():
        sections.append(_page_section(study, rows, key, lines[key]))
        n = describe(
            [(row.label, row.size(OVERALL), "") for row in lines[key] if row.blocks]
        )
        note = f"{legend} {n}." if n else legend
        tables.append(paper_table(lines[key], [OVERALL], section.title, note))
        texts.append(f"{section.title}\n\n{text_table(lines[key], [OVERALL])}")
    in_all = list(chain.from_iterable(lines.values()))
    warning = warn_of_limit(in_all, [OVERALL])
    if warning:
        texts.append(f"WARNING {warning}")
    base, shown = _headline(study, next(iter(lines.values())), subject)
    return Contents(
        text="\n".join(texts).rstrip(),
        write_page=partial(
            write_page,
            runs=[],
            evaluations=_evaluations(out, study, rows, shown.label if shown else ""),
            title=study.title,
            text=study.text.strip(),
            warning=warning,
            legend=legend,
            figures=changes_between_rows(base, shown, OVERALL)
            if base and shown
            else [],
            sections=sections,
            max_mb=max_mb,
        ),
        sections=sections,
        tables=tables,
    )


def _headline(
    study: Study, rows: Sequence[TableRow], subject: str | None
) -> tuple[TableRow | None, TableRow | None]:
    """Return the rows of the baseline and of the study's subject; None for one that is not
    finished.

    rows: those of the first section.
    """
    finished = {row.label: row for row in rows if row.blocks}
    return finished.get(study.baseline), finished.get(subject or "")


def _evaluations(
    out: Path, study: Study, rows: Sequence[StudyRow], last: str
) -> dict[str, Path]:
    """Return label -> directory of the evaluation of each finished run, once.

    The baseline comes first, the run called `last` at the end.
    """
    by_directory: dict[str, StudyRow] = {}
    for row in rows:
        if row.error is None:
            by_directory.setdefault(row.directory, row)
    in_order = sorted(
        by_directory.values(),
        key=lambda row: (row.name != study.baseline, row.name == last, row.seed),
    )
    return {
        run_label(row.name, row.seed): out / row.directory / "eval" for row in in_order
    }


def _legend(
    study: Study, rows: Sequence[StudyRow], lines: Mapping[str, Sequence[TableRow]]
) -> str:
    """Say what the columns are, how many runs are finished, and what stands around values.

    lines: the rows of each section's table.
    """
    directories = {row.directory for row in rows}
    finished = {row.directory for row in rows if row.error is None}
    legend = (
        f"{len(finished)} of {count_of([len(directories)], 'run')} finished. CR: mean response "
        f"tokens over those of {study.baseline}; Eff: accuracy / tokens in %. In brackets: "
        f"{OVER_PROBLEMS}"
    )
    in_all = list(chain.from_iterable(lines.values()))
    if any(row.seeds > 1 for row in in_all):
        legend += "; ±: deviation of the seeds"
    if any(DIFFERENCES.keys() & row.blocks.get(OVERALL, {}).keys() for row in in_all):
        legend += (
            f". ΔAcc, ΔTok: minus {subject_of(study, rows)}, over the seeds that both have; the "
            "95 % intervals are paired: each resample has the same problems in both, and the "
            "seeds of a problem stay together"
        )
    return f"{legend}."


def table_rows(study: Study, rows: Sequence[StudyRow], section: str) -> list[TableRow]:
    """Return a row of the table for each name of a section.

    Its values are means over seeds with their deviation, or one seed's with intervals; a name
    without a finished run has no block.
    """
    finished = [row for row in rows if row.section == section and row.error is None]
    subject = subject_of(study, rows)
    lines = []
    for name in study.sections[section].runs:
        runs = [row for row in finished if row.name == name]
        lines.append(_table_row(name, runs, study.baseline, subject or ""))
    return lines


def _table_row(
    name: str, runs: Sequence[StudyRow], baseline: str, subject: str
) -> TableRow:
    """Return one row, with its differences to the study's subject in columns of their own.

    runs: the finished runs of that name, one for each seed.
    """
    if not runs:
        return TableRow(label=name, blocks={})
    budgets = []
    for index, (budget, _) in enumerate(runs[0].budgets):
        at_budget = [run.budgets[index][1] for run in runs]
        budgets.append((budget, _mean_over_seeds(at_budget)))
    size = runs[0].size
    differences = runs[0].differences
    to_subject = differences.get(subject, {})
    columns = {
        column: to_subject[metric]
        for column, metric in DIFFERENCES.items()
        if metric in to_subject
    }
    return TableRow(
        label=name,
        blocks={
            OVERALL: {**_mean_over_seeds([run.metrics for run in runs]), **columns}
        },
        differences={OVERALL: differences.get(baseline, {})},
        budgets={OVERALL: budgets},
        sizes={OVERALL: size} if size else {},
        seeds=len(runs),
    )


def _mean_over_seeds(seeds: Sequence[Metrics]) -> Metrics:
    """Return the mean of each metric over seeds, with its standard deviation (over n - 1).

    One seed alone keeps its own metrics, with intervals.
    """
    if len(seeds) == 1:
        return seeds[0]
    means: dict[str, Estimate] = {}
    for name in seeds[0]:
        values = [metrics[name].value for metrics in seeds if name in metrics]
        means[name] = Estimate(value=fmean(values))
        if len(values) > 1:
            means[name] = MeanOverSeeds(value=fmean(values), deviation=stdev(values))
    return means


def _page_section(
    study: Study, rows: Sequence[StudyRow], key: str, lines: Sequence[TableRow]
) -> PageSection:
    """Return a section of the page, with the notes on its runs. lines: rows of its table."""
    section = study.sections[key]
    sentences = [section.text.strip()]
    for name, entry in section.runs.items():
        if entry is not None and entry.note:
            sentences.append(f"{name}: {entry.note}.")
    errors: dict[str, str] = {}
    for row in reversed(rows):
        if row.section == key and row.error:
            errors[row.name] = row.error  # in the end that of the first seed
    sentences += [f"{name} has no result: {error}." for name, error in errors.items()]
    text = " ".join(filter(None, sentences))
    name = key if len(study.sections) > 1 else ""
    return page_section_of(lines, OVERALL, section.title, text, name=name)
