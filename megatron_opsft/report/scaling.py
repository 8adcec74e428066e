"""Step time over ranks, strong and weak, and what ranks wait for: one figure."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_opsft.errors import UserError
from megatron_opsft.report.canvas import check_suffixes, figure_saved_as
from megatron_opsft.report.labels import shown

_COLORS = ("#2a6f97", "#c1541c", "#4f772d", "#7b2d8b", "#b08900", "#555555")
_IDLE_COLORS = ("#c9ada7", "#9a8c98", "#4a4e69")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """seconds: of a step, by ranks; hollow: whether each of them is simulated."""

    name: str
    ranks: tuple[int, ...]
    seconds: tuple[float, ...]
    hollow: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """Shares of a step that ranks wait, by cause and by ranks."""

    name: str
    ranks: tuple[int, ...]
    causes: dict[str, tuple[float, ...]]


def plot_scaling(
    strong: Sequence[Line], weak: Sequence[Line], idle: Idle | None, out_path: Path
) -> None:
    """Draw what there is into a .png, .svg or .pdf file. Errors: `UserError` for another suffix and
    where there is nothing to draw. The same points give the same bytes.
    """
    check_suffixes([out_path])
    panels: list[Any] = []
    if strong:
        panels.append(lambda axes: _draw_lines(axes, strong, "strong scaling", ideal=True))
    if weak:
        panels.append(lambda axes: _draw_lines(axes, weak, "weak scaling", ideal=False))
    if idle is not None:
        panels.append(lambda axes: _draw_idle(axes, idle))
    if not panels:
        raise UserError("there is nothing to draw: no layout was tried on two numbers of ranks")

    with figure_saved_as([out_path], (4.4 * len(panels), 4.6), font_size=9) as figure:
        all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for draw, axes in zip(panels, all_axes, strict=True):
            draw(axes)
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_xlabel("ranks")


def _draw_lines(axes: Any, lines: Sequence[Line], title: str, *, ideal: bool) -> None:
    for number, line in enumerate(lines):
        color = _COLORS[number % len(_COLORS)]
        for hollow in (False, True):
            here = [
                (ranks, seconds)
                for ranks, seconds, is_hollow in zip(
                    line.ranks, line.seconds, line.hollow, strict=True
                )
                if is_hollow is hollow
            ]
            if not here:
                continue
            axes.plot(
                *zip(*here, strict=True),
                color=color,
                marker="o",
                markerfacecolor="white" if hollow else color,
                linewidth=1.2,
                linestyle="--" if hollow else "-",
                label=shown(f"{line.name} ({'simulated' if hollow else 'measured'})"),
            )
            if ideal and number == 0:
                first = here[0]
                axes.plot(
                    [ranks for ranks, _ in here],
                    [first[1] * first[0] / ranks for ranks, _ in here],
                    color="#aaaaaa",
                    linewidth=0.8,
                    linestyle=":",
                    label="ideal" if hollow is line.hollow[0] else None,
                )
    _ranks_axis(axes, [ranks for line in lines for ranks in line.ranks])
    axes.set_ylim(bottom=0)
    axes.set_ylabel("seconds of a step")
    axes.set_title(title)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    _legend(axes)


def _draw_idle(axes: Any, idle: Idle) -> None:
    axes.stackplot(
        idle.ranks,
        [[100 * value for value in shares] for shares in idle.causes.values()],
        labels=[shown(cause) for cause in idle.causes],
        colors=_IDLE_COLORS,
    )
    _ranks_axis(axes, idle.ranks)
    axes.set_ylim(0, 100)
    axes.set_ylabel("% of a step that ranks wait (simulated)")
    axes.set_title(shown("waiting: " + idle.name.partition(", ")[2]), fontsize=8)
    _legend(axes)


def _legend(axes: Any) -> None:
    """Below the axes: names are long."""
    axes.legend(frameon=False, fontsize=6.5, loc="upper center", bbox_to_anchor=(0.5, -0.2))


def _ranks_axis(axes: Any, ranks: Sequence[int]) -> None:
    ticks = sorted(set(ranks))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=45 if len(ticks) > 6 else 0)
    axes.minorticks_off()
