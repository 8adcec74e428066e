"""How the responses of a step are dealt to engines. That all ranks sample by it, and alike in every
layout: tests/gloo/test_end_to_end.py.
"""

from itertools import groupby

import pytest

from megatron_opsft.rollout.requests import deal_evenly, make_requests


@pytest.mark.parametrize(
    ("num_prompts", "sizes"),
    [(64, [64] * 8), (64, [512]), (7, [19, 19, 18]), (1, [1, 0] * 8)],
)
def test_every_engine_makes_as_many_responses(num_prompts: int, sizes: list[int]) -> None:
    """Prompts are dealt in turn, as they come by length, and only divided where parts meet."""
    groups = [make_requests(f"p{n}", (1, n), 8, 0, 1) for n in range(num_prompts)]
    parts = deal_evenly(groups, len(sizes))
    assert [len(part) for part in parts] == sizes
    dealt = [request for part in parts for request in part]
    everything = {id(request) for group in groups for request in group}
    assert {id(request) for request in dealt} == everything
    in_turn = [n for first in range(len(sizes)) for n in range(num_prompts)[first :: len(sizes)]]
    assert [name for name, _ in groupby(r.problem_id for r in dealt)] == [f"p{n}" for n in in_turn]
