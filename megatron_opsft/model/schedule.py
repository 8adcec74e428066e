"""Megatron's pipeline schedule over the model chunks of this rank, on packed micro-batches."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_opsft.model.hidden_states import output_head, without_output_layer
from megatron_opsft.records import MicroBatch


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


class PassSchedule:
    """Runs passes of the model, and knows whether its weights have arrived.

    vocab_size: without padding. Every rank calls every method.
    """

    def __init__(
        self, chunks: list[DistributedDataParallel], config: TransformerConfig, *, vocab_size: int
    ) -> None:
        self.chunks = chunks
        self._config = config
        self._vocab_size = vocab_size
        self._gathering = False

    @property
    def models(self) -> list[GPTModel]:
        """The GPTModel chunks without their data-parallel wrapper."""
        return [cast(GPTModel, chunk.module) for chunk in self.chunks]

    def run(
        self,
        of_hidden: Any,
        batches: Sequence[MicroBatch],
        *,
        temperature: float = 1.0,
        **how: bool,
    ) -> Any:
        """What `of_hidden(config, head, batch, hidden)` gave, by micro-batch, on the last stage.

        batches: equally many on every rank. temperature: of the head; how: for Megatron's schedule.
        """
        iterators = [iter(batches) for _ in self.chunks]
        interleaved = len(self.chunks) > 1
        self.finish_gathering_weights()
        with without_output_layer(self.models):
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
        of_hidden: Any,
        temperature: float,
        batches: Iterator[MicroBatch],
        chunk: DistributedDataParallel,
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
        model = cast(GPTModel, chunk.module)
        if not model.post_process:
            return hidden, None
        head = output_head(model, self._vocab_size, temperature)
        return hidden, partial(of_hidden, self._config, head, batch)

    def start_gathering_weights(self) -> None:
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
