"""Objectives as formulas on Hugging Face's models, one response at a time, with plain autograd."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hf_reference import hf_model, hf_weights
from jobs import ADVANTAGES, NUM_ROLLOUTS, Case
from objective_jobs import Found
from tiny_models import samples
from torch import Tensor
from transformers import PreTrainedModel

from megatron_opsft.methods.objective import (
    Objective,
    SequenceClip,
    SquaredLogRatio,
    TokenClip,
)
from megatron_opsft.records import Sample

LIMIT = 1e-4  # largest difference of a tensor / largest entry of that tensor, float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """too_low, too_high: tokens whose ratio is beyond that end of the clip, so that the gradient is
    taken away; kl: the sum of the estimates; num_tokens: of the batch.
    """

    loss: float
    gradient: dict[str, Tensor]
    too_low: int
    too_high: int
    kl: float
    num_tokens: int


def model_with(name: str, values: dict[str, Any]) -> PreTrainedModel:
    """The model of `SHAPES` with these weights by HF name."""
    model = hf_model(name)
    parameters = hf_weights(model)
    assert parameters.keys() == values.keys()
    for hf_name, value in values.items():
        parameters[hf_name].copy_(torch.from_numpy(value))
    return model


def token_log_probs(model: PreTrainedModel, sample: Sample, temperature: float) -> Tensor:
    """log p(o_t | prompt, o_<t), float32 [tokens of the response]."""
    ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
    log_probs = (model(input_ids=ids).logits[0, :-1].float() / temperature).log_softmax(-1)
    return log_probs.gather(1, ids[0, 1:, None])[-len(sample.response_ids) :, 0]


def response_loss(
    objective: Objective, advantage: Tensor, now: Tensor, old: Tensor, ref: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(sum over the response's tokens of the loss, ratios that the clip sees, sum of the KL)."""
    ratio = (now - old).exp()
    match objective.surrogate:
        case TokenClip(low=low, high=high, dual=dual):
            kept = torch.clip(ratio, 1 - low, 1 + high)
            value = torch.min(ratio * advantage, kept * advantage)
            if dual is not None:
                value = torch.where(advantage < 0, torch.max(value, dual * advantage), value)
            surrogate = value.sum()
        case SequenceClip(low=low, high=high):
            ratio = (now.mean() - old.mean()).exp()
            kept = torch.clip(ratio, 1 - low, 1 + high)
            surrogate = torch.min(ratio * advantage, kept * advantage).mean()
        case SquaredLogRatio(tau=tau):
            log_ratio = now.sum() - old.sum()
            surrogate = (advantage * now).sum() - tau / 2 * log_ratio**2
        case _:
            surrogate = (advantage * now).sum()
    d = ref - now
    kl = {"k1": now - ref, "k2": d * d / 2, "k3": torch.exp(d) - d - 1}[objective.kl].sum()
    return objective.beta * kl - surrogate, ratio.detach(), kl.detach()


def hf_objective(
    name: str,
    objective: Objective,
    *,
    advantages: tuple[float, ...],
    divisors: list[float],
    now: dict[str, Any],
    old: dict[str, Any],
    reference: dict[str, Any],
) -> Expected:
    """Loss, its gradient, and what the clip did; divisors: of each response's sum over tokens."""
    models = [model_with(name, values) for values in (now, old, reference)]
    total = kl_sum = 0.0
    too_low = too_high = num_tokens = 0
    clip = objective.surrogate if objective.clips else TokenClip(low=1e9, high=1e9)
    assert isinstance(clip, TokenClip | SequenceClip)
    batch = samples(len(divisors))
    with torch.no_grad():
        fixed = [
            [token_log_probs(model, s, objective.temperature) for s in batch]
            for model in models[1:]
        ]
    for number, (sample, divisor) in enumerate(zip(batch, divisors, strict=True)):
        log_probs = token_log_probs(models[0], sample, objective.temperature)
        advantage = torch.full(log_probs.shape, advantages[number])
        loss, ratio, kl = response_loss(
            objective, advantage, log_probs, *(values[number] for values in fixed)
        )
        (loss / divisor).backward()
        total += float(loss.detach()) / divisor
        kl_sum += float(kl)
        num_tokens += len(sample.response_ids)
        too_low += int(((ratio < 1 - clip.low) & (advantage < 0)).sum())
        dual = getattr(clip, "dual", None) or math.inf
        highest = torch.where(advantage > 0, 1 + clip.high, dual)
        too_high += int(((ratio > highest) & (advantage != 0)).sum())
    return Expected(
        loss=total,
        gradient=hf_weights(models[0], gradients=True),
        too_low=too_low,
        too_high=too_high,
        kl=kl_sum,
        num_tokens=num_tokens,
    )


def compare(case: Case, found: Found) -> Expected:
    """Loss, gradient and statistics with the formula's; each response's mean counts alike."""
    assert case.aggregation == "sequence"
    expected = hf_objective(
        case.model,
        case.objective,
        advantages=ADVANTAGES,
        divisors=[NUM_ROLLOUTS * len(s.response_ids) for s in samples(case.num_samples)],
        now=found.now,
        old=found.sampled_from,
        reference=found.reference,
    )
    assert found.gradient.keys() == expected.gradient.keys()
    errors = {
        name: float((torch.from_numpy(found.gradient[name]) - want).abs().max() / want.abs().max())
        for name, want in expected.gradient.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] < LIMIT, f"{worst}: {errors[worst]:.2e}"
    assert found.loss == pytest.approx(expected.loss, rel=LIMIT)
    clipped = (expected.too_low + expected.too_high) / expected.num_tokens
    assert found.clip_share == (clipped if case.objective.clips else None)
    if case.objective.needs_reference:
        assert found.kl_mean == pytest.approx(expected.kl / expected.num_tokens, rel=LIMIT)
    else:
        assert found.kl_mean is None
    return expected
