"""What a run says of its held-out problems: over all responses, whatever their verdicts."""

from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from responses import rollout_of

from megatron_opsft.records import FinishReason, Outcome, Problem, TokenUse, Verdict
from megatron_opsft.rollout.engine import SamplingSettings
from megatron_opsft.run.record import evaluations, rollout_log
from megatron_opsft.run.record.evaluations import Evaluations
from megatron_opsft.run.record.rollout_log import RolloutLog
from megatron_opsft.run.start.input import HeldOut
from megatron_opsft.runtime.durable import json_lines
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

    def always_fails(self, outcomes: Any, num_problems: int) -> bool:
        assert num_problems == 2
        assert [*outcomes] == [(f"p{n // 2}", out) for n, (_, _, out) in enumerate(RESPONSES)]
        return False


def files_in(directory: Path) -> list[str]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return sorted(path.relative_to(directory).as_posix() for path in files)


@pytest.mark.parametrize("saves", [True, False])
def test_length_and_accuracy_are_over_all_responses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves: bool
) -> None:
    """The length of the correct ones alone would fall where a model fails at long problems. All
    responses are on disk when the line is written.
    """
    monkeypatch.setattr(evaluations, "gather_from_all", lambda mine: mine)
    monkeypatch.setattr(exchange, "all_gather_bytes", lambda mine: [mine])
    monkeypatch.setattr(rollout_log, "deal", lambda mine: list(chain(*mine.values())))
    monkeypatch.setattr(rollout_log, "max_over_world", list)
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
        meter=SimpleNamespace(measure=lambda rollout, verdict: TokenUse(num_thinking=4)),
        prompt_of=lambda problem, held_out: (),
        held_out=HeldOut(problems=problems, settings=settings, samples_per_problem=2),
        more_held_out={
            "hard": HeldOut(problems=problems, settings=settings, samples_per_problem=2)
        },
    )
    files = ["held_out/hard/step_000004.jsonl.gz", "held_out/step_000004.jsonl.gz"] * saves

    def note(line: Any, more: Any) -> None:
        assert files_in(tmp_path) == files
        told.append(line)

    noted: Any = SimpleNamespace(write_evaluation=note)
    run: Any = SimpleNamespace(dir=tmp_path, save_rollouts=saves)
    layout: Any = SimpleNamespace(rank=0, world_size=1)
    shown: list[str] = []
    monkeypatch.setattr(evaluations, "say", lambda text, dim: shown.append(text))
    # It empties a copy: the run keeps its own line.
    emptying: Any = SimpleNamespace(on_evaluation=dict.clear)
    made = Evaluations(session, noted, RolloutLog(run, layout), callbacks=[emptying], lines=[])
    made.evaluate(step=4)
    assert 0 <= told[0].pop("eval_seconds") < 10
    of_set = {
        "accuracy": 0.25,
        "mean_response_tokens": 40.0,
        "truncated_share": 0.25,
        "samples": 4,
        "num_unfinished": 1,
        "num_wrong": 1,
        "num_no_answer": 1,
        "verify_timeouts": 0,
        "verify_errors": 0,
        # Of the three that finished; the meter says 4 tokens of thinking for each.
        "mean_thinking_tokens": 4.0,
        "mean_answer_tokens": 110 / 3 - 4,
        "mean_doubts": 0.0,
        "repeated_share": 0.0,
        "mean_leaked_tokens": 0.0,
        "num_empty_think": 0,
        "num_malformed_think": 0,
    }
    line = {"step": 4, "eval_correct_tokens_tenth": 10, "eval_correct_tokens_half": 10}
    line |= {f"eval_{key}": value for key, value in of_set.items()}
    line |= {f"eval_hard_{key}": value for key, value in of_set.items()}
    assert told == made.lines == [line]
    for file in files:
        rows = list(json_lines(tmp_path / file))
        assert [(row["problem_id"], row["sample_index"], row["outcome"]) for row in rows] == [
            ("p0", 0, "correct"),
            ("p0", 1, "wrong"),
            ("p1", 0, "unfinished"),
            ("p1", 1, "no_answer"),
        ]
        assert rows[3]["text"] == "response 3" and rows[3]["problem"] == "?"
        assert rows[3]["token_use"]["num_thinking"] == 4 and rows[3]["first_right_char"] is None
        assert "reward" not in rows[0] and "advantage" not in rows[0]
    (example,) = shown
    assert example.startswith("  for example: ?\n  -> response 0 (10 tokens, correct")
