"""Packing: nothing lost, nothing twice, within the budget, equally many micro-batches for all."""

import random

import pytest
import torch

from megatron_opsft.objective.normalization import Normalization
from megatron_opsft.objective.packing import (
    build_microbatch,
    pack,
    pack_bins,
    plan_packing,
    sequence_cost,
)
from megatron_opsft.records import Sample

CPU = torch.device("cpu")


def sample(prompt: tuple[int, ...], response: tuple[int, ...], index: int = 0) -> Sample:
    return Sample(problem_id="a", sample_index=index, prompt_ids=prompt, response_ids=response)


def draw_lengths(seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randint(1, 300) for _ in range(draw.randint(1, 60))]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("dp_size", "multiple"), [(1, 1), (2, 1), (3, 4), (8, 2)])
def test_every_sequence_is_packed_once_and_within_the_budget(
    seed: int, dp_size: int, multiple: int
) -> None:
    lengths, budget = draw_lengths(seed), 256
    plan = plan_packing(lengths, budget=budget, dp_size=dp_size, multiple=multiple)
    assert len(plan) == dp_size
    (num_bins,) = {len(bins) for bins in plan}
    assert num_bins % multiple == 0
    packed = sorted(index for bins in plan for indices in bins for index in indices)
    assert packed == list(range(len(lengths)))
    for bins in plan:
        for indices in bins:
            assert len(indices) == 1 or sum(lengths[i] for i in indices) <= budget


@pytest.mark.parametrize("seed", range(20))
def test_no_more_microbatches_than_needed(seed: int) -> None:
    lengths, budget = draw_lengths(seed), 300
    lower_bound = -(-sum(lengths) // budget)
    num_bins = len(pack_bins(lengths, budget))
    assert num_bins <= 11 / 9 * lower_bound + 1  # first-fit-decreasing's guarantee, and more
    for dp_size in (1, 2, 4):
        per_rank = len(plan_packing(lengths, budget=budget, dp_size=dp_size)[0])
        assert per_rank == -(-num_bins // dp_size)


def test_ranks_are_balanced() -> None:
    draw = random.Random(1)
    lengths = [int(min(3500, draw.lognormvariate(6.5, 0.6))) for _ in range(400)]
    plan = plan_packing(lengths, budget=16384, dp_size=8)
    costs = [sum(sequence_cost(lengths[i]) for b in bins for i in b) for bins in plan]
    assert max(costs) / (sum(costs) / len(costs)) < 1.05


def test_longer_sequence_than_the_budget_is_alone() -> None:
    plan = plan_packing([500, 10, 10], budget=100, dp_size=1)
    assert sorted(sorted(indices) for indices in plan[0]) == [[0], [1, 2]]


def test_microbatch_by_hand() -> None:
    batch = build_microbatch(
        [sample((1, 2), (3, 4, 5)), sample((6,), (7,))], [1.0, 0.5], align=1, device=CPU
    )
    assert batch.tokens_T.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert batch.labels_T.tolist() == [2, 3, 4, 5, 0, 7, 0]
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert batch.weights_T.tolist() == [0.0, 1.0, 1.0, 1.0, 0.0, 0.5, 0.0]
    assert batch.cu_seqlens.tolist() == [0, 5, 7]
    assert batch.max_seqlen == 5
    assert batch.num_loss_tokens == 4
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.weights_T.dtype == torch.float32


@pytest.mark.parametrize("align", [2, 4, 8])
def test_filler_is_a_sequence_of_its_own_without_weight(align: int) -> None:
    batch = build_microbatch([sample((1, 2), (3, 4, 5))], [1.0], align=align, device=CPU)
    assert batch.tokens_T.numel() % align == 0
    assert batch.cu_seqlens.tolist() == [0, 5, batch.tokens_T.numel()]
    assert not batch.weights_T[5:].any()


def test_empty_microbatch_has_no_weight_and_some_tokens() -> None:
    batch = build_microbatch([], [], align=4, device=CPU)
    assert batch.tokens_T.numel() == 4
    assert batch.num_loss_tokens == 0
    assert not batch.weights_T.any()


def test_weighted_tokens_of_all_ranks_are_the_responses() -> None:
    samples = [sample((1, 2, 3), tuple(range(n)), n) for n in range(1, 20)]
    normalization = Normalization(token_weights=tuple(float(n) for n in range(1, 20)), factor=1.0)
    for dp_size in (1, 2, 5):
        total = 0.0
        for dp_rank in range(dp_size):
            batches = pack(
                samples, normalization, budget=40, dp_rank=dp_rank, dp_size=dp_size, device=CPU
            )
            total += sum(float(batch.weights_T.sum()) for batch in batches)
        assert total == sum(n * n for n in range(1, 20))
