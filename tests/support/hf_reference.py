"""What the gradient must be: Hugging Face's model and plain autograd, one response at a time."""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import torch
from hf_configs import hf_config
from jobs import Logits
from tiny_models import SHAPES, samples, weights
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatron_opsft.config import OptimizerConfig
from megatron_opsft.methods.objective import Aggregation
from megatron_opsft.records import Sample
from megatron_opsft.rollout.hf.engine import by_disk_name


def hf_model(name: str, values: dict[str, Tensor] | None = None) -> PreTrainedModel:
    """The float32 model of `SHAPES` with these weights by HF name, or those of `tiny_models`."""
    model = AutoModelForCausalLM.from_config(hf_config(SHAPES[name]), dtype=torch.float32)
    parameters = hf_weights(model)
    values = values or weights(name)
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
    worst, lengths = 0.0, set()
    for tokens, cu_seqlens, values in found:
        assert values.shape == (len(tokens), SHAPES[name].vocab_size)
        for start, stop in pairwise(cu_seqlens):
            ids = torch.tensor([tokens[start:stop]])
            expected = evaluated_hf_model(name)(input_ids=ids).logits[0]
            worst = max(worst, float((torch.from_numpy(values[start:stop]) - expected).abs().max()))
            lengths.add(stop - start)
    assert len(lengths) > 5
    return worst


def log_probs(
    model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0
) -> Tensor:
    """Of the whole vocabulary where the model predicts the response, float32 [tokens, V]."""
    logits = model(input_ids=torch.tensor([[*prompt, *response]])).logits
    return (logits[0, len(prompt) - 1 : -1].float() / temperature).log_softmax(-1)


def of_labels(log_probs_RV: Tensor, response: Sequence[int]) -> Tensor:
    """log p(o_t | prompt, o_<t), float32 [tokens of the response]."""
    return log_probs_RV.gather(1, torch.tensor(response)[:, None])[:, 0]


def response_log_prob(model: PreTrainedModel, sample: Sample) -> Tensor:
    """sum_t log p(o_t | prompt, o_<t) of one response."""
    given = log_probs(model, sample.prompt_ids, sample.response_ids)
    return of_labels(given, sample.response_ids).sum()


def backward(
    model: PreTrainedModel, accepted: list[Sample], num_rollouts: int, aggregation: Aggregation
) -> float:
    """Add the gradient of the loss of Algorithm 1 (or of another aggregation); that loss."""
    lengths = [len(sample.response_ids) for sample in accepted]
    loss = 0.0
    for sample, length in zip(accepted, lengths, strict=True):
        divisors = {"max_accepted": num_rollouts * max(lengths), "sequence": num_rollouts * length}
        divisors["accepted_tokens"] = sum(lengths)
        part = -response_log_prob(model, sample) / divisors[aggregation]
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
    decay = optimizer.weight_decay  # of matrices, not of vectors
    adamw = torch.optim.AdamW(
        [{"params": [p], "weight_decay": decay * (p.ndim > 1)} for p in model.parameters()],
        lr=optimizer.lr,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.eps,
    )
    losses, norms = [], []
    for step in range(num_steps):
        adamw.zero_grad()
        accepted = samples(num_samples, seed=step)
        losses.append(backward(model, accepted, num_rollouts, "max_accepted"))
        norms.append(float(clip_grad_norm_(model.parameters(), optimizer.clip_grad)))
        adamw.step()
    return losses, norms, hf_weights(model)
