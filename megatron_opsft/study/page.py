"""The page of a study: one HTML file that needs no network, with every table and figure."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from megatron_opsft.evaluate.comparison import compare
from megatron_opsft.evaluate.results import read_results
from megatron_opsft.report.canvas import figure_saved_as
from megatron_opsft.report.evaluation import plot_accuracy_length, plot_budgets
from megatron_opsft.report.labels import shown
from megatron_opsft.runtime.durable import write_text
from megatron_opsft.study.jobs import files_of
from megatron_opsft.study.study_file import StudyPlan
from megatron_opsft.study.table import PHASES, Row, over_seeds

_MEASURES = ("accuracy", "pass_at_n", "tokens", "compression_ratio", "efficiency", "norm_std")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One name of a section over its seeds; (mean, standard deviation) of each measure that any
    seed has. costs: means over seeds.
    """

    name: str
    note: str
    rows: list[Row]
    measures: dict[str, tuple[float, float]]
    costs: dict[str, float]

    @property
    def errors(self) -> list[str]:
        """Of the runs that did not end."""
        return [row.error for row in self.rows if row.error]


def write_page(out: Path, plan: StudyPlan, rows: Sequence[Row]) -> None:
    """report.html in `out`."""
    sections = []
    for key, section in plan.study.sections.items():
        own = [row for row in rows if row.section == key]
        lines = [
            _line(name, entry.note if entry else "", own) for name, entry in section.runs.items()
        ]
        sections.append(
            {
                "key": key,
                "title": section.title,
                "text": section.text,
                "lines": lines,
                "figures": _figures(out, plan, key),
                "lengths": _length_figure(lines),
                "trains": any(row.training for row in own),
            }
        )
    environment = Environment(
        loader=PackageLoader("megatron_opsft.study", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("page.html").render(
        study=plan.study,
        sections=sections,
        phases=PHASES,
        finished=sum(files_of(out, run).is_finished for run in plan.runs),
        total=len(plan.runs),
    )
    write_text(out / "report.html", page)


def _line(name: str, note: str, rows: Sequence[Row]) -> Line:
    own = [row for row in rows if row.name == name]
    done = [row for row in own if row.error is None]
    measures = {
        key: over_seeds(values)
        for key in _MEASURES
        if (values := [v for row in done if (v := getattr(row, key)) is not None])
    }
    trained = [row.training for row in own if row.training is not None]
    costs: dict[str, float] = {}
    if trained:
        costs = {
            "step": fmean([t.seconds / t.steps for t in trained]),
            "trained_tokens": fmean([t.tokens / t.steps for t in trained]),
            "skipped": fmean([t.skipped_steps for t in trained]),
            **{phase: fmean([t.phases.get(phase, 0.0) for t in trained]) for phase in PHASES},
        }
        if ends := [t for t in trained if t.converged_seconds is not None]:
            costs["converged_step"] = fmean([t.converged_step or 0 for t in ends])
            costs["converged_seconds"] = fmean([t.converged_seconds or 0.0 for t in ends])
    return Line(name=name, note=note, rows=own, measures=measures, costs=costs)


def _figures(out: Path, plan: StudyPlan, section: str) -> list[Markup]:
    """Accuracy against length with the Pareto front, and the budget curves, of the first seed."""
    base = [(run.name, run) for run in plan.runs if run.name == plan.study.baseline][:1]
    rows = [(name, runs[0]) for name, runs in plan.rows[section].items()]
    if base[0][1] in [run for _, run in rows]:
        base = []
    results = [
        read_results(files.evaluation).model_copy(update={"model": name})
        for name, run in [*base, *rows]
        if (files := files_of(out, run)).is_finished
    ]
    if len(results) < 2:
        return []
    comparison = compare(results)
    block = comparison.blocks[-1]
    figures = [_drawn(lambda path: plot_accuracy_length(comparison.points(block), [path]))]
    if curves := comparison.curves(block):
        figures.append(_drawn(lambda path: plot_budgets(curves, [path])))
    return figures


def _length_figure(lines: Sequence[Line]) -> Markup | None:
    """Mean response tokens of held-out problems over the steps, first seed."""
    curves = [
        (line.name, line.rows[0].training.lengths)
        for line in lines
        if line.rows and line.rows[0].training and len(line.rows[0].training.lengths) > 1
    ]
    if not curves:
        return None

    def draw(path: Path) -> None:
        with figure_saved_as([path], (6.6, 4.6)) as figure:
            axes = figure.subplots()
            for place, (name, lengths) in enumerate(curves):
                style = ("-", "--", ":", "-.")[place // 10 % 4]
                axes.plot(*zip(*lengths, strict=True), label=shown(name), linestyle=style)
            axes.set_xlabel("step")
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.set_ylabel("mean response tokens")
            axes.set_ylim(bottom=0)
            figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)

    return _drawn(draw)


def _drawn(draw: Any) -> Markup:
    """An SVG to stand inside a page; `draw` writes it into a file."""
    with TemporaryDirectory() as directory:
        path = Path(directory) / "figure.svg"
        draw(path)
        text = path.read_text(encoding="utf-8")
    return Markup(text[text.index("<svg") :])
