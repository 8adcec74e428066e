"""The rehearsal as a table and as a figure."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_opsft.report.canvas import figure_saved_as

MAX_SECONDS, MAX_BYTES = 1.0, 200e6  # what every part is to stay below
_COLORS = ("#2a6f97", "#c1541c", "#4f772d", "#7b2d8b", "#b08900", "#555555", "#9a8c98", "#1b998b")
_MARKERS = "osD^v<>Ph*X"


def show_table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: seconds and MB of each part, by model and ranks."""
    ranks = sorted({row["ranks"] for row in rows})
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        lines += [f"{model}, {mine[-1]['layout']} on the most ranks:", ""]
        lines += ["| part | " + " | ".join(f"{w:,} ranks" for w in ranks) + " |"]
        lines += ["|---|" + "---:|" * len(ranks)]
        for part in dict.fromkeys(row["part"] for row in mine):
            cells = {row["ranks"]: row for row in mine if row["part"] == part}
            shown = [_cell(cells[w]) if w in cells else "" for w in ranks]
            lines.append(f"| {part} | " + " | ".join(shown) + " |")
        lines.append("")
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    return f"{row['seconds']:.3f} s, {row['bytes'] / 1e6:.1f} MB"


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Seconds and bytes of the largest model over ranks, one line a part."""
    model = rows[-1]["model"]
    mine = [row for row in rows if row["model"] == model]
    with figure_saved_as([path], (10.0, 4.8), font_size=9) as figure:
        panels = figure.subplots(1, 2)
        for axes, key, scale, limit in zip(
            panels, ("seconds", "bytes"), (1.0, 1e6), (MAX_SECONDS, MAX_BYTES / 1e6), strict=True
        ):
            for number, part in enumerate(dict.fromkeys(row["part"] for row in mine)):
                points = [
                    (r["ranks"], max(r[key] / scale, 1e-4)) for r in mine if r["part"] == part
                ]
                axes.loglog(
                    *zip(*points, strict=True),
                    marker=_MARKERS[number % len(_MARKERS)],
                    color=_COLORS[number % len(_COLORS)],
                    label=part,
                )
            axes.axhline(limit, color="#bb0000", linestyle="--", linewidth=1)
            axes.set_xticks(sorted({r["ranks"] for r in mine}))
            axes.get_xaxis().set_major_formatter("{x:,.0f}")
            axes.minorticks_off()
            axes.set_xlabel("ranks")
            axes.spines[["top", "right"]].set_visible(False)
        panels[0].set_title(f"{model}: seconds of a rank")
        panels[1].set_title(f"{model}: MB of a rank")
        panels[1].legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
