"""The whole gradient of a divergence from a teacher, every parameter under its HF name, against
plain Hugging Face autograd of the formula.
"""

from dataclasses import replace
from typing import Any

import pytest
from distillation_jobs import PLAIN, TAUGHT, distilled_gradient, is_correct, prompt_of
from hf_objective import check_gradient, log_probs, model_with, of_labels
from hf_reference import hf_model
from jobs import Case
from tiers import for_release
from tiny_models import rounding, samples
from world import World

from megatron_opsft.methods.catalog.self_distillation import SelfDistillation

ALL: dict[str, Any] = {"responses": "all", "aggregation": "sequence"}
LAYOUTS = [
    Case(),
    Case(tp=2, pp=2, sequence_parallel=True),
    Case(pp=2, vpp=2, model="qwen3"),
    Case(pp=2, model="qwen2_tied"),
    Case(dp=2, ep=2, model="qwen3_moe"),
    Case(tp=2, pp=2, sequence_parallel=True, model="qwen3_5"),
    Case(dp=2, ep=2, model="qwen3_5_moe"),
    Case(cp=2, tp=2, sequence_parallel=True),
    Case(dp=2, budget=70),
]
COMBINED = [
    Case(pp=2),
    Case(dp=2),
    Case(tp=2, sequence_parallel=True, model="qwen2_tied"),
    Case(cp=2),
    Case(dp=2, budget=10_000),
]
SETTINGS: list[tuple[dict[str, Any], int]] = [
    *((keys, chunk_tokens) for keys in ({}, ALL) for chunk_tokens in (500, 16)),
    ({"direction": "forward"}, 500),
    ({"likelihood": 1.0, "beta": 0.3}, 500),
]


@pytest.mark.parametrize(
    ("case", "keys", "chunk_tokens"),
    [
        *((case, {}, 500) for case in LAYOUTS),
        *((Case(tp=2), *given) for given in SETTINGS),
        *for_release((case, {}, 500) for case in COMBINED),
    ],
    ids=str,
)
def test_gradient_matches_hf(
    world: World, case: Case, keys: dict[str, Any], chunk_tokens: int
) -> None:
    """In layouts and packs, for settings and chunks. HF has each response alone, and no pack."""
    method = SelfDistillation(**keys)
    found = world.run(distilled_gradient, case.world_size, case, method, chunk_tokens)[0]
    assert found.left_out == 0
    policy, teacher = model_with(case.model, found.now), hf_model(case.model)
    batch = samples(case.num_samples)
    trained = [s for s in batch if method.responses == "all" or is_correct(s)]
    total = sum(len(s.response_ids) for s in trained)
    loss = 0.0
    for s in trained:
        by_length = len(batch) * len(s.response_ids)
        p, q = (
            log_probs(model, prompt_of(s.problem_id, kind), s.response_ids, 1.0)
            for model, kind in ((policy, PLAIN), (teacher, TAUGHT))
        )
        q = q.detach()
        if method.direction == "reverse":
            of_tokens = (p.exp() * (p - q)).sum(1)
        else:
            of_tokens = (q.exp() * (q - p)).sum(1)
        sampled = of_labels(p, s.response_ids)
        part = (method.beta * of_tokens - method.likelihood * sampled).sum()
        part = part / (by_length if method.aggregation == "sequence" else total)
        part.backward()
        loss += part.item()
    limit = rounding(case.model)  # largest difference of a tensor / largest entry of that tensor
    check_gradient(found.gradient, policy, limit)
    assert found.loss == pytest.approx(loss, rel=limit)
    if not keys:  # of each token alike
        assert found.kl_mean == pytest.approx(loss, rel=limit)


@pytest.mark.parametrize(
    ("case", "direction"),
    [
        (Case(), "reverse"),
        (Case(tp=2), "forward"),
        (Case(pp=2), "reverse"),
        (Case(dp=2), "forward"),
    ],
    ids=str,
)
def test_a_policy_that_is_its_teacher_has_no_loss_and_no_gradient(
    world: World, case: Case, direction: Any
) -> None:
    """After the teacher was made the policy again."""
    method = SelfDistillation(direction=direction)
    found = world.run(distilled_gradient, case.world_size, case, method, 500, True)[0]
    assert found.loss == found.kl_mean == 0
    assert all(not values.any() for values in found.gradient.values())


def test_pairs_that_are_too_long_are_left_out_of_the_mean_too(world: World) -> None:
    """Those of the correct responses; a micro-batch has room for 40 tokens."""
    case = replace(Case(dp=2), budget=40)
    lengths = [
        len(s.response_ids) + max(len(prompt_of(s.problem_id, kind)) for kind in (PLAIN, TAUGHT))
        for s in samples(case.num_samples)
        if is_correct(s)
    ]
    found = world.run(distilled_gradient, 2, case, SelfDistillation(), 500)[0]
    assert found.left_out == sum(length > 40 for length in lengths) > 0
    assert found.loss == pytest.approx(found.kl_mean)
