"""Page of runs, evaluations or a study: one self-contained HTML file that fetches nothing."""

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

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
)
from megatron_opsft.commands.report.sampling import (
    evaluation_samples,
    held_out_of,
    rollouts_of,
    sample_responses,
)
from megatron_opsft.commands.report.table import Table, TableRow
from megatron_opsft.errors import UserError
from megatron_opsft.records import JsonObject
from megatron_opsft.runtime.durable import write_bytes
from megatron_opsft.runtime.owned_directory import NOT_SET

_Source = tuple[str, Mapping[Any, Sequence[Path]]]
"""Name and files of the responses of a run or an evaluation."""


def write_page(
    out: Path,
    runs: Sequence[Path],
    evaluations: Mapping[str, Path] = MappingProxyType({}),
    *,
    max_mb: float = MAX_MB,
    title: str = "",
    text: str = "",
    figures: Sequence[Change] = (),
    sections: Sequence[PageSection] = (),
) -> None:
    """Write the page of runs, finished or not, and of evaluations.

    runs: directories.
    evaluations: label -> directory, for their responses; if there is no run, the first and the last
        evaluation's responses to one problem stand at the top.
    max_mb: approximate bound on the file's size, in 10^6 bytes; responses are sampled to fit.
    title: by default the names of runs or evaluations.
    text: sentences at the top.
    figures: quantities before and after at the top; by default those of a single run.
    sections: tables and charts below the top.

    Errors: `UserError` for a directory that is not a run's, or if `out` is a directory.
    """
    if out.is_dir():
        raise UserError(f"page {out} is a directory; name a file")
    names = distinct(runs)
    shown = [read_run(run, name) for run, name in zip(runs, names, strict=True)]
    if not figures and len(shown) == 1:
        figures = changes_of(shown[0])
    top, other_curves = curves_of(shown)
    values: dict[str, Any] = {
        "title": title or ", ".join(names or evaluations),
        "text": text,
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "runs": shown,
        "figures": figures,
        "table": table_of_runs(shown),
        "plots_at_top": top,
        "curves": other_curves,
        "sections": sections,
        "settings": _settings_of(shown),
        "example": [],
    }
    sources: list[_Source] = list(zip(names, map(rollouts_of, runs), strict=True))
    for name, run in zip(names, runs, strict=True):
        for title, held_out in held_out_of(run).items():
            sources.append((f"{name}, {title}", held_out))
    for label, evaluation in evaluations.items():
        sources.append((f"evaluation of {label}", evaluation_samples(evaluation)))
    room = int(1e6 * max_mb) - len(render(values, []))
    responses = _sample(sources, room)
    all_rollouts = [source["rollouts"] for source in responses]
    if runs:
        values["example"] = example_of(all_rollouts[0], all_rollouts[0])
    elif len(responses) > 1:
        values["example"] = example_of(all_rollouts[0], all_rollouts[-1])
    out.parent.mkdir(parents=True, exist_ok=True)
    responses = [source for source in responses if source["rollouts"]["rows"]]
    write_bytes(out, render(values, responses))


def _sample(sources: Sequence[_Source], room: int) -> list[JsonObject]:
    """Sample responses that take about `room` bytes, or fewer, in the page.

    Returns a dictionary for each source: its name; rollouts: as `sample_responses` returns them.
    """
    samples = []
    for index, (name, files) in enumerate(sources):
        rollouts = sample_responses(files, room // (len(sources) - index))
        room -= encoded_size(rollouts)
        samples.append({"name": name, "rollouts": rollouts})
    return samples


def figures_of_rows(before: TableRow, after: TableRow, block: str) -> list[Change]:
    """Compare length and accuracy of two rows: a model, and the model that was made from it."""
    names = f"{before.label} to {after.label}"
    old, new = before.blocks[block], after.blocks[block]
    return [
        change_of(
            f"Mean response tokens, {names}",
            old["mean_tokens"].value,
            new["mean_tokens"].value,
            is_share=False,
        ),
        change_of(
            f"Accuracy, {names}",
            old["accuracy"].value,
            new["accuracy"].value,
            is_share=True,
        ),
    ]


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
