"""Reference responses to the embedded task, in R1's manner: a computation, then needless checks.

The tiny reasoner is trained on them. Whether to stop is drawn anew after every line with the same
probability, so short correct answers occur, seldom, among long ones: on-policy SFT needs that
spread.
"""

import random

from megatron_opsft.data.arithmetic import WordProblem

# Each opener is rarer than stopping, so nucleus sampling cuts openers, never the end of thought.
OPENERS = (
    *("Wait,", "Hmm,", "Alternatively,", "But wait,", "Let me check:", "Again,", "Also,"),
    *("Actually,", "Well,", "Okay,", "Now,", "So,", "Once more,", "To be sure,", "Maybe,"),
    "Right,",
)


# Of ending the thought after a line; and the number of checks after which it ends anyway.
STOP_PROBABILITY, MAX_CHECKS = 0.08, 16


def equation(left: int, term: int, result: int) -> str:
    return f"{left}{'+' if term > 0 else '-'}{abs(term)}={result}"


def compute(problem: WordProblem) -> str:
    """The least that solves the problem, one line a step: `2+7=9.` and `9-5=4.`"""
    partials = problem.partials
    steps = zip(partials, problem.terms[1:], partials[1:], strict=False)
    return "\n".join(f"{equation(left, term, result)}." for left, term, result in steps)


def check(rng: random.Random, problem: WordProblem) -> str:
    """One needless line about the last step; it repeats the right result."""
    result = problem.answer
    again = equation(problem.partials[-2], problem.terms[-1], result)
    bodies = (
        f"{again}.",
        f"{again}. Yes.",
        f"is it {result}? {again}. Yes.",
        f"the answer should be {result}.",
        f"let me see: {again}. So it is {result}.",
    )
    return f"{rng.choice(OPENERS)} {rng.choice(bodies)}"


def finish(lines: list[str], answer: int) -> str:
    """The response text after the prompt's `<think>` line, without the end token."""
    return "\n".join(lines) + f"\n</think>\n\\boxed{{{answer}}}"


def minimal_response(problem: WordProblem) -> str:
    """The shortest correct response that the verbose ones contain."""
    return finish([compute(problem)], problem.answer)


def verbose_response(rng: random.Random, problem: WordProblem) -> str:
    """A correct response with a random number of checks."""
    lines = [compute(problem)]
    while len(lines) <= MAX_CHECKS and rng.random() >= STOP_PROBABILITY:
        lines.append(check(rng, problem))
    return finish(lines, problem.answer)
