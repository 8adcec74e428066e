"""Says how a run ended: whether the model got worse, and where it is."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_opsft.config import Config
from megatron_opsft.run.record.advice import advise_on_training
from megatron_opsft.run.run_files import (
    Line,
    best_evaluation,
    describe_best,
    describe_decline,
    describe_skipped,
    is_worse,
)
from megatron_opsft.runtime.formatting import count_of, percent


def closing_lines(
    summary: Mapping[str, Any], evaluations: Sequence[Line], config: Config
) -> Iterator[tuple[int, str]]:
    """Yield the last lines of a finished run, each with its level of `logging`.

    Each line depends on its own facts alone, and what nobody may miss comes last: that the model
    got worse. summary: of summary.json. evaluations: the lines of evals.jsonl.
    """
    directory, step = config.run.dir, summary["steps"]
    if num_worse := summary.get("worse_in_a_row"):
        early_end = describe_early_end(num_worse, step, summary["model_step"], config)
        yield logging.WARNING, early_end
    if skipped := describe_skipped(summary["skipped_steps"], step):
        yield logging.WARNING, skipped
    if step:  # without a step the model is the base model
        yield (
            logging.INFO,
            f"the model is in {directory / 'hf'}; `megatron-opsft report {directory}` compares",
        )
        if "best" in summary:
            yield logging.INFO, describe_best(summary["best"], directory)
    if decline := warn_of_decline(evaluations, config):
        yield logging.WARNING, decline


def worse_in_a_row(evaluations: Sequence[Line]) -> int:
    """Count the last evaluations in a row that are worse than the first.

    Worse: less accurate, by more than chance. evaluations: the lines of evals.jsonl.
    """
    num_worse = 0
    for line in reversed(evaluations[1:]):
        if not is_worse(evaluations[0], line):
            break
        num_worse += 1
    return num_worse


def describe_early_end(worse: int, step: int, model_step: int, config: Config) -> str:
    """Explain why `eval.stop_when_worse` ended a run, and which model it exports.

    worse: the number of evaluations in a row that were worse. step: the last one of the run.
    model_step: the step of the model in hf/.
    """
    handed_out = f"hf/ holds the best model, of step {model_step}"
    if model_step == step:
        handed_out = "best/ has no better model, so hf/ holds the last one"
    return (
        f"ended after step {step} of {config.run.steps}, with {count_of([worse], 'evaluation')} in "
        f"a row less accurate than the base model's by more than chance (eval.stop_when_worse="
        f"{config.eval.stop_when_worse}); {handed_out}"
    )


def warn_of_decline(evaluations: Sequence[Line], config: Config) -> str:
    """Warn if a run's last evaluation is less accurate than its first by more than chance.

    evaluations: the lines of evals.jsonl. The warning names the best evaluation and the key that is
    most likely the cause. Returns "" if the last evaluation is not worse.
    """
    if not evaluations:
        return ""
    decline = describe_decline(evaluations[0], evaluations[-1])
    if not decline:
        return ""
    best_so_far = "no later evaluation was as accurate as the base model"
    best = best_evaluation(evaluations, config.eval)
    if best["step"]:
        is_in_best = config.eval.keeps_best
        its_model = (
            "its model is in best/" if is_in_best else "eval.export_best keeps it"
        )
        best_so_far = (
            f"the best evaluation is after step {best['step']}, "
            f"{percent(best['eval_accuracy'])}, "
            f"{best['eval_mean_response_tokens']:.1f} tokens ({its_model})"
        )
    return f"{decline}; {best_so_far}; most likely {advise_on_training(config)}"
