"""Runs beside their plan: the factors that made the seconds come out again, and the same run on
several nodes.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forked_cli import ForkedCli
from plan_cases import SMALL, make_job
from rows import write_rows

from megatron_opsft.config import Config
from megatron_opsft.config.load import to_yaml
from megatron_opsft.errors import UserError
from megatron_opsft.plan.estimate import estimate_step
from megatron_opsft.plan.hardware import PHASES, load_hardware
from megatron_opsft.plan.measured import (
    calibrate,
    efficiencies,
    read_row,
    report_scaling,
    scaling_runs,
    write_hardware,
)

MODEL = f"model.path=deepseek-ai/{SMALL}"
BASE = load_hardware("h100")
TRUE = BASE.model_copy(
    update={"rollout_factor": 3.0, "verify_factor": 0.5, "train_factor": 2.7, "sync_factor": 4.0}
)


def write_run(path: Path, config: Config, world_size: int, lines: list[dict[str, Any]]) -> Path:
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(to_yaml(config))
    (path / "manifest.json").write_text(json.dumps({"kind": "run", "world_size": world_size}))
    write_rows(path / "metrics.jsonl", lines)
    return path


def true_run(path: Path, *overrides: str) -> Path:
    """A run whose seconds are what a plan with the true factors says."""
    lines = []
    for step in range(1, 11):
        # Shorter from step to step, as training makes them, and more of them accepted.
        told = {"mean_tokens": 3000 / step**0.5, "acceptance": 0.2 + 0.04 * step}
        job = replace(make_job(SMALL, 8, "parallel.tp=2", MODEL, *overrides, **told), hardware=TRUE)
        work = job.workload
        mean = sum(work.trained) / len(work.trained)
        # Their mean is all that is written down of the accepted ones.
        work = replace(work, trained=(round(mean),) * len(work.trained))
        seconds = estimate_step(replace(job, workload=work))
        lines.append(
            {
                "step": step,
                "num_rollouts": len(work.lengths),
                "num_accepted": len(work.trained),
                "mean_response_tokens": work.mean_tokens,
                "mean_accepted_tokens": mean,
                **{f"{phase}_seconds": seconds[phase] for phase in PHASES},
                "step_seconds": seconds["total"],
            }
        )
    return write_run(path, job.config, 8, lines)


def fit(*runs: Path) -> dict[str, dict[str, float]]:
    return calibrate(runs, BASE, prompt_tokens=100, sigma=0.6)


def test_the_factors_behind_runs_are_found_and_written_as_a_plan_reads_them(tmp_path: Path) -> None:
    runs = [true_run(tmp_path / "large"), true_run(tmp_path / "small", "rollout.group_size=2")]
    fitted = fit(*runs)
    assert set(fitted) == set(PHASES)
    for phase, one in fitted.items():
        assert one["factor"] == pytest.approx(getattr(TRUE, f"{phase}_factor"), rel=0.02), phase
        before = getattr(BASE, f"{phase}_factor")
        stretched = one["measured"] / one["planned"]
        assert stretched == pytest.approx(one["factor"] / before, rel=0.05)
    out = tmp_path / "deep" / "hardware.yaml"
    write_hardware(out, BASE, fitted, runs)
    assert "large, small" in out.read_text().splitlines()[0]
    written = load_hardware("h100", out)
    assert written.rollout_factor == pytest.approx(fitted["rollout"]["factor"])
    factors = {f"{phase}_factor": getattr(BASE, f"{phase}_factor") for phase in PHASES}
    assert written.model_copy(update=factors) == BASE
    assert load_hardware("b200", out) == load_hardware("b200")


def test_the_command_says_what_was_measured(cli: ForkedCli, tmp_path: Path) -> None:
    run, out = nodes_run(tmp_path, 1, 16.0, verify=0.0), tmp_path / "hardware.yaml"
    ended = cli.run(["plan", "calibrate", run, "--out", out])
    assert ended.exit_code == 0, ended.stderr
    assert "rollout: measured 8.000 s, planned " in ended.stdout
    assert f"use it with --hardware {out} --gpu h100" in ended.stdout
    again = ["plan", "calibrate", run, "--out", out]
    refused = cli.run(again)
    assert refused.exit_code == 2 and f"--out={out} exists" in refused.stderr
    told = json.loads(cli.run([*again, "--overwrite", "--json"]).stdout)
    assert set(told["phases"]) == {"rollout", "train", "sync"}  # it verified nothing


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no config\.yaml"):
        fit(tmp_path)
    path = true_run(tmp_path / "run")
    metrics = path / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:2]))
    with pytest.raises(UserError, match="no step with an update after the first 2"):
        fit(path)
    metrics.write_text("".join(lines) + '{"step": 9, "eval_accuracy": 0.5}\n')
    with pytest.raises(UserError, match=rf"metrics\.jsonl:{len(lines) + 1}: num_accepted is null"):
        fit(path)
    (path / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"manifest\.json cannot be read"):
        fit(path)


def nodes_run(folder: Path, nodes: int, seconds: float, verify: float = 0.0) -> Path:
    """Ten steps of 64 responses of 1,000 tokens, after two that start the run."""
    line = {
        "num_rollouts": 64,
        "num_accepted": 32,
        "mean_response_tokens": 1000.0,
        "mean_accepted_tokens": 800.0,
        "rollout_seconds": 0.5 * seconds,
        "verify_seconds": verify,
        "train_seconds": 0.25 * seconds,
        "sync_seconds": 0.125 * seconds,
    }
    lines = [
        {"step": step, "step_seconds": seconds if step > 2 else 100 * seconds, **line}
        for step in range(1, 13)
    ]
    return write_run(folder / f"nodes_{nodes}", make_job(SMALL, 8, MODEL).config, 8 * nodes, lines)


def test_a_row_has_medians_without_the_start_and_the_plan_of_as_many_nodes(tmp_path: Path) -> None:
    first = read_row(nodes_run(tmp_path, 1, 16.0), None, None)
    second = read_row(nodes_run(tmp_path, 2, 10.0), None, None)
    assert first.measured == {
        "step": 16.0,
        "rollout": 8.0,
        "verify": 0.0,
        "train": 4.0,
        "sync": 2.0,
        "other": 2.0,
        "rate": 64 * 1000 / 16 / 8,
    }
    assert (second.nodes, second.gpus, second.device) == (2, 16, "h100")
    _, (measured, planned) = efficiencies([first, second])
    assert measured == pytest.approx(16 / 20)
    expected = first.planned["step"] / second.planned["step"] / 2
    assert planned == pytest.approx(expected) and 0.4 < planned < 1
    said: list[str] = []
    runs = [tmp_path / "nodes_1", tmp_path / "nodes_2"]
    report_scaling(runs, tmp_path / "report.html", None, None, said.append)
    head, _, _, _, one, two = said[0].splitlines()
    assert head.endswith("measured (planned for h100)")
    assert f"16.00 ({first.planned['step']:.2f})" in one and one.endswith("100% (100%)")
    assert two.endswith(f"80% ({planned:.0%})")


def test_the_folder_is_reported_in_the_order_of_nodes(cli: ForkedCli, tmp_path: Path) -> None:
    for nodes in (16, 2, 1):
        nodes_run(tmp_path, nodes, 10 / nodes)
    ended = cli.run(["report", tmp_path, "--gpu", "h200"])
    assert ended.exit_code == 0, ended.stderr
    rows = [line.split()[:2] for line in ended.stdout.splitlines() if line.endswith("%)")]
    assert rows == [["1", "8"], ["2", "16"], ["16", "128"]]
    assert "planned for h200" in ended.stdout
    page = (tmp_path / "report.html").read_text()
    assert "Median seconds of a step, measured (planned for h200)" in page
    assert "Efficiency, 1 to 16 nodes" in page and 'aria-label="Efficiency: measured 100%' in page
    words = ["report", tmp_path / "nodes_1", tmp_path / "nodes_2", "--html", tmp_path / "two.html"]
    assert cli.run(words).exit_code == 0
    assert "exists; name another file" in cli.run(words).stderr


def test_a_run_that_is_not_there_yet_does_not_hide_the_others(
    cli: ForkedCli, tmp_path: Path
) -> None:
    nodes_run(tmp_path, 1, 8.0)
    (tmp_path / "nodes_2").mkdir()
    ended = cli.run(["report", tmp_path])
    assert ended.exit_code == 2
    assert "nodes_2: not read: " in ended.stdout and "100% (100%)" in ended.stdout
    assert "1 of 2 could not be read" in ended.stderr and "Traceback" not in ended.stderr
    with pytest.raises(UserError, match="8 ranks was not on 3 nodes"):
        read_row((tmp_path / "nodes_1").rename(tmp_path / "nodes_3"), None, None)


def test_other_paths_are_no_scaling_experiment(tmp_path: Path) -> None:
    one, other = (nodes_run(tmp_path / name, 1, 8.0) for name in ("a", "b"))
    assert scaling_runs([one]) == []  # a run as any other
    assert scaling_runs([one, other]) == []  # two runs on one node
    assert scaling_runs([tmp_path]) == []
    assert scaling_runs([one.parent]) == [one]
