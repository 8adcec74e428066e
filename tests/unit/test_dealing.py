"""How the responses of a step are dealt to engines. That all ranks sample by it, and alike in every
layout: tests/gloo/test_end_to_end.py.
"""

import pytest

from megatron_opsft.rollout.requests import deal_evenly, make_requests

GROUP = 8


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
def test_every_engine_makes_as_many_responses(num_prompts: int, sizes: list[int]) -> None:
    groups = [make_requests(f"p{n}", (1, n), GROUP, 0, 1) for n in range(num_prompts)]
    parts = deal_evenly(groups, len(sizes))
    assert [len(part) for part in parts] == sizes
    dealt = {(r.problem_id, r.sample_index): r for part in parts for r in part}
    assert dealt == {(r.problem_id, r.sample_index): r for group in groups for r in group}
    # Dealt in turn, as prompts come by length, and only divided where two parts meet.
    in_turn = [
        f"p{n}" for first in range(len(sizes)) for n in range(num_prompts)[first :: len(sizes)]
    ]
    ids = [request.problem_id for part in parts for request in part]
    assert list(dict.fromkeys(ids)) == in_turn
    assert sum(a != b for a, b in zip(ids, ids[1:], strict=False)) == num_prompts - 1
