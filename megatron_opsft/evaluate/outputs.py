"""What an evaluation leaves behind: results.json, tables, figures, samples; and of a comparison."""

from collections.abc import Sequence
from pathlib import Path

from megatron_opsft.errors import UserError
from megatron_opsft.evaluate.comparison import Comparison, compare
from megatron_opsft.evaluate.directory import MANIFEST, read_manifest
from megatron_opsft.evaluate.identity import comparable_settings
from megatron_opsft.evaluate.inputs import Earlier, Inputs, Subject
from megatron_opsft.evaluate.references import own_references
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
    base = None if inputs.baseline is None else _samples(inputs, inputs.baseline)
    results = build_results(_samples(inputs, inputs.model), baseline=base, budgets=inputs.budgets)
    rows = [results]
    if isinstance(inputs.baseline, Earlier):
        rows = [inputs.baseline.results, results]
    elif inputs.baseline is not None and base is not None:
        alone = build_results(base, budgets=inputs.budgets)
        write_results(inputs.baseline.out / "results.json", alone)
        rows = [alone, results]
    table = write_comparison(compare(rows), inputs.settings.out)
    # Last: whoever finds results.json finds the rest.
    write_results(inputs.settings.out / "results.json", results)
    return table


def table_of(directory: Path) -> str:
    """The table of one evaluation and its baseline, for a terminal. Errors: `UserError` where there
    is no evaluation.
    """
    return compare([read_results(path) for path in with_baselines([directory])]).text().rstrip()


def with_baselines(directories: Sequence[Path]) -> list[Path]:
    """The evaluations, each behind its baseline's where that is still there, with the samples that
    it was compared with. Errors: `UserError` where one is none.
    """
    found: dict[Path, Path] = {}
    for directory in directories:
        results = read_results(directory)
        places = [directory / "baseline"]
        if results.baseline is not None and (directory / MANIFEST).is_file():
            settings = read_manifest(directory).get("settings", {})
            places.append(Path(settings.get("baseline") or places[0]).expanduser())
        for place in places:
            if results.baseline is not None and (place / "results.json").is_file():
                _, reference = own_references([read_results(place), results])
                if reference is not None and reference.row is not None:
                    found.setdefault(place.resolve(), place)
        found.setdefault(directory.resolve(), directory)
    return list(found.values())


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
    """table.md, accuracy_length.* and, where some row has a curve, budgets.* in `out`;
    returns the table as text.
    """
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "table.md", comparison.markdown(intervals=True))
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


def _samples(inputs: Inputs, model: Subject | Earlier) -> ModelSamples:
    """The stored samples that this evaluation asks for."""
    earlier = model.results if isinstance(model, Earlier) else None
    samples = {}
    for benchmark in inputs.benchmarks:
        ids = {problem.id for problem in benchmark.problems}
        each = benchmark.samples
        if earlier is not None:
            each = earlier.benchmarks[benchmark.name].samples_per_problem
        samples[benchmark.name] = [
            sample.scored()
            for sample in SampleFiles(model.out).read(benchmark.name)
            if sample.problem_id in ids and sample.sample_index < each
        ]
    return ModelSamples(
        name=model.results.model if isinstance(model, Earlier) else model.model.name,
        samples=samples,
        settings=comparable_settings(inputs) if earlier is None else earlier.settings,
    )
