"""A model that only reads: its weights on this rank, without gradients, buffers and optimizer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_opsft.architectures.config_from_hf import read_model_shape
from megatron_opsft.config import ParallelConfig, TrainConfig
from megatron_opsft.loss.output_head import OutputHead, whole_hidden
from megatron_opsft.model.build import build_model
from megatron_opsft.model.checks import check_layout
from megatron_opsft.model.hidden_states import output_head, without_output_layer
from megatron_opsft.model.schedule import packed_params
from megatron_opsft.model.shards import ModelShards
from megatron_opsft.model.transformer_config import transformer_config, uses_transformer_engine
from megatron_opsft.records import MicroBatch
from megatron_opsft.runtime.device import Device
from megatron_opsft.runtime.distributed import Layout
from megatron_opsft.storage.opened import open_weights
from megatron_opsft.weights.rules import WeightTable


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenModel:
    """One pipeline stage, tensor-parallel. vocab_size: without padding."""

    model: Any
    config: TransformerConfig
    vocab_size: int

    @torch.no_grad()
    def hidden_states(self, batch: MicroBatch) -> tuple[Tensor, OutputHead]:
        """Of all tokens, [T, H] on every rank of the tensor-parallel group, and the layer that
        makes logits of them. Called by all ranks of the group.
        """
        with without_output_layer([self.model]):
            hidden = self.model(
                input_ids=batch.tokens_T[None],
                position_ids=batch.positions_T[None],
                attention_mask=None,
                packed_seq_params=packed_params(batch),
            )
        head = output_head(self.model, self.vocab_size)
        parallel = self.config.sequence_parallel
        return whole_hidden(hidden[0], head.group, sequence_parallel=parallel), head


def tensor_parallel(model_dir: Path, tp: int) -> ParallelConfig:
    """The layout of a model of one stage. Errors: `UserError` where the model cannot be cut so."""
    shape = read_model_shape(model_dir)
    parallel = ParallelConfig(tp=tp, sequence_parallel=shape.moe is not None and tp > 1)
    check_layout(shape, parallel)
    return parallel


def load_frozen(model_dir: Path, *, dtype: str, device: Device, layout: Layout) -> FrozenModel:
    """The directory's model; each rank reads only its own slices. Called by every rank of a layout
    of one stage, whose tensor-parallel size fits (`tensor_parallel`).
    """
    shape = read_model_shape(model_dir)
    config = transformer_config(
        shape,
        dtype=dtype,
        parallel=tensor_parallel(model_dir, layout.tp_size),
        train=TrainConfig(),
        device=device,
    )
    names: Literal["te", "local"] = "te" if uses_transformer_engine(device, dtype) else "local"
    (model,) = models = build_model(shape, config, device)
    stored = open_weights(model_dir, WeightTable(shape, "te"), check=False)
    ModelShards.of(models, WeightTable(shape, names, layout.tp_size), layout).fill(stored.read)
    model.eval()
    return FrozenModel(model=model, config=config, vocab_size=shape.vocab_size)
