"""What a study leaves: table.json, table.md and its page, report.html."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pstdev

from markupsafe import Markup

from megatron_opsft.report.page.plot import Series, number, plot
from megatron_opsft.report.page.tables import Section, Table, plots_of_block, table_of
from megatron_opsft.report.page.write import figures_of_rows, write_page
from megatron_opsft.report.table import (
    OVERALL,
    Cell,
    Estimate,
    TableRow,
    escape_markdown,
    markdown_table,
)
from megatron_opsft.runtime.durable import write_text
from megatron_opsft.study.study_file import StudyPlan
from megatron_opsft.study.table import PHASES, Row, Training, to_json

_MARKED = 7  # rows whose lengths have a colour of their own


def write_outputs(out: Path, plan: StudyPlan, rows: Sequence[Row]) -> None:
    """All files, of the runs that are there."""
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "table.json", to_json(rows))
    lines = {key: _lines(plan, rows, key) for key in plan.rows}
    tables = [
        f"## {escape_markdown(section.title)}\n\n"
        + markdown_table(lines[key], [OVERALL], intervals=True)
        for key, section in plan.study.sections.items()
    ]
    write_text(out / "table.md", "\n".join(tables))
    made = [run for run in plan.runs if run.is_finished]
    done = [row for row in next(iter(lines.values())) if row.blocks]
    base = [row for row in done if row.label == plan.study.baseline]
    others = [row for row in done if row.label != plan.study.baseline]
    best = sorted(others, key=lambda row: -row.blocks[OVERALL]["efficiency"].value)[:1]
    names = [run.name for run in made]
    compared = [names.index(row.label) for row in base + best if row.label in names]
    write_page(
        out / "report.html",
        [],
        [run.evaluation for run in made],
        title=plan.study.title,
        text=f"{plan.study.text.strip()} {_legend(plan, len(made))}",
        figures=figures_of_rows(base[0], best[0], OVERALL) if base and best else (),
        sections=[_section(plan, rows, key, lines[key]) for key in plan.rows],
        compared=(compared[0], compared[-1]) if compared else (0, -1),
    )


def _legend(plan: StudyPlan, num_made: int) -> str:
    seeds = max(len(runs) for rows in plan.rows.values() for runs in rows.values())
    return (
        f"{num_made} of {len(plan.runs)} runs are finished. CR: mean response tokens over those of "
        f"{plan.study.baseline}; Eff: accuracy / tokens in %. In brackets: 95 % intervals over "
        "problems" + ("; ±: deviation of the seeds." if seeds > 1 else ".")
    )


def _lines(plan: StudyPlan, rows: Sequence[Row], section: str) -> list[TableRow]:
    """A row of the table for each name: means over seeds with their deviation, or one seed's
    intervals; without a block where no run is finished.
    """
    found = []
    for name in plan.rows[section]:
        done = [r for r in rows if (r.section, r.name, r.error) == (section, name, None)]
        metrics = dict(done[0].metrics) if done else {}
        deviations = {}
        if len(done) > 1:
            for metric in metrics:
                values = [row.metrics[metric].value for row in done if metric in row.metrics]
                metrics[metric] = Estimate(value=fmean(values))
                deviations[metric] = pstdev(values)
        blocks = {OVERALL: metrics} if done else {}
        budgets = {OVERALL: done[0].budgets} if done else {}
        found.append(
            TableRow(label=name, blocks=blocks, budgets=budgets, deviations={OVERALL: deviations})
        )
    return found


def _section(plan: StudyPlan, rows: Sequence[Row], key: str, lines: Sequence[TableRow]) -> Section:
    section = plan.study.sections[key]
    own = [row for row in rows if row.section == key]
    table = table_of(lines, OVERALL, section.title)
    errors = {row.name: row.error for row in reversed(own) if row.error}  # of the first seed
    notes = [
        f"{name}: {entry.note}." for name, entry in section.runs.items() if entry and entry.note
    ]
    notes += [f"{name} has no result: {error}." for name, error in errors.items()]
    trained = {
        name: [row.training for row in own if row.name == name and row.training]
        for name in section.runs
    }
    return Section(
        title=section.title,
        text=" ".join(filter(None, [section.text.strip(), *notes])),
        table=table,
        plots=[*plots_of_block(lines, OVERALL), *_lengths(trained)],
        folded=_costs(trained) if any(trained.values()) else None,
    )


def _lengths(trained: dict[str, list[Training]]) -> list[Markup]:
    """Mean response tokens of held-out problems over the steps, first seeds."""
    curves = {name: own[0].lengths for name, own in trained.items() if own}
    series = [
        Series(label=name, place=place, points=lengths)
        for place, (name, lengths) in enumerate(curves.items())
        if len(lengths) > 1
    ]
    if not series or len(series) > _MARKED:
        return []
    return [plot("Mean response tokens on held-out problems", series, from_zero=True)]


def _costs(trained: dict[str, list[Training]]) -> Table:
    """Means over seeds."""
    rows: list[list[Cell | str]] = []
    for name, own in trained.items():
        if not own:
            continue
        ends = [t for t in own if t.converged_seconds is not None]
        values = [
            fmean(t.seconds / t.steps for t in own),
            *(fmean(t.phases.get(phase, 0.0) for t in own) for phase in PHASES),
            fmean(t.tokens / t.steps for t in own),
            fmean(t.skipped_steps for t in own),
            fmean(t.converged_step or 0 for t in ends) if ends else None,
            fmean(t.converged_seconds or 0.0 for t in ends) if ends else None,
        ]
        rows.append([name, *map(number, values)])
    headings = ["run", "s a step", *(f"{phase.replace('_', ' ')} s" for phase in PHASES)]
    headings += ["trained tokens a step", "steps without any", "converged at step", "after s"]
    caption = "What they cost; phases are median seconds of a step"
    return Table(caption=caption, headings=headings, rows=rows)
