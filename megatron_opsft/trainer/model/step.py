"""The trainer of one rank: training steps, and passes that only score responses."""

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_opsft.errors import NonFiniteError
from megatron_opsft.methods.objective import LIKELIHOOD, Objective
from megatron_opsft.records import MicroBatch, Sample, StepResult
from megatron_opsft.runtime.distributed import (
    Layout,
    any_over_world,
    broadcast_over,
    gather_from_all,
    join_over_context,
    sum_over_world,
)
from megatron_opsft.runtime.phase import current_phase, describe_rank
from megatron_opsft.trainer.batching.microbatch import build_microbatch
from megatron_opsft.trainer.loss.cross_entropy import summed_loss
from megatron_opsft.trainer.loss.fused_linear import token_statistics
from megatron_opsft.trainer.loss.loss_memory import CrossEntropyKind
from megatron_opsft.trainer.loss.output_head import OutputHead, whole_hidden
from megatron_opsft.trainer.loss.token_losses import WeightedLikelihood
from megatron_opsft.trainer.model.build import output_weight, without_output_layer
from megatron_opsft.trainer.model.optimizer import set_learning_rate, update
from megatron_opsft.trainer.model.passes import (
    BatchSums,
    OfHidden,
    packed_params,
    sum_losses,
)
from megatron_opsft.trainer.model.routing_replay import replayed, replaying

NOTHING_DONE = StepResult(
    applied=False, loss=0.0, grad_norm=0.0, lr=0.0, trained_tokens=0, num_microbatches=0
)


