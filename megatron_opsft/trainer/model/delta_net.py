"""Gated delta nets for packed sequences, as Megatron modules in the place of self-attention.

A value head has a state S [key size, value size]. At each token it fades, and the value that S has
for the token's key moves towards the token's value; the token's query reads it:

    S = exp(g) S;   S = S + beta k (v - k S);   o = q S

`GatedDeltaNet` is plain torch: on a CPU, in float32, and on a GPU without flash-linear-attention.
Its parameters have the names and shapes of Megatron-Core's module of the same name, which a GPU
uses where it can (`delta_spec`). Memory and time grow with the length, not with its square.

Source: Yang et al., "Gated Delta Networks" (arXiv:2412.06464); computed chunk by chunk as in Yang
et al., "Parallelizing Linear Transformers with the Delta Rule" (arXiv:2406.06484).

Shapes: T tokens of a pack, C chunks of it with L tokens each, H value heads of this rank, K and V
numbers of a key and of a value.
"""

from collections.abc import Sequence
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

CHUNK_LENGTH = 64
_SMALLEST_NORM = (
    1e-6  # added to the square of a query's or key's norm, as in transformers
)


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
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            sum(self.sections.values()) * tp_size,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.tp_group,
        )
        conv_size = sum(self.conv_sections.values())
        dtype = config.params_dtype
        # Only its weight is used, [rows, 1, tokens that are seen].
        self.conv1d = nn.Conv1d(
            conv_size,
            conv_size,
            cast(int, config.linear_conv_kernel_dim),
            groups=conv_size,
            bias=False,
            dtype=dtype,
        )
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads, dtype=dtype))
        self.A_log = nn.Parameter(torch.empty(self.num_heads, dtype=dtype))
        for parameter in (self.conv1d.weight, self.dt_bias, self.A_log):
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)
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
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_group=self.tp_group,
        )

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


def causal_convolution(x: Tensor, weight: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return for each token and channel the weighted sum of the last tokens of its sequence, [T,
    channels], computed in float32.

    x: [T, channels]; weight: [channels, tokens that are seen], the token's own last; lengths:
    tokens of each sequence.
    """
    positions = torch.cat([torch.arange(length) for length in lengths]).to(x.device)
    weights = weight.float().T  # [tokens that are seen, channels]
    rows = x.float()
    total = rows * weights[-1]
    for distance in range(1, len(weights)):
        earlier = F.pad(rows, (0, 0, distance, 0))[: len(rows)]
        is_inside = (positions >= distance)[:, None]
        total = total + torch.where(is_inside, earlier, 0.0) * weights[-1 - distance]
    return total.to(x.dtype)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    lengths: Sequence[int],
) -> Tensor:
    """Return the outputs o of a pack, [T, H, V] in the dtype of v; computed in float32.

    q, k: [T, H, K], of any norm: they are divided by it, and q by sqrt(K) too. v: [T, H, V].
    log_decay, the g above, and beta: [T, H]. lengths: tokens of each sequence; every one begins
    with a state of zeros.

    Inside a chunk, the differences v - k S of all tokens solve one triangular system. From chunk to
    chunk only the states pass, those of all sequences at once.
    """
    dtype = v.dtype
    num_chunks = [-(-length // CHUNK_LENGTH) for length in lengths]
    rows = _rows_in_chunks(lengths, num_chunks).to(q.device)
    scale = q.shape[-1] ** -0.5

    def in_chunks(x: Tensor) -> Tensor:
        """Lay [T, H, ...] out as [C, H, L, ...], with zeros behind the end of each sequence."""
        padded = x.new_zeros(sum(num_chunks) * CHUNK_LENGTH, *x.shape[1:])
        padded = padded.index_copy(0, rows, x)
        return padded.unflatten(0, (-1, CHUNK_LENGTH)).transpose(1, 2)

    q, k, v = in_chunks(_unit(q) * scale), in_chunks(_unit(k)), in_chunks(v.float())
    log_decay, beta = in_chunks(log_decay.float()), in_chunks(beta.float())[..., None]
    faded = log_decay.cumsum(-1)  # since the beginning of the chunk
    # From token j to a later token i of the chunk, [C, H, i, j].
    between = (faded[..., :, None] - faded[..., None, :]).tril().exp().tril()
    until = faded.exp()[..., None]
    system = (beta * k @ k.mT) * between
    differences = _solve(system, beta * v)
    of_state = _solve(system, beta * k * until)
    inside = (q @ k.mT) * between
    total = faded[..., -1:]
    to_the_end = k * (total - faded).exp()[..., None]

    states = v.new_zeros(len(lengths), v.shape[1], q.shape[-1], v.shape[-1])
    sequences = torch.arange(len(lengths))  # those that go on
    numbers = torch.tensor(num_chunks)
    first_chunk = numbers.cumsum(0) - numbers
    outputs, order = [], []
    # The first chunk of every sequence, then the second of those that have one, and so on.
    for step in range(max(num_chunks)):
        goes_on = numbers[sequences] > step
        states, sequences = states[goes_on.to(states.device)], sequences[goes_on]
        chunks = (first_chunk[sequences] + step).to(states.device)
        news = differences[chunks] - of_state[chunks] @ states
        outputs.append(q[chunks] * until[chunks] @ states + inside[chunks] @ news)
        order.append(chunks)
        states = states * total[chunks].exp()[..., None] + to_the_end[chunks].mT @ news
    in_order = torch.cat(outputs)[torch.cat(order).argsort()]
    return in_order.transpose(1, 2).flatten(0, 1)[rows].to(dtype)


def _rows_in_chunks(lengths: Sequence[int], num_chunks: Sequence[int]) -> Tensor:
    """Return for each token its row in the pack whose sequences are padded to whole chunks, [T]."""
    rows, start = [], 0
    for length, number in zip(lengths, num_chunks, strict=True):
        rows.append(torch.arange(start, start + length))
        start += number * CHUNK_LENGTH
    return torch.cat(rows)


def _unit(x: Tensor) -> Tensor:
    """Divide queries or keys by their norm, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _SMALLEST_NORM)


def _solve(system: Tensor, right: Tensor) -> Tensor:
    """Solve (1 + the part of `system` below its diagonal) x = right."""
    return torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
