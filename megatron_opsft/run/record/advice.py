"""What a run says of steps and evaluations that went wrong: why, and what would help."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import takewhile

from megatron_opsft.config import Config
from megatron_opsft.run.run_files import best_evaluation

Counts = Mapping[str, float | int]

# Keys of a line of metrics.jsonl: what the console calls them, and what helps where it is most.
_REASONS = {
    "num_unfinished": ("cut off", ""),
    "num_wrong": (
        "wrong",
        "most are finished and wrong: does the answer field hold what the problems ask for, and "
        "does the model solve such problems? rollouts/ has every response",
    ),
    "num_no_answer": (
        "no answer",
        r"most are finished without an answer in \boxed{}: look at rollouts/, and at data.template "
        "and the model's chat template",
    ),
    "verify_timeouts": (
        "timed out",
        "raise verify.timeout_seconds, or give the verifier more CPU cores",
    ),
    "verify_errors": (
        "verifier failed",
        "the verifier fails on most: look at rollouts/",
    ),
}
_TENTH, _HALF = (
    "eval_correct_tokens_tenth",
    "eval_correct_tokens_half",
)  # of a line of evals.jsonl
_FEW = 0.05
RECENT_STEPS = 10  # that are looked at together
_HARD = 0.2  # a base model that solves less has little to learn from


def measure_correct(lengths: Sequence[int]) -> dict[str, int]:
    """The lengths within which a tenth and half of the correct responses end, for evals.jsonl.

    lengths: tokens of each correct response, end token included; {} if there is none.
    """
    if not lengths:
        return {}
    ordered = sorted(lengths)
    return {
        _TENTH: ordered[max(0, -(-len(ordered) // 10) - 1)],
        _HALF: ordered[(len(ordered) - 1) // 2],
    }


def describe_rejected(counts: Counts) -> str:
    """For example `28 cut off, 3 wrong, 1 no answer`; "" if nothing was rejected."""
    return ", ".join(
        f"{counts[key]} {name}"
        for key, (name, _) in _REASONS.items()
        if counts.get(key)
    )


def describe_correct(evaluation: Counts) -> str:
    """How long the correct answers of an evaluation are, which helps to choose the limit; "" if
    there is none.
    """
    if _HALF not in evaluation:
        return ""
    return (
        f"correct answers: p10 {evaluation[_TENTH]}, median {evaluation[_HALF]} tokens"
    )


def warn_of_cut_off(name: str, evaluation: Counts, key: str) -> str:
    """A warning if the limit distorts an evaluation; "" if it cuts few responses off.

    key: the beginning of the set's names in `evaluation`.
    """
    share = evaluation[f"{key}_truncated_share"]
    if share <= _FEW:
        return ""
    return (
        f"{name}: {100 * share:.1f} % of the responses were cut off, so accuracy and tokens are "
        "lower than the model's; raise eval.max_response_tokens"
    )


def explain_empty_step(counts: Counts, limit: int, base: Counts) -> str:
    """Why a step trained on nothing: the most common reason, and the remedy.

    counts: its line of metrics.jsonl. limit: rollout.max_response_tokens. base: the line of
    evals.jsonl before the first step; empty if nothing is evaluated.
    """
    begin = f"step {counts['step']} trained on no token, so nothing was learned:"
    if "num_accepted" not in counts:
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


def few_accepted(steps: Sequence[Counts]) -> Counts | None:
    """The counts of the last ten steps together, where they accepted some responses but fewer than
    one in twenty; else None.

    steps: lines of metrics.jsonl, ten at most.
    """
    if len(steps) < RECENT_STEPS or any(
        "num_accepted" not in counts for counts in steps
    ):
        return None
    added = ("num_rollouts", "num_accepted", *_REASONS)
    counts = {key: sum(int(step.get(key, 0)) for step in steps) for key in added}
    if not 0 < counts["num_accepted"] < _FEW * counts["num_rollouts"]:
        return None
    in_force = steps[-1].get("length_limit")
    return counts if in_force is None else {**counts, "length_limit": in_force}


def explain_few_accepted(counts: Counts, limit: int, base: Counts) -> str:
    """Why so few responses were accepted: the most common reason, and the remedy.

    counts: as of `few_accepted`; limit, base: as of `explain_empty_step`.
    """
    return (
        f"the last {RECENT_STEPS} steps accepted {counts['num_accepted']} of "
        f"{counts['num_rollouts']} responses, so little is learned: {describe_rejected(counts)}; "
        f"{_remedy(counts, limit, base)}"
    )


def _remedy(counts: Counts, limit: int, base: Counts) -> str:
    """What helps where few responses are accepted, by the most common reason."""
    _, remedy = _REASONS[max(_REASONS, key=lambda key: counts.get(key, 0))]
    key = "rollout.max_response_tokens"
    if (in_force := int(counts.get("length_limit", limit))) < limit:
        key, limit = "method.limits", in_force
    remedy = remedy or _lengths_remedy(key, limit, base)
    return remedy + (f"; {advice}" if base and (advice := advise_on_base(base)) else "")


def explain_left_out(counts: Counts, *, room: int, positions: int) -> str:
    """Why a method with a teacher does not learn from some responses, and the remedy.

    counts: a line of metrics.jsonl. room: tokens of a micro-batch; positions: of the model.
    """
    why = f"the model's {positions} positions; lower rollout.max_response_tokens"
    if room < positions:
        why = f"a micro-batch ({room} tokens); raise train.max_tokens_per_microbatch"
    nothing = "" if counts["trained_tokens"] else ", so nothing was learned"
    return (
        f"step {counts['step']} left out {counts['num_pairs_left_out']} of "
        f"{counts['num_rollouts']} responses{nothing}: with the teacher's prompt, or with the "
        f"plain one, they are longer than {why}"
    )


def worse_in_a_row(evaluations: Sequence[Counts]) -> int:
    """How many evaluations in a row, up to the last one, are less accurate than the first by more
    than chance explains.

    evaluations: the lines of evals.jsonl.
    """
    first, *later = evaluations or [{}]
    return sum(1 for _ in takewhile(partial(_is_worse, first), reversed(later)))


def describe_early_end(worse: int, step: int, model_step: int, config: Config) -> str:
    """What a run says that `eval.stop_when_worse` ended.

    worse: evaluations in a row that were worse; step: after which it ended; model_step: of the
    model in hf/.
    """
    handed_out = f"hf/ holds the best model, of step {model_step}"
    if model_step == step:
        handed_out = "best/ has no better model, so hf/ holds the last one"
    return (
        f"ended after step {step} of {config.run.steps}, because {worse} evaluations in a row were "
        f"less accurate than the base model's by more than chance (eval.stop_when_worse="
        f"{config.eval.stop_when_worse}); {handed_out}"
    )


def warn_of_decline(evaluations: Sequence[Counts], config: Config) -> str:
    """A warning if a run's last evaluation is less accurate than its first by more than chance
    explains, with the best evaluation and the likely key; "" if it is not.

    evaluations: the lines of evals.jsonl.
    """
    if len(evaluations) < 2:
        return ""
    first, last = evaluations[0], evaluations[-1]
    if not _is_worse(first, last):
        return ""
    best = best_evaluation(evaluations, config.eval.best_within)
    advice = f"lower optimizer.lr={config.optimizer.lr:g}"
    if (temperature := config.rollout.temperature) != 1:
        advice = f"set rollout.temperature={temperature:g} to 1"
    if best is None or not best["step"]:
        found = "no later evaluation was as accurate as the base model"
    else:
        kept = (
            "its model is in best/"
            if config.eval.keeps_best
            else "eval.export_best keeps it"
        )
        found = (
            f"the best evaluation is after step {best['step']}, "
            f"{100 * best['eval_accuracy']:.1f} %, "
            f"{best['eval_mean_response_tokens']:.1f} tokens ({kept})"
        )
    return (
        f"THE MODEL GOT WORSE: held-out accuracy fell from {100 * first['eval_accuracy']:.1f} % "
        f"to {100 * last['eval_accuracy']:.1f} %, more than chance; {found}; most likely {advice}"
    )


def _is_worse(first: Counts, last: Counts) -> bool:
    """Whether the accuracy of an evaluation is below the first one's by more than chance."""
    return first["eval_accuracy"] - last["eval_accuracy"] > _interval(first, last)


