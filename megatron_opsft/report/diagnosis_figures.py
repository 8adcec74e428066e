"""Pictures of a diagnosis: D_t by position and kind of token, a shaded response, a word cloud.

summary: as in summary.json (docs/evaluation.md). The same input gives the same bytes.
"""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_opsft.report.canvas import figure_saved_as
from megatron_opsft.report.diagnosis import DiagnosedResponse
from megatron_opsft.report.labels import shown

log = logging.getLogger("megatron_opsft")
_COLOR = "#b2182b"
_COLUMNS, _MAX_LINES = 96, 40  # of the shaded response
_LINE_BREAK = "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"
_Summary = Mapping[str, Any]


def plot_kinds(summary: _Summary, path: Path) -> None:
    """Mean D_t by kind of token, and what part of all divergence the kind has."""
    rows = sorted(summary["kinds"], key=lambda row: row["mean_kl"])
    with figure_saved_as([path], (7.2, 0.5 + 0.36 * len(rows))) as figure:
        axes = figure.subplots()
        axes.barh([row["kind"] for row in rows], [row["mean_kl"] for row in rows], color=_COLOR)
        for place, row in enumerate(rows):
            told = f" {100 * row['share']:.0f} % of $D_t$, {row['tokens']:,} tokens"
            axes.text(row["mean_kl"], place, told, va="center", fontsize=8)
        axes.set_xlim(0, 1.45 * max(row["mean_kl"] for row in rows) or 1.0)
        axes.set_xlabel(r"mean $D_t$ (nats)")
        axes.spines[["top", "right"]].set_visible(False)


def plot_positions(summary: _Summary, path: Path) -> None:
    """Mean D_t along the response: by its share of the length, and by tokens."""
    with figure_saved_as([path], (9.0, 3.2)) as figure:
        panels = figure.subplots(1, 2, sharey=True)
        for axes, name in zip(panels, ("by_relative_position", "by_position"), strict=True):
            rows = summary[name]
            edges = [row["start"] for row in rows] + [rows[-1]["stop"]]
            axes.stairs([row["mean_kl"] for row in rows], edges, color=_COLOR, fill=True, alpha=0.8)
            axes.set_ylim(bottom=0)
            axes.spines[["top", "right"]].set_visible(False)
        panels[0].set_xlabel("share of the response before the token")
        panels[1].set_xscale("symlog", base=2, linthresh=16)
        ticks = [row["stop"] for row in summary["by_position"]]
        panels[1].set_xlim(left=0)
        panels[1].set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=30)
        panels[1].set_xlabel("tokens of the response before the token")
        panels[0].set_ylabel(r"mean $D_t$ (nats)")


def plot_tokens(response: DiagnosedResponse, summary: _Summary, path: Path) -> None:
    """A response with its tokens shaded by D_t; a long one's beginning."""
    cells = list(_cells(response, shade_of(summary)))
    num_lines = 1 + max((line for line, _, _, _ in cells), default=0)
    with figure_saved_as([path], (0.085 * _COLUMNS, 0.3 + 0.19 * num_lines)) as figure:
        axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
        axes.set_axis_off()
        axes.set_xlim(0, _COLUMNS)
        axes.set_ylim(num_lines, 0)
        for line, column, text, shade in cells:
            if shade > 0:
                axes.barh(line + 0.5, len(text), 0.92, column, color=_COLOR, alpha=0.85 * shade)
            color = "white" if shade > 0.6 else "black"
            for place, sign in enumerate(text):  # by cell, whatever the font's widths are
                axes.text(
                    column + place + 0.5,
                    line + 0.5,
                    shown(sign) if sign.strip() else "",
                    color=color,
                    family="monospace",
                    fontsize=8,
                    ha="center",
                    va="center_baseline",
                )


def shade_of(summary: _Summary) -> float:
    """The D_t that has the full colour."""
    return float(max(summary["quantiles"]["0.99"], 1e-12))


def _cells(response: DiagnosedResponse, full: float) -> Iterator[tuple[int, int, str, float]]:
    """(line, column, text, shade from 0 to 1), no text longer than a line has room for."""
    line = column = 0
    for token, kl in zip(response.tokens, response.kl, strict=True):
        shade = min(1.0, kl / full) ** 0.5
        for part in token.replace("\n", f"{_LINE_BREAK}\n").splitlines(keepends=True):
            text = part.rstrip("\n")
            while text:
                if column == _COLUMNS:
                    line, column = line + 1, 0
                if line == _MAX_LINES:
                    return
                room = text[: _COLUMNS - column]
                yield line, column, room, shade
                column, text = column + len(room), text[len(room) :]
            if part.endswith("\n"):
                line, column = line + 1, 0


def plot_words(summary: _Summary, path: Path) -> None:
    """The tokens at large D_t, each as large as the sum of its D_t. Needs the package wordcloud;
    without it, or without a token to draw, nothing is drawn and the log says so.
    """
    path.unlink(missing_ok=True)
    weights = {row["text"]: row["kl"] for row in summary["words"] if row["kl"] > 0}
    if not weights:
        log.info("%s: not drawn, since the models differ nowhere", path.name)
        return
    try:
        from wordcloud import WordCloud
    except ImportError:
        log.warning("%s: not drawn; pip install wordcloud, then give the command again", path.name)
        return
    import matplotlib

    cloud = WordCloud(
        width=1200,
        height=600,
        background_color="white",
        color_func=lambda *_, **__: _COLOR,
        prefer_horizontal=1.0,
        random_state=0,
        font_path=f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf",
    ).generate_from_frequencies(weights)
    with figure_saved_as([path], (8.0, 4.0)) as figure:
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.imshow(cloud.to_array(), interpolation="bilinear")
