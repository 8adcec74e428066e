"""The sampler against exact probabilities, transformers' warpers and SplitMix64."""

from itertools import product

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopPLogitsWarper

from megatron_opsft.rollout import sampling
from megatron_opsft.rollout.sampling import response_seed, sample_tokens, uniforms


def splitmix64(seed: int, count: int) -> list[int]:
    mask = (1 << 64) - 1
    outputs = []
    for _ in range(count):
        seed = (seed + 0x9E3779B97F4A7C15) & mask
        z = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        outputs.append(z ^ (z >> 31))
    return outputs


def test_uniforms_match_splitmix64_whatever_their_number_and_neighbours() -> None:
    assert splitmix64(1234567, 2) == [6457827717110365317, 3203168211198807973]
    seeds = [0, 1234567, (1 << 63) - 1]
    expected = [[(z >> 11) * 2.0**-53 for z in splitmix64(seed, 5)] for seed in seeds]
    assert uniforms(torch.tensor(seeds), 5).tolist() == expected


def test_response_seeds_are_stable_and_distinct_and_their_numbers_independent() -> None:
    assert response_seed(0, 1, "gsm8k/7", 3) == 1498029987247375355
    keys = [*product(range(3), range(5), ("1", "11", "a"), range(4))]
    seeds = [response_seed(*key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    numbers = uniforms(torch.tensor(seeds[:8]), 20_000)
    assert abs(numbers.mean().item() - 0.5) < 0.003
    assert torch.corrcoef(numbers).triu(1).abs().max().item() < 0.03


@pytest.mark.parametrize("vocab_size", [40, 600])
@pytest.mark.parametrize(
    ("top_p", "temperature"), [(0.3, 0.6), (0.8, 1.0), (0.95, 2.0), (1.0, 0.6)]
)
def test_support_matches_hf_top_p(vocab_size: int, top_p: float, temperature: float) -> None:
    """Over a grid of uniforms every token comes up as often as transformers' warpers say."""
    torch.manual_seed(0)
    for spread in (0.5, 3.0):
        logits = torch.randn(vocab_size, dtype=torch.float64) * spread
        warped = TemperatureLogitsWarper(temperature)(None, logits[None])
        if top_p < 1:
            warped = TopPLogitsWarper(top_p)(None, warped)
        exact = warped.softmax(dim=-1)[0]
        grid = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
        drawn = sample_tokens(logits.expand(len(grid), -1), grid, temperature, top_p)
        share = torch.bincount(drawn, minlength=vocab_size) / len(grid)
        assert (share - exact).abs().max().item() <= 1.01 / len(grid)
        assert share[exact == 0].sum().item() == 0


@pytest.mark.parametrize("top_p", [0.2, 0.95])
def test_candidates_give_the_same_as_a_full_sort(
    monkeypatch: pytest.MonkeyPatch, top_p: float
) -> None:
    torch.manual_seed(1)
    flat = torch.randn(50, 3000)
    logits = torch.cat([6 * flat, flat, flat.bfloat16().float(), torch.zeros(50, 3000)])
    numbers = uniforms(torch.arange(200), 1)[:, 0]
    with_candidates = sample_tokens(logits, numbers, 1.0, top_p)
    monkeypatch.setattr(sampling, "_FIRST_CANDIDATES", 3000)
    assert torch.equal(with_candidates, sample_tokens(logits, numbers, 1.0, top_p))


@pytest.mark.parametrize(("top_p", "tokens"), [(0.5, [2, 2]), (1.0, [1, 2])])
def test_extreme_uniforms_stay_inside(top_p: float, tokens: list[int]) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 0.1, -torch.inf]]).repeat(2, 1)
    numbers = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    assert sample_tokens(logits, numbers, 1.0, top_p).tolist() == tokens


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-45, 1e-320, 0.0])
def test_a_temperature_near_zero_takes_the_most_probable_token(temperature: float) -> None:
    """Of equals greedy decoding takes the lower."""
    torch.manual_seed(0)
    for vocab_size, top_p in ((40, 0.95), (600, 1.0), (600, 0.95)):
        logits, numbers = 10 * torch.randn(50, vocab_size), torch.rand(50, dtype=torch.float64)
        expected = logits.argmax(dim=-1).tolist()
        if temperature == 0:
            logits[:, -1] = logits.amax(dim=-1)
        assert sample_tokens(logits, numbers, temperature, top_p).tolist() == expected
