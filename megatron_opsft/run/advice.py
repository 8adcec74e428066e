"""What to say of a step's counts: why responses were rejected, and what would help; pure."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Counts = Mapping[str, float | int]

# Keys of a line of metrics.jsonl, and what the console calls them.
REASONS = (
    ("num_unfinished", "cut off"),
    ("num_wrong", "wrong"),
    ("num_no_answer", "no answer"),
    ("verify_timeouts", "timed out"),
    ("verify_errors", "verifier failed"),
)
_RECENT_STEPS = 10
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectLengths:
    """Tokens within which a tenth and a half of the base model's correct answers end."""

    tenth: int
    half: int


def measure_correct(lengths: Sequence[int]) -> CorrectLengths | None:
    """lengths: of correct responses, end token included; None where there is none."""
    if not lengths:
        return None
    ordered = sorted(lengths)
    return CorrectLengths(
        tenth=ordered[max(0, -(-len(ordered) // 10) - 1)], half=ordered[(len(ordered) - 1) // 2]
    )


def describe_rejected(counts: Counts) -> str:
    """Such as `28 cut off, 3 wrong, 1 no answer`; "" where nothing was rejected."""
    return ", ".join(f"{counts[key]} {name}" for key, name in REASONS if counts.get(key))


def describe_correct(evaluation: Counts) -> str:
    """How long the correct answers of an evaluation are, by which the limit is chosen; "" where
    none is.
    """
    if "eval_correct_tokens_half" not in evaluation:
        return ""
    tenth, half = (evaluation[f"eval_correct_tokens_{part}"] for part in ("tenth", "half"))
    return f"; of the correct ones a tenth end within {tenth} tokens, half within {half}"


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


def explain_empty_step(
    counts: Counts,
    limit: int,
    correct: CorrectLengths | None,
    base: Counts | None = None,
) -> str:
    """A step that accepted nothing: the reason in counts, and the remedy.

    limit: rollout.max_response_tokens. correct, base: what the evaluation before the first step
    found, and its line of evals.jsonl.
    """
    key, _ = max(REASONS, key=lambda reason: counts.get(reason[0], 0))
    remedy = _lengths_remedy(limit, correct, base) if key == "num_unfinished" else _REMEDIES[key]
    if base and (hard := _hardness(base)):
        remedy += f"; {hard}"
    return (
        f"step {counts['step']} accepted none of {counts['num_rollouts']} responses, so nothing "
        f"was learned: {describe_rejected(counts)}; {remedy}"
    )


def advise_on_base(evaluation: Counts) -> str:
    """Of the evaluation before the first step: whether there is enough to learn from; "" if so."""
    hard = _hardness(evaluation)
    return hard and f"{hard}; a small instruct model may need data.template=chat"


def _hardness(evaluation: Counts) -> str:
    """What to do where few held-out problems are solved, as far as responses were not cut off."""
    accuracy, cut_off = evaluation["eval_accuracy"], evaluation["eval_truncated_share"]
    if accuracy >= _HARD:
        return ""
    if accuracy + cut_off < _HARD:
        return (
            f"the base model solves only {100 * accuracy:.3g} % of the held-out problems: easier "
            "ones, or a stronger model, come first"
        )
    return (
        f"what the base model solves is not known: {100 * cut_off:.0f} % of its held-out responses "
        "were cut off; raise eval.max_response_tokens"
    )


def _lengths_remedy(limit: int, correct: CorrectLengths | None, base: Counts | None) -> str:
    key = "rollout.max_response_tokens"
    if correct is None:
        how = "eval.max_response_tokens"
        if base is None:  # nothing is evaluated
            how = f"evaluate, with eval.holdout or eval.data and a larger {how},"
        else:
            how = f"raise {how} further,"
        return (
            f"how much longer they would be is not known ({key}={limit}): raise it, and {how} to "
            "see the lengths of correct answers"
        )
    if correct.tenth <= limit:
        share, within = ("a tenth", correct.tenth)
        further = f"; {key}={correct.half} would take half of them"
        if correct.half <= limit:
            share, within, further = "half", correct.half, ""
        return (
            f"{share} of the base model's correct answers end within {within} tokens, which "
            f"{key}={limit} allows: more of data.prompts_per_step x rollout.group_size would find "
            f"some{further}"
        )
    return (
        f"{key}={limit} is less than the base model needs: {key}={correct.tenth} would have taken "
        f"a tenth of its correct answers on held-out problems, {correct.half} half of them"
    )


class RecentAcceptance:
    """Share of responses accepted in the last steps, watched for too little to learn from."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, int]] = deque(maxlen=_RECENT_STEPS)
        self._quiet = 0

    def add(self, counts: Counts) -> str:
        """What to say after this step: "", or a warning, at most once in so many steps."""
        self._recent.append((int(counts["num_accepted"]), int(counts["num_rollouts"])))
        self._quiet = max(0, self._quiet - 1)
        accepted, sampled = (sum(column) for column in zip(*self._recent, strict=True))
        if len(self._recent) < _RECENT_STEPS or self._quiet or accepted >= _FEW * sampled:
            return ""
        self._quiet = _RECENT_STEPS
        return (
            f"only {accepted} of {sampled} responses ({100 * accepted / sampled:.1f} %) were "
            f"accepted in the last {_RECENT_STEPS} steps; the last one: {describe_rejected(counts)}"
        )
