"""Logits of every architecture against Hugging Face's own class, on packs of unequal sequences."""

import pytest
from hf_reference import largest_logit_difference
from jobs import Case, logits
from tiny_models import SHAPES
from world import World

LIMIT = 1e-4  # largest absolute difference, float32; the logits themselves reach about 4
LAYOUTS = ((1, 1), (2, 1), (1, 2), (2, 2))


@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
@pytest.mark.parametrize("model", SHAPES)
def test_logits_match_hf(world: World, model: str, tp: int, pp: int) -> None:
    # Megatron trains experts over several tensor-parallel ranks with sequence parallelism alone.
    experts = SHAPES[model].moe is not None
    case = Case(model=model, tp=tp, pp=pp, sequence_parallel=experts and tp > 1)
    (found,) = (batches for batches in world.run(logits, case.world_size, case) if batches)
    assert largest_logit_difference(model, found) < LIMIT
