"""What gradients of adapters must be: PEFT's autograd; the chain rule through merged weights."""

from functools import cache
from typing import Any

from hf_reference import backward, hf_model, hf_weights
from jobs import NUM_ROLLOUTS
from tiny_models import adapter_values, merged_weights, samples
from torch import Tensor

from megatron_opsft.config import LoraConfig


def peft_model(name: str, lora: LoraConfig) -> tuple[Any, dict[str, Tensor]]:
    """PEFT's model with the values of `tiny_models`; A and B by its names without their prefix."""
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
    return model, trained


@cache
def peft_gradient(name: str, lora: LoraConfig, num_samples: int) -> tuple[float, dict[str, Tensor]]:
    """Loss, and gradients of A and B."""
    model, trained = peft_model(name, lora)
    loss = backward(model, samples(num_samples), NUM_ROLLOUTS, "max_accepted")
    return loss, {hf_name: parameter.grad for hf_name, parameter in trained.items()}  # type: ignore[misc]


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
    for hf_name in values:
        layer, factor, _ = hf_name.rsplit(".", 2)
        of_weight = of_weights[f"{layer}.weight"]
        if factor == "lora_A":
            expected[hf_name] = scale * values[f"{layer}.lora_B.weight"].T @ of_weight
        else:
            expected[hf_name] = scale * of_weight @ values[f"{layer}.lora_A.weight"].T
    return loss, expected
