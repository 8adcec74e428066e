"""Reference responses to the embedded task, in R1's manner: a computation, then needless checks.

The tiny reasoner is trained on them. Whether to stop is drawn anew after every line with the same
probability, so short correct answers occur, seldom, among long ones: on-policy SFT needs that
spread.
"""

import random
from dataclasses import dataclass

from megatron_opsft.data.arithmetic import WordProblem

# Each opener is rarer than stopping, so nucleus sampling cuts openers, never the end of thought.
OPENERS = (
    "Wait,",
    "Hmm,",
    "Alternatively,",
    "But wait,",
    "Let me check:",
    "Again,",
    "Also,",
    "Actually,",
    "Well,",
    "Okay,",
    "Now,",
    "So,",
    "Once more,",
    "To be sure,",
    "Maybe,",
    "Right,",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Redundancy:
    """How wordy the responses are.

    stop_probability: of ending the thought after a line; max_checks: it ends after so many;
    slip_probability: of getting the result wrong by one in a check, and keeping the wrong result.
    """

    stop_probability: float
    max_checks: int
    slip_probability: float


def equation(left: int, term: int, result: int) -> str:
    return f"{left}{'+' if term > 0 else '-'}{abs(term)}={result}"


def compute(problem: WordProblem) -> str:
    """The least that solves the problem, one line a step: `12+7=19.` and `19-5=14.`"""
    partials = problem.partials
    steps = zip(partials, problem.terms[1:], partials[1:], strict=False)
    return "\n".join(f"{equation(left, term, result)}." for left, term, result in steps)


def check(rng: random.Random, problem: WordProblem, result: int) -> str:
    """One needless line; its last number is always `result`."""
    before, term = problem.partials[-2], problem.terms[-1]
    again = equation(before, term, result)
    bodies = {
        f"{again}.": 3,
        f"is it {result}? Yes.": 3,
        f"the answer should be {result}.": 3,
        f"let me see: {again}.": 3,
        f"{equation(result, -term, before)}, so {again}.": 1,
    }
    (body,) = rng.choices(list(bodies), weights=list(bodies.values()))
    return f"{rng.choice(OPENERS)} {body}"


def finish(lines: list[str], answer: int) -> str:
    """The response text after the prompt's `<think>` line, without the end token."""
    return "\n".join(lines) + f"\n</think>\n\\boxed{{{answer}}}"


def minimal_response(problem: WordProblem) -> str:
    """The shortest correct response that the verbose ones contain."""
    return finish([compute(problem)], problem.answer)


def verbose_response(rng: random.Random, problem: WordProblem, redundancy: Redundancy) -> str:
    """A response with a random number of checks; correct unless a check slipped."""
    lines, result = [compute(problem)], problem.answer
    for _ in range(redundancy.max_checks):
        if rng.random() < redundancy.stop_probability:
            break
        if rng.random() < redundancy.slip_probability:
            result = max(1, result + rng.choice((1, -1)))
        lines.append(check(rng, problem, result))
    return finish(lines, result)
