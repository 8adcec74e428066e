"""One point of a scaling experiment: a layout on so many ranks and what a step of it takes."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from megatron_opsft.errors import UserError
from megatron_opsft.runtime.durable import write_text


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPoint:
    """Seconds are medians over `steps` steps; measured phases are rank 0's, where waiting for
    others is part of train; simulated ones end with their slowest rank.

    source: the run's directory or the device whose figures were simulated. fits: whether the plan
    fits the device's memory; None where that was not asked. The last three are shares of a step
    that ranks wait, means over them, and None where they were measured.
    """

    simulated: bool
    source: str
    model: str
    ranks: int
    tp: int
    pp: int
    vpp: int
    rollout_tp: int
    prompts_per_step: int
    group_size: int
    max_response_tokens: int
    steps: int
    step_seconds: float
    rollout_seconds: float
    verify_seconds: float
    train_seconds: float
    push_seconds: float
    tokens_per_second: float
    fits: bool | None = None
    rollout_tail: float | None = None
    pipeline_bubble: float | None = None
    slowest_rank: float | None = None

    @property
    def layout(self) -> tuple[str, int, int, int, int, int, int]:
        """What stays the same when a run is scaled."""
        return (
            self.model,
            self.tp,
            self.pp,
            self.vpp,
            self.rollout_tp,
            self.group_size,
            self.max_response_tokens,
        )

    @property
    def layout_name(self) -> str:
        """For tables and figures."""
        name = f"{self.model}, TP {self.tp} x PP {self.pp}"
        name += f", {self.vpp} virtual stages" if self.vpp > 1 else ""
        name += f", engines of {self.rollout_tp}" if self.rollout_tp > 1 else ""
        return f"{name}, G {self.group_size}, L {self.max_response_tokens}"


def write_points(points: Sequence[ScalingPoint], directory: Path) -> None:
    """points.json and points.csv, the same in both."""
    rows = [asdict(point) for point in points]
    text = io.StringIO()
    writer = csv.DictWriter(text, [f.name for f in fields(ScalingPoint)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(directory / "points.csv", text.getvalue())
    write_text(directory / "points.json", json.dumps({"points": rows}, indent=1) + "\n")


def read_points(path: Path) -> list[ScalingPoint]:
    """The points of a points.json. Errors: `UserError`."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["points"]
        return [ScalingPoint(**row) for row in rows]
    except FileNotFoundError:
        raise UserError(f"--with={path} does not exist") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--with={path} is no points.json: {error!r}") from None
