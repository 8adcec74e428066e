"""How the responses of a step are dealt to engines: in a run, and in the plan of one."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from plan_cases import make_job, make_responses
from real_shapes import REAL_SHAPES

from megatron_opsft.plan.engines import engine_shares
from megatron_opsft.records import Problem, Rollout
from megatron_opsft.rollout.dealing import deal_evenly
from megatron_opsft.rollout.engine import Replica, SamplingSettings
from megatron_opsft.rollout.requests import PromptRequest, make_request
from megatron_opsft.rollout.sample import Sampler

GROUP = 8
SETTINGS = SamplingSettings(temperature=1.0, top_p=0.95, max_response_tokens=9, end_token_ids=(1,))


class Recorder:
    """An engine that keeps what it is asked for."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.asked: list[PromptRequest] = []

    def generate(self, prompts: Sequence[PromptRequest], _: SamplingSettings) -> list[Rollout]:
        self.asked = list(prompts)
        return []


def asked_of_ranks(
    num_prompts: int, num_ranks: int, batch_size: int | None
) -> list[list[tuple[str, int]]]:
    """(problem, sample index) of each response that each rank's engine is asked for."""
    problems = [Problem(id=f"p{n}", text="x" * n, answer="1") for n in range(num_prompts)]
    asked = []
    for rank in range(num_ranks):
        engine: Any = Recorder(Replica(number=rank, count=num_ranks, batch_size=batch_size))
        encoder: Any = SimpleNamespace(encode=lambda problem: (2, *range(len(problem.text))))
        layout: Any = SimpleNamespace(rank=rank, world_size=num_ranks)
        job: Any = None  # asked only by engines that take from each other
        sampler = Sampler(engine=engine, encoder=encoder, layout=layout, seed=0, job=job)
        assert sampler.sample(problems, SETTINGS, num_samples=GROUP, step=1) == []
        asked.append([(r.problem_id, i) for r in engine.asked for i in r.sample_indices])
    return asked


@pytest.mark.parametrize(
    ("num_prompts", "batch_size", "sizes"),
    [
        (64, 256, [64] * 8),
        (64, 256, [256] * 2),
        (64, 256, [512]),
        (3, 256, [6] * 4),
        (3, 4, [8, 8, 4, 4]),
        (1, 256, [1] * 8 + [0] * 8),
        (3, None, [8, 8, 8, 0]),
    ],
)
def test_no_rank_is_idle_while_another_decodes_a_whole_batch(
    num_prompts: int, batch_size: int | None, sizes: list[int]
) -> None:
    """batch_size None: an engine that takes whole groups."""
    asked = asked_of_ranks(num_prompts, len(sizes), batch_size)
    assert [len(share) for share in asked] == sizes
    everything = [response for share in asked for response in share]
    assert sorted(everything) == sorted(
        (f"p{n}", index) for n in range(num_prompts) for index in range(GROUP)
    )


@pytest.mark.parametrize(
    ("engine", "num_ranks", "num_prompts"),
    [("hf", 8, 64), ("hf", 2, 64), ("hf", 3, 5), ("hf", 16, 1), ("vllm", 8, 64), ("vllm", 8, 3)],
)
def test_planned_shares_are_those_of_a_run(engine: str, num_ranks: int, num_prompts: int) -> None:
    job = make_job(
        REAL_SHAPES["DeepSeek-R1-Distill-Qwen-1.5B"],
        num_ranks,
        f"rollout.engine={engine}",
        f"data.prompts_per_step={num_prompts}",
        f"rollout.group_size={GROUP}",
        "rollout.dealing=fixed",
    )
    batch_size = job.config.rollout.batch_size if engine == "hf" else None
    asked = asked_of_ranks(num_prompts, num_ranks, batch_size)
    planned = engine_shares(job, make_responses(job))
    assert [len(share) for share in planned] == [len(share) for share in asked]


@pytest.mark.parametrize(("num_ranks", "num_prompts"), [(8, 64), (3, 5), (16, 1), (48, 64)])
def test_planned_parts_are_those_of_engines_that_steal(num_ranks: int, num_prompts: int) -> None:
    job = make_job(
        REAL_SHAPES["DeepSeek-R1-Distill-Qwen-1.5B"],
        num_ranks,
        f"data.prompts_per_step={num_prompts}",
        f"rollout.group_size={GROUP}",
        "rollout.dealing=stealing",
    )
    requests = [make_request(f"p{n}", (2,), GROUP, 0, 1) for n in range(num_prompts)]
    parts = deal_evenly(requests, num_ranks)
    planned = engine_shares(job, make_responses(job))
    assert [len(share) for share in planned] == [len(part) for part in parts]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
