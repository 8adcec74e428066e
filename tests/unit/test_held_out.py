"""What a run says of its held-out problems: over all responses, whatever their verdicts."""

from typing import Any

import pytest
from responses import rollout_of

from megatron_opsft.records import FinishReason, Outcome, Problem, Verdict
from megatron_opsft.rollout.engine import SamplingSettings
from megatron_opsft.run import held_out
from megatron_opsft.run.held_out import HeldOut

CUT_OFF = FinishReason.LENGTH
RESPONSES = [  # tokens, how it ended, verdict
    (10, FinishReason.STOP, Outcome.CORRECT),
    (30, FinishReason.STOP, Outcome.WRONG),
    (50, CUT_OFF, Outcome.UNFINISHED),
    (70, FinishReason.STOP, Outcome.NO_ANSWER),
]


class Sampled:
    """The two responses to each problem, and their verdicts, as sampler and as verifier."""

    def sample(self, problems: Any, settings: Any, **more: Any) -> list[Any]:
        assert (more["num_samples"], more["step"]) == (2, 0)
        return [
            rollout_of(
                f"response {number}",
                (1,) * length,
                problem_id=f"p{number // 2}",
                sample_index=number % 2,
                finish_reason=reason,
            )
            for number, (length, reason, _) in enumerate(RESPONSES)
        ]

    def score(self, rollouts: Any, problems: Any) -> list[Verdict]:
        assert sorted(problems) == ["p0", "p1"]
        return [Verdict(outcome=outcome) for _, _, outcome in RESPONSES]


def test_length_and_accuracy_are_over_all_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The length of the correct ones alone would fall where a model fails at long problems."""
    monkeypatch.setattr(held_out, "gather_from_all", lambda mine: mine)
    monkeypatch.setattr(held_out, "sum_over_world", lambda mine: mine)
    problems = [Problem(id=f"p{number}", text="?", answer="1") for number in range(2)]
    settings = SamplingSettings(
        temperature=1.0, top_p=1.0, max_response_tokens=50, end_token_ids=(1,), seeded=True
    )
    given = HeldOut(problems=problems, settings=settings, samples_per_problem=2)
    both: Any = Sampled()
    found = given.evaluate(both, both, lambda problem: (), key="eval", num_shown=1)
    assert found.values == {
        "eval_accuracy": 0.25,
        "eval_mean_response_tokens": 40.0,
        "eval_truncated_share": 0.25,
        "eval_samples": 4,
    }
    assert found.correct_lengths == [10]
    ((problem, rollout, verdict),) = found.shown
    assert (problem.id, rollout.text, verdict.outcome) == ("p0", "response 0", Outcome.CORRECT)
