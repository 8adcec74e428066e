"""Runs beside their plan: the factors that made the seconds come out again, and the same run on
several numbers of nodes.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forked_cli import ForkedCli
from plan_cases import SMALL, make_run
from rows import write_rows

from megatron_opsft.commands.plan.assumptions import PHASES, load_hardware
from megatron_opsft.commands.plan.job import PlannedRun
from megatron_opsft.commands.plan.measured import calibrate, read_row, scaling_runs
from megatron_opsft.commands.plan.seconds import estimate_step
from megatron_opsft.config.load import to_yaml
from megatron_opsft.errors import UserError

MODEL = f"model.path=deepseek-ai/{SMALL}"
BASE = load_hardware("h100")
FACTORS = {"rollout_factor": 3.0, "verify_factor": 0.5, "train_factor": 2.7, "sync_factor": 4.0}


def write_run(path: Path, run: PlannedRun, lines: list[dict[str, Any]]) -> Path:
    path.mkdir()
    (path / "config.yaml").write_text(to_yaml(run.config))
    manifest = {"kind": "run", "world_size": run.world_size}
    (path / "manifest.json").write_text(json.dumps(manifest))
    write_rows(path / "metrics.jsonl", [{"step": n, **line} for n, line in enumerate(lines, 1)])
    return path


def true_run(path: Path, *overrides: str) -> Path:
    """A run whose seconds are what a plan with the true factors says."""
    lines, true = [], BASE.model_copy(update=FACTORS)
    for step in range(1, 11):
        # Shorter from step to step, as training makes them, and more of them accepted.
        told = {"mean_tokens": 3000 / step**0.5, "acceptance": 0.2 + 0.04 * step}
        run = replace(make_run(SMALL, 8, "parallel.tp=2", MODEL, *overrides, **told), hardware=true)
        work = run.workload
        mean = sum(work.trained) / len(work.trained)
        # Their mean is all that is written down of the accepted ones.
        work = replace(work, trained=(round(mean),) * len(work.trained))
        seconds = estimate_step(replace(run, workload=work))
        facts = {"num_rollouts": len(work.lengths), "num_accepted": len(work.trained)}
        facts["trained_tokens"] = sum(work.trained)
        facts |= {"mean_response_tokens": work.mean_tokens, "mean_accepted_tokens": mean}
        phases = {f"{phase}_seconds": seconds[phase] for phase in PHASES}
        lines.append({**facts, **phases, "step_seconds": seconds["total"]})
    return write_run(path, run, lines)


def nodes_run(folder: Path, nodes: int, seconds: float) -> Path:
    """Ten steps of 64 responses of 1,000 tokens, after two that start the run; none is verified."""
    line = {"num_rollouts": 64, "num_accepted": 32, "trained_tokens": 9}
    line |= {"mean_response_tokens": 1000, "mean_accepted_tokens": 800, "verify_seconds": 0}
    shares = {"step": 1, "rollout": 0.5, "train": 0.25, "sync": 0.125}
    line |= {f"{name}_seconds": share * seconds for name, share in shares.items()}
    start = line | {"step_seconds": 100 * seconds}
    run = make_run(SMALL, 8 * nodes, MODEL)
    return write_run(folder / f"nodes_{nodes}", run, [start] * 2 + [line] * 10)


def test_the_factors_behind_runs_are_found_and_are_a_file_for_plans(tmp_path: Path) -> None:
    runs = [true_run(tmp_path / "large"), true_run(tmp_path / "small", "rollout.group_size=2")]
    text = calibrate(runs, BASE)
    assert "large, small" in text.splitlines()[0]
    out = tmp_path / "hardware.yaml"
    out.write_text(text)
    found = load_hardware("h100", out)
    for name, factor in FACTORS.items():
        assert getattr(found, name) == pytest.approx(factor, rel=0.02), name
    before = {name: getattr(BASE, name) for name in FACTORS}
    assert found.model_copy(update=before) == BASE


def test_the_command_says_what_was_measured(cli: ForkedCli, tmp_path: Path) -> None:
    ended = cli.run(["plan", "calibrate", nodes_run(tmp_path, 1, 16.0)])
    assert ended.exit_code == 0, ended.stderr
    (line,) = (line for line in ended.stdout.splitlines() if "rollout_factor" in line)
    assert "# measured 8.000 s, planned " in line
    assert "  verify_factor: 1.0\n" in ended.stdout  # it verified nothing
    assert "config.yaml does not exist" in cli.run(["plan", "calibrate", tmp_path]).error


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    path = nodes_run(tmp_path, 1, 16.0)
    metrics = path / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    for text, message in (
        ("".join(lines[:2]), "no step with an update after the first 2"),
        ('{"step": 9, "eval_accuracy": 0.5}\n', r"metrics\.jsonl:1: trained_tokens is null"),
    ):
        metrics.write_text(text)
        with pytest.raises(UserError, match=message):
            calibrate([path], BASE)
    (path / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"manifest\.json cannot be read"):
        calibrate([path], BASE)


def test_a_row_has_medians_without_the_start_and_the_plan_of_as_many_nodes(tmp_path: Path) -> None:
    first, second = (read_row(nodes_run(tmp_path, n, 16.0 / n), None, None) for n in (1, 2))
    seconds = {"step": 16.0, "rollout": 8.0, "verify": 0.0, "train": 4.0, "sync": 2.0, "other": 2.0}
    assert first.measured == seconds | {"rate": 64 * 1000 / 16 / 8}
    assert (second.nodes, second.gpus, second.device) == (2, 16, "h100")
    assert first.planned["step"] / second.planned["step"] / 2 == pytest.approx(
        second.planned["rate"] / first.planned["rate"]
    )
    with pytest.raises(UserError, match="8 ranks was not on 3 nodes"):
        read_row((tmp_path / "nodes_1").rename(tmp_path / "nodes_3"), None, None)


def test_the_folder_is_reported_in_the_order_of_nodes_with_what_is_there(
    cli: ForkedCli, tmp_path: Path
) -> None:
    for nodes, seconds in ((16, 0.625), (2, 6.25), (1, 10)):
        nodes_run(tmp_path, nodes, seconds)
    (tmp_path / "nodes_4").mkdir()
    ended = cli.run(["report", tmp_path, "--gpu", "h200"])
    assert ended.exit_code == 2
    assert "1 of 4 could not be read" in ended.stderr and "Traceback" not in ended.stderr
    assert "nodes_4: not read: " in ended.stdout
    lines = [line.split() for line in ended.stdout.splitlines() if line.endswith("%)")]
    assert [line[:2] for line in lines] == [["1", "8"], ["2", "16"], ["16", "128"]]
    assert lines[0][-2:] == ["100%", "(100%)"] and lines[0][2] == "10.00"
    assert lines[1][-2] == "80%" and 40 < int(lines[1][-1].strip("(%)")) < 100
    page = (tmp_path / "report.html").read_text()
    assert "Median seconds of a step, measured (planned for h200)" in page
    assert 'aria-label="Efficiency: measured 100%' in page
    assert scaling_runs(tmp_path / "nodes_1") == []  # a run as any other
