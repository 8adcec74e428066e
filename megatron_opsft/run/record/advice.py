"""Explains steps and evaluations that went wrong, and says what would help."""

from collections.abc import Mapping, Sequence

from megatron_opsft.config import Config
from megatron_opsft.run.run_files import REASONS, Line, describe_rejected
from megatron_opsft.runtime.formatting import count_of, percent
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


def warn_of_cut_off(shares: Mapping[str, float], key: str) -> str:
    """Warn if the limit distorts evaluations; "" if it cuts few of their responses off.

    shares: what was evaluated, in words, "" for a single one -> the share of its responses that was
    cut off. key: the option or key of the limit.
    """
    texts = []
    for name, share in shares.items():
        if share > _FEW:
            texts.append(f"{percent(share)} ({name})" if name else percent(share))
    if not texts:
        return ""
    return (
        f"{', '.join(texts)} of the responses were cut off, so accuracy and tokens are lower than "
        f"the model's; raise {key}"
    )


def cuts_off_more(base: Line, evaluation: Line, key: str) -> bool:
    """True if the limit cuts off a larger share of responses than before training, by more than
    chance. Arguments: see `explain_cut_off`.
    """
    share = evaluation[f"{key}_truncated_share"]
    before = base.get(f"{key}_truncated_share", share)
    num_before, num_now = (
        int(line.get(f"{key}_samples", 0)) for line in (base, evaluation)
    )
    return share - before > share_margin(before, num_before, share, num_now)


def explain_cut_off(base: Line, evaluation: Line, key: str, config: Config) -> str:
    """Explain why the limit distorts an evaluation of a run, and the remedy: a higher limit, unless
    training made the model's responses longer. Returns "" if few responses are cut off.

    base, evaluation: lines of evals.jsonl, before the first step and now. key: the prefix of the
    keys of a held-out set.
    """
    share = evaluation[f"{key}_truncated_share"]
    if share > _FEW and cuts_off_more(base, evaluation, key):
        return (
            f"{percent(share)} of the responses were cut off, and of the base model's "
            f"{percent(base[f'{key}_truncated_share'])}: training did this; most likely "
            f"{advise_on_training(config)}"
        )
    return warn_of_cut_off({"": share}, "eval.max_response_tokens")


def advise_on_training(config: Config) -> str:
    """Name the key that is most likely the cause where training makes a model worse."""
    temperature = config.rollout.temperature
    if temperature != 1:
        return f"set rollout.temperature={temperature:g} to 1"
    return f"lower optimizer.lr={config.optimizer.lr:g}"


def explain_empty_step(counts: Line, config: Config, base: Line, first: Line) -> str:
    """Explain why a step trained on nothing: the most common reason, and the remedy.

    counts, first: lines of metrics.jsonl, of the step and of the run's first one, whose responses
    are the base model's. base: the line of evals.jsonl before the first step; {} if nothing is
    evaluated.
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
    responses = count_of([counts["num_rollouts"]], "response")
    return (
        f"step {counts['step']} accepted none of {responses}, so nothing was learned: "
        f"{describe_rejected(counts)}; {_remedy(counts, config, base, first)}"
    )


def explain_few_accepted(
    steps: Sequence[Line], config: Config, base: Line, first: Line
) -> str:
    """Explain why recent steps accepted some responses, but fewer than 5 %: the most common reason,
    and the remedy.

    steps: the last lines of metrics.jsonl, `RECENT_STEPS` at most. base, first: see
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
        f"{_remedy(counts, config, base, first)}"
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


def _remedy(counts: Line, config: Config, base: Line, first: Line) -> str:
    """Say what helps if few responses are accepted, by the most common reason. If the judge gave
    no verdict at all, that is the reason, however many responses were cut off; and if the first
    step accepted more, it is training, whatever is wrong with the responses.
    """
    limit = config.rollout.max_response_tokens
    num_finished = counts["num_rollouts"] - counts.get("num_unfinished", 0)
    num_no_verdict = sum(counts.get(key, 0) for key in _NO_VERDICT)
    reasons = _NO_VERDICT if 0 < num_no_verdict == num_finished else tuple(REASONS)
    most_common = max(reasons, key=lambda key: counts.get(key, 0))
    if most_common not in _NO_VERDICT and _accepts_fewer(counts, first, config):
        return (
            f"step {first['step']} accepted {first['num_accepted']} of {first['num_rollouts']}, so "
            f"training did this: most likely {advise_on_training(config)}"
        )
    if most_common in _REMEDIES:
        remedy = _REMEDIES[most_common]
    elif counts.get("length_limit", limit) < limit:
        remedy = _lengths_remedy("method.limits", int(counts["length_limit"]), base)
    else:
        remedy = _lengths_remedy("rollout.max_response_tokens", limit, base)
    advice = advise_on_base(base) if base else ""
    return f"{remedy}; {advice}" if advice else remedy


def _accepts_fewer(counts: Line, first: Line, config: Config) -> bool:
    """True if a smaller share of responses is accepted than in the first step, under the same
    limit, by more than chance.

    Chance: that of so many problems, as if each had one response: those to one problem are alike.
    """
    if counts.get("length_limit") != first.get("length_limit"):
        return False
    before, now = (
        line["num_accepted"] / line["num_rollouts"] for line in (first, counts)
    )
    num_before, num_now = (
        int(line["num_rollouts"]) // config.rollout.group_size
        for line in (first, counts)
    )
    return before - now > share_margin(before, num_before, now, num_now)


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
