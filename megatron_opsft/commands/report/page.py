"""Page of runs, evaluations or a study: one self-contained HTML file that fetches nothing."""

import math
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron_opsft.commands.report.chart import Bars
from megatron_opsft.commands.report.curves import curves_of
from megatron_opsft.commands.report.html import MAX_MB, encoded_size, render
from megatron_opsft.commands.report.page_sections import (
    PageSection,
    example_of,
    table_of_runs,
)
from megatron_opsft.commands.report.runs import (
    Change,
    Run,
    change_of,
    changes_of,
    read_run,
    warn_of_held_out,
)
from megatron_opsft.commands.report.sampling import (
    evaluation_samples,
    held_out_of,
    rollouts_of,
    sample_responses,
)
from megatron_opsft.commands.report.table import (
    Estimate,
    MeanOverSeeds,
    Table,
    TableRow,
)
from megatron_opsft.commands.report.token_use import read_token_uses, where_tokens_went
from megatron_opsft.data.stored_samples import SampleFiles
from megatron_opsft.errors import UserError
from megatron_opsft.records import JsonObject
from megatron_opsft.runtime.durable import write_bytes
from megatron_opsft.runtime.owned_directory import NOT_SET

_MAX_BARS = 7  # of where the tokens went; of more evaluations, the first and the last
_NORMAL = 1.96  # half a 95 % interval over the standard deviation


class _Source(NamedTuple):
    """The responses of a run or an evaluation."""

    name: str
    files: Mapping[Any, Sequence[Path]]
    """Step or benchmark -> its files."""
    texts: Mapping[tuple[str, str], str] | None = None
    """(Benchmark, problem) -> text of the problem; None for a run, whose responses have it."""


def write_page(
    out: Path,
    runs: Sequence[Path],
    evaluations: Mapping[str, Path] = MappingProxyType({}),
    *,
    max_mb: float = MAX_MB,
    title: str = "",
    text: str = "",
    warning: str = "",
    legend: str = "",
    figures: Sequence[Change] = (),
    sections: Sequence[PageSection] = (),
) -> None:
    """Write the page of runs, finished or not, and of evaluations.

    runs: directories. evaluations: label -> directory, for their responses; if there is no run, the
        first and the last evaluation's responses to one problem stand at the top.
    max_mb: approximate bound on the file's size, in 10^6 bytes; responses are sampled to fit.
    title: by default the names of runs or evaluations.
    text: sentences at the top. legend: how to read the tables, above them.
    warning: what nobody may miss, at the top, too, besides what `warn_of_held_out` says.
    figures: quantities before and after at the top; by default those of a single run.
    sections: tables and charts below the top.

    Errors: `UserError` for a directory that is not a run's, or if `out` is a directory.
    """
    if out.is_dir():
        raise UserError(f"page {out} is a directory; name a file")
    names = distinct(runs)
    shown = list(map(read_run, runs, names))
    if not figures and len(shown) == 1:
        figures = changes_of(shown[0])
    top, other_curves = curves_of(shown)
    values: dict[str, Any] = {
        "title": title or ", ".join(names or evaluations),
        "text": text,
        "warning": " ".join(filter(None, [warn_of_held_out(shown), warning])),
        "legend": legend,
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "runs": shown,
        "figures": figures,
        "table": table_of_runs(shown),
        "plots_at_top": [*top],
        "curves": other_curves,
        "sections": sections,
        "settings": _settings_of(shown),
    }
    named_runs = dict(zip(names, runs, strict=True))
    sources = _sources_of(named_runs, evaluations)
    values["plots_at_top"] += filter(None, [bars_of_tokens(named_runs, evaluations)])
    room = int(1e6 * max_mb) - len(render({**values, "example": []}, []))
    responses = _sample(sources, room)
    values["example"] = _example_of(responses, len(runs), len(evaluations))
    out.parent.mkdir(parents=True, exist_ok=True)
    responses = [source for source in responses if source["rollouts"]["rows"]]
    write_bytes(out, render(values, responses))


def _example_of(
    responses: Sequence[JsonObject], num_runs: int, num_evaluations: int
) -> list[JsonObject]:
    """Return a response before and one after, see `example_of`: of the first run, to held-out
    problems if it keeps those, else of the first and the last evaluation.

    responses: as of `_sample`, of `_sources_of`.
    """
    rollouts = [source["rollouts"] for source in responses]
    if num_runs:
        has_held_out = len(rollouts) > num_runs + num_evaluations
        of_run = rollouts[num_runs if has_held_out else 0]
        return example_of(of_run, of_run)
    return example_of(rollouts[0], rollouts[-1]) if len(rollouts) > 1 else []


