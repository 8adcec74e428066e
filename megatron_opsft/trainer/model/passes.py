"""Passes of micro-batches through the model, on Megatron's pipeline schedule.

The losses multiply by the output layer's weight themselves, for response tokens alone: a pass hands
them hidden states instead of logits.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_opsft.records import MicroBatch
from megatron_opsft.trainer.loss.output_head import OutputHead, whole_hidden
from megatron_opsft.trainer.model.build import output_weight, without_output_layer
from megatron_opsft.trainer.model.routing_replay import replayed, replaying

OfHidden = Callable[[OutputHead, MicroBatch, Tensor], Any]
"""Takes a micro-batch and the hidden states of all its tokens after the last layer, [T, H]; returns
what a pass computes: a loss, scores, or some of the hidden states.
"""


def packed_params(batch: MicroBatch) -> PackedSeqParams:
    """Return Megatron's description of a packed micro-batch.

    Padding at the end of a sequence counts as its tokens: causal attention never lets earlier
    tokens see it, every sequence can be cut for context parallelism, and no attention has to skip
    gaps. TransformerEngine up to 2.17.1 skips them wrongly if the ranks' shares have uneven lengths
    (its issue 3331).
    """
    borders = batch.cu_seqlens if batch.response_indices_R is not None else None
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        # The same tensors tell TransformerEngine that there are no gaps.
        cu_seqlens_q_padded=borders,
        cu_seqlens_kv_padded=borders,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
    )


def run_schedule(
    chunks: Sequence[DistributedDataParallel],
    batches: Sequence[MicroBatch],
    of_hidden: OfHidden,
    *,
    config: TransformerConfig,
    vocab_size: int,
    temperature: float,
    forward_only: bool,
) -> Any:
    """Pass the micro-batches through this rank's chunks. On the last stage return the results of
    `of_hidden`, one for each micro-batch.

    Called by every rank, with equally many micro-batches. forward_only: compute no gradients;
    otherwise `of_hidden` returns a loss as Megatron's schedule expects it.
    """
    for chunk in chunks:
        chunk.train(not forward_only)
    replays = any(batch.routing_TW is not None for batch in batches)

    def forward_step(
        batch_iterator: Iterator[MicroBatch], chunk: DistributedDataParallel
    ) -> tuple[Tensor, Any]:
        """Pass one micro-batch through one chunk. Return its output [1, T, H] and, on the last
        stage, the function that the schedule calls with this output.
        """
        batch = next(batch_iterator)
        model: GPTModel = chunk.module
        replay = replaying(model, batch, config) if replays else nullcontext()
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
            vocab_size=vocab_size,
            group=model.pg_collection.tp,
            temperature=temperature,
        )

        def finish(output: Tensor, non_loss_data: bool = True) -> Any:
            sharded = config.sequence_parallel
            hidden_TH = whole_hidden(output[0], head.group, sequence_parallel=sharded)
            return of_hidden(head, batch, hidden_TH)

        return output, finish

    models: list[GPTModel] = [chunk.module for chunk in chunks]
    iterators = [iter(batches) for _ in chunks]
    is_interleaved = len(chunks) > 1
    with without_output_layer(models), replayed(models if replays else ()):
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if is_interleaved else iterators[0],
            model=chunks if is_interleaved else chunks[0],
            num_microbatches=len(batches),
            # Micro-batches differ in length and tell theirs themselves (variable_seq_lengths).
            seq_length=max(batch.num_tokens for batch in batches),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )


def with_log_probs(
    batches: Sequence[MicroBatch], log_probs: Sequence[Tensor], name: str
) -> list[MicroBatch]:
    """Return the micro-batches with the result of `Trainer.score_batches` as their field `name`,
    which is `old_log_probs_R` or `reference_log_probs_R`.

    Without log-probs they are unchanged: only ranks of the last stage have and need them.
    """
    if not log_probs:
        return list(batches)
    pairs = zip(batches, log_probs, strict=True)
    return [replace(batch, **cast(Any, {name: values_R})) for batch, values_R in pairs]
