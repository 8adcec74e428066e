"""What an evaluation leaves behind: results.json, table, page, samples; and of a comparison."""

from collections.abc import Sequence
from pathlib import Path

from megatron_opsft.errors import UserError
from megatron_opsft.evaluate.comparison import Comparison, compare
from megatron_opsft.evaluate.directory import MANIFEST, read_manifest
from megatron_opsft.evaluate.identity import comparable_settings
from megatron_opsft.evaluate.inputs import Earlier, Inputs, Subject
from megatron_opsft.evaluate.results import (
    ModelSamples,
    build_results,
    read_results,
    write_results,
)
from megatron_opsft.evaluate.samples import SampleFiles
from megatron_opsft.report.page.tables import sections_of
from megatron_opsft.report.page.write import write_page
from megatron_opsft.runtime.durable import write_text


def write_outputs(inputs: Inputs) -> str:
    """All files of a finished evaluation; returns the table for a terminal. Rank 0 alone."""
    for subject in inputs.subjects:
        for benchmark in inputs.benchmarks:
            SampleFiles(subject.out).combine(benchmark.name)
    base = None if inputs.baseline is None else _samples(inputs, inputs.baseline)
    results = build_results(_samples(inputs, inputs.model), baseline=base, budgets=inputs.budgets)
    rows, directories = [results], [inputs.settings.out]
    if inputs.baseline is not None:
        directories = [inputs.baseline.out, inputs.settings.out]
    if isinstance(inputs.baseline, Earlier):
        rows = [inputs.baseline.results, results]
    elif inputs.baseline is not None and base is not None:
        alone = build_results(base, budgets=inputs.budgets)
        write_results(inputs.baseline.out / "results.json", alone)
        rows = [alone, results]
    comparison = compare(rows)
    write_text(inputs.settings.out / "table.md", comparison.markdown())
    # Before the page, which is made of it, and after all else.
    write_results(inputs.settings.out / "results.json", results)
    _write_page(comparison, inputs.settings.out, directories)
    return comparison.text()


def table_of(directory: Path) -> str:
    """The table of one evaluation and its baseline, for a terminal. Errors: `UserError` where there
    is no evaluation.
    """
    return compare([read_results(path) for path in with_baselines([directory])]).text().rstrip()


def with_baselines(directories: Sequence[Path]) -> list[Path]:
    """The evaluations, each behind its baseline's where that is still there. Errors: `UserError`
    where one is none.
    """
    found: dict[Path, Path] = {}
    for directory in directories:
        places = [directory / "baseline"]
        if (directory / MANIFEST).is_file():
            given = read_manifest(directory).get("settings", {}).get("baseline")
            places.insert(0, Path(given or places[0]).expanduser())
        if read_results(directory).baseline is None:
            places = []
        places = [place for place in places if (place / "results.json").is_file()][:1]
        for place in (*places, directory):
            found.setdefault(place.resolve(), place)
    return list(found.values())


def compare_directories(
    directories: Sequence[Path], out: Path, baseline: str | None, *, overwrite: bool = False
) -> str:
    """One table and page of several results, and the settings in which they differ.

    Errors: `UserError` for a directory without results, when nothing can be compared, or for a
    table that is in `out` already, unless it may be overwritten.
    """
    results = [read_results(directory) for directory in directories]
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; name a directory")
    if (out / "results.json").exists():
        raise UserError(
            f"--out {out} holds an evaluation, whose table would be replaced; name another "
            "directory"
        )
    if (out / "table.md").exists() and not overwrite:
        raise UserError(
            f"--out {out} holds a table.md already; name another directory, or give --overwrite"
        )
    comparison = compare(results, baseline=baseline)
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "table.md", comparison.markdown())
    _write_page(comparison, out, [d if d.is_dir() else d.parent for d in directories])
    return comparison.text()


def _write_page(comparison: Comparison, out: Path, directories: Sequence[Path]) -> None:
    """report.html of evaluations that are there."""
    text = " ".join([comparison.legend, *(f"{n[0].upper()}{n[1:]}." for n in comparison.notes)])
    sections = sections_of(comparison.rows, comparison.sizes)
    write_page(out / "report.html", [], directories, text=text, sections=sections)


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
