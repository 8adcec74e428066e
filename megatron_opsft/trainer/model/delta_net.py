"""Gated delta nets as Megatron modules in the place of self-attention.

`GatedDeltaNet` is plain torch around the linear layers of its spec. Its parameters have the names
and shapes of Megatron-Core's module of the same name, which a GPU uses where it can (`delta_spec`).
`delta_rule` has what it computes.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn

from megatron_opsft.records import record
from megatron_opsft.trainer.model.delta_rule import causal_convolution, gated_delta_rule


@record
class DeltaSubmodules:
    """The parts of a gated delta net that a layer spec chooses."""

    in_proj: type
    """Hidden states -> queries, keys, values, their gates z, beta, alpha; heads are cut."""
    out_norm: type
    """Over the numbers of one head; it multiplies by its weight, also in a model whose other norms
    multiply by 1 + weight.
    """
    out_proj: type


class GatedDeltaNet(MegatronModule):
    """The gated delta net of one layer; this rank's heads of it."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: DeltaSubmodules,
        layer_number: int = 1,
        pg_collection: ProcessGroupCollection | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(config)
        assert pg_collection is not None
        self.tp_group = pg_collection.tp
        tp_size = self.tp_group.size()
        num_key_heads = cast(int, config.linear_num_key_heads) // tp_size
        self.num_heads = cast(int, config.linear_num_value_heads) // tp_size
        self.heads_per_key = self.num_heads // num_key_heads
        self.key_dim = cast(int, config.linear_key_head_dim)
        self.value_dim = cast(int, config.linear_value_head_dim)
        key_size = num_key_heads * self.key_dim
        value_size = self.num_heads * self.value_dim
        self.conv_sections = {"query": key_size, "key": key_size, "value": value_size}
        self.sections = {
            **self.conv_sections,
            "z": value_size,
            "beta": self.num_heads,
            "alpha": self.num_heads,
        }
        self._add_convolution_and_decay()
        linear = {
            "config": config,
            "bias": False,
            "is_expert": False,
            "tp_group": self.tp_group,
        }
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            sum(self.sections.values()) * tp_size,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **linear,
        )
        self.out_norm = build_module(
            submodules.out_norm,
            config=config,
            hidden_size=self.value_dim,
            eps=config.layernorm_epsilon,
        )
        self.out_proj = build_module(
            submodules.out_proj,
            value_size * tp_size,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **linear,
        )

    def _add_convolution_and_decay(self) -> None:
        """Add the parameters of this rank's channels and heads that are in no linear layer."""
        num_channels = sum(self.conv_sections.values())
        dtype = self.config.params_dtype
        # Only its weight is used, [channels, 1, tokens that are seen].
        self.conv1d = nn.Conv1d(
            num_channels,
            num_channels,
            cast(int, self.config.linear_conv_kernel_dim),
            groups=num_channels,
            bias=False,
            dtype=dtype,
        )
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads, dtype=dtype))
        self.A_log = nn.Parameter(torch.empty(self.num_heads, dtype=dtype))
        for parameter in (self.conv1d.weight, self.dt_bias, self.A_log):
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *args: Any,
        packed_seq_params: PackedSeqParams,
        **unused: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output for hidden states [T, 1, hidden], and no bias; with sequence
        parallelism each rank has its share of the tokens. All ranks of the tensor-parallel group
        call it.
        """
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        mixed, _ = self.in_proj(hidden_states)
        conv_size = sum(self.conv_sections.values())
        _, _, _, z_size, *head_sizes = self.sections.values()
        qkv, z, b, a = mixed[:, 0].split([conv_size, z_size, *head_sizes], dim=-1)

        qkv = F.silu(causal_convolution(qkv, self.conv1d.weight[:, 0], lengths))
        q, k, v = qkv.split(list(self.conv_sections.values()), dim=-1)
        q, k = (self._for_each_value_head(part) for part in (q, k))
        v = v.unflatten(-1, (self.num_heads, self.value_dim))
        step = F.softplus(a.float() + self.dt_bias.float())
        log_decay = -self.A_log.float().exp() * step
        outputs = gated_delta_rule(q, k, v, log_decay, b.sigmoid(), lengths)

        gates = F.silu(z.unflatten(-1, (self.num_heads, self.value_dim)).float())
        gated = (self.out_norm(outputs) * gates).to(mixed.dtype)
        output: tuple[Tensor, Tensor | None] = self.out_proj(gated.flatten(1)[:, None])
        return output

    def _for_each_value_head(self, part: Tensor) -> Tensor:
        """Return queries or keys as [T, H, K]: the value heads that share one follow each other."""
        heads = part.unflatten(-1, (-1, self.key_dim))
        return heads.repeat_interleave(self.heads_per_key, dim=1)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Describe the parameters for a checkpoint, by the keys of Megatron-Core's own module: what
        is made of several sections has a tensor for each.
        """
        described: dict[str, Any] = super().sharded_state_dict(
            prefix, sharded_offsets, metadata
        )
        sections_of: dict[str, dict[str, int]] = {
            "in_proj.weight": self.sections,
            "conv1d.weight": self.conv_sections,
            "dt_bias": {"": self.num_heads},
            "A_log": {"": self.num_heads},
        }
        for name, sections in sections_of.items():
            key = prefix + name
            described[key] = ShardedTensorFactory(
                key,
                self.get_parameter(name),
                lambda key, tensor, *unused, sections=sections: self._pieces(
                    key, tensor, sections, sharded_offsets
                ),
                merge_fn=torch.cat,
            )
        return described

    def _pieces(
        self,
        key: str,
        tensor: Tensor,
        sections: dict[str, int],
        sharded_offsets: tuple[tuple[int, int, int], ...],
    ) -> list[ShardedTensor]:
        """Return this rank's share of each section of a parameter, views of `tensor`."""
        num_lead_axes = len(sharded_offsets)
        cut = (num_lead_axes, self.tp_group.rank(), self.tp_group.size())
        copy_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        pieces = []
        for name, rows in zip(
            sections, tensor.split(list(sections.values())), strict=True
        ):
            pieces.append(
                ShardedTensor.from_rank_offsets(
                    f"{key}.{name}" if name else key,
                    rows,
                    *sharded_offsets,
                    cut,
                    replica_id=(0, 0, copy_rank),
                    prepend_axis_num=num_lead_axes,
                )
            )
        return pieces
