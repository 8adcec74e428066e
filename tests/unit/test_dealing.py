"""How the responses of a step are dealt to engines."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_opsft.records import Problem, Rollout
from megatron_opsft.rollout.engine import EngineShare, SamplingSettings
from megatron_opsft.rollout.requests import ResponseRequest, deal_evenly, make_requests
from megatron_opsft.rollout.sample import Sampler

GROUP = 8
SETTINGS = SamplingSettings(temperature=1.0, top_p=0.95, max_response_tokens=9, end_token_ids=(1,))


class Recorder:
    """An engine that keeps what it is asked for."""

    def __init__(self, share: EngineShare) -> None:
        self.share = share
        self.asked: list[ResponseRequest] = []

    def generate(self, requests: Sequence[ResponseRequest], _: SamplingSettings) -> list[Rollout]:
        self.asked = list(requests)
        return []


def asked_of_ranks(num_prompts: int, num_ranks: int) -> list[list[tuple[str, int]]]:
    """(problem, sample index) of each response that each rank's engine is asked for."""
    problems = [Problem(id=f"p{n}", text="x" * n, answer="1") for n in range(num_prompts)]
    asked = []
    for rank in range(num_ranks):
        engine: Any = Recorder(EngineShare(index=rank, count=num_ranks))
        encoder: Any = SimpleNamespace(encode=lambda problem: (2, *range(len(problem.text))))
        layout: Any = SimpleNamespace(rank=rank, world_size=num_ranks)
        sampler = Sampler(engine=engine, encoder=encoder, layout=layout, seed=0)
        assert sampler.sample(problems, SETTINGS, num_samples=GROUP, step=1) == []
        asked.append([(r.problem_id, r.sample_index) for r in engine.asked])
    return asked


@pytest.mark.parametrize(
    ("num_prompts", "sizes"),
    [
        (64, [64] * 8),
        (64, [512]),
        (3, [6] * 4),
        (7, [19, 19, 18]),
        (1, [1] * 8),
        (1, [1, 0] * 8),
    ],
)
def test_every_rank_makes_as_many_responses(num_prompts: int, sizes: list[int]) -> None:
    asked = asked_of_ranks(num_prompts, len(sizes))
    assert [len(share) for share in asked] == sizes
    everything = [response for share in asked for response in share]
    assert sorted(everything) == sorted(
        (f"p{n}", index) for n in range(num_prompts) for index in range(GROUP)
    )


def test_groups_are_divided_only_where_two_parts_meet() -> None:
    parts = deal_evenly([make_requests(f"p{n}", (1, n), GROUP, 0, 1) for n in range(7)], 3)
    # Dealt in turn, as prompts come by length: no part has all the long ones.
    assert [request.problem_id for request in parts[0][::GROUP]] == ["p0", "p3", "p6"]
    ids = [request.problem_id for part in parts for request in part]
    assert sum(a != b for a, b in zip(ids, ids[1:], strict=False)) == 6
