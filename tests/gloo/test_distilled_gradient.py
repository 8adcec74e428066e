"""The whole gradient of a divergence from a teacher, every parameter under its HF name, against
plain Hugging Face autograd of the formula.
"""

from dataclasses import replace

import pytest
import torch
from distillation_jobs import (
    Found,
    distilled_gradient,
    is_correct,
    plain_samples,
    teacher_prompt,
)
from hf_objective import model_with
from hf_reference import hf_model, hf_weights
from jobs import Case
from torch import Tensor
from transformers import PreTrainedModel
from world import World

from megatron_opsft.methods.catalog.self_distillation import SelfDistillation

LIMIT = 1e-5  # largest difference of a tensor / largest entry of that tensor, float32


def log_probs(model: PreTrainedModel, prompt: tuple[int, ...], response: tuple[int, ...]) -> Tensor:
    """Of the whole vocabulary where the model predicts the response, float32 [tokens, V]."""
    ids = torch.tensor([[*prompt, *response]])
    return model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)


def expected(case: Case, method: SelfDistillation, found: Found) -> tuple[float, dict[str, Tensor]]:
    """The loss and its gradient; each response alone, and no pack."""
    policy, teacher = model_with(case.model, found.now), hf_model(case.model)
    batch = plain_samples(0, case.num_samples)
    trained = [s for n, s in enumerate(batch) if method.responses == "all" or is_correct(n)]
    total = sum(len(s.response_ids) for s in trained)
    loss = 0.0
    for s in trained:
        by_length = len(batch) * len(s.response_ids)
        divisor = by_length if method.aggregation == "sequence" else total
        p = log_probs(policy, s.prompt_ids, s.response_ids)
        with torch.no_grad():
            q = log_probs(teacher, teacher_prompt(s.problem_id), s.response_ids)
        if method.direction == "reverse":
            of_tokens = (p.exp() * (p - q)).sum(1)
        else:
            of_tokens = (q.exp() * (q - p)).sum(1)
        labels = torch.tensor(s.response_ids)
        sampled = p.gather(1, labels[:, None])[:, 0]
        part = (method.beta * of_tokens - method.likelihood * sampled).sum() / divisor
        part.backward()
        loss += part.item()
    return loss, hf_weights(policy, gradients=True)


def check(
    world: World, case: Case, method: SelfDistillation | None = None, chunk_tokens: int = 500
) -> None:
    method = method or SelfDistillation()
    found = world.run(distilled_gradient, case.world_size, case, method, chunk_tokens)[0]
    assert found.left_out == 0
    loss, gradient = expected(case, method, found)
    assert found.gradient.keys() == gradient.keys()
    errors = {
        name: float((torch.from_numpy(found.gradient[name]) - want).abs().max() / want.abs().max())
        for name, want in gradient.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] < LIMIT, f"{worst}: {errors[worst]:.2e}"
    assert found.loss == pytest.approx(loss, rel=LIMIT)
    if method == SelfDistillation():  # of each token alike
        assert found.kl_mean == pytest.approx(loss, rel=LIMIT)


ALL = SelfDistillation(responses="all", aggregation="sequence")
LAYOUTS = [
    Case(),
    Case(pp=2),
    Case(dp=2),
    Case(tp=2, sequence_parallel=True, model="qwen2_tied"),
    Case(tp=2, pp=2, sequence_parallel=True),
    Case(pp=2, vpp=2, model="qwen3"),
    Case(pp=2, model="qwen2_tied"),
    Case(dp=2, ep=2, model="qwen3_moe"),
    Case(cp=2),
    Case(cp=2, tp=2, sequence_parallel=True),
]


@pytest.mark.parametrize("chunk_tokens", [500, 16])
@pytest.mark.parametrize("method", [SelfDistillation(), ALL], ids=["correct", "all"])
def test_gradient_matches_hf_for_responses_and_chunks(
    world: World, method: SelfDistillation, chunk_tokens: int
) -> None:
    check(world, Case(tp=2), method, chunk_tokens)


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_gradient_matches_hf_in_layout(world: World, case: Case) -> None:
    check(world, case)


@pytest.mark.parametrize(
    "keys",
    [{"direction": "forward"}, {"likelihood": 1.0, "beta": 0.3}],
    ids=["forward", "beside likelihood"],
)
def test_gradient_matches_hf_for_settings(world: World, keys: dict[str, object]) -> None:
    check(world, Case(tp=2), SelfDistillation.model_validate(keys))


@pytest.mark.parametrize("budget", [70, 10_000])
def test_gradient_matches_hf_for_any_packing(world: World, budget: int) -> None:
    check(world, Case(dp=2, budget=budget))


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
    world: World, case: Case, direction: str
) -> None:
    """After the teacher was made the policy again."""
    method = SelfDistillation.model_validate({"direction": direction})
    found = world.run(distilled_gradient, case.world_size, case, method, 500, True)[0]
    assert found.loss == found.kl_mean == 0
    assert all(not values.any() for values in found.gradient.values())


def test_pairs_that_are_too_long_are_left_out_of_the_mean_too(world: World) -> None:
    """Those of the correct responses; a micro-batch has room for 40 tokens."""
    case = replace(Case(dp=2), budget=40)
    lengths = [
        len(s.response_ids) + max(len(s.prompt_ids), len(teacher_prompt(s.problem_id)))
        for n, s in enumerate(plain_samples())
        if is_correct(n)
    ]
    found = world.run(distilled_gradient, 2, case, SelfDistillation(), 500)[0]
    assert found.left_out == sum(length > 40 for length in lengths) > 0
    assert found.loss == pytest.approx(found.kl_mean)
