"""What a run says about its counts: why responses were rejected, and what would help."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_opsft.report.runs import read_json_lines

log = logging.getLogger("megatron_opsft")

Counts = Mapping[str, float | int]

# Keys of a line of metrics.jsonl, and what the console calls them.
REASONS = (
    ("num_unfinished", "cut off"),
    ("num_wrong", "wrong"),
    ("num_no_answer", "no answer"),
    ("verify_timeouts", "timed out"),
    ("verify_errors", "verifier failed"),
)
_TENTH, _HALF = "eval_correct_tokens_tenth", "eval_correct_tokens_half"  # of a line of evals.jsonl
_FEW = 0.05
_HARD = 0.2  # a base model that solves less has little to learn from
_REMEDIES = {
    "num_wrong": "most are finished and wrong: does the answer field hold what the problems ask "
    "for, and does the model solve such problems? rollouts/ has every response",
    "num_no_answer": r"most are finished without an answer in \boxed{}: look at rollouts/, and at "
    "data.template and the model's chat template",
    "verify_timeouts": "raise verify.timeout_seconds, or give the verifier more CPU cores",
    "verify_errors": "the verifier fails on most: look at rollouts/",
}


class AcceptanceNotes:
    """Warns of the first step that accepts nothing. Used by rank 0."""

    def __init__(self, run_dir: Path, limit: int) -> None:
        """limit: rollout.max_response_tokens."""
        self._evaluations = run_dir / "evals.jsonl"
        self._limit = limit
        self._has_explained = False

    def note(self, metrics: Counts) -> None:
        """After each step, with its line of metrics.jsonl."""
        if not metrics["num_accepted"] and not self._has_explained:
            self._has_explained = True
            base: Counts = next(iter(read_json_lines(self._evaluations)), {})
            log.warning("%s", explain_empty_step(metrics, self._limit, base))


def measure_correct(lengths: Sequence[int]) -> dict[str, int]:
    """Tokens within which a tenth and a half of the correct answers end, as evals.jsonl has them.

    lengths: of correct responses, end token included; nothing where there is none.
    """
    if not lengths:
        return {}
    ordered = sorted(lengths)
    return {
        _TENTH: ordered[max(0, -(-len(ordered) // 10) - 1)],
        _HALF: ordered[(len(ordered) - 1) // 2],
    }


def describe_rejected(counts: Counts) -> str:
    """For example `28 cut off, 3 wrong, 1 no answer`; "" where nothing was rejected."""
    return ", ".join(f"{counts[key]} {name}" for key, name in REASONS if counts.get(key))


def describe_correct(evaluation: Counts) -> str:
    """How long the correct answers of an evaluation are, by which the limit is chosen; "" where
    none is.
    """
    if _HALF not in evaluation:
        return ""
    tenth, half = evaluation[_TENTH], evaluation[_HALF]
    return f"; correct answers: p10 {tenth}, median {half} tokens"


def warn_of_cut_off(name: str, evaluation: Counts, key: str) -> str:
    """A warning where the limit distorts an evaluation; "" where it cuts few responses off.

    key: what the set's names in `evaluation` begin with.
    """
    share = evaluation[f"{key}_truncated_share"]
    if share <= _FEW:
        return ""
    return (
        f"{name}: {100 * share:.1f} % of the responses were cut off, so accuracy and tokens are "
        "lower than the model's; raise eval.max_response_tokens"
    )


def explain_empty_step(counts: Counts, limit: int, base: Counts) -> str:
    """A step that accepted nothing: the reason in counts, and the remedy.

    limit: rollout.max_response_tokens. base: the line of evals.jsonl before the first step; empty
    where nothing is evaluated.
    """
    key, _ = max(REASONS, key=lambda reason: counts.get(reason[0], 0))
    remedy = _lengths_remedy(limit, base) if key == "num_unfinished" else _REMEDIES[key]
    if base and (hard := _hardness(base)):
        remedy += f"; {hard}"
    return (
        f"step {counts['step']} accepted none of {counts['num_rollouts']} responses, so nothing "
        f"was learned: {describe_rejected(counts)}; {remedy}"
    )


def advise_on_base(evaluation: Counts) -> str:
    """A warning if the evaluation before the first step shows too little to learn from, else ""."""
    hard = _hardness(evaluation)
    return hard and f"{hard}; a small instruct model may need data.template=chat"


def _hardness(evaluation: Counts) -> str:
    """What to do where few held-out problems are solved, as far as responses were not cut off."""
    accuracy, cut_off = evaluation["eval_accuracy"], evaluation["eval_truncated_share"]
    if accuracy >= _HARD:
        return ""
    if accuracy + cut_off < _HARD:
        return (
            f"the base model solves only {100 * accuracy:.3g} % of the held-out problems: take "
            "easier ones first, or a stronger model"
        )
    return (
        f"the base model's accuracy is not known: {100 * cut_off:.0f} % of its held-out responses "
        "were cut off; raise eval.max_response_tokens"
    )


def _lengths_remedy(limit: int, base: Counts) -> str:
    key = f"rollout.max_response_tokens={limit}"
    fix = f"raise {key}"
    if _HALF not in base:
        return (
            f"raise {key}; to see how long correct answers are, set eval.holdout or eval.data, "
            "and a large enough eval.max_response_tokens"
        )
    if base[_HALF] <= limit:
        fix = f"keep {key} and raise data.prompts_per_step or rollout.group_size"
    return (
        f"the base model's correct answers on held-out problems: p10 {base[_TENTH]}, median "
        f"{base[_HALF]} tokens; {fix}"
    )
