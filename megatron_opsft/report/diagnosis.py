"""What `megatron-opsft diagnose` leaves on disk, as everything reads it, and its page.

Of a response of the original model every token with D_t = KL(p_original || p_efficient), the
divergence of the two models' next-token distributions where that token was sampled, in nats.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from markupsafe import Markup
from pydantic import BeforeValidator, ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

from megatron_opsft.errors import UserError, first_line
from megatron_opsft.report.page.html import render
from megatron_opsft.report.page.plot import Series, bars, percent, plot
from megatron_opsft.runtime.durable import whole_lines

TOKENS, SUMMARY, MANIFEST = "tokens.jsonl", "summary.json", "manifest.json"
KIND = "diagnosis"  # in manifest.json
_LEVELS = 9  # of shade, and of a word's size
# With a ? for each lone surrogate: no font has one, and no file of UTF-8 can hold it.
_Text = Annotated[str, BeforeValidator(lambda t: str(t).encode("utf-8", "replace").decode("utf-8"))]


@dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Alternative:
    """What the efficient model prefers at a token of large D_t.

    position: of the token in the response, from 0. p_original, p_efficient: its probabilities
    under the two models. preferred: the efficient model's likeliest tokens with its probabilities,
    falling; the token itself may be among them.
    """

    position: int
    p_original: float
    p_efficient: float
    preferred: tuple[tuple[_Text, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosedResponse:
    """A line of tokens.jsonl.

    gold: the problem's answer; outcome: a value of `records.Outcome`.
    tokens: as pieces of text that make up the response, its end token included; a character of
    several tokens is with the last of them. kl: of each, >= 0. alternatives: by position.
    """

    problem_id: _Text
    sample_index: int
    problem: _Text
    gold: _Text
    outcome: str
    tokens: tuple[_Text, ...]
    kl: tuple[float, ...]
    alternatives: tuple[Alternative, ...]

    def __post_init__(self) -> None:
        if len(self.kl) != len(self.tokens):
            raise ValueError(f"{len(self.kl)} divergences of {len(self.tokens)} tokens")
        if any(not 0 <= each.position < len(self.tokens) for each in self.alternatives):
            raise ValueError("an alternative at no token")


def is_diagnosis(directory: Path) -> bool:
    """Whether a diagnosis is there, finished or not."""
    return (directory / TOKENS).is_file() or read_manifest(directory).get("kind") == KIND


def labels_of(directory: Path) -> tuple[str, str]:
    """What the original and the efficient model are called; without a manifest by what they are."""
    original, efficient = read_manifest(directory).get("labels", ("original", "efficient"))
    return str(original), str(efficient)


def read_manifest(directory: Path) -> dict[str, Any]:
    """manifest.json; empty where there is none that can be read."""
    try:
        manifest = json.loads((directory / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def read_responses(directory: Path) -> Iterator[DiagnosedResponse]:
    """Those of a diagnosis, one by one. Errors: `UserError` naming the line."""
    path = directory / TOKENS
    for number_of_line, line in enumerate(whole_lines(path), start=1):
        try:
            yield parse_response(line)
        except ValueError as error:
            raise UserError(
                f"{path}:{number_of_line}: not a diagnosed response ({first_line(error)}); restore "
                "the file, or diagnose again with --overwrite"
            ) from None


def parse_response(line: bytes) -> DiagnosedResponse:
    """Errors: `ValueError` for anything else than a whole line."""
    found: DiagnosedResponse = TypeAdapter(DiagnosedResponse).validate_python(json.loads(line))
    return found


def render_page(
    summary: Mapping[str, Any],
    responses: Sequence[DiagnosedResponse],
    *,
    max_bytes: float = float("inf"),
) -> bytes:
    """One HTML file that needs nothing else, in UTF-8: responses shaded by D_t, and where it is
    large. summary: as in summary.json.

    max_bytes: where the page is larger the first half of its responses is tried, and so on.
    """
    words = [row for row in summary["words"] if row["kl"] > 0]
    largest = max((row["kl"] for row in words), default=1.0)
    full = max(summary["quantiles"]["0.99"], 1e-12)  # the D_t that has the full colour
    shaded = [(response, _shades(response, full)) for response in responses]
    while True:
        page = render(
            "diagnosis.html.j2",
            {"runs": []},
            title=f"{summary['original']} against {summary['efficient']}",
            summary=summary,
            figures=_plots(summary),
            words=[(row, _level(row["kl"] / largest)) for row in words],
            responses=shaded,
        )
        if len(page) <= max_bytes or not shaded:
            return page
        shaded = shaded[: len(shaded) // 2]


def _plots(summary: Mapping[str, Any]) -> list[Markup]:
    """D_t by kind of token, and along the responses."""
    kinds = sorted(summary["kinds"], key=lambda row: -row["mean_kl"])
    shares = [(f"{row['kind']} ({row['tokens']:,})", row["share"]) for row in kinds]
    found = [
        bars("Mean D", [(row["kind"], row["mean_kl"], f"{row['mean_kl']:.4f}") for row in kinds]),
        bars("Share of all D (tokens)", [(*share, percent(share[1])) for share in shares]),
    ]
    for name, x in (("by_relative_position", "share of the response"), ("by_position", "tokens")):
        points = [(row["start"], row["mean_kl"]) for row in summary[name]]
        series = [Series(label="", place=1, points=points)]
        found.append(plot(f"Mean D by {x} before the token", series, x=x, from_zero=True))
    return found


def _level(share: float) -> int:
    return round(_LEVELS * min(1.0, share) ** 0.5)


def _shades(response: DiagnosedResponse, full: float) -> list[tuple[str, int, str]]:
    """(text, level of shade, what is said when it is pointed at) of each token."""
    preferred = {each.position: each.preferred for each in response.alternatives}
    found = []
    for place, (text, kl) in enumerate(zip(response.tokens, response.kl, strict=True)):
        told = f"D = {kl:.4g}"
        if place in preferred:
            told += "; efficient: "
            told += ", ".join(f"{t!r} {100 * p:.0f} %" for t, p in preferred[place])
        found.append((text, _level(kl / full), told))
    return found
