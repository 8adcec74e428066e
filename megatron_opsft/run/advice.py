"""What a run says about rejected responses: why they were rejected, and what would help."""

from collections.abc import Mapping, Sequence

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
    "verify_errors": ("verifier failed", "the verifier fails on most: look at rollouts/"),
}
_TENTH, _HALF = "eval_correct_tokens_tenth", "eval_correct_tokens_half"  # of a line of evals.jsonl
_FEW = 0.05
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
        f"{counts[key]} {name}" for key, (name, _) in _REASONS.items() if counts.get(key)
    )


def describe_correct(evaluation: Counts) -> str:
    """How long the correct answers of an evaluation are, which helps to choose the limit; "" if
    there is none.
    """
    if _HALF not in evaluation:
        return ""
    return f"correct answers: p10 {evaluation[_TENTH]}, median {evaluation[_HALF]} tokens"


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
    """Why a step accepted nothing: the most common reason, and the remedy.

    limit: rollout.max_response_tokens. base: the line of evals.jsonl before the first step; empty
    if nothing is evaluated.
    """
    _, remedy = _REASONS[max(_REASONS, key=lambda key: counts.get(key, 0))]
    remedy = remedy or _lengths_remedy(limit, base)
    hard = f"; {advice}" if base and (advice := advise_on_base(base)) else ""
    return (
        f"step {counts['step']} accepted none of {counts['num_rollouts']} responses, so nothing "
        f"was learned: {describe_rejected(counts)}; {remedy}{hard}"
    )


def _lengths_remedy(limit: int, base: Counts) -> str:
    key = f"rollout.max_response_tokens={limit}"
    if not (lengths := describe_correct(base)):
        return f"raise {key}; with eval.holdout or eval.data the run says how long answers are"
    few = base[_HALF] <= limit
    more = f"keep {key} and raise data.prompts_per_step or rollout.group_size"
    return f"of the base model on held-out problems, {lengths}; {more if few else f'raise {key}'}"


def advise_on_base(evaluation: Counts) -> str:
    """A warning if the evaluation before the first step shows too little to learn from, else ""."""
    # Responses that were cut off may be correct: `warn_of_cut_off` says it of these.
    if evaluation["eval_accuracy"] + evaluation["eval_truncated_share"] >= _HARD:
        return ""
    return (
        f"the base model solves only {100 * evaluation['eval_accuracy']:.3g} % of the held-out "
        "problems: take easier ones first, or a stronger model"
    )
