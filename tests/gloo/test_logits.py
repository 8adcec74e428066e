"""Logits of every architecture against Hugging Face's own class, on packs of unequal sequences."""

from functools import cache

import pytest
import torch
from hf_reference import hf_model
from jobs import Case, logits
from tiny_models import SHAPES
from torch import Tensor
from transformers import PreTrainedModel
from world import World

LIMIT = 1e-4  # largest absolute difference, float32; the logits themselves reach about 4
LAYOUTS = ((1, 1), (2, 1), (1, 2), (2, 2))


@cache
def reference(name: str) -> PreTrainedModel:
    return hf_model(name).eval()


@torch.no_grad()
def hf_logits(name: str, tokens: list[int]) -> Tensor:
    """[T, vocabulary] of one sequence."""
    return reference(name)(input_ids=torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
@pytest.mark.parametrize("model", SHAPES)
def test_logits_match_hf(world: World, model: str, tp: int, pp: int) -> None:
    # Megatron trains experts over several tensor-parallel ranks with sequence parallelism alone.
    experts = SHAPES[model].moe is not None
    case = Case(model=model, tp=tp, pp=pp, sequence_parallel=experts and tp > 1)
    ranks = world.run(logits, case.world_size, case)
    (found,) = (batches for batches in ranks if batches)
    lengths = []
    worst = 0.0
    for tokens, cu_seqlens, values in found:
        assert values.shape == (len(tokens), SHAPES[model].vocab_size)
        for start, stop in zip(cu_seqlens, cu_seqlens[1:], strict=False):
            expected = hf_logits(model, tokens[start:stop])
            worst = max(worst, float((torch.from_numpy(values[start:stop]) - expected).abs().max()))
            lengths.append(stop - start)
    assert len(found) > 1 and len(set(lengths)) > 5
    assert worst < LIMIT
