"""Bytes, facts and tokens between ranks: everything arrives at its place, and nothing else does."""

import random

import pytest
import torch
from world import World

from megatron_opsft.batching.exchange import fetch_samples, share_facts
from megatron_opsft.config import ParallelConfig
from megatron_opsft.records import FinishReason, Outcome, Problem, Rollout, Verdict
from megatron_opsft.runtime.device import select_device
from megatron_opsft.runtime.distributed import (
    deal,
    gather_from_all,
    gather_to_main,
    start_distributed,
)
from megatron_opsft.runtime.exchange import all_gather_bytes, route_bytes


def route_and_gather() -> None:
    """Checks on every rank what the others sent; sizes differ, and some ranks send nothing."""
    import torch.distributed as dist

    me, size = dist.get_rank(), dist.get_world_size()
    gathered = all_gather_bytes(torch.full((3 * me,), me, dtype=torch.uint8))
    assert [part.tolist() for part in gathered] == [[r] * 3 * r for r in range(size)]

    def part(source: int, to: int) -> torch.Tensor:
        return torch.arange(source * 16 + to + 1, dtype=torch.uint8)

    pairs = {(source, to) for source in range(size) for to in range(size) if (source + to) % 3}
    came = route_bytes({to: part(me, to) for to in range(size) if (me, to) in pairs})
    assert list(came) == [source for source in range(size) if (source, me) in pairs]
    for source, content in came.items():
        assert content.tolist() == part(source, me).tolist()

    items = [me] * (me % 3) + ["x" * 1000 * me]
    expected = [item for r in range(size) for item in [r] * (r % 3) + ["x" * 1000 * r]]
    assert gather_from_all(items) == expected
    assert gather_to_main(items) == (expected if me == 0 else [])
    assert deal({size - 1: items, me: ["own"]}) == (
        expected[: -len(items)] + ["own"] if me == size - 1 else ["own"]
    )
    assert deal({}) == []


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_everything_that_is_sent_arrives_once_and_in_the_order_of_ranks(
    world: World, world_size: int
) -> None:
    world.run(route_and_gather, world_size)


PROBLEMS = [Problem(id=f"p{n}", text="", answer="") for n in range(5)]
DEALT = [(1, 0), (0, 1), (3, 0), (2, 2), (2, 1), (0, 0), (4, 0), (2, 0)]  # (problem, sample)


def response(place: int, index: int) -> tuple[Rollout, Verdict]:
    """Of as many tokens as nothing else."""
    length = 1 + 10 * place + index
    rollout = Rollout(
        problem_id=f"p{place}",
        sample_index=index,
        prompt_ids=tuple(range(place + 1)),
        response_ids=tuple(random.Random(length).choices(range(150_000), k=length)),
        text="<think>" if place == 4 else "",
        finish_reason=FinishReason.LENGTH if place == 3 else FinishReason.STOP,
        weight_version=0,
    )
    outcome = Outcome.UNFINISHED if place == 3 else list(Outcome)[index]
    return rollout, Verdict(outcome=outcome)


def share_and_fetch(tp: int, pp: int, holders: int) -> list[tuple[int, ...]]:
    """`DEALT` is dealt to the first ranks; each replica fetches some. The order of all facts."""
    parallel = ParallelConfig(tp=tp, pp=pp)
    layout = start_distributed(select_device("cpu"), parallel)
    mine = (
        [response(*one) for one in DEALT[layout.rank :: holders]] if layout.rank < holders else []
    )
    rollouts = [rollout for rollout, _ in mine]
    facts = share_facts(rollouts, [verdict for _, verdict in mine], PROBLEMS)
    for one in facts:
        rollout, verdict = response(one.problem_index, one.sample_index)
        assert (one.num_prompt_tokens, one.num_tokens) == (
            len(rollout.prompt_ids),
            len(rollout.response_ids),
        )
        assert (one.outcome, one.finished) == (verdict.outcome, one.problem_index != 3)
        assert one.unclosed_think == (one.problem_index == 4)
    # The last replica packs nothing where there are several, and one response nobody.
    packing = max(1, layout.dp_size - 1)
    wanted: list[list[int]] = [[] for _ in range(layout.dp_size)]
    for number in range(len(facts) - 1):
        wanted[number % packing].insert(0, number)
    cpu = torch.device("cpu")
    samples = fetch_samples(facts, wanted, rollouts, PROBLEMS, layout, cpu)
    assert sorted(samples) == sorted(wanted[layout.dp_rank])
    for number, sample in samples.items():
        rollout, _ = response(facts[number].problem_index, facts[number].sample_index)
        assert (sample.problem_id, sample.sample_index) == (
            rollout.problem_id,
            rollout.sample_index,
        )
        assert (sample.prompt_ids, sample.response_ids) == (
            rollout.prompt_ids,
            rollout.response_ids,
        )
    return [(one.problem_index, one.sample_index) for one in facts]


@pytest.mark.parametrize(
    ("tp", "pp", "world_size", "holders"), [(1, 1, 3, 2), (2, 1, 4, 3), (1, 2, 4, 4), (2, 2, 4, 1)]
)
def test_facts_reach_all_ranks_and_tokens_the_replica_that_packs_them(
    world: World, tp: int, pp: int, world_size: int, holders: int
) -> None:
    orders = world.run(share_and_fetch, world_size, tp, pp, holders)
    assert orders == [sorted(DEALT)] * world_size
