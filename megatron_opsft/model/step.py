"""One training step on Megatron's forward-backward schedule."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_opsft.batching.microbatch import build_microbatch
from megatron_opsft.errors import NonFiniteError
from megatron_opsft.loss.cross_entropy import Method, summed_loss
from megatron_opsft.loss.fused_linear import token_statistics
from megatron_opsft.loss.output_head import OutputHead, whole_hidden
from megatron_opsft.loss.token_losses import token_losses
from megatron_opsft.methods.objective import LIKELIHOOD, Objective
from megatron_opsft.model.hidden_states import output_head, without_output_layer
from megatron_opsft.model.optimizer import set_learning_rate, update
from megatron_opsft.records import MicroBatch, Sample, StepResult
from megatron_opsft.runtime.distributed import (
    Layout,
    any_over_world,
    broadcast_over,
    gather_from_all,
    sum_over_world,
)
from megatron_opsft.runtime.phase import current_phase, describe_rank


def packed_params(batch: MicroBatch) -> PackedSeqParams:
    """Megatron's description of a packed micro-batch."""
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
    )


def _sum_losses(
    method: Method,
    objective: Objective,
    config: TransformerConfig,
    head: OutputHead,
    batch: MicroBatch,
    hidden: Tensor,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """The weighted, unnormalised sum of one micro-batch's token losses, for the schedule; again,
    with the sums of the objective's statistics.
    """
    losses = token_losses(objective, batch)
    loss_sum, log_probs_R = summed_loss(
        method,
        whole_hidden(hidden[0], head.group, sequence_parallel=config.sequence_parallel),
        head,
        batch.loss_indices_R,
        batch.labels_R,
        losses,
        accumulation_fusion=config.gradient_accumulation_fusion,
    )
    num_tokens = torch.tensor(batch.num_loss_tokens, dtype=torch.int, device=loss_sum.device)
    sums = (loss_sum.detach().clone(), *losses.statistics(log_probs_R))
    return loss_sum, num_tokens, sums


def _log_probs(
    config: TransformerConfig,
    head: OutputHead,
    batch: MicroBatch,
    hidden: Tensor,
    non_loss_data: bool = True,
) -> Tensor:
    """Statistics of the response tokens [R] of one micro-batch, for a forward-only schedule."""
    hidden_TH = whole_hidden(hidden[0], head.group, sequence_parallel=config.sequence_parallel)
    return token_statistics(hidden_TH, head, batch.loss_indices_R, batch.labels_R).log_probs_R


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulated:
    """What `Trainer.accumulate` summed; fields as in `StepResult`, equal on every rank."""

    loss: float
    trained_tokens: int
    clip_share: float | None
    kl_mean: float | None


class Trainer:
    """The model's shards and their optimizer on this rank."""

    def __init__(
        self,
        chunks: list[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        config: TransformerConfig,
        layout: Layout,
        *,
        vocab_size: int,
        weight_decay: float,
        cross_entropy: Method = "fused_linear",
        objective: Objective = LIKELIHOOD,
    ) -> None:
        """vocab_size: without padding; weight_decay: AdamW's, on matrices."""
        self.chunks = chunks
        self.optimizer = optimizer
        self.layout = layout
        self._config = config
        self._cross_entropy: Method = cross_entropy
        self._objective = objective
        self._vocab_size = vocab_size
        self._gathering = False
        self._own_loss_is_finite = True
        self._weight_decay = weight_decay
        # Sums over micro-batches and ranks are final here; Megatron's own division by a token
        # count is not wanted, so `num_tokens` is left out.
        config.finalize_model_grads_func = lambda model, num_tokens=None, **kwargs: (
            finalize_model_grads(model, None, **kwargs)
        )

    @property
    def models(self) -> list[Any]:
        """The GPTModel chunks without their data-parallel wrapper."""
        return [chunk.module for chunk in self.chunks]

    def accumulate(self, batches: Sequence[MicroBatch], factor: float) -> Accumulated:
        """Main gradients of `factor` x the weighted sum of all ranks' token losses.

        Every rank calls it with equally many micro-batches.
        """
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        sums = self._run_schedule(
            partial(_sum_losses, self._cross_entropy, self._objective), batches, forward_only=False
        )
        for chunk in self.chunks:
            chunk.scale_gradients(factor)
        mine: list[float] = []
        if self.layout.is_loss_rank:
            mine = [sum(map(float, each)) for each in zip(*sums, strict=True)]
            mine.insert(0, sum(batch.num_loss_tokens for batch in batches))
        mine += [0.0] * (4 - len(mine))
        self._own_loss_is_finite = math.isfinite(mine[1])
        tokens, loss, clipped, divergence = sum_over_world(mine)
        return Accumulated(
            loss=factor * loss,
            trained_tokens=int(tokens),
            clip_share=clipped / tokens if self._objective.clips else None,
            kl_mean=divergence / tokens if self._objective.beta else None,
        )

    def _run_schedule(self, of_hidden: Any, batches: Sequence[MicroBatch], **how: bool) -> Any:
        """Megatron's schedule over all chunks of this rank; what it collected."""
        iterators = [iter(batches) for _ in self.chunks]
        interleaved = len(self.chunks) > 1
        self.finish_gathering_weights()
        with without_output_layer(self.models):
            return get_forward_backward_func()(
                forward_step_func=partial(self._forward, of_hidden),
                data_iterator=iterators if interleaved else iterators[0],
                model=self.chunks if interleaved else self.chunks[0],
                num_microbatches=len(batches),
                # Micro-batches differ in length and say so themselves (variable_seq_lengths).
                seq_length=max(batch.num_tokens for batch in batches),
                micro_batch_size=1,
                **how,
            )

    def _forward(
        self, of_hidden: Any, batches: Iterator[MicroBatch], chunk: Any
    ) -> tuple[Tensor, Any]:
        """One micro-batch through one chunk, for the schedule: hidden states [1, T, H], and on the
        last stage what is to be made of them.
        """
        batch = next(batches)
        hidden = chunk(
            input_ids=batch.tokens_T[None],
            position_ids=batch.positions_T[None],
            attention_mask=None,
            packed_seq_params=packed_params(batch),
        )
        if not chunk.module.post_process:
            return hidden, None
        head = output_head(chunk.module, self._vocab_size)
        return hidden, partial(of_hidden, self._config, head, batch)

    @torch.no_grad()
    def score(self, samples: Sequence[Sample]) -> list[tuple[float, ...]]:
        """Log-probabilities of every response token under the current weights.

        Called by every rank with the same samples; every data-parallel replica computes them with
        its own weights and returns its own result, on all of its ranks.
        """
        config = self._config
        batch = build_microbatch(
            samples,
            [1.0] * len(samples),
            align=config.tensor_model_parallel_size,
            device=next(self.chunks[0].parameters()).device,
        )
        # Interleaved stages want a multiple of their number.
        batches = [batch] * (self.layout.pp_size if len(self.chunks) > 1 else 1)
        for chunk in self.chunks:
            chunk.eval()
        found = self._run_schedule(
            _log_probs, batches, forward_only=True, collect_non_loss_data=True
        )
        ends = list(accumulate(len(sample.response_ids) for sample in samples))
        flat_R = self._of_loss_rank(found[0] if self.layout.is_loss_rank else None, ends[-1])
        flat = flat_R.tolist()
        return [tuple(flat[a:b]) for a, b in zip([0, *ends], ends, strict=False)]

    def _of_loss_rank(self, log_probs_R: Tensor | None, length: int) -> Tensor:
        """The log-probs of the replica's loss rank, float32, on all ranks of the replica."""
        if log_probs_R is None:
            device = next(self.chunks[0].parameters()).device
            log_probs_R = torch.empty(length, dtype=torch.float32, device=device)
        source = (self.layout.pp_size - 1) * self.layout.tp_size
        return broadcast_over(
            log_probs_R.contiguous(), source, parallel_state.get_model_parallel_group()
        )

    def step(self, batches: Sequence[MicroBatch], factor: float, lr: float) -> StepResult:
        """One update with learning rate `lr`; called by every rank.

        No micro-batch anywhere (nothing accepted): nothing changes and `applied` is False.
        Errors: `NonFiniteError` on every rank, before any weight changes.
        """
        if not batches:
            return StepResult(
                applied=False,
                loss=0.0,
                grad_norm=0.0,
                lr=lr,
                trained_tokens=0,
                num_microbatches=0,
            )
        found = self.accumulate(batches, factor)
        set_learning_rate(self.optimizer, lr, self._weight_decay)
        self.optimizer.prepare_grads()
        norm = self.optimizer.get_grad_norm()
        grad_norm = math.nan if any_over_world(norm is None) else float(norm)
        if not (math.isfinite(found.loss) and math.isfinite(grad_norm)):
            raise NonFiniteError(self._describe_non_finite(found.loss, grad_norm))
        update(self.optimizer, norm)
        self._start_gathering_weights()
        return StepResult(
            applied=True,
            loss=found.loss,
            grad_norm=grad_norm,
            lr=lr,
            trained_tokens=found.trained_tokens,
            num_microbatches=len(batches),
            clip_share=found.clip_share,
            kl_mean=found.kl_mean,
        )

    def _describe_non_finite(self, loss: float, grad_norm: float) -> str:
        """What is wrong and where it came from; called by every rank."""
        values = f"loss {loss}, gradient norm {grad_norm}"
        message = f"{current_phase()}: {values}: the step was not applied"
        sources = gather_from_all([] if self._own_loss_is_finite else [describe_rank()])
        return f"{message}; not finite at {', '.join(sources)}" if sources else message

    def _start_gathering_weights(self) -> None:
        """Every rank has updated its part of the weights; the rest comes from the others."""
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync()
                self._gathering = True

    def finish_gathering_weights(self) -> None:
        """Wait until every weight on this rank is that of the last step. Whoever reads weights
        between a step and the next pass of the model calls it first.
        """
        if self._gathering:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
            self._gathering = False