def _interval(first: Counts, last: Counts) -> float:
    """Half the width of the 95 % interval of a difference of two shares (Agresti and Caffo)."""
    variance = 0.0
    for line in (first, last):
        count = line["eval_samples"] + 2
        share = (line["eval_accuracy"] * line["eval_samples"] + 1) / count
        variance += share * (1 - share) / count
    return 1.96 * math.sqrt(variance)


def _lengths_remedy(key: str, limit: int, base: Counts) -> str:
    """key: of the limit, which is in force."""
    higher = f"raise {key} above {limit}"
    if not base:
        return f"{higher}; with eval.holdout or eval.data the run says how long answers are"
    if not (lengths := describe_correct(base)):
        return f"{higher}; the base model gave no correct answer to a held-out problem"
    few = base[_HALF] <= limit
    more = f"keep {key}={limit} and raise data.prompts_per_step or rollout.group_size"
    return (
        f"of the base model on held-out problems, {lengths}; {more if few else higher}"
    )


def advise_on_base(evaluation: Counts) -> str:
    """A warning if the evaluation before the first step shows too little to learn from, else ""."""
    # Responses that were cut off may be correct: `warn_of_cut_off` says it of these.
    if evaluation["eval_accuracy"] + evaluation["eval_truncated_share"] >= _HARD:
        return ""
    return (
        f"the base model solves only {100 * evaluation['eval_accuracy']:.3g} % of the held-out "
        "problems: take easier ones first, or a stronger model"
    )
