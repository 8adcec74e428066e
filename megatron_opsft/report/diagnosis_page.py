"""tokens.html of a diagnosis: responses shaded by D_t, and the tokens where it is largest."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from megatron_opsft.report.diagnosis import DiagnosedResponse
from megatron_opsft.report.diagnosis_figures import shade_of

_LEVELS = 9  # of shade


def render_page(summary: Mapping[str, Any], responses: Sequence[DiagnosedResponse]) -> str:
    """One HTML file without scripts that needs nothing else. summary: as in summary.json."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    largest = max((row["kl"] for row in summary["words"]), default=0.0)
    words = [(row, (row["kl"] / largest) ** 0.5) for row in summary["words"] if row["kl"] > 0]
    full = shade_of(summary)
    shaded = [(response, _tokens(response, full)) for response in responses]
    return environment.get_template("diagnosis.html.j2").render(
        summary=summary, words=words, responses=shaded, levels=_LEVELS
    )


def _tokens(response: DiagnosedResponse, full: float) -> list[tuple[str, int, str]]:
    """(text, level of shade, what is said when it is pointed at) of each."""
    preferred = {each.position: each.preferred for each in response.alternatives}
    found = []
    for place, (text, kl) in enumerate(zip(response.tokens, response.kl, strict=True)):
        told = f"D = {kl:.4g}"
        if place in preferred:
            told += "; efficient: " + ", ".join(
                f"{t!r} {100 * p:.0f} %" for t, p in preferred[place]
            )
        found.append((text, round(_LEVELS * min(1.0, kl / full) ** 0.5), told))
    return found
