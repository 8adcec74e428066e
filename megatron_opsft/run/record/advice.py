"""Explains steps and evaluations that went wrong, and says what would help."""

from collections.abc import Sequence

from megatron_opsft.config import Config
from megatron_opsft.run.run_files import (
    REASONS,
    Line,
    best_evaluation,
    describe_rejected,
)
from megatron_opsft.runtime.formatting import percent
from megatron_opsft.runtime.intervals import share_margin
from megatron_opsft.runtime.rounding import ceil_div

# Advice for each reason if it is the most common one, see `_remedy`.
_REMEDIES = {
    "num_wrong": (
        "most are finished and wrong: does the answer field hold what the problems ask for, and "
        "does the model solve such problems? rollouts/ has every response"
    ),
    "num_no_answer": (
        r"most are finished without an answer in \boxed{}: look at rollouts/, and at data.template "
        "and the model's chat template"
    ),
    "verify_timeouts": "raise verify.timeout_seconds, or give the judge more CPU cores",
    "verify_errors": "the judge fails: rollouts/ has its message as the answer of each response",
}
# The reasons that say nothing about a response: the judge gave no verdict.
_NO_VERDICT = ("verify_timeouts", "verify_errors")
# Keys of evals.jsonl, see `measure_correct`.
_TENTH = "eval_correct_tokens_tenth"
_HALF = "eval_correct_tokens_half"
# Smaller shares of responses count as few.
_FEW = 0.05
# A judge that takes less is not worth a word, whatever its share of a step.
_MIN_JUDGE_SECONDS = 1.0
# The number of steps whose accepted responses are counted together.
RECENT_STEPS = 10
# A base model that solves less has little to learn from.
_MIN_BASE_ACCURACY = 0.2


def measure_correct(lengths: Sequence[int]) -> dict[str, int]:
    """Return the lengths within which a tenth and half of the correct responses end.

    They are values of evals.jsonl, by key. lengths: tokens of each correct response, end token
    included. Returns {} if there is none.
    """
    if not lengths:
        return {}
    ordered = sorted(lengths)
    return {
        _TENTH: ordered[ceil_div(len(ordered), 10) - 1],
        _HALF: ordered[ceil_div(len(ordered), 2) - 1],
    }


def describe_correct(evaluation: Line) -> str:
    """Say how long the correct answers of an evaluation are, which helps to choose the limit.

    Returns "" if there is no correct answer.
    """
    if _HALF not in evaluation:
        return ""
    return (
        f"correct answers: p10 {evaluation[_TENTH]}, median {evaluation[_HALF]} tokens"
    )


def warn_of_cut_off(name: str, evaluation: Line, key: str) -> str:
    """Warn if the limit distorts an evaluation; "" if it cuts few responses off.

    name: the set, for the message. key: the prefix of the set's keys in `evaluation`.
    """
    share = evaluation[f"{key}_truncated_share"]
    if share <= _FEW:
        return ""
    return (
        f"{name}: {percent(share)} of the responses were cut off, so accuracy and tokens are "
        "lower than the model's; raise eval.max_response_tokens"
    )


def explain_empty_step(counts: Line, limit: int, base: Line) -> str:
    """Explain why a step trained on nothing: the most common reason, and the remedy.

    counts: its line of metrics.jsonl. limit: rollout.max_response_tokens. base: the line of
    evals.jsonl before the first step; {} if nothing is evaluated.
    """
    begin = f"step {counts['step']} trained on no token, so nothing was learned:"
    if "num_accepted" not in counts:  # fixed data
        return (
            f"{begin} none of its rows of data.responses has an advantage; make them again, or "
            "look at them"
        )
    if counts["num_accepted"]:
        return (
            f"{begin} all responses to each of its {counts['zero_advantage_groups']} problems got "
            "the same reward, so none was better than the others; take problems that the model "
            "solves sometimes, or raise rollout.group_size"
        )
    return (
        f"step {counts['step']} accepted none of {counts['num_rollouts']} responses, so nothing "
        f"was learned: {describe_rejected(counts)}; {_remedy(counts, limit, base)}"
    )


def explain_few_accepted(steps: Sequence[Line], limit: int, base: Line) -> str:
    """Explain why recent steps accepted some responses, but fewer than 5 %: the most common reason,
    and the remedy.

    steps: the last lines of metrics.jsonl, `RECENT_STEPS` at most. limit, base: see
    `explain_empty_step`. Returns "" if more are accepted, or none, or if these are not
    `RECENT_STEPS` steps of a method that accepts responses.
    """
    if len(steps) < RECENT_STEPS:
        return ""
    totals = dict.fromkeys(("num_rollouts", "num_accepted", *REASONS), 0)
    for step in steps:
        for key in totals:
            totals[key] += int(step.get(key, 0))
    accepts_few = 0 < totals["num_accepted"] < _FEW * totals["num_rollouts"]
    if not accepts_few:
        return ""
    counts = {**steps[-1], **totals}
    return (
        f"the last {RECENT_STEPS} steps accepted {counts['num_accepted']} of "
        f"{counts['num_rollouts']} responses, so little is learned: {describe_rejected(counts)}; "
        f"{_remedy(counts, limit, base)}"
    )


def explain_slow_judge(step: Line, num_workers: int, world_size: int) -> str:
    """Say that a judge of the user's own takes most of a step; "" if it does not, or if every
    response has a worker of its own already.

    step: a line of metrics.jsonl. num_workers: how many processes of a rank judge at once.
    """
    num_finished = step.get("num_rollouts", 0) - step.get("num_unfinished", 0)
    if num_finished <= num_workers * world_size:
        return ""
    seconds, in_all = step.get("verify_seconds", 0.0), step["step_seconds"]
    if seconds < max(_MIN_JUDGE_SECONDS, in_all / 2):
        return ""
    return (
        f"step {step['step']}: the judge took {seconds:.1f} of {in_all:.1f} s with {num_workers} "
        "workers a rank; if it waits, for a server say, raise verify.workers, beyond the CPU cores "
        "too"
    )


