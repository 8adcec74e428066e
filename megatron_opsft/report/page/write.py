"""A page of runs and evaluations: one HTML file that needs nothing else and asks nobody."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_opsft.errors import UserError
from megatron_opsft.report.page.embed import MAX_MB, encoded_size, script_json
from megatron_opsft.report.page.evaluation_data import evaluation_data, samples_of
from megatron_opsft.report.page.html import render
from megatron_opsft.report.page.run_data import run_data
from megatron_opsft.report.page.sampling import rollouts_of, sample_responses
from megatron_opsft.report.page.settings import differing
from megatron_opsft.runtime.durable import write_bytes

# In the order in which they build on each other.
_SCRIPTS = (
    "elements.js",
    "table.js",
    "plot.js",
    "curves.js",
    "overview.js",
    "evaluations.js",
    "histogram.js",
    "response.js",
    "reader.js",
    "theme.js",
    "tabs.js",
)


def write_page(
    out: Path,
    runs: Sequence[Path],
    evaluations: Sequence[Path] = (),
    *,
    max_mb: float = MAX_MB,
    title: str = "",
) -> None:
    """Write the page of run directories, finished or not, and of evaluation directories.

    max_mb: about how large the file may be, in 10^6 bytes; curves are thinned and responses sampled
    to fit. Errors: `UserError` for a directory that holds neither, or where there is nothing to
    show.
    """
    if not runs and not evaluations:
        raise UserError("page: there is no run and no evaluation to show")
    if out.is_dir():
        raise UserError(f"page {out}: is a directory; name a file")
    if not max_mb > 0:
        raise UserError(f"--max-mb {max_mb:g}: must be above 0")
    share = 0.5e6 * max_mb / max(1, len(runs))  # half of the page is for responses
    named = zip(runs, distinct(runs), strict=True)
    shown_runs = [run_data(run, name, share) for run, name in named]
    shown_evaluations = [evaluation_data(path) for path in evaluations]
    if len({shown["name"] for shown in shown_evaluations}) < len(evaluations):
        for shown, name in zip(shown_evaluations, distinct(evaluations), strict=True):
            shown["name"] += f" ({name})"
    if len({tuple(shown["blocks"]) for shown in shown_evaluations}) > 1:
        for shown in shown_evaluations:  # overall of other benchmarks is another quantity
            *names, overall = shown["blocks"]
            shown["blocks"][f"{overall} of {', '.join(names)}"] = shown["blocks"].pop(overall)
    data = {
        "title": title or ", ".join(shown["name"] for shown in shown_runs or shown_evaluations),
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "runs": shown_runs,
        "settings": differing([shown["settings"] for shown in shown_runs]),
        "evaluations": shown_evaluations,
    }
    files: list[Mapping[Any, Sequence[Path]]] = [
        *map(rollouts_of, runs),
        *map(samples_of, evaluations),
    ]
    room = int(1e6 * max_mb) - encoded_size(data)
    for place, shown in enumerate([*shown_runs, *shown_evaluations]):
        shown["rollouts"] = sample_responses(files[place], room // (len(files) - place))
        room -= encoded_size(shown["rollouts"])
    out.parent.mkdir(parents=True, exist_ok=True)
    page = render(
        "page.html.j2",
        styles=["page.css"],
        scripts=_SCRIPTS,
        title=data["title"],
        data=script_json(data),
    )
    write_bytes(out, page)


def distinct(paths: Sequence[Path]) -> list[str]:
    """Names of directories that tell them apart: the last folder, and more where it is not enough.

    A directory that is there twice has the same name twice.
    """
    parts = [path.resolve().parts for path in paths]
    names: list[str] = []
    for depth in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(set(parts)):
            break
    return names
