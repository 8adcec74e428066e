"""Sweeps, points, tables and the commands of tools/scaling.py."""

import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megatron_opsft.errors import UserError
from megatron_opsft.plan.scaling.figure_data import idle_of, lines_of
from megatron_opsft.plan.scaling.measure import measured_point
from megatron_opsft.plan.scaling.points import ScalingPoint, read_points, write_points
from megatron_opsft.plan.scaling.sweep import (
    SweepCase,
    make_cases,
    parse_ranks,
    parse_vary,
    start_run,
)
from megatron_opsft.plan.scaling.tables import compared, scaling_page, strong_series, weak_series
from megatron_opsft.report.scaling import plot_scaling

TOOL = Path(__file__).parents[2] / "tools" / "scaling.py"
POINT = ScalingPoint(
    simulated=False,
    source="runs/a",
    model="tiny",
    ranks=1,
    tp=1,
    pp=1,
    vpp=1,
    rollout_tp=1,
    prompts_per_step=8,
    group_size=4,
    max_response_tokens=64,
    steps=5,
    step_seconds=8.0,
    rollout_seconds=5.0,
    verify_seconds=0.5,
    train_seconds=2.0,
    push_seconds=0.5,
    tokens_per_second=100.0,
)


def simulated(ranks: int, step_seconds: float, prompts: int = 8) -> ScalingPoint:
    return replace(
        POINT,
        simulated=True,
        source="cpu",
        ranks=ranks,
        prompts_per_step=prompts,
        step_seconds=step_seconds,
        fits=True,
        rollout_tail=0.1,
        pipeline_bubble=0.0,
        slowest_rank=0.05,
    )


POINTS = [
    POINT,
    replace(POINT, ranks=2, step_seconds=5.0),
    simulated(1, 7.6),
    simulated(2, 4.0),
    simulated(4, 2.5),
    simulated(2, 8.0, prompts=16),
]


def test_a_sweep_is_every_combination() -> None:
    assert parse_ranks("4,1,2,2") == [1, 2, 4]
    assert parse_vary("parallel.tp,parallel.pp=4x1,2x2") == [
        ("parallel.tp=4", "parallel.pp=1"),
        ("parallel.tp=2", "parallel.pp=2"),
    ]
    cases = list(make_cases([8, 16], ["rollout.group_size=4,8"], 64, "both"))
    assert [(case.ranks, case.overrides) for case in cases] == [
        (8, ("rollout.group_size=4",)),
        (8, ("rollout.group_size=8",)),
        (16, ("rollout.group_size=4",)),
        (16, ("rollout.group_size=4", "data.prompts_per_step=128")),
        (16, ("rollout.group_size=8",)),
        (16, ("rollout.group_size=8", "data.prompts_per_step=128")),
    ]
    weak = list(make_cases([8, 16], [], 64, "weak"))
    assert [case.overrides for case in weak] == [(), ("data.prompts_per_step=128",)]
    assert len({case.name for case in cases}) == len(cases)


@pytest.mark.parametrize("text", ["", "a,2", "0,1"])
def test_bad_ranks_are_named(text: str) -> None:
    with pytest.raises(UserError, match="must be numbers of ranks"):
        parse_ranks(text)


@pytest.mark.parametrize("text", ["parallel.tp", "=1", "a,b=1x2,3"])
def test_bad_variations_are_named(text: str) -> None:
    with pytest.raises(UserError, match="--vary"):
        parse_vary(text)


