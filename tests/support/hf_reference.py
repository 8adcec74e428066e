"""What the gradient must be: Hugging Face's model and plain autograd, one response at a time."""

from functools import cache
from itertools import pairwise

import torch
from hf_configs import hf_config
from jobs import Logits
from tiny_models import SHAPES, samples, weights
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatron_opsft.config import OptimizerConfig
from megatron_opsft.methods.objective import Aggregation
from megatron_opsft.records import Sample
from megatron_opsft.rollout.hf.engine import by_disk_name


def hf_model(name: str) -> PreTrainedModel:
    """The float32 model of `SHAPES` with the weights of `tiny_models`."""
    config = hf_config(SHAPES[name])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    parameters = hf_weights(model)
    values = weights(name)
    assert parameters.keys() == values.keys()
    for hf_name, value in values.items():
        parameters[hf_name].copy_(value)
    return model


def hf_weights(model: PreTrainedModel, *, gradients: bool = False) -> dict[str, Tensor]:
    """Name in a model directory -> the parameter, or its gradient where there is one."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        value = parameter.grad if gradients else parameter.data
        if value is not None:
            found |= by_disk_name(name, value)
    return found


@cache
def evaluated_hf_model(name: str) -> PreTrainedModel:
    """`hf_model`, one for all tests that only look at it."""
    return hf_model(name).eval()


@torch.no_grad()
def largest_logit_difference(name: str, found: Logits) -> float:
    """Between HF's logits of each packed sequence, by itself, and those found in the packs."""
    assert len(found) > 1
    worst = 0.0
    lengths = set()
    for tokens, cu_seqlens, values in found:
        assert values.shape == (len(tokens), SHAPES[name].vocab_size)
        for start, stop in pairwise(cu_seqlens):
            ids = torch.tensor([tokens[start:stop]])
            expected = evaluated_hf_model(name)(input_ids=ids).logits[0]
            worst = max(worst, float((torch.from_numpy(values[start:stop]) - expected).abs().max()))
            lengths.add(stop - start)
    assert len(lengths) > 5
    return worst


def response_log_prob(model: PreTrainedModel, sample: Sample) -> Tensor:
    """sum_t log p(o_t | prompt, o_<t) of one response."""
    ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
    log_probs_TV = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
    log_probs_T = log_probs_TV.gather(1, ids[0, 1:, None])[:, 0]
    return log_probs_T[-len(sample.response_ids) :].sum()


def backward(
    model: PreTrainedModel, accepted: list[Sample], num_rollouts: int, aggregation: Aggregation
) -> float:
    """Add the gradient of the loss of Algorithm 1 (or of another aggregation); that loss."""
    longest = max(len(sample.response_ids) for sample in accepted)
    total = sum(len(sample.response_ids) for sample in accepted)
    loss = 0.0
    for sample in accepted:
        divisor = {
            "max_accepted": num_rollouts * longest,
            "sequence": num_rollouts * len(sample.response_ids),
            "accepted_tokens": total,
        }[aggregation]
        part = -response_log_prob(model, sample) / divisor
        part.backward()
        loss += part.item()
    return loss


@cache
def hf_gradient(
    name: str, num_samples: int, num_rollouts: int, aggregation: Aggregation = "max_accepted"
) -> tuple[float, dict[str, Tensor]]:
    """The loss and its gradient by HF name."""
    model = hf_model(name)
    loss = backward(model, samples(num_samples), num_rollouts, aggregation)
    return loss, hf_weights(model, gradients=True)


@cache
def hf_training(
    name: str, num_samples: int, num_rollouts: int, optimizer: OptimizerConfig, num_steps: int
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, gradient norms before clipping, and final weights with torch's own AdamW."""
    model = hf_model(name)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    adamw = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": optimizer.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=optimizer.lr,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.eps,
    )
    losses, norms = [], []
    for step in range(num_steps):
        adamw.zero_grad()
        accepted = samples(num_samples, seed=step)
        losses.append(backward(model, accepted, num_rollouts, "max_accepted"))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer.clip_grad)
        norms.append(float(norm))
        adamw.step()
    return losses, norms, hf_weights(model)
