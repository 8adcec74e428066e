"""Runs and evaluations as they are left on disk, made up: small, and with texts that mean harm."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval_samples import Model, made_model
from responses import rollout_of

from megatron_opsft.commands.evaluate.comparison import compare
from megatron_opsft.commands.evaluate.results import build_results, read_results, to_json
from megatron_opsft.data.stored_samples import SampleFiles
from megatron_opsft.records import (
    FinishReason,
    Outcome,
    Problem,
    Thinking,
    TokenUse,
    Verdict,
)
from megatron_opsft.run.record.rollout_log import rollout_line
from megatron_opsft.runtime.durable import json_lines

# Ends a script, fetches, runs, and is no Unicode.
HARM = (
    "</script><script>console.error('ran')</script><!--<img src='http://example.invalid/a' "
    "onerror='console.error(1)'>\u2028\udc9f]]>"
)


def make_run(
    run: Path,
    *,
    steps: int = 3,
    problems: int = 4,
    lr: float = 1e-4,
    words: int = 10,
    finished: bool = True,
) -> Path:
    """Of each problem: sample 0 is correct, 1 wrong, 2 cut off; lengths fall by steps."""
    (run / "rollouts").mkdir(parents=True)
    (run / "config.yaml").write_text(f"run:\n  steps: {steps}\noptimizer:\n  lr: {lr}\n")
    for step in range(1, steps + 1):
        rows = [response(step, f"p-{p}", n, words) for p in range(problems) for n in range(3)]
        write_responses(run / f"rollouts/step_{step:06d}.jsonl.gz", rows)
        metrics = {"step": step, "loss": float("nan") if step == 2 else 1 / step, "grad_norm": 0.5}
        metrics |= {"accuracy": 0.3 + 0.1 * step, "mean_response_tokens": 100.0 / step}
        metrics |= {"accept_rate": 0.25, "num_accepted": 3, "logprob_diff_mean": 1e-6}
        metrics |= {"trained_tokens": 70, "rollout_seconds": 2.0, "train_seconds": 1.0}
        metrics["step_seconds"] = 3.5
        _append(run / "metrics.jsonl", metrics)
    for step, accuracy in ((0, 0.5), (steps, 0.75)):
        line = {"step": step, "eval_accuracy": accuracy, "eval_mean_response_tokens": 80.0 - step}
        line |= {"eval_hard_accuracy": accuracy / 2, "eval_hard_mean_response_tokens": 90.0}
        _append(run / "evals.jsonl", line)
    if finished:
        (run / "summary.json").write_text('{"seconds": 9.0}')
    return run


def response(step: int, problem_id: str, sample: int, words: int = 10) -> dict[str, Any]:
    """A line of `rollouts/`."""
    outcome = (Outcome.CORRECT, Outcome.WRONG, Outcome.UNFINISHED)[sample]
    rollout = rollout_of(
        f"{outcome} in step {step}, sample {sample}. " + "word " * words + HARM,
        tuple(range(100 // step + sample)),
        problem_id=problem_id,
        sample_index=sample,
        finish_reason=FinishReason.LENGTH if sample == 2 else FinishReason.STOP,
    )
    problem = Problem(id=problem_id, text=f"What is {problem_id}? {HARM}", answer="7")
    verdict = Verdict(outcome=outcome, answer=("7", "8", "")[sample])
    reward = 1.0 - bool(sample)
    line = rollout_line(problem, rollout, verdict, TokenUse(), reward=reward, advantage=reward / 2)
    return {**line, "token_use": None}  # as in runs of earlier versions; see `measure`


def write_responses(path: Path, rows: list[dict[str, Any]]) -> None:
    lines = "".join(json.dumps(row, ensure_ascii=True) + "\n" for row in rows)
    path.write_bytes(gzip.compress(lines.encode(), compresslevel=1, mtime=0))


def make_evaluation(
    out: Path, name: str, tokens: int, correct: int, baseline: Model | None = None
) -> Path:
    """Of `made_model`."""
    name, samples, settings = made_model(name, tokens, correct)
    SampleFiles(out).append("gsm8k", samples["gsm8k"])
    SampleFiles(out).combine("gsm8k")
    base = baseline and baseline[:2]
    results = build_results(name, samples, settings, baseline=base, budgets=(64, 128))
    (out / "results.json").write_text(to_json(results))
    return out


def measure(
    path: Path, text: str, right: int | None, *, thinking: int, first_right: int | None
) -> None:
    """Give every response of a packed file this text, and say where its tokens went.

    right, first_right: the end of the first right answer, in characters and in tokens.
    """
    use = TokenUse(Thinking.CLOSED, thinking, first_right, num_restated=2, num_doubts=1)
    rows = [*json_lines(path)]
    for row in rows:
        row |= {"text": text, "token_use": use._asdict(), "first_right_char": right}
    write_responses(path, rows)


def write_report(page: Path, evaluations: list[Path], runs: Sequence[Path] = ()) -> None:
    comparison = compare([read_results(path) for path in evaluations])
    comparison.write_page(page, evaluations, runs)


def _append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