def test_points_are_the_same_in_json_and_csv(tmp_path: Path) -> None:
    write_points(POINTS, tmp_path)
    assert read_points(tmp_path / "points.json") == POINTS
    with open(tmp_path / "points.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["step_seconds"]) for row in rows] == [p.step_seconds for p in POINTS]
    assert [row["simulated"] for row in rows] == [str(p.simulated) for p in POINTS]
    assert rows[0]["rollout_tail"] == ""
    (tmp_path / "points.json").write_text('{"points": [{"ranks": 1}]}')
    with pytest.raises(UserError, match=r"is no points\.json"):
        read_points(tmp_path / "points.json")


def test_series_are_strong_or_weak() -> None:
    ((_, strong),) = strong_series(POINTS)
    assert [(p.ranks, p.simulated) for p in strong] == [
        (1, False),
        (1, True),
        (2, False),
        (2, True),
        (4, True),
    ]
    ((name, weak),) = weak_series(POINTS)
    assert name == "tiny, TP 1 x PP 1, G 4, L 64, B 8 a rank"
    assert [(p.ranks, p.prompts_per_step) for p in weak] == [(1, 8), (1, 8), (2, 16)]


def test_tables_mark_what_is_simulated_and_compare_it() -> None:
    page = scaling_page(POINTS)
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    efficiency = {
        (row[0].strip("| "), row[1]): row[8] for row in rows if row[1] in ("measured", "simulated")
    }
    # Relative to the first of its own kind: 8 / (2 x 5), 7.6 / (2 x 4), 7.6 / (4 x 2.5).
    assert efficiency["2", "measured"] == "80 %"
    assert efficiency["4", "simulated"] == "76 %"
    assert "| 2 | simulated | 8 |" in page and "| 95 % |" in page  # weak: 7.6 / 8
    assert [(m.ranks, s.step_seconds) for m, s in compared(POINTS)] == [(1, 7.6), (2, 4.0)]
    assert "| tiny, TP 1 x PP 1, G 4, L 64, B 8 | 2 | 5 | 4 | 0.80 |" in page
    assert "## Points" in scaling_page([POINT])


def test_simulated_points_have_hollow_markers(tmp_path: Path) -> None:
    lines = lines_of(strong_series(POINTS))
    assert lines[0].hollow == (False, True, False, True, True)
    idle = idle_of(strong_series(POINTS))
    assert idle is not None and idle.ranks == (1, 2, 4)
    assert idle.causes["rollout tail"] == (0.1, 0.1, 0.1)
    assert idle_of(strong_series(POINTS[:2])) is None
    out = tmp_path / "deep" / "figure.svg"
    plot_scaling(lines, lines_of(weak_series(POINTS)), idle, out)
    first = out.read_bytes()
    plot_scaling(lines, lines_of(weak_series(POINTS)), idle, out)
    assert out.read_bytes() == first
    assert b"simulated" in first or b"#ffffff" in first
    with pytest.raises(UserError, match="suffix"):
        plot_scaling(lines, [], None, tmp_path / "figure.txt")
    with pytest.raises(UserError, match="nothing to draw"):
        plot_scaling([], [], None, out)


def write_run(path: Path, ranks: int, step_seconds: list[float]) -> Path:
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(json.dumps({"world_size": ranks}))
    config = {
        "model": {"path": "tiny_reasoner", "dtype": "float32"},
        "data": {"train": "arithmetic", "prompts_per_step": 4, "max_prompt_tokens": 128},
        "rollout": {"group_size": 2, "max_response_tokens": 64, "batch_size": 2},
    }
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    lines = [
        {
            "step": number,
            "num_rollouts": 8,
            "num_accepted": 4 * (number != 5),
            "mean_response_tokens": 30.0,
            "mean_accepted_tokens": 20.0,
            "rollout_seconds": 0.5 * seconds,
            "verify_seconds": 0.0,
            "train_seconds": 0.4 * seconds,
            "sync_seconds": 0.1 * seconds,
            "step_seconds": seconds,
        }
        for number, seconds in enumerate(step_seconds, 1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_run_is_collected_without_its_first_steps(tmp_path: Path) -> None:
    # The fifth step trained on nothing.
    point = measured_point(write_run(tmp_path / "a", 2, [99, 99, 2.0, 3.0, 0.1, 4.0]))
    assert (point.ranks, point.steps, point.step_seconds) == (2, 3, 3.0)
    assert (point.rollout_seconds, point.push_seconds) == pytest.approx((1.5, 0.3))
    assert point.tokens_per_second == pytest.approx(30.0 * 8 / 3)
    assert (point.simulated, point.fits, point.rollout_tail) == (False, None, None)
    with pytest.raises(UserError, match="no step with an update"):
        measured_point(write_run(tmp_path / "b", 1, [1.0, 1.0]))


def scaling(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOL), *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_runs_are_collected_and_simulated_beside(tmp_path: Path) -> None:
    runs = [str(write_run(tmp_path / f"w{n}", n, [4.0 / n] * 5)) for n in (1, 2)]
    out = tmp_path / "out"
    done = scaling("collect", *runs, "--out", str(out), "--gpu", "cpu", "--node-cores", "2")
    assert done.returncode == 0, done.stderr
    points = read_points(out / "points.json")
    assert [(p.ranks, p.simulated) for p in points] == [
        (1, False),
        (2, False),
        (1, True),
        (2, True),
    ]
    assert "## Simulated and measured" in (out / "scaling.md").read_text()
    assert (out / "scaling.svg").stat().st_size > 0
    again = scaling("collect", *runs, "--out", str(out))
    assert again.returncode == 2
    assert again.stderr.strip().splitlines()[-1].startswith("error: --out=")
    # Simulated on their own, with the measured ones beside.
    config = tmp_path / "w1" / "config.yaml"
    both = scaling(
        "simulate", str(config), "parallel.pp=1", "--ranks", "1,2,3", "--gpu", "cpu",
        "--vary", "parallel.tp=1,2", "--scaling", "strong", "--mean-tokens", "30",
        "--with", str(out / "points.json"), "--out", str(tmp_path / "both"), "--figure", "png",
    )  # fmt: skip
    assert both.returncode == 0, both.stderr
    assert "left out: ranks_3-parallel.tp_2: world size 3" in both.stderr
    made = read_points(tmp_path / "both" / "points.json")
    assert len(made) == 4 + len(points)
    assert {(p.ranks, p.tp) for p in made[:4]} == {(1, 1), (2, 1), (2, 2), (3, 1)}
    assert (tmp_path / "both" / "scaling.png").is_file()


@pytest.mark.slow
def test_finished_runs_stay_and_failed_ones_are_named(tmp_path: Path) -> None:
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "summary.json").write_text("{}")
    nothing = tmp_path / "no.yaml"
    start_run(nothing, SweepCase(ranks=1, overrides=()), tmp_path / "done", [])
    assert [path.name for path in (tmp_path / "done").iterdir()] == ["summary.json"]
    case = SweepCase(ranks=1, overrides=("parallel.tp=1",))
    with pytest.raises(UserError, match=r"ranks_1-parallel.tp_1: .* exit code 1; see .*bad\.log"):
        start_run(nothing, case, tmp_path / "bad", [])
    assert f"error: config file {nothing}" in (tmp_path / "bad.log").read_text()
