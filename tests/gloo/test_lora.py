"""LoRA in every layout: gradients of A and B against Hugging Face with PEFT, and with plain autograd
through merged weights; the merged weights that leave the trainer.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hf_reference import backward, hf_model, hf_weights
from jobs import NUM_ROLLOUTS, Case, gradient, merged_export
from tiny_models import SHAPES, adapter_values, merged_weights, samples
from torch import Tensor
from world import World

from megatron_opsft.config import LoraConfig

LIMIT = 1e-5  # largest difference of a tensor / largest entry of that tensor, float32
LORA = LoraConfig(rank=4, alpha=8.0)
LAYOUTS = [
    replace(case, lora=LORA)
    for case in (
        Case(),
        Case(model="qwen3", tp=2),
        Case(model="llama3", tp=2, dp=2, sequence_parallel=True),
        Case(model="qwen2_tied", tp=2, pp=2, sequence_parallel=True, recompute="full"),
        Case(model="qwen2_tied", pp=2, vpp=2, dp=2, recompute="selective"),
        Case(model="qwen3", cp=2, dp=2, all_on_rank=3),
        Case(model="llama_mha", tp=4),
        Case(cp=2, tp=2, cross_entropy="te"),
        Case(dp=4, overlap=False),
    )
]
SOME = LoraConfig(rank=2, alpha=2.0, targets=("q_proj", "v_proj", "up_proj"))
PARTLY = [replace(case, lora=SOME) for case in (Case(model="qwen3"), Case(tp=2, pp=2))]
EXPERTS = [
    replace(case, model="qwen3_moe", lora=LORA)
    for case in (
        Case(),
        Case(tp=2, pp=2, sequence_parallel=True),
        Case(dp=4, ep=4),
        Case(tp=2, dp=2, ep=2, sequence_parallel=True),
        Case(tp=2, dp=2, ep=4, etp=1, sequence_parallel=True),
        Case(pp=2, vpp=2, dp=2, ep=2, recompute="full"),
        Case(cp=2, dp=2, ep=2),
    )
]


@cache
def peft_gradient(name: str, lora: LoraConfig, num_samples: int) -> tuple[float, dict[str, Tensor]]:
    """Loss, and gradients of A and B by PEFT's names without their prefix."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    config = PeftConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets), lora_dropout=0.0
    )
    model: Any = get_peft_model(hf_model(name), config)
    values = adapter_values(name, lora)
    trained = {}
    for peft_name, parameter in model.named_parameters():
        if parameter.requires_grad:
            hf_name = peft_name.removeprefix("base_model.model.").replace(".default", "")
            parameter.data.copy_(values[hf_name])
            trained[hf_name] = parameter
    assert trained.keys() == values.keys()
    loss = backward(model, samples(num_samples), NUM_ROLLOUTS, "max_accepted")
    return loss, {hf_name: parameter.grad for hf_name, parameter in trained.items()}


@cache
def merged_gradient(
    name: str, lora: LoraConfig, num_samples: int
) -> tuple[float, dict[str, Tensor]]:
    """Loss, and gradients of A and B by the chain rule from those of the merged weights."""
    model = hf_model(name, merged_weights(name, lora))
    loss = backward(model, samples(num_samples), NUM_ROLLOUTS, "max_accepted")
    of_weights = hf_weights(model, gradients=True)
    values = adapter_values(name, lora)
    scale = lora.alpha / lora.rank
    expected = {}
    for hf_name, value in values.items():
        layer, factor, _ = hf_name.rsplit(".", 2)
        of_weight = of_weights[f"{layer}.weight"]
        if factor == "lora_A":
            expected[hf_name] = scale * values[f"{layer}.lora_B.weight"].T @ of_weight
        else:
            expected[hf_name] = scale * of_weight @ values[f"{layer}.lora_A.weight"].T
    return loss, expected


def check(world: World, case: Case, reference: Any) -> None:
    loss, _, found = world.run(gradient, case.world_size, case)[0]
    expected_loss, expected = reference(case.model, case.lora, case.num_samples)
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        error = abs(found[name] - want.numpy()).max() / abs(want).max()
        assert error < LIMIT, f"{name}: {error:.2e}"
    assert loss == pytest.approx(expected_loss, rel=1e-5)


@pytest.mark.parametrize("case", LAYOUTS + PARTLY, ids=str)
def test_gradient_of_adapters_matches_peft(world: World, case: Case) -> None:
    check(world, case, peft_gradient)


@pytest.mark.parametrize("case", EXPERTS, ids=str)
def test_gradient_of_experts_adapters_matches_that_of_merged_weights(
    world: World, case: Case
) -> None:
    check(world, case, merged_gradient)


@pytest.mark.parametrize("case", [LAYOUTS[3], PARTLY[1], EXPERTS[3], EXPERTS[4]], ids=str)
def test_what_leaves_the_trainer_is_merged(world: World, case: Case) -> None:
    found = world.run(merged_export, case.world_size, case)[0]
    expected = merged_weights(case.model, case.lora)
    if SHAPES[case.model].tied_embeddings:
        expected.pop("lm_head.weight", None)
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        torch.testing.assert_close(torch.from_numpy(found[name]), want, rtol=1e-6, atol=1e-7)
