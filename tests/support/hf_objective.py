"""Objectives as formulas on Hugging Face's models, one response at a time, with plain autograd."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hf_reference import hf_model, hf_weights, log_probs, of_labels
from jobs import ADVANTAGES, NUM_ROLLOUTS, Case
from objective_jobs import Found
from tiny_models import samples
from torch import Tensor
from transformers import PreTrainedModel

from megatron_opsft.methods.objective import Objective, SequenceClip, SquaredLogRatio, TokenClip

LIMIT = 1e-4  # largest difference of a tensor / largest entry of that tensor, float32


@dataclass(kw_only=True)
class Expected:
    """Of a batch: its loss, the sum of the divergences, its tokens, and how many of them have a
    ratio beyond either end of the clip, so that their gradient is taken away.
    """

    loss: float = 0.0
    kl: float = 0.0
    num_tokens: int = 0
    too_low: int = 0
    too_high: int = 0


def model_with(name: str, values: dict[str, Any]) -> PreTrainedModel:
    """The model of `SHAPES` with these weights by HF name."""
    return hf_model(name, {key: torch.from_numpy(value) for key, value in values.items()})


def check_gradient(found: dict[str, Any], model: PreTrainedModel, limit: float) -> None:
    """Every tensor's by its HF name, to `limit` of its largest entry."""
    expected = hf_weights(model, gradients=True)
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        error = float((torch.from_numpy(found[name]) - want).abs().max() / want.abs().max())
        assert error < limit, f"{name}: {error:.2e}"


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
            surrogate = (advantage * now).sum() - tau / 2 * (now.sum() - old.sum()) ** 2
        case _:
            surrogate = (advantage * now).sum()
    d = ref - now
    kl = {"k1": now - ref, "k2": d * d / 2, "k3": torch.exp(d) - d - 1}[objective.kl].sum()
    return objective.beta * kl - surrogate, ratio.detach(), kl.detach()


def token_advantages(
    objective: Objective, values: Sequence[float], old: list[Tensor], ref: list[Tensor]
) -> list[Tensor]:
    """The advantage of each token of every response."""
    penalty = objective.token_penalty
    if penalty is None:
        return [torch.full(o.shape, value) for value, o in zip(values, old, strict=True)]
    found = []
    for value, o, r in zip(values, old, ref, strict=True):
        penalties = [penalty.beta * (o - r)[token:].sum() for token in range(len(o))]
        found.append(value - torch.stack(penalties))
    if not penalty.whitens:
        return found
    flat = torch.cat(found).double()
    std = (flat.var(correction=0) + 1e-8).sqrt()
    return [((advantages - flat.mean()) / std).float() for advantages in found]


def compare(case: Case, found: Found) -> Expected:
    """Loss, gradient and statistics with the formula's; each response's mean counts alike."""
    assert case.aggregation == "sequence"
    objective, expected = case.objective, Expected()
    models = [model_with(case.model, w) for w in (found.now, found.sampled_from, found.reference)]
    clip = objective.surrogate if objective.clips else TokenClip(low=1e9, high=1e9)
    assert isinstance(clip, TokenClip | SequenceClip)
    dual = getattr(clip, "dual", None) or math.inf
    batch = samples(case.num_samples)
    by_model = []
    for model in models:
        given = [(s.prompt_ids, s.response_ids, objective.temperature) for s in batch]
        found_by_model = [of_labels(log_probs(model, *each), each[1]) for each in given]
        by_model.append(found_by_model)
    of_now = by_model[0]
    of_old, of_ref = ([values.detach() for values in found] for found in by_model[1:])
    advantages = token_advantages(objective, ADVANTAGES, of_old, of_ref)
    rows = zip(batch, advantages, of_now, of_old, of_ref, strict=True)
    for sample, advantage, now, old, ref in rows:
        loss, ratio, kl = response_loss(objective, advantage, now, old, ref)
        loss = loss / (NUM_ROLLOUTS * len(sample.response_ids))
        loss.backward()
        expected.loss += loss.item()
        expected.kl += float(kl)
        expected.num_tokens += len(sample.response_ids)
        expected.too_low += int(((ratio < 1 - clip.low) & (advantage < 0)).sum())
        highest = torch.where(advantage > 0, 1 + clip.high, dual)
        expected.too_high += int(((ratio > highest) & (advantage != 0)).sum())
    check_gradient(found.gradient, models[0], LIMIT)
    assert found.loss == pytest.approx(expected.loss, rel=LIMIT)
    clipped = (expected.too_low + expected.too_high) / expected.num_tokens
    assert found.clip_share == (clipped if objective.clips else None)
    kl_mean = pytest.approx(expected.kl / expected.num_tokens, rel=LIMIT)
    assert found.kl_mean == (kl_mean if objective.needs_reference else None)
    return expected
