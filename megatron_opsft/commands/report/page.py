"""A page of runs, evaluations or a study: one HTML file that needs nothing else and asks nobody."""

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_opsft.commands.report.curves import curves_of
from megatron_opsft.commands.report.html import MAX_MB, encoded_size, render
from megatron_opsft.commands.report.runs import (
    Change,
    Run,
    change_of,
    changes_of,
    read_run,
)
from megatron_opsft.commands.report.sampling import (
    rollouts_of,
    sample_responses,
    samples_of,
)
from megatron_opsft.commands.report.table import Table, TableRow
from megatron_opsft.commands.report.tables import Section, example_of, table_of_runs
from megatron_opsft.errors import UserError
from megatron_opsft.runtime.durable import write_bytes
from megatron_opsft.runtime.owned_directory import NOT_SET


def write_page(
    out: Path,
    runs: Sequence[Path],
    evaluations: Mapping[str, Path] = MappingProxyType({}),
    *,
    max_mb: float = MAX_MB,
    title: str = "",
    text: str = "",
    figures: Sequence[Change] = (),
    sections: Sequence[Section] = (),
) -> None:
    """Write the page of run directories, finished or not, and of evaluations.

    evaluations: label -> directory, for the responses; without a run the first and the last of them
    answer one problem at the top. text, figures, sections: what is said of them, and of a study.
    max_mb: about how large the file may be, in 10^6 bytes; responses are sampled to fit. Errors:
    `UserError` for a directory that holds no run.
    """
    if out.is_dir():
        raise UserError(f"page {out} is a directory; name a file")
    shown = [
        read_run(run, name) for run, name in zip(runs, distinct(runs), strict=True)
    ]
    top, others = curves_of(shown)
    values: dict[str, Any] = {
        "title": title or ", ".join([run.name for run in shown] or evaluations),
        "text": text,
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "runs": shown,
        "figures": figures or (changes_of(shown[0]) if len(shown) == 1 else ()),
        "table": table_of_runs(shown) if len(shown) > 1 else None,
        "plots_at_top": top,
        "curves": others,
        "sections": sections,
        "settings": _settings(shown),
    }
    sources: list[tuple[str, Mapping[Any, Sequence[Path]]]] = [
        *((run.name, rollouts_of(path)) for run, path in zip(shown, runs, strict=True)),
        *(
            (f"evaluation of {label}", samples_of(path))
            for label, path in evaluations.items()
        ),
    ]
    room = int(1e6 * max_mb) - len(_rendered(values, []))
    responses = _responses(sources, room)
    if runs or len(responses) > 1:
        last = responses[0 if runs else -1]
        values["example"] = example_of(responses[0]["rollouts"], last["rollouts"])
    out.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(
        out, _rendered(values, [one for one in responses if one["rollouts"]["rows"]])
    )


def _rendered(values: Mapping[str, Any], responses: Sequence[dict[str, Any]]) -> bytes:
    more = {"example": [], "has_responses": bool(responses)}
    return render("page.html.j2", {"runs": responses}, **(more | dict(values)))


def _responses(
    sources: Sequence[tuple[str, Mapping[Any, Sequence[Path]]]], room: int
) -> list[dict[str, Any]]:
    """name, and rollouts: as of `sample_responses`; all together of about `room` bytes."""
    found = []
    for place, (name, files) in enumerate(sources):
        rollouts = sample_responses(files, room // (len(sources) - place))
        room -= encoded_size(rollouts)
        found.append({"name": name, "rollouts": rollouts})
    return found


def figures_of_rows(before: TableRow, after: TableRow, block: str) -> list[Change]:
    """Two rows of a table: a model and what it was made of."""
    ends = before.blocks[block], after.blocks[block]
    name = f", {before.label} to {after.label}"
    return [
        change_of(
            f"{title}{name}",
            *(metrics[key].value for metrics in ends),
            is_share=key == "accuracy",
        )
        for title, key in (
            ("Mean response tokens", "mean_tokens"),
            ("Accuracy", "accuracy"),
        )
    ]


def _settings(runs: Sequence[Run]) -> list[Table]:
    """Settings in which runs differ (where a run lives is none), and all of them."""
    values = {
        key: [run.settings.get(key, NOT_SET) for run in runs]
        for key in dict.fromkeys(key for run in runs for key in run.settings)
    }
    differ = [
        key for key in sorted(values) if len({*values[key]}) > 1 and key != "run.dir"
    ]
    tables = [("Settings that differ", differ)] if len(runs) > 1 else []
    return [
        Table(
            caption=caption,
            headings=["setting", *(run.name for run in runs)],
            rows=[[key, *values[key]] for key in keys],
        )
        for caption, keys in (*tables, ("All settings", values))
        if values
    ]


def distinct(paths: Sequence[Path]) -> list[str]:
    """Names of directories that tell them apart: from the last folder that they share."""
    whole = [path.resolve() for path in paths]
    shared = os.path.commonpath([path.parent for path in whole] or [Path("/")])
    return [str(path.relative_to(shared)) for path in whole]
