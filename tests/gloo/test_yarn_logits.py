"""Logits of models with YaRN, packed, within their original length and beyond, against Hugging
Face's.
"""

from dataclasses import replace
from itertools import pairwise
from math import log
from unittest.mock import patch

import pytest
from hf_reference import largest_logit_difference
from jobs import Case, Logits, logits
from tiny_models import SHAPES, YARN
from world import World

LIMIT = 2e-5  # largest absolute difference, float32; the logits themselves reach about 4
PAPER = replace(YARN, attention_factor=0.1 * log(YARN.factor) + 1.0)
WITH_YARN = {
    f"{name} with yarn": replace(SHAPES[name], rope_scaling=PAPER)
    for name in ("qwen2", "qwen3", "llama_mha")
}


def yarn_logits(case: Case) -> Logits:
    with patch.dict(SHAPES, WITH_YARN):
        return logits(case)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("model", WITH_YARN)
def test_logits_match_hf(world: World, model: str, tp: int) -> None:
    found = world.run(yarn_logits, tp, Case(model=model, tp=tp))[0]
    with patch.dict(SHAPES, WITH_YARN):
        assert largest_logit_difference(model, found) < LIMIT
    longest = max(stop - start for _, ends, _ in found for start, stop in pairwise(ends))
    assert longest > 1.5 * YARN.original_max_position
