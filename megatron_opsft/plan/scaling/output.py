"""What a scaling experiment leaves in its directory: points, tables and a figure."""

from collections.abc import Sequence
from pathlib import Path

from megatron_opsft.errors import UserError
from megatron_opsft.plan.scaling.figure_data import idle_of, lines_of
from megatron_opsft.plan.scaling.points import ScalingPoint, read_points, write_points
from megatron_opsft.plan.scaling.tables import scaling_page, strong_series, weak_series
from megatron_opsft.report.scaling import plot_scaling
from megatron_opsft.runtime.durable import write_text


def check_output(out: Path, figure: str, overwrite: bool) -> None:
    """Before anything is computed. Errors: `UserError` for points that would be replaced."""
    if figure not in ("png", "svg"):
        raise UserError(f"--figure={figure} must be png or svg")
    if (out / "points.json").exists() and not overwrite:
        raise UserError(f"--out={out} holds points; name another directory or give --overwrite")


def write_output(
    points: Sequence[ScalingPoint], others: Sequence[Path], out: Path, figure: str
) -> str:
    """Everything in --out, these points and those of other files; the tables, and where it all is.

    Errors: `UserError` where there is no point, and for what is no points.json.
    """
    everything = [*points, *(point for path in others for point in read_points(path))]
    if not everything:
        raise UserError("no case is left; see what was left out")
    out.mkdir(parents=True, exist_ok=True)
    write_points(everything, out)
    page = scaling_page(everything)
    write_text(out / "scaling.md", page)
    strong, weak = strong_series(everything), weak_series(everything)
    if strong or weak:
        plot_scaling(
            lines_of(strong), lines_of(weak), idle_of(strong or weak), out / f"scaling.{figure}"
        )
    return f"{page}\npoints, tables and figure: {out}"
