"""The page of a diagnosis: responses shaded by D_t, and the tokens where it is largest.

`megatron-opsft diagnose` leaves it as tokens.html, `megatron-opsft report` as report.html.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_opsft.report.diagnosis import DiagnosedResponse
from megatron_opsft.report.diagnosis_figures import shade_of
from megatron_opsft.report.page.html import render

_LEVELS = 9  # of shade, and of a word's size
_LEFT, _RIGHT, _HEIGHT = 50, 395, 120  # where bars are, in units of the drawing


def render_page(
    summary: Mapping[str, Any],
    responses: Sequence[DiagnosedResponse],
    *,
    max_bytes: float = float("inf"),
) -> bytes:
    """One HTML file that needs nothing else, in UTF-8. summary: as in summary.json.

    max_bytes: where the page is larger the first half of its responses is tried, and so on.
    """
    largest = max((row["kl"] for row in summary["words"]), default=0.0)
    words = [
        (row, round(_LEVELS * (row["kl"] / largest) ** 0.5))
        for row in summary["words"]
        if row["kl"] > 0
    ]
    full = shade_of(summary)
    shaded = [(response, _tokens(response, full)) for response in responses]
    while True:
        page = render(
            "diagnosis.html.j2",
            styles=["page.css", "diagnosis.css"],
            scripts=["theme.js", "diagnosis.js"],
            summary=summary,
            kinds=sorted(summary["kinds"], key=lambda row: -row["mean_kl"]),
            plots=_plots(summary),
            words=words,
            responses=shaded,
        )
        if len(page) <= max_bytes or not shaded:
            return page
        shaded = shaded[: len(shaded) // 2]


def _plots(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Mean D_t along the responses: by share of the length, and by tokens."""
    return [
        _plot(
            "Mean D by share of the response before the token",
            summary["by_relative_position"],
            lambda share: f"{100 * share:.0f} %",
        ),
        _plot(
            "Mean D by tokens of the response before the token",
            summary["by_position"],
            lambda tokens: f"{tokens:,}",
        ),
    ]


def _plot(
    title: str, rows: Sequence[Mapping[str, Any]], shown: Callable[[Any], str]
) -> dict[str, Any]:
    """What the template draws: a bar a row, equally wide, in units of the drawing."""
    top = max(row["mean_kl"] for row in rows)
    width = (_RIGHT - _LEFT) / len(rows)
    bars = [
        {
            "x": _LEFT + place * width + 0.5,
            "width": width - 1,
            "height": _HEIGHT * row["mean_kl"] / top if top > 0 else 0.0,
            "told": f"{shown(row['start'])} to {shown(row['stop'])}: mean D = "
            f"{row['mean_kl']:.4g}, {row['tokens']:,} tokens",
        }
        for place, row in enumerate(rows)
    ]
    return {
        "title": title,
        "top": f"{top:.2g}",
        "first": shown(rows[0]["start"]),
        "last": shown(rows[-1]["stop"]),
        "bars": bars,
    }


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