def _remedy(counts: Line, limit: int, base: Line) -> str:
    """Say what helps if few responses are accepted, by the most common reason. If the judge gave
    no verdict at all, that is the reason, however many responses were cut off.
    """
    num_finished = counts["num_rollouts"] - counts.get("num_unfinished", 0)
    num_no_verdict = sum(counts.get(key, 0) for key in _NO_VERDICT)
    reasons = _NO_VERDICT if 0 < num_no_verdict == num_finished else tuple(REASONS)
    most_common = max(reasons, key=lambda key: counts.get(key, 0))
    if most_common in _REMEDIES:
        remedy = _REMEDIES[most_common]
    elif counts.get("length_limit", limit) < limit:
        remedy = _lengths_remedy("method.limits", int(counts["length_limit"]), base)
    else:
        remedy = _lengths_remedy("rollout.max_response_tokens", limit, base)
    advice = advise_on_base(base) if base else ""
    return f"{remedy}; {advice}" if advice else remedy


def explain_left_out(counts: Line, *, room: int, positions: int) -> str:
    """Explain why a method with a teacher does not learn from some responses, and the remedy.

    counts: a line of metrics.jsonl. room: most tokens of a micro-batch. positions: most tokens of a
    sequence of the model.
    """
    limit_and_remedy = (
        f"the model's {positions} positions; lower rollout.max_response_tokens"
    )
    if room < positions:
        limit_and_remedy = (
            f"a micro-batch ({room} tokens); raise train.max_tokens_per_microbatch"
        )
    nothing = "" if counts["trained_tokens"] else ", so nothing was learned"
    return (
        f"step {counts['step']} left out {counts['num_pairs_left_out']} of "
        f"{counts['num_rollouts']} responses{nothing}: with the teacher's prompt, or with the "
        f"plain one, they are longer than {limit_and_remedy}"
    )


def worse_in_a_row(evaluations: Sequence[Line]) -> int:
    """Count the last evaluations in a row that are worse than the first.

    Worse: less accurate, by more than chance. evaluations: the lines of evals.jsonl.
    """
    num_worse = 0
    for line in reversed(evaluations[1:]):
        if not _is_worse(evaluations[0], line):
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
        f"ended after step {step} of {config.run.steps}, because {worse} evaluations in a row were "
        f"less accurate than the base model's by more than chance (eval.stop_when_worse="
        f"{config.eval.stop_when_worse}); {handed_out}"
    )


def warn_of_decline(evaluations: Sequence[Line], config: Config) -> str:
    """Warn if a run's last evaluation is less accurate than its first by more than chance.

    evaluations: the lines of evals.jsonl. The warning names the best evaluation and the key that is
    most likely the cause. Returns "" if the last evaluation is not worse.
    """
    if len(evaluations) < 2:
        return ""
    first, last = evaluations[0], evaluations[-1]
    if not _is_worse(first, last):
        return ""
    advice = f"lower optimizer.lr={config.optimizer.lr:g}"
    temperature = config.rollout.temperature
    if temperature != 1:
        advice = f"set rollout.temperature={temperature:g} to 1"
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
    return (
        f"THE MODEL GOT WORSE: held-out accuracy fell from {percent(first['eval_accuracy'])} "
        f"to {percent(last['eval_accuracy'])}, more than chance; {best_so_far}; most likely "
        f"{advice}"
    )


def _is_worse(first: Line, later: Line) -> bool:
    """True if the accuracy of a later evaluation is below the first one's by more than chance.

    Chance: half the width of the 95 % interval of their difference, see `share_margin`.
    """
    before, after = first["eval_accuracy"], later["eval_accuracy"]
    num_before, num_after = int(first["eval_samples"]), int(later["eval_samples"])
    return before - after > share_margin(before, num_before, after, num_after)


def _lengths_remedy(key: str, limit: int, base: Line) -> str:
    """Say what to do about responses that are cut off, by the lengths of the base model's answers.

    key, limit: the setting that cuts them off, and its value.
    """
    advice = f"raise {key} above {limit}"
    if not base:
        return f"{advice}; with eval.holdout or eval.data the run says how long answers are"
    lengths = describe_correct(base)
    if not lengths:
        return f"{advice}; the base model gave no correct answer to a held-out problem"
    if base[_HALF] <= limit:
        advice = (
            f"keep {key}={limit} and raise data.prompts_per_step or rollout.group_size"
        )
    return f"of the base model on held-out problems, {lengths}; {advice}"


def advise_on_base(evaluation: Line) -> str:
    """Warn if the evaluation before the first step shows that the model solves too few problems to
    learn from.

    Returns "" if it solves enough.
    """
    # Responses that were cut off may be correct; `warn_of_cut_off` warns of these. So may those
    # that the judge failed at, which the verifier logs.
    num_no_verdict = sum(evaluation.get(f"eval_{key}", 0) for key in _NO_VERDICT)
    share = evaluation["eval_accuracy"] + evaluation["eval_truncated_share"]
    share += num_no_verdict / max(evaluation.get("eval_samples", 0), 1)
    if share >= _MIN_BASE_ACCURACY:
        return ""
    return (
        f"the base model solves only {100 * evaluation['eval_accuracy']:.3g} % of the held-out "
        "problems: take easier ones first, or a stronger model"
    )
