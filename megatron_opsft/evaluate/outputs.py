"""What an evaluation leaves behind: results.json, tables, figures, samples; and of a comparison."""

from collections.abc import Sequence
from pathlib import Path

from megatron_opsft.errors import UserError
from megatron_opsft.evaluate.comparison import Comparison, compare
from megatron_opsft.evaluate.identity import comparable_settings
from megatron_opsft.evaluate.inputs import Earlier, Inputs, Subject
from megatron_opsft.evaluate.metrics import ScoredSample
from megatron_opsft.evaluate.results import (
    ModelSamples,
    Results,
    build_results,
    read_results,
    write_results,
)
from megatron_opsft.evaluate.samples import SampleFiles
from megatron_opsft.report.evaluation import plot_accuracy_length, plot_budgets
from megatron_opsft.runtime.durable import write_text

FIGURE_ENDINGS = (".png", ".svg")


def write_outputs(inputs: Inputs) -> str:
    """All files of a finished evaluation; returns the table for a terminal. Rank 0 alone."""
    for subject in inputs.subjects:
        for benchmark in inputs.benchmarks:
            SampleFiles(subject.out).combine(benchmark.name)
    baseline = _baseline_samples(inputs)
    if isinstance(inputs.baseline, Subject):
        assert baseline is not None
        alone = build_results(baseline, budgets=inputs.budgets)
        write_results(inputs.baseline.out / "results.json", alone)
    results = build_results(
        _samples(inputs, inputs.model), baseline=baseline, budgets=inputs.budgets
    )
    rows = [results]
    if isinstance(inputs.baseline, Subject):
        rows = [alone, results]
    elif isinstance(inputs.baseline, Earlier):
        rows = [inputs.baseline.results, results]
    table = write_comparison(compare(rows), inputs.settings.out)
    # Last: whoever finds results.json finds the rest.
    write_results(inputs.settings.out / "results.json", results)
    return table


def compare_directories(directories: Sequence[Path], out: Path, baseline: str | None) -> str:
    """One table and figure of several results, and the settings in which they differ.

    Errors: `UserError` for a directory without results, or when nothing can be compared.
    """
    results: list[Results] = [read_results(directory) for directory in directories]
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; name a directory")
    if (out / "results.json").exists():
        raise UserError(
            f"--out {out} holds an evaluation, whose table would be replaced; name another "
            "directory"
        )
    return write_comparison(compare(results, baseline=baseline), out)


def write_comparison(comparison: Comparison, out: Path) -> str:
    """table.md, table.tex, accuracy_length.* and, where some row has a curve, budgets.* in `out`;
    returns the table as text.
    """
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "table.md", comparison.markdown(intervals=True))
    write_text(out / "table.tex", comparison.latex())
    block = comparison.blocks[-1]
    plot_accuracy_length(comparison.points(block), _figures(out, "accuracy_length"), title=block)
    if curves := comparison.curves(block):
        without = ", ".join(comparison.without_curve)
        title = f"{block}, without {without}" if without else block
        plot_budgets(curves, _figures(out, "budgets"), title=title)
    else:
        for path in _figures(out, "budgets"):
            path.unlink(missing_ok=True)
    return comparison.text()


def _figures(out: Path, name: str) -> list[Path]:
    return [out / f"{name}{ending}" for ending in FIGURE_ENDINGS]


def _samples(inputs: Inputs, subject: Subject) -> ModelSamples:
    return ModelSamples(
        name=subject.model.name,
        samples={
            b.name: _wanted(subject.out, b.name, b.samples, inputs) for b in inputs.benchmarks
        },
        settings=comparable_settings(inputs),
    )


def _baseline_samples(inputs: Inputs) -> ModelSamples | None:
    if isinstance(inputs.baseline, Subject):
        return _samples(inputs, inputs.baseline)
    if isinstance(inputs.baseline, Earlier):
        earlier = inputs.baseline
        sizes = {n: s.samples_per_problem for n, s in earlier.results.benchmarks.items()}
        return ModelSamples(
            name=earlier.results.model,
            samples={
                b.name: _wanted(earlier.out, b.name, sizes[b.name], inputs)
                for b in inputs.benchmarks
            },
            settings=earlier.results.settings,
        )
    return None


def _wanted(out: Path, benchmark: str, num_samples: int, inputs: Inputs) -> list[ScoredSample]:
    """Of what is stored, the samples that this evaluation asks for."""
    problems = next(b.problems for b in inputs.benchmarks if b.name == benchmark)
    ids = {problem.id for problem in problems}
    return [
        sample.scored()
        for sample in SampleFiles(out).read(benchmark)
        if sample.problem_id in ids and sample.sample_index < num_samples
    ]
