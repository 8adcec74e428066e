"""Algorithm 1's choice: correct, finished, and no longer than L."""

from dataclasses import replace

import pytest

from megatron_opsft.methods.batch import describe_rollouts, in_problem_order
from megatron_opsft.methods.selection import select
from megatron_opsft.records import FinishReason, Outcome, Problem, Rollout, Verdict


def rollout(
    length: int, finish: FinishReason = FinishReason.STOP, problem: str = "a", index: int = 0
) -> Rollout:
    return Rollout(
        problem_id=problem,
        sample_index=index,
        prompt_ids=(7, 8),
        response_ids=tuple(range(length)),
        text="",
        finish_reason=finish,
        weight_version=0,
    )


@pytest.mark.parametrize("outcome", list(Outcome))
def test_only_correct_responses_are_accepted(outcome: Outcome) -> None:
    accepted = select([rollout(5)], [Verdict(outcome=outcome)], 10)
    assert bool(accepted) == (outcome is Outcome.CORRECT)


def test_length_counts_every_response_token_and_no_prompt_token() -> None:
    rollouts = [rollout(9), rollout(10), rollout(11)]
    accepted = select(rollouts, [Verdict(outcome=Outcome.CORRECT)] * 3, 10)
    assert [len(sample.response_ids) for sample in accepted] == [9, 10]


def test_a_response_without_end_token_is_not_accepted_even_when_correct() -> None:
    cut = rollout(10, FinishReason.LENGTH)
    assert select([cut], [Verdict(outcome=Outcome.CORRECT)], 10) == []


def test_samples_keep_ids_and_tokens() -> None:
    (sample,) = select([rollout(3, problem="p", index=4)], [Verdict(outcome=Outcome.CORRECT)], 3)
    assert (sample.problem_id, sample.sample_index) == ("p", 4)
    assert (sample.prompt_ids, sample.response_ids) == ((7, 8), (0, 1, 2))


def test_each_rollout_needs_its_verdict() -> None:
    with pytest.raises(ValueError):
        select([rollout(1)], [], 10)


def test_order_follows_the_problems_and_not_the_ranks() -> None:
    problems = [Problem(id=name, text="", answer="") for name in ("z", "a", "m")]
    rollouts = [rollout(1, problem=p, index=i) for p in ("m", "z", "a") for i in (1, 0)]
    samples = select(rollouts, [Verdict(outcome=Outcome.CORRECT)] * 6, 10)
    ordered = in_problem_order(samples, problems)
    places = [(sample.problem_id, sample.sample_index) for sample in ordered]
    assert places == [("z", 0), ("z", 1), ("a", 0), ("a", 1), ("m", 0), ("m", 1)]


@pytest.mark.parametrize(("opened", "expected"), [(True, 2), (False, 1)])
def test_finished_responses_that_never_end_their_thinking_are_counted(
    opened: bool, expected: int
) -> None:
    """Those that hit the limit are not; opened: by the prompt."""
    texts = ["so </think> 1", "so 1", "<think> so 1", "<think> so </think> 1"]
    rollouts = [replace(rollout(2), text=text) for text in texts]
    rollouts.append(replace(rollout(8, FinishReason.LENGTH), text="<think> so"))
    pairs = [(one, Verdict(outcome=Outcome.CORRECT)) for one in rollouts]
    metrics = describe_rollouts(pairs, [], prompts_open_think=opened)
    assert metrics["num_unclosed_think"] == expected


def test_metrics_of_a_step() -> None:
    rollouts = [rollout(2), rollout(4), rollout(6), rollout(8, FinishReason.LENGTH)]
    outcomes = [Outcome.CORRECT, Outcome.CORRECT, Outcome.TIMEOUT, Outcome.UNFINISHED]
    verdicts = [Verdict(outcome=outcome) for outcome in outcomes]
    pairs = list(zip(rollouts, verdicts, strict=True))
    metrics = describe_rollouts(pairs, select(rollouts, verdicts, 3), prompts_open_think=False)
    assert metrics["num_rollouts"] == 4
    assert metrics["num_accepted"] == 1
    assert metrics["accept_rate"] == 0.25
    assert metrics["accuracy"] == 0.5
    assert metrics["truncated_share"] == 0.25
    assert metrics["verify_timeouts"] == 1
    assert metrics["mean_response_tokens"] == 5.0
    assert metrics["max_accepted_tokens"] == 2
