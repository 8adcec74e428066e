"""Lines of answers that the judge of mathematics must accept and refuse."""

from megatron_opsft.records import Outcome
from megatron_opsft.verify.math_verifier import judge


def assert_judged(line: str, response: str) -> None:
    """Check `gold == accepted ; accepted != refused ; refused`, each answer put in the response."""
    same, _, other = line.partition(" != ")
    gold, _, accepted = same.partition(" == ")
    for answers in (accepted, other):
        for answer in filter(None, answers.split(" ; ")):
            text = response.replace("ANSWER", answer).replace("⏎", "\n")
            is_right = judge(text, gold).outcome is Outcome.CORRECT
            assert is_right == (answers is accepted), answer
