"""Passes of the model through Megatron's pipeline schedule, and those that only score responses.

The losses take the output layer's product over themselves, for response tokens alone: a pass hands
them hidden states instead of logits.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_opsft.methods.objective import LIKELIHOOD, Objective
from megatron_opsft.records import MicroBatch, Sample
from megatron_opsft.runtime.distributed import Layout, broadcast_over, join_over_context
from megatron_opsft.trainer.batching.microbatch import build_microbatch
from megatron_opsft.trainer.loss.cross_entropy import Method, summed_loss
from megatron_opsft.trainer.loss.fused_linear import token_statistics
from megatron_opsft.trainer.loss.output_head import OutputHead, whole_hidden
from megatron_opsft.trainer.loss.token_losses import WeightedLikelihood
from megatron_opsft.trainer.model.build import output_weight, without_output_layer
from megatron_opsft.trainer.model.routing_replay import replayed, replaying

# What is made of a micro-batch's hidden states on the last stage, [T, H] of all its tokens.
OfHidden = Callable[[OutputHead, MicroBatch, Tensor], Any]


def packed_params(batch: MicroBatch) -> PackedSeqParams:
    """Megatron's description of a packed micro-batch.

    Fillers that end a sequence count as its tokens. Nothing before them attends to them, every
    sequence can be cut as context parallelism wants it, and no attention has to leave gaps out:
    TransformerEngine up to 2.17.1 does so wrongly between parts of uneven lengths (its issue 3331).
    """
    borders = batch.cu_seqlens if batch.response_indices_R is not None else None
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        # The same tensors: that is how TransformerEngine knows that there are no gaps.
        cu_seqlens_q_padded=borders,
        cu_seqlens_kv_padded=borders,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
    )


@dataclass(eq=False, kw_only=True)
class ModelPasses:
    """The model's chunks on this rank. Every rank calls every method.

    vocab_size: without padding. objective: whose temperature the policy has.
    """

    chunks: list[DistributedDataParallel]
    config: TransformerConfig
    layout: Layout
    vocab_size: int
    cross_entropy: Method = "fused_linear"
    objective: Objective = LIKELIHOOD
    _replays: bool = field(
        default=False, init=False
    )  # whether micro-batches bring their routing

    @property
    def models(self) -> list[GPTModel]:
        """The GPTModel chunks without their data-parallel wrapper."""
        return [cast(GPTModel, chunk.module) for chunk in self.chunks]

    @torch.no_grad()
    def score_batches(
        self, batches: Sequence[MicroBatch], *, temperature: float | None = None
    ) -> list[Tensor]:
        """Log-probs [R] of each micro-batch, float32, with the rounding of a training step's, on
        the ranks of the last stage; none elsewhere.

        batches: equally many on every rank, packed as for a training step. temperature: the
        objective's unless it is given.
        """
        if not batches:
            return []
        if temperature is None:
            temperature = self.objective.temperature

        def log_probs(head: OutputHead, batch: MicroBatch, hidden_TH: Tensor) -> Tensor:
            losses = WeightedLikelihood(batch.weights_R)
            found = summed_loss(
                self.cross_entropy,
                hidden_TH,
                head,
                batch.loss_indices_R,
                batch.labels_R,
                losses,
            )
            return found[1]

        return self._score(log_probs, batches, temperature)

    @torch.no_grad()
    def hidden_states(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Hidden states [R, H] at the response tokens of each micro-batch, of the whole pack under
        context parallelism, in the CPU's memory; ranks and batches as for `score_batches`.
        """
        if not batches:
            return []
        found = self._score(
            lambda _, batch, h_TH: h_TH[batch.loss_indices_R].cpu(), batches, 1.0
        )
        device = batches[0].labels_R.device
        return [
            states_RH
            if batch.response_indices_R is None
            else join_over_context(
                states_RH.to(device),
                batch.response_indices_R,
                sum(batch.response_lengths),
            ).cpu()
            for batch, states_RH in zip(batches, found, strict=False)
        ]

    @torch.no_grad()
    def score(
        self,
        samples: Sequence[Sample],
        *,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> list[tuple[float, ...]]:
        """Log-probs of every response token of each sample under softmax(logits / temperature), or
        the entropy of that distribution at each of them, in nats; from float32 logits.

        Called with the same samples by every rank; every data-parallel replica computes them with
        its own weights and returns its own result, on all of its ranks.
        """
        layout, device = self.layout, next(self.chunks[0].parameters()).device
        batch = build_microbatch(
            samples,
            [1.0] * len(samples),
            align=self.config.tensor_model_parallel_size,
            device=device,
            cp_rank=layout.cp_rank,
            cp_size=layout.cp_size,
        )

        def scores(head: OutputHead, batch: MicroBatch, hidden_TH: Tensor) -> Tensor:
            of_tokens = batch.loss_indices_R, batch.labels_R
            found = token_statistics(hidden_TH, head, *of_tokens, entropy=entropy)
            return found.log_probs_R if found.entropy_R is None else found.entropy_R

        # Interleaved stages want a multiple of their number.
        batches = [batch] * (layout.pp_size if len(self.chunks) > 1 else 1)
        found = self._score(scores, batches, temperature)
        num_scores = sum(batch.response_lengths)
        flat_R = torch.empty(num_scores, device=device)
        if layout.is_loss_rank:
            flat_R = join_over_context(found[0], batch.response_indices_R, num_scores)
        source = (layout.pp_size - 1) * layout.tp_size
        broadcast_over(flat_R, source, parallel_state.get_model_parallel_group())
        flat, ends = flat_R.tolist(), list(accumulate(batch.response_lengths))
        return [tuple(flat[a:b]) for a, b in zip([0, *ends], ends, strict=False)]

    def _score(
        self, of_hidden: OfHidden, batches: Sequence[MicroBatch], temperature: float
    ) -> list[Tensor]:
        for chunk in self.chunks:
            chunk.eval()
        return self._run(
            of_hidden,
            batches,
            temperature,
            forward_only=True,
            collect_non_loss_data=True,
        )

    def _run(
        self,
        of_hidden: OfHidden,
        batches: Sequence[MicroBatch],
        temperature: float,
        **how: bool,
    ) -> Any:
        """What `of_hidden(head, batch, hidden_TH)` gave, by micro-batch, on the last stage.

        batches: equally many on every rank. temperature: of the head; how: for Megatron's schedule.
        """
        iterators = [iter(batches) for _ in self.chunks]
        interleaved = len(self.chunks) > 1
        self._replays = any(batch.routing_TW is not None for batch in batches)
        with (
            without_output_layer(self.models),
            replayed(self.models if self._replays else ()),
        ):
            return get_forward_backward_func()(
                forward_step_func=partial(self._forward, of_hidden, temperature),
                data_iterator=iterators if interleaved else iterators[0],
                model=self.chunks if interleaved else self.chunks[0],
                num_microbatches=len(batches),
                # Micro-batches differ in length and say so themselves (variable_seq_lengths).
                seq_length=max(batch.num_tokens for batch in batches),
                micro_batch_size=1,
                **how,
            )

    def _forward(
        self,
        of_hidden: OfHidden,
        temperature: float,
        batches: Iterator[MicroBatch],
        chunk: DistributedDataParallel,
    ) -> tuple[Tensor, Any]:
        """One micro-batch through one chunk, for the schedule: hidden states [1, T, H], and on the
        last stage what is to be made of them.
        """
        batch = next(batches)
        model = cast(GPTModel, chunk.module)
        replay = replaying(model, batch, self.config, self.layout)
        with replay if self._replays else nullcontext():
            hidden = chunk(
                input_ids=batch.tokens_T[None],
                position_ids=batch.positions_T[None],
                attention_mask=None,
                packed_seq_params=packed_params(batch),
            )
        if not model.post_process:
            return hidden, None
        head = OutputHead(
            weight_VH=output_weight(model),
            vocab_size=self.vocab_size,
            group=model.pg_collection.tp,
            temperature=temperature,
        )

        def finish(hidden: Tensor, non_loss_data: bool = True) -> Any:
            sharded = self.config.sequence_parallel
            return of_hidden(
                head,
                batch,
                whole_hidden(hidden[0], head.group, sequence_parallel=sharded),
            )

        return hidden, finish


def with_log_probs(
    batches: Sequence[MicroBatch],
    log_probs: Sequence[Tensor],
    name: str,
) -> list[MicroBatch]:
    """The micro-batches with what `score_batches` found, as `old_log_probs_R` or
    `reference_log_probs_R`; unchanged where it found nothing, since only the last stage reads them.
    """
    if not log_probs:
        return list(batches)
    pairs = zip(batches, log_probs, strict=True)
    return [replace(batch, **cast(Any, {name: found})) for batch, found in pairs]