@dataclass(eq=False, kw_only=True)
class Trainer:
    """The model's chunks and their optimizer on this rank. Every rank calls every method."""

    chunks: list[DistributedDataParallel]
    optimizer: ChainedOptimizer
    config: TransformerConfig
    layout: Layout
    vocab_size: int
    """Size of the vocabulary without padding."""
    cross_entropy: CrossEntropyKind = "fused_linear"
    objective: Objective = LIKELIHOOD
    """The losses, and the temperature of the policy."""

    def __post_init__(self) -> None:
        # False if the loss of this rank's last micro-batches was not finite.
        self._loss_is_finite = True
        # Sums over micro-batches and ranks are final here; Megatron must not divide them by a
        # token count, so `num_tokens` is left out.
        self.config.finalize_model_grads_func = (
            lambda model, num_tokens=None, **options: finalize_model_grads(
                model, None, **options
            )
        )

    @property
    def models(self) -> list[GPTModel]:
        """The GPTModel chunks without their data-parallel wrapper."""
        return [cast(GPTModel, chunk.module) for chunk in self.chunks]

    @torch.no_grad()
    def score_batches(
        self, batches: Sequence[MicroBatch], *, temperature: float | None = None
    ) -> list[Tensor]:
        """Return the log-probs of each micro-batch, float32 [R], with the rounding of a training
        step's; an empty list on ranks before the last stage.

        batches: equally many on every rank, packed as for a training step. temperature: by default
        the objective's.
        """
        if temperature is None:
            temperature = self.objective.temperature

        def log_probs(head: OutputHead, batch: MicroBatch, hidden_TH: Tensor) -> Tensor:
            _, token_values = summed_loss(
                self.cross_entropy,
                hidden_TH,
                head,
                batch.loss_indices_R,
                batch.labels_R,
                WeightedLikelihood(batch.weights_R),
            )
            return token_values.log_probs_R

        return self._run(log_probs, batches, temperature)

    @torch.no_grad()
    def hidden_states(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the hidden states at the response tokens of each micro-batch, [R, H], in the CPU's
        memory; under context parallelism of the whole pack. Ranks and batches as for
        `score_batches`.
        """

        def states(head: OutputHead, batch: MicroBatch, hidden_TH: Tensor) -> Tensor:
            return join_over_context(hidden_TH[batch.loss_indices_R], batch).cpu()

        return self._run(states, batches, temperature=1.0)

    @torch.no_grad()
    def score(
        self,
        samples: Sequence[Sample],
        *,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> list[tuple[float, ...]]:
        """Return the log-probs of each sample's response tokens under softmax(logits /
        temperature), or with `entropy` the entropy of that distribution at each of them, in nats;
        from float32 logits.

        Called by every rank with the same samples. Every data-parallel replica computes with its
        own weights and returns its own result, on all of its ranks.
        """
        layout = self.layout
        device = next(self.chunks[0].parameters()).device
        batch = build_microbatch(
            samples,
            [1.0] * len(samples),
            align=self.config.tensor_model_parallel_size,
            device=device,
            cp_rank=layout.cp_rank,
            cp_size=layout.cp_size,
        )

        def scores(head: OutputHead, batch: MicroBatch, hidden_TH: Tensor) -> Tensor:
            token_values = token_statistics(
                hidden_TH, head, batch.loss_indices_R, batch.labels_R, entropy=entropy
            )
            scores_R = token_values.entropy_R
            if scores_R is None:
                scores_R = token_values.log_probs_R
            return join_over_context(scores_R, batch)

        batches = [batch]
        if len(self.chunks) > 1:  # interleaved stages need a multiple of their number
            batches = [batch] * layout.pp_size
        scored = self._run(scores, batches, temperature)
        flat_R = torch.empty(sum(batch.response_lengths), device=device)
        if layout.is_loss_rank:
            flat_R = scored[0]
        source = (layout.pp_size - 1) * layout.tp_size
        broadcast_over(flat_R, source, parallel_state.get_model_parallel_group())
        by_sample = flat_R.cpu().split(batch.response_lengths)
        return [tuple(values.tolist()) for values in by_sample]

    def _run(
        self,
        of_hidden: OfHidden,
        batches: Sequence[MicroBatch],
        temperature: float,
        *,
        forward_only: bool = True,
    ) -> Any:
        """Pass the micro-batches through the chunks, on Megatron's pipeline schedule. On the last
        stage return the results of `of_hidden`, one for each micro-batch.

        batches: equally many on every rank. forward_only: compute no gradients; otherwise
        `of_hidden` returns a loss as the schedule expects it.
        """
        if not batches:
            return []
        for chunk in self.chunks:
            chunk.train(not forward_only)
        replays = any(batch.routing_TW is not None for batch in batches)
        with (
            without_output_layer(self.models),
            replayed(self.models),
        ):
            return get_forward_backward_func()(
                forward_step_func=partial(
                    self._forward, of_hidden, temperature, replays
                ),
                data_iterator=[iter(batches) for _ in self.chunks],
                model=self.chunks,
                num_microbatches=len(batches),
                # Micro-batches tell their lengths, which differ (variable_seq_lengths).
                seq_length=max(batch.num_tokens for batch in batches),
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )

    def _forward(
        self,
        of_hidden: OfHidden,
        temperature: float,
        replays: bool,
        batches: Iterator[MicroBatch],
        chunk: DistributedDataParallel,
    ) -> tuple[Tensor, Any]:
        """Pass one micro-batch through one chunk. Return its output [1, T, H] and, on the last
        stage, the function that the schedule calls with this output.
        """
        batch = next(batches)
        model: GPTModel = chunk.module
        replay = replaying(model, batch, self.config) if replays else nullcontext()
        with replay:
            output = chunk(
                input_ids=batch.tokens_T[None],
                position_ids=batch.positions_T[None],
                attention_mask=None,
                packed_seq_params=packed_params(batch),
            )
        if not model.post_process:
            return output, None
        head = OutputHead(
            weight_VH=output_weight(model),
            vocab_size=self.vocab_size,
            group=model.pg_collection.tp,
            temperature=temperature,
        )

        def finish(output: Tensor, non_loss_data: bool = True) -> Any:
            hidden_TH = whole_hidden(
                output[0],
                head.group,
                sequence_parallel=self.config.sequence_parallel,
            )
            return of_hidden(head, batch, hidden_TH)

        return output, finish

    def accumulate(self, batches: Sequence[MicroBatch], factor: float) -> StepResult:
        """Compute the main gradients of `factor` x the weighted sum of all ranks' token losses.
        Return the result of a step that is not applied yet, equal on every rank.

        Called with equally many micro-batches on every rank, at least one.
        """
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        sums_of_batches: list[BatchSums] = self._run(
            partial(
                sum_losses,
                self.objective,
                self.cross_entropy,
                self.config.gradient_accumulation_fusion,
            ),
            batches,
            self.objective.temperature,
            forward_only=False,
        )
        for chunk in self.chunks:
            chunk.scale_gradients(factor)
        tokens_here = 0
        sums_here = [0.0, 0.0, 0.0]
        if self.layout.is_loss_rank:
            tokens_here = sum(batch.num_loss_tokens for batch in batches)
            columns = zip(*sums_of_batches, strict=True)
            sums_here = [sum(map(float, column)) for column in columns]
        self._loss_is_finite = math.isfinite(sums_here[0])
        tokens, loss, clipped, divergence = sum_over_world([tokens_here, *sums_here])
        return replace(
            NOTHING_DONE,
            loss=factor * loss,
            trained_tokens=int(tokens),
            num_microbatches=len(batches),
            clip_share=clipped / tokens if self.objective.clips else None,
            kl_mean=divergence / tokens if self.objective.keeps_frozen_model else None,
        )

    def step(
        self, batches: Sequence[MicroBatch], factor: float, lr: float
    ) -> StepResult:
        """Make one update with learning rate `lr`. Called by every rank.

        Without any micro-batch (nothing accepted anywhere) nothing changes and `applied` is False.
        Errors: `NonFiniteError` on every rank, before any weight changes.
        """
        if not batches:
            return replace(NOTHING_DONE, lr=lr)
        result = self.accumulate(batches, factor)
        set_learning_rate(self.optimizer, lr)
        self.optimizer.prepare_grads()
        norm = self.optimizer.get_grad_norm()
        grad_norm = math.nan if any_over_world(norm is None) else float(norm)
        if not (math.isfinite(result.loss) and math.isfinite(grad_norm)):
            raise NonFiniteError(self._describe_non_finite(result.loss, grad_norm))
        update(self.optimizer, norm)
        return replace(result, applied=True, grad_norm=grad_norm, lr=lr)

    def _describe_non_finite(self, loss: float, grad_norm: float) -> str:
        """Return what is not finite, and on which ranks. Called by every rank."""
        values = f"loss {loss}, gradient norm {grad_norm}"
        message = f"{current_phase()}: {values}: the step was not applied"
        sources = gather_from_all([] if self._loss_is_finite else [describe_rank()])
        return f"{message}; not finite at {', '.join(sources)}" if sources else message
