"""Tables and page of a study: table.md and report.html beside its results."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from megatron_opsft.commands.report.chart import describe
from megatron_opsft.commands.report.contents import Contents
from megatron_opsft.commands.report.html import MAX_MB
from megatron_opsft.commands.report.page import figures_of_rows, write_page
from megatron_opsft.commands.report.page_sections import (
    OVER_PROBLEMS,
    PageSection,
    page_section_of,
)
from megatron_opsft.commands.report.table import (
    OVERALL,
    Estimate,
    Metrics,
    TableRow,
    escape_markdown,
    markdown_table,
    paper_table,
    text_table,
)
from megatron_opsft.commands.study.results import Row, read_written, write_results
from megatron_opsft.commands.study.study_file import RunEntry, Study
from megatron_opsft.runtime.durable import write_text


def write_outputs(out: Path, study: Study, rows: Sequence[Row]) -> None:
    """Write all files, from the finished runs."""
    write_results(out, study, rows)
    tables = [
        f"## {escape_markdown(section.title)}\n\n"
        + markdown_table(table_rows(study, rows, key), [OVERALL])
        for key, section in study.sections.items()
    ]
    write_text(out / "table.md", "\n".join(tables))
    describe_study(out, study, rows).write_page(out / "report.html")


def read_study_report(out: Path, *, max_mb: float) -> Contents:
    """Tables, charts and page of the study whose results are in `out`. Errors: `UserError`."""
    return describe_study(out, *read_written(out), max_mb=max_mb)


def describe_study(
    out: Path, study: Study, rows: Sequence[Row], *, max_mb: float = MAX_MB
) -> Contents:
    """Tables, charts and page of the finished runs. max_mb: as of `report.page.write_page`."""
    lines = {key: table_rows(study, rows, key) for key in study.sections}
    legend = _legend(study, rows)
    sections = [_section(study, rows, key, lines[key]) for key in study.sections]
    tables = []
    for key, section in study.sections.items():
        n = describe(
            [(row.label, row.size(OVERALL), "") for row in lines[key] if row.blocks]
        )
        note = f"{legend} {f'{n}.' if n else ''}".rstrip()
        tables.append(paper_table(lines[key], [OVERALL], section.title, note))

    def write(page: Path) -> None:
        done = [row for row in lines[next(iter(lines))] if row.blocks]
        base = [row for row in done if row.label == study.baseline]
        others = [row for row in done if row.label != study.baseline]
        best = sorted(others, key=lambda row: -row.blocks[OVERALL]["efficiency"].value)[
            :1
        ]
        write_page(
            page,
            [],
            _evaluations(out, study, rows, best[0].label if best else ""),
            title=study.title,
            text=f"{study.text.strip()} {legend}",
            figures=figures_of_rows(base[0], best[0], OVERALL) if base and best else (),
            sections=sections,
            max_mb=max_mb,
        )

    told = [
        f"{study.sections[key].title}\n\n{text_table(lines[key], [OVERALL])}"
        for key in lines
    ]
    return Contents(
        text="\n".join(told).rstrip(),
        write_page=write,
        sections=sections,
        tables=tables,
    )


def _evaluations(
    out: Path, study: Study, rows: Sequence[Row], last: str
) -> dict[str, Path]:
    """Label -> directory of each finished run, once: the baseline first, `last` at the end."""
    by_directory = {row.directory: row for row in reversed(rows) if row.error is None}
    order = dict.fromkeys(row.directory for row in rows if row.error is None)
    made = sorted((by_directory[name] for name in order), key=lambda row: row.seed)
    made.sort(key=lambda row: (row.name != study.baseline) + (row.name == last))
    return {
        f"{row.name}, seed {row.seed}" if row.seed else row.name: out
        / row.directory
        / "eval"
        for row in made
    }


def _legend(study: Study, rows: Sequence[Row]) -> str:
    """What the columns are, how many runs are finished, and what stands around values."""
    made = len({row.directory for row in rows if row.error is None})
    of = len({row.directory for row in rows})
    lines = [line for key in study.sections for line in table_rows(study, rows, key)]
    several = any(line.seeds > 1 for line in lines)
    return (
        f"{made} of {of} runs are finished. CR: mean response tokens over those of "
        f"{study.baseline}; Eff: accuracy / tokens in %. In brackets: {OVER_PROBLEMS}"
        + ("; ±: deviation of the seeds." if several else ".")
    )


def table_rows(study: Study, rows: Sequence[Row], section: str) -> list[TableRow]:
    """A row of the table for each name: means over seeds with their deviation, or one seed's
    intervals; without a block where no run is finished.
    """
    return [
        _table_row(
            name,
            [r for r in rows if (r.section, r.name, r.error) == (section, name, None)],
        )
        for name in study.sections[section].runs
    ]


def _table_row(name: str, done: Sequence[Row]) -> TableRow:
    """done: the finished runs of that name, one for each seed."""
    if not done:
        return TableRow(label=name, blocks={})
    metrics, deviations = _means([row.metrics for row in done])
    limits = [limit for limit, _ in done[0].budgets]
    points = [_means([row.budgets[n][1] for row in done]) for n in range(len(limits))]
    means = [(limit, found) for limit, (found, _) in zip(limits, points, strict=True)]
    size = done[0].size
    return TableRow(
        label=name,
        blocks={OVERALL: metrics},
        budgets={OVERALL: means},
        deviations={OVERALL: deviations},
        budget_deviations={OVERALL: [spread for _, spread in points]},
        sizes={OVERALL: size} if size else {},
        seeds=len(done),
    )


def _means(found: Sequence[Metrics]) -> tuple[Metrics, dict[str, float]]:
    """The mean of each metric over seeds, and the standard deviation of the sample (over n - 1); of
    one seed its own metrics, with intervals.
    """
    if len(found) == 1:
        return found[0], {}
    values = {m: [each[m].value for each in found if m in each] for m in found[0]}
    means = {metric: Estimate(value=fmean(those)) for metric, those in values.items()}
    return means, {
        metric: stdev(those) for metric, those in values.items() if len(those) > 1
    }


def _section(
    study: Study, rows: Sequence[Row], key: str, lines: Sequence[TableRow]
) -> PageSection:
    section = study.sections[key]
    own = [row for row in rows if row.section == key]
    errors = {
        row.name: row.error for row in reversed(own) if row.error
    }  # of the first seed
    entries = {name: entry or RunEntry() for name, entry in section.runs.items()}
    notes = [f"{name}: {entry.note}." for name, entry in entries.items() if entry.note]
    notes += [f"{name} has no result: {error}." for name, error in errors.items()]
    text = " ".join(filter(None, [section.text.strip(), *notes]))
    name = key if len(study.sections) > 1 else ""
    return page_section_of(lines, OVERALL, section.title, text, name=name)
