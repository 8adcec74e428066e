"""Factors from runs: those that made the seconds come out again."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from forked_cli import ForkedCli
from plan_cases import make_job, make_responses
from real_shapes import REAL_SHAPES

from megatron_opsft.config.load import to_yaml
from megatron_opsft.errors import UserError
from megatron_opsft.plan.calibrate import (
    Seconds,
    calibrate,
    read_steps,
    write_hardware,
)
from megatron_opsft.plan.estimate import estimate_step
from megatron_opsft.plan.hardware import PHASES, load_hardware
from megatron_opsft.plan.stages import count_stages

NAME = "DeepSeek-R1-Distill-Qwen-1.5B"
BASE = load_hardware("h100")
TRUE = BASE.model_copy(
    update={"rollout_factor": 3.0, "verify_factor": 0.5, "train_factor": 2.7, "sync_factor": 4.0}
)


def write_run(path: Path, *overrides: str) -> Path:
    """A run whose seconds are what a plan with the true factors says."""
    model = f"model.path=deepseek-ai/{NAME}"
    job = replace(make_job(REAL_SHAPES[NAME], 8, "parallel.tp=2", model, *overrides), hardware=TRUE)
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(to_yaml(job.config))
    (path / "manifest.json").write_text(json.dumps({"world_size": 8}))
    lines = []
    for step in range(1, 11):
        # Shorter from step to step, as training makes them, and more of them accepted.
        work = make_responses(job, mean_tokens=3000 / step**0.5, acceptance=0.2 + 0.04 * step)
        mean = sum(work.trained) / len(work.trained)
        # Their mean is all that is written down of the accepted ones.
        work = replace(work, trained=(round(mean),) * len(work.trained))
        seconds = estimate_step(job, work, count_stages(job))
        lines.append(
            {
                "step": step,
                "num_rollouts": len(work.lengths),
                "num_accepted": len(work.trained),
                "mean_response_tokens": work.mean_tokens,
                "mean_accepted_tokens": mean,
                **{f"{phase}_seconds": getattr(seconds, phase) for phase in PHASES},
                "step_seconds": seconds.total,
            }
        )
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(path: Path) -> list[Seconds]:
    return read_steps(path, BASE, prompt_tokens=100, sigma=0.6)


def test_the_factors_behind_runs_are_found_and_written_as_a_plan_reads_them(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "large"), write_run(tmp_path / "small", "rollout.group_size=2")]
    steps = [step for run in runs for step in read(run)]
    assert len(steps) == 16  # without the first two of each
    fitted = calibrate(steps, BASE)
    for phase, one in fitted.items():
        assert one.factor == pytest.approx(getattr(TRUE, f"{phase}_factor"), rel=0.02), phase
        before = getattr(BASE, f"{phase}_factor")
        assert one.measured / one.planned == pytest.approx(one.factor / before, rel=0.05)
    out = tmp_path / "deep" / "hardware.yaml"
    write_hardware(out, BASE, fitted, runs)
    assert "large, small" in out.read_text().splitlines()[0]
    written = load_hardware("h100", out)
    assert written.rollout_factor == pytest.approx(fitted["rollout"].factor)
    factors = {f"{phase}_factor": getattr(BASE, f"{phase}_factor") for phase in PHASES}
    assert written.model_copy(update=factors) == BASE
    assert load_hardware("b200", out) == load_hardware("b200")


def test_the_command_says_what_was_measured(cli: ForkedCli, tmp_path: Path) -> None:
    out = tmp_path / "hardware.yaml"
    command = ["plan", "calibrate", write_run(tmp_path / "run"), "--out", out, "--sigma", 0.6]
    ended = cli.run([*command, "--prompt-tokens", 100])
    assert ended.exit_code == 0, ended.stderr
    assert "rollout: measured " in ended.stdout and "rollout_factor 1.667 -> 3" in ended.stdout
    assert f"use it with --hardware {out} --gpu h100" in ended.stdout
    ended = cli.run([*command, "--overwrite", "--json"])
    assert set(json.loads(ended.stdout)["phases"]) == set(PHASES)


def test_a_phase_that_no_run_has_stays(tmp_path: Path) -> None:
    steps = [step | {"verify": (0.0, 0.1)} for step in read(write_run(tmp_path / "run"))]
    assert set(calibrate(steps, BASE)) == {"rollout", "train", "sync"}


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no config\.yaml"):
        read(tmp_path)
    path = write_run(tmp_path / "run")
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join(lines[:2]))
    with pytest.raises(UserError, match="no step with an update after the first 2"):
        read(path)
    (path / "metrics.jsonl").write_text('{"step": 1\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:1: not a line of JSON"):
        read(path)
    (path / "metrics.jsonl").write_text("".join(lines) + '{"step": 9, "eval_accuracy": 0.5}\n')
    with pytest.raises(UserError, match=rf"metrics\.jsonl:{len(lines) + 1}: no num_accepted"):
        read(path)
    (path / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"manifest\.json is damaged"):
        read(path)
