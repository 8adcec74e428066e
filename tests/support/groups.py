"""Groups of responses for tests of methods."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from responses import facts

from megatron_opsft.methods.catalog import METHODS
from megatron_opsft.methods.facts import Group
from megatron_opsft.methods.updates import Credits, MethodRun, Update
from megatron_opsft.records import Outcome, Thinking, TokenUse

LENGTHS, CORRECT = (800, 1600, 2400, 4000), (1, 1, 0, 1)
OUTCOMES = (Outcome.WRONG, Outcome.CORRECT)


def group(
    lengths: Sequence[int] = LENGTHS,
    correct: Sequence[int] = CORRECT,
    finished: Sequence[int] = (),
    **others: Any,
) -> Group:
    """By default all finished, and far from the limit."""
    responses = [
        facts(num_tokens=n, outcome=OUTCOMES[c], finished=bool(f))
        for n, c, f in zip(lengths, correct, finished or [1] * len(lengths), strict=True)
    ]
    return Group(**{"responses": responses, "limit": 16384, **others})


def by_thinking(given: Group) -> Group:
    """The group with its lengths as those of thinking, in responses of other lengths; a method
    counts the thinking.
    """
    responses = []
    for response in given.responses:
        use = TokenUse(thinking=Thinking.CLOSED, num_thinking=response.num_tokens)
        num_tokens = 20_000 - response.num_tokens  # in the opposite order
        responses.append(response._replace(token_use=use, num_tokens=num_tokens))
    return replace(given, responses=responses, length_of="thinking")


class Columns(NamedTuple):
    """The credits of a batch as columns, group behind group."""

    rewards: tuple[float, ...]
    advantages: tuple[float, ...]
    trained: tuple[bool, ...]


def columns(credits: Credits) -> Columns:
    """The columns of a batch's credits."""
    rows = [credit for group in credits for credit in group]
    return Columns(
        tuple(credit.reward for credit in rows),
        tuple(credit.advantage for credit in rows),
        tuple(credit.is_trained for credit in rows),
    )


def weigh(name: str, *batch: Group, state: dict[str, Any] | None = None, **keys: Any) -> Columns:
    """What a method makes of a batch, with these settings and this state."""
    run = MethodRun(METHODS[name](**keys), seed=0)
    run.state = run.state.model_copy(update=state or {})
    return columns(run.credit(batch))


def update(name: str, *batch: Group, **keys: Any) -> Update:
    """The one optimizer step that a method takes on a batch."""
    run = MethodRun(METHODS[name](**keys), seed=0)
    (found,) = run.updates(batch, run.credit(batch))
    return found
