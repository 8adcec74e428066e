"""GRPO's train phase on given rollouts, as one writes it in PyTorch without a framework.

`against_peers.py` times it. Its gradient is that of TRL's default loss (DAPO's, arXiv 2503.14476):

- padded micro-batches of all samples, prompts to the left and responses to the right;
- the policy's log-probabilities before the update, and with beta > 0 those of a frozen copy;
- loss = - 1/(number of response tokens) sum_t min(r_t A, clip(r_t, 0.8, 1.2) A) - beta k3_t, with
  r_t = p / p_old, A = (reward - group mean) / (group deviation + 1e-4) and
  k3_t = p_ref/p - log(p_ref/p) - 1; from all logits of the responses through log_softmax.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen2ForCausalLM
from update_work import PAD_ID, Work

from megatron_opsft.config import OptimizerConfig
from megatron_opsft.records import Sample

EPSILON = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedBatch:
    """ids, mask: [rows, prompt + response], mask 1 on real tokens; response_mask: its right part,
    [rows, response]; advantages: float32 [rows].
    """

    ids: Tensor
    mask: Tensor
    response_mask: Tensor
    advantages: Tensor


def pad_batch(samples: Sequence[Sample], advantages: Tensor, device: torch.device) -> PaddedBatch:
    """Prompts padded left and responses right, each to the longest of these samples."""
    prompts = [torch.tensor(sample.prompt_ids) for sample in samples]
    responses = [torch.tensor(sample.response_ids) for sample in samples]

    def join(lefts: list[Tensor], rights: list[Tensor]) -> Tensor:
        left = pad_sequence(lefts, batch_first=True, padding_side="left", padding_value=PAD_ID)
        right = pad_sequence(rights, batch_first=True, padding_value=PAD_ID)
        return torch.cat([left, right], dim=1).to(device)

    mask = join([torch.ones_like(p) for p in prompts], [torch.ones_like(r) for r in responses])
    return PaddedBatch(
        ids=join(prompts, responses),
        mask=mask,
        response_mask=mask[:, -max(map(len, responses)) :],
        advantages=advantages.to(device),
    )


class Updates:
    """AdamW with the settings of a run."""

    def __init__(self, model: torch.nn.Module, settings: OptimizerConfig) -> None:
        self._parameters = list(model.parameters())
        self._clip_grad = settings.clip_grad
        betas = settings.beta1, settings.beta2
        self._adamw = torch.optim.AdamW(
            self._parameters, settings.lr, betas, settings.eps, settings.weight_decay, fused=True
        )

    def apply(self) -> float:
        """Clip the gradients, apply them and forget them; their norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._clip_grad)
        self._adamw.step()
        self._adamw.zero_grad()
        return float(norm)


class PlainGrpo:
    """Policy, optimizer, and with beta > 0 the reference model."""

    def __init__(self, work: Work, beta: float) -> None:
        self.work = work
        self.beta = beta
        self.device = work.device.torch_device
        self.policy = self._load().train()
        self.reference = self._load().eval().requires_grad_(False) if beta else None
        self.updates = Updates(self.policy, work.optimizer)

    def _load(self) -> Any:
        model = Qwen2ForCausalLM.from_pretrained(self.work.model_dir, dtype=torch.float32)
        return model.to(self.device)

    def log_probs(self, model: Any, batch: PaddedBatch) -> Tensor:
        """log p of every response token, float32 [rows, response]."""
        width = batch.response_mask.shape[1]
        with_bf16 = self.work.dtype == "bfloat16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=with_bf16):
            logits = model(batch.ids, batch.mask, use_cache=False, logits_to_keep=width + 1).logits
        # The position behind the last token comes along: leaving it out here would copy all logits.
        log_probs = logits.float().log_softmax(-1)
        return log_probs[:, :-1].gather(-1, batch.ids[:, -width:, None])[..., 0]

    def loss_sum(self, batch: PaddedBatch, old: Tensor, reference: Tensor | None) -> Tensor:
        """Of a micro-batch's token losses, not normalised."""
        now = self.log_probs(self.policy, batch)
        ratio = (now - old).exp()
        advantages = batch.advantages[:, None]
        clipped = ratio.clamp(1 - EPSILON, 1 + EPSILON)
        losses = -torch.min(ratio * advantages, clipped * advantages)
        if reference is not None:
            losses = losses + self.beta * ((reference - now).exp() - (reference - now) - 1)
        return (losses * batch.response_mask).sum()

    def step(self) -> float:
        """One update; the gradient norm before clipping."""
        samples, rows = self.work.samples, self.work.rows
        advantages = self.work.advantages()
        batches = [
            pad_batch(samples[start : start + rows], advantages[start : start + rows], self.device)
            for start in range(0, len(samples), rows)
        ]
        reference: list[Tensor | None] = [None] * len(batches)
        with torch.no_grad():
            if self.reference is not None:
                reference = [self.log_probs(self.reference, batch) for batch in batches]
            old = [self.log_probs(self.policy, batch) for batch in batches]
        num_tokens = sum(len(sample.response_ids) for sample in samples)
        for batch, old_part, reference_part in zip(batches, old, reference, strict=True):
            (self.loss_sum(batch, old_part, reference_part) / num_tokens).backward()
        return self.updates.apply()
