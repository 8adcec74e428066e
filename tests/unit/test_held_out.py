"""What a run says of its held-out problems: over all responses, whatever their verdicts."""

from types import SimpleNamespace
from typing import Any

import pytest
from responses import rollout_of

from megatron_opsft.records import FinishReason, Outcome, Problem, Verdict
from megatron_opsft.rollout.engine import SamplingSettings
from megatron_opsft.run.record import evaluations
from megatron_opsft.run.record.evaluations import Evaluations
from megatron_opsft.run.start.input import HeldOut
from megatron_opsft.trainer.batching import exchange

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
    monkeypatch.setattr(evaluations, "gather_from_all", lambda mine: mine)
    monkeypatch.setattr(exchange, "all_gather_bytes", lambda mine: [mine])
    problems = [Problem(id=f"p{number}", text="?", answer="1") for number in range(2)]
    settings = SamplingSettings(
        temperature=1.0, top_p=1.0, max_response_tokens=50, end_token_ids=(1,), seeded=True
    )
    told: list[Any] = []
    session: Any = SimpleNamespace(
        config=SimpleNamespace(run=SimpleNamespace(show_samples=1)),
        layout=SimpleNamespace(rank=0),
        sampler=Sampled(),
        verifier=Sampled(),
        prompt_of=lambda problem, held_out: (),
        held_out=HeldOut(problems=problems, settings=settings, samples_per_problem=2),
        more_held_out={},
    )
    noted: Any = SimpleNamespace(write_evaluation=lambda line, more: told.append(line))
    shown: list[str] = []
    monkeypatch.setattr(evaluations, "say", lambda text, dim: shown.append(text))
    # It empties a copy: the run keeps its own line.
    emptying: Any = SimpleNamespace(on_evaluation=dict.clear)
    made = Evaluations(session, metrics_log=noted, callbacks=[emptying], lines=[])
    made.evaluate(step=4)
    assert 0 <= told[0].pop("eval_seconds") < 10
    assert (
        told
        == made.lines
        == [
            {
                "step": 4,
                "eval_accuracy": 0.25,
                "eval_mean_response_tokens": 40.0,
                "eval_truncated_share": 0.25,
                "eval_samples": 4,
                "eval_correct_tokens_tenth": 10,
                "eval_correct_tokens_half": 10,
            }
        ]
    )
    (example,) = shown
    assert example.startswith("  for example: ?\n  -> response 0 (10 tokens, correct")
