"""Figures fitted to runs: those that made the seconds come out again."""

import gzip
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from plan_cases import make_job, make_responses
from real_shapes import REAL_SHAPES

from megatron_opsft.config_file import to_yaml
from megatron_opsft.errors import UserError
from megatron_opsft.plan.calibrate import calibrate, fit_two, write_hardware
from megatron_opsft.plan.hardware import Hardware, load_hardware
from megatron_opsft.plan.lengths import Workload
from megatron_opsft.plan.measured import read_run
from megatron_opsft.plan.step import estimate_step

SHAPE = REAL_SHAPES["DeepSeek-R1-Distill-Qwen-1.5B"]
TRUE = replace(
    load_hardware("h100"),
    training_fraction=0.37,
    prefill_fraction=0.37,
    step_overhead_seconds=0.05,
    decode_fraction=0.43,
    decode_overhead_seconds=0.002,
    push_fraction=0.2,
    verify_seconds=0.01,
)


SMALL_BATCHES = ("rollout.group_size=2", "train.max_tokens_per_microbatch=4600")


def write_run(path: Path, hardware: Hardware, *overrides: str, lengths: bool = True) -> Path:
    """A run whose seconds are what a plan with these figures predicts."""
    job = replace(make_job(SHAPE, 8, "parallel.tp=2", *overrides), hardware=hardware)
    (path / "rollouts").mkdir(parents=True)
    (path / "config.yaml").write_text(to_yaml(job.config))
    (path / "manifest.json").write_text(json.dumps({"world_size": 8}))
    lines = []
    for step in range(1, 11):
        # Shorter from step to step, as training makes them, and more of them accepted.
        work = make_responses(job, mean_tokens=3000 / step**0.5, acceptance=0.2 + 0.04 * step)
        mean = sum(work.accepted) / len(work.accepted)
        if not lengths:  # then their mean is all that is written down of the accepted ones
            work = replace(work, accepted=(round(mean),) * len(work.accepted))
        seconds = estimate_step(job, work)
        lines.append(
            {
                "step": step,
                "num_rollouts": len(work.lengths),
                "num_accepted": len(work.accepted),
                "mean_response_tokens": work.sampled_tokens / len(work.lengths),
                "mean_accepted_tokens": mean,
                "rollout_seconds": seconds.rollout,
                "verify_seconds": seconds.verify,
                "train_seconds": seconds.train,
                "sync_seconds": seconds.push,
                "step_seconds": seconds.total,
            }
        )
        if lengths:
            accepted = Counter(work.accepted)
            rows = "".join(response_row(n, work, accepted) for n in work.lengths)
            file = path / "rollouts" / f"step_{step:06d}.jsonl.gz"
            file.write_bytes(gzip.compress(rows.encode()))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def response_row(num_tokens: int, work: Workload, accepted: Counter[int]) -> str:
    """As rollouts/ has it; takes an accepted one of this length, if there is one left."""
    outcome = "correct" if accepted[num_tokens] else "wrong"
    accepted[num_tokens] -= accepted[num_tokens] > 0
    row = {"num_tokens": num_tokens, "num_prompt_tokens": work.prompt_tokens, "outcome": outcome}
    return json.dumps(row) + "\n"


def fitted(directory: Path, *, lengths: bool) -> tuple[Hardware, dict[tuple[str, str], float]]:
    """The figures, and by run and phase the relative error of what they then predict."""
    base = load_hardware("h100")
    runs = [
        read_run(
            write_run(directory / name, TRUE, *overrides, lengths=lengths),
            lambda name: SHAPE,
            base,
            prompt_tokens=100,
            sigma=0.6,
        )
        for name, overrides in (("large", ()), ("small", SMALL_BATCHES))
    ]
    assert [len(run.steps) for run in runs] == [8, 8]  # without the first two
    result = calibrate(runs, base)
    errors = {(c.run, c.phase): c.predicted / c.measured - 1 for c in result.checks}
    return result.hardware, errors


def test_the_figures_behind_two_runs_are_found(tmp_path: Path) -> None:
    found, errors = fitted(tmp_path, lengths=True)
    assert found.training_fraction == pytest.approx(0.37, rel=0.01)
    assert found.step_overhead_seconds == pytest.approx(0.05, rel=0.05)
    assert found.decode_fraction == pytest.approx(0.43, rel=0.01)
    assert found.decode_overhead_seconds == pytest.approx(0.002, rel=0.02)
    assert found.push_fraction == pytest.approx(0.2, rel=0.01)
    assert found.verify_seconds == pytest.approx(0.01)
    assert all(abs(error) < 0.01 for error in errors.values())


def test_without_saved_lengths_the_means_do(tmp_path: Path) -> None:
    found, errors = fitted(tmp_path, lengths=False)
    assert found.decode_fraction == pytest.approx(0.43, rel=0.05)
    assert abs(errors["large", "rollout"]) < 0.02
    assert abs(errors["small", "rollout"]) < 0.02


def test_one_run_is_described_even_where_the_figures_cannot_be_told_apart(tmp_path: Path) -> None:
    base = load_hardware("h100")
    path = write_run(tmp_path / "run", TRUE)
    run = read_run(path, lambda name: SHAPE, base, prompt_tokens=100, sigma=0.6)
    for check in calibrate([run], base).checks:
        assert check.predicted == pytest.approx(check.measured, rel=0.02)


def test_the_written_file_is_what_a_plan_reads(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "hardware.yaml"
    write_hardware(out, TRUE, [Path("runs/first")], base_file=None)
    assert load_hardware("h100", out) == TRUE
    assert load_hardware("b200", out) == load_hardware("b200")
    text = out.read_text()
    assert text.count("calibrated from first") == 6 + 1


def test_two_figures_are_told_apart_where_the_rows_differ() -> None:
    rows = [(a, b, a / 0.25 + b * 0.5) for a, b in ((1.0, 1.0), (4.0, 1.0), (2.0, 3.0))]
    assert fit_two(rows, 0.6, 9.0) == pytest.approx((0.25, 0.5))
    # Noise that would want an overhead below none.
    assert fit_two([(1.0, 1.0, 4.0), (4.0, 1.0, 16.4)], 0.6, 9.0) == pytest.approx((0.247, 0), 0.01)
    # All alike: the overhead is believed.
    assert fit_two(rows[:1] * 3, 0.6, 0.1) == pytest.approx((1 / 4.4, 0.1))
    # It cannot be, the rest would be faster than peak: then the fraction is believed.
    fraction, overhead = fit_two(rows[:1] * 3, 0.5, 4.0)
    assert (fraction, overhead) == pytest.approx((0.5, 2.5))
    # Nothing to read (one rank has nothing to push): all of it is overhead.
    assert fit_two([(0.0, 1.0, 3.0), (0.0, 1.0, 5.0)], 0.6, 1.0) == (0.6, 4.0)


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    def read(path: Path) -> None:
        read_run(path, lambda name: SHAPE, load_hardware("h100"), prompt_tokens=1, sigma=0.5)

    with pytest.raises(UserError, match=r"holds no config\.yaml"):
        read(tmp_path)
    path = write_run(tmp_path / "run", TRUE)
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