def _sources_of(
    runs: Mapping[str, Path], evaluations: Mapping[str, Path]
) -> list[_Source]:
    """Find the responses of runs and evaluations. Both: label -> directory."""
    sources = [_Source(name, rollouts_of(run)) for name, run in runs.items()]
    for name, run in runs.items():
        for title, files_of_step in held_out_of(run).items():
            sources.append(_Source(f"{name}, {title}", files_of_step))
    for label, evaluation in evaluations.items():
        files = evaluation_samples(evaluation)
        texts = SampleFiles(evaluation).problems()
        sources.append(_Source(f"evaluation of {label}", files, texts))
    return sources


def _sample(sources: Sequence[_Source], room: int) -> list[JsonObject]:
    """Sample responses that take about `room` bytes, or fewer, in the page.

    Returns a dictionary for each source: its name; rollouts: as `sample_responses` returns them.
    """
    samples = []
    for index, (name, files, texts) in enumerate(sources):
        fair_share = room // (len(sources) - index)
        rollouts = sample_responses(files, fair_share, texts)
        room -= encoded_size(rollouts)
        samples.append({"name": name, "rollouts": rollouts})
    return samples


def bars_of_tokens(
    runs: Mapping[str, Path], evaluations: Mapping[str, Path]
) -> Bars | None:
    """Return the bars of the first and the last step of each run, and of each evaluation; None if
    no response says where its tokens went. Both: label -> directory.

    A run is measured on its held-out problems, if it keeps their responses.
    """
    groups: dict[str, list[Path]] = {}  # label -> files of its responses
    for name, run in runs.items():
        files_of_step = next(iter(held_out_of(run).values()), rollouts_of(run))
        steps = sorted(files_of_step)
        for step in dict.fromkeys([*steps[:1], *steps[-1:]]):
            label = f"step {step}" if len(runs) == 1 else f"{name}, step {step}"
            groups[label] = list(files_of_step[step])
    labels = list(evaluations)
    if len(labels) > _MAX_BARS:
        labels = [labels[0], labels[-1]]
    for label in labels:
        files = evaluation_samples(evaluations[label])
        groups[label] = list(chain.from_iterable(files.values()))
    return where_tokens_went(
        {label: read_token_uses(files) for label, files in groups.items()}
    )


def changes_between_rows(before: TableRow, after: TableRow, block: str) -> list[Change]:
    """Compare length and accuracy of two rows: a model, and the model that was made from it."""
    names = f"{before.label} to {after.label}"
    sizes = dict.fromkeys(filter(None, [before.size(block), after.size(block)]))
    figures = []
    for metric, title in (
        ("mean_tokens", "Mean response tokens"),
        ("accuracy", "Accuracy"),
    ):
        old, new = before.blocks[block][metric], after.blocks[block][metric]
        paired = after.differences.get(block, {}).get(metric)
        figures.append(
            change_of(
                f"{title}, {names}",
                old.value,
                new.value,
                is_share=metric == "accuracy",
                n=" / ".join(sizes),
                interval=paired.interval if paired else _unpaired(old, new),
            )
        )
    return figures


def _unpaired(before: Estimate, after: Estimate) -> tuple[float, float] | None:
    """Return the 95 % interval of after - before from the spread of each, as if they were
    independent, which is too wide for answers to the same problems; None if one has no spread.
    """
    variance = 0.0
    for estimate in (before, after):
        if estimate.interval is None:
            return None
        low, high = estimate.interval
        half = (high - low) / 2
        if isinstance(estimate, MeanOverSeeds):
            half *= _NORMAL  # its interval is a standard deviation
        variance += half**2
    difference = after.value - before.value
    return difference - math.sqrt(variance), difference + math.sqrt(variance)


def _settings_of(runs: Sequence[Run]) -> list[Table]:
    """Return a table of the settings in which runs differ, and one of all settings. Directories of
    runs always differ, so they do not count.
    """
    rows, differing = [], []
    for key in dict.fromkeys(chain.from_iterable(run.settings for run in runs)):
        values = [run.settings.get(key, NOT_SET) for run in runs]
        rows.append([key, *values])
        if len(set(values)) > 1 and key != "run.dir":
            differing.append([key, *values])
    if not rows:
        return []
    headings = ["setting", *(run.name for run in runs)]
    all_settings = Table(caption="All settings", headings=headings, rows=rows)
    if len(runs) == 1:
        return [all_settings]
    caption = "Settings that differ"
    differences = Table(caption=caption, headings=headings, rows=sorted(differing))
    return [differences, all_settings]


def distinct(paths: Sequence[Path]) -> list[str]:
    """Return different names of directories: their paths from the last folder that they share."""
    absolute = [path.resolve() for path in paths]
    shared = os.path.commonpath([path.parent for path in absolute] or [Path("/")])
    return [str(path.relative_to(shared)) for path in absolute]
