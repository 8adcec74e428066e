"""LoRA on Megatron's linear layers: the weights are frozen, and adapters beside them are trained.

`models/weights/lora.py` says which layers get adapters and how they are cut. An adapter adds its
output to its layer's by a hook, so that Megatron's own layers and TransformerEngine's compute as
they always do. Tensor-parallel ranks exchange r numbers a token instead of hidden states, and
gradients of small factors.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from megatron_opsft.config import LoraConfig
from megatron_opsft.models.architectures.template import ShardKind, WeightRule
from megatron_opsft.models.weights.filling import ReadRect, fill_shard
from megatron_opsft.models.weights.lora import (
    MERGE_BYTES,
    AdapterRules,
    adapter_rules,
)
from megatron_opsft.models.weights.rectangles import Rect
from megatron_opsft.models.weights.rules import WeightTable, local_to_global
from megatron_opsft.models.weights.slicing import shard_parameter, shard_shape
from megatron_opsft.runtime.distributed import Layout, Shard, tensor_parallel_group
from megatron_opsft.runtime.parked import Whereabouts, in_place


class Adapter(nn.Module):
    """This rank's share of the adapter of one linear layer.

    Called with the layer's input, [..., in], by all ranks of the layer's tensor-parallel group, it
    returns what it adds to the layer's output, [..., out].
    """

    def __init__(
        self,
        rules: AdapterRules,
        lora: LoraConfig,
        shard: Shard,
        config: TransformerConfig,
        weight: Tensor,
        norm_weight: Tensor | None,
    ) -> None:
        """rules: those of `weight`, the parameter that the adapter belongs to. shard: this rank's
        of it. norm_weight: that of the RMSNorm that the layer itself applies to its input, as
        TransformerEngine's may. A and B get the weight's dtype and device.
        """
        super().__init__()
        self.rules = rules
        self.shard = shard
        self._rank = lora.rank
        self._scale = lora.scale
        # Experts get and give whole tokens: the dispatcher gathers them and sums their outputs.
        self._is_expert = rules.weight.is_expert
        self._splits_tokens = config.sequence_parallel and not self._is_expert
        self._group = tensor_parallel_group(is_expert=self._is_expert)
        self._cuts_inputs = rules.weight.kind is ShardKind.ROW
        self._norm_weight = norm_weight
        self._norm_eps = config.layernorm_epsilon
        self._norm_is_zero_centered = config.layernorm_zero_centered_gamma
        # The rows of this rank's weight: groups of equal height, one after another, and in each the
        # rows of every part in turn.
        self._num_groups = 1
        if rules.weight.kind in (ShardKind.QKV, ShardKind.GATED_QKV):
            self._num_groups = rules.weight.num_groups // shard.tp_size
        num_rows = dict.fromkeys(rules.weight.hf_shapes, 0)
        for piece in shard_parameter(rules.weight, shard.tp_rank, shard.tp_size).copies:
            num_rows[piece.source.tensor] += piece.target.row1 - piece.target.row0
        self._rows_of_part = [rows // self._num_groups for rows in num_rows.values()]
        self.lora_A = self._factor(rules.lora_A, weight)
        self.lora_B = self._factor(rules.lora_B, weight)

    def _factor(self, rule: WeightRule, weight: Tensor) -> nn.Parameter:
        """Return this rank's A or B, uninitialised, with the marks that Megatron looks for."""
        factor = nn.Parameter(weight.new_empty(shard_shape(rule, self.shard.tp_size)))
        # False for experts that only some ranks have: they get an optimizer of their own.
        marks: Any = factor
        marks.allreduce = getattr(weight, "allreduce", True)
        is_copy = rule.kind is ShardKind.COPY
        if self._is_expert or not is_copy:
            # Gradient norms count a parameter without this mark on tensor-parallel rank 0 alone,
            # also one of experts, whose ranks are others.
            set_tensor_model_parallel_attributes(factor, True, rule.kind.axis, 1)
        if self._is_expert and is_copy and self.shard.tp_rank:
            marks.shared = True  # counted on the first rank of the experts' group alone
        return factor

    def factors(self) -> list[tuple[WeightRule, nn.Parameter]]:
        """Return A and B with their rules."""
        return [(self.rules.lora_A, self.lora_A), (self.rules.lora_B, self.lora_B)]

    def fill(self, read: ReadRect) -> None:
        """Overwrite A and B from tensors under their HF names."""
        for rule, factor in self.factors():
            tp_rank, tp_size = self.shard.tp_rank, self.shard.tp_size
            fill_shard(rule, read, factor, tp_rank=tp_rank, tp_size=tp_size)

    def forward(self, input_: Tensor) -> Tensor:
        lora_A: Tensor = self.lora_A
        lora_B: Tensor = self.lora_B
        if self._norm_weight is not None:
            input_ = self._normed(input_, self._norm_weight)
        # The factor that is not cut has a part of its gradient on each rank: from its share of the
        # tokens, or for experts from its share of the weight.
        if self._splits_tokens or self._is_expert:
            if self._cuts_inputs:
                lora_B = self._with_summed_gradient(lora_B)
            else:
                lora_A = self._with_summed_gradient(lora_A)
        low = self._exchange(F.linear(input_, lora_A))
        return self._spread(self._scale * low, lora_B)

    def _normed(self, input_: Tensor, weight: Tensor) -> Tensor:
        """Return what the layer's own norm makes of its input."""
        size = input_.shape[-1:]
        if not self._norm_is_zero_centered:
            return F.rms_norm(input_, size, weight, self._norm_eps)
        scale = 1.0 + weight.float()
        return F.rms_norm(input_.float(), size, scale, self._norm_eps).to(input_.dtype)

    def _with_summed_gradient(self, tensor: Tensor) -> Tensor:
        """Return the tensor; its gradient is the sum of the gradients on the group's ranks."""
        return copy_to_tensor_model_parallel_region(tensor, group=self._group)

    def _exchange(self, low: Tensor) -> Tensor:
        """Return A x of the tokens that B gets, summed over the ranks if A is cut. low: A x of this
        rank's tokens, or its part of the sum.
        """
        if self._is_expert:
            return low
        if self._cuts_inputs:
            if self._splits_tokens:
                return reduce_scatter_to_sequence_parallel_region(
                    low, group=self._group
                )
            return reduce_from_tensor_model_parallel_region(low, group=self._group)
        if self._splits_tokens:
            return gather_from_sequence_parallel_region(
                low, tensor_parallel_output_grad=True, group=self._group
            )
        return self._with_summed_gradient(low)

    def _spread(self, low: Tensor, lora_B: Tensor) -> Tensor:
        """Multiply each part's r numbers, side by side in `low` [..., parts x r], by its rows of B;
        return the results in the order of the weight's rows, [..., out].
        """
        rows_by_group = lora_B.unflatten(0, (self._num_groups, -1))
        first_row = first_column = 0
        outputs = []
        for layer, num_rows in zip(self.rules.parts, self._rows_of_part, strict=True):
            if layer is None:
                shape = (*low.shape[:-1], self._num_groups, num_rows)
                outputs.append(low.new_zeros(shape))
                continue
            rows = rows_by_group[:, first_row : first_row + num_rows].flatten(0, 1)
            part = low[..., first_column : first_column + self._rank]
            output = F.linear(part, rows).unflatten(-1, (self._num_groups, num_rows))
            outputs.append(output)
            first_row += num_rows
            first_column += self._rank
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return joined.flatten(-2)

    @torch.no_grad()
    def merged_into(self, weight: Tensor, on_device: Whereabouts = in_place) -> Tensor:
        """Return W + (alpha / r) B A for this rank's `weight`, new memory of its dtype.

        on_device: of the three while the trainer sleeps, `Offload.on_device`.
        Computed in float64 and rounded once, so other devices and layouts get the same numbers, up
        to rare ties. No communication: A and B are cut as the weight is.
        """
        merged = torch.empty_like(weight)
        weight = on_device(weight)
        lora_A = on_device(self.lora_A).double()
        lora_B = on_device(self.lora_B).double() * self._scale
        num_rows, num_columns = weight.shape
        # Some columns at a time: their float64 sums would take four times the weight's memory.
        step = max(1, MERGE_BYTES // (8 * num_rows))
        for first in range(0, num_columns, step):
            columns = slice(first, first + step)
            # Column i of B A is what the adapter makes of the i-th unit vector, whose A x is
            # column i of A.
            sums = self._spread(lora_A[:, columns].T, lora_B).T
            merged[:, columns] = sums.add_(weight[:, columns])
        return merged


def add_adapters(
    models: Sequence[GPTModel],
    table: WeightTable,
    layout: Layout,
    lora: LoraConfig,
    seed: int,
) -> None:
    """Freeze the weights of `models`, this rank's unwrapped chunks, and add adapters that change
    nothing yet: A random as PEFT's, B zero. Called by every rank.

    seed: A depends on it and on names, so it is the same in every layout.
    """
    experts = layout.local_experts(table.num_experts)
    for model in models:
        model.requires_grad_(False)
        adapted: set[nn.Module] = set()
        for global_name, local_name in global_names(model, experts).items():
            rules = adapter_rules(table.by_mcore_name[global_name], lora)
            if rules is None:
                continue
            path, _, name = local_name.rpartition(".")
            linear = model.get_submodule(path)
            shard = layout.shard(is_expert=rules.weight.is_expert)
            weight = model.get_parameter(local_name)
            norm_weight = getattr(linear, "layer_norm_weight", None)
            adapter = Adapter(rules, lora, shard, model.config, weight, norm_weight)
            adapter.fill(first_values(rules, seed))
            linear.add_module(name.replace("weight", "adapter"), adapter)
            adapted.add(linear)
        for linear in adapted:
            linear.register_forward_hook(_add_adapter_output)
        if model.pre_process and model.config.recompute_granularity:
            # What is recomputed has gradients only if its input has one.
            model.embedding.register_forward_hook(_require_gradient)


def global_names(model: GPTModel, experts: range) -> dict[str, str]:
    """Return the name of every parameter of a chunk with the whole model's indices -> its own.

    experts: global numbers of the experts on this rank.
    """
    offset = get_transformer_layer_offset(model.config, vp_stage=model.vp_stage)
    return {
        local_to_global(name, offset, experts.start): name
        for name, _ in model.named_parameters()
    }


def first_values(rules: AdapterRules, seed: int) -> ReadRect:
    """Return a function that makes the values that an adapter starts from, by their HF names: A
    uniform in +-1 / sqrt(in), as in PEFT, and B zero.
    """
    shapes_of_A = rules.lora_A.hf_shapes

    def read(rect: Rect) -> Tensor:
        if rect.tensor not in shapes_of_A:
            return rect.view(torch.zeros(rules.lora_B.hf_shapes[rect.tensor]))
        num_rows, num_inputs = shapes_of_A[rect.tensor]
        digest = hashlib.sha256(f"{seed} {rect.tensor}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
        bound = 1 / math.sqrt(num_inputs)
        values = torch.empty(num_rows, num_inputs)
        return rect.view(values.uniform_(-bound, bound, generator=generator))

    return read


def _add_adapter_output(
    linear: nn.Module, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    """Add the adapters' output to that of their layer: a forward hook of the layer."""
    output, bias = outputs
    adapters = [child for child in linear.children() if isinstance(child, Adapter)]
    if len(inputs) == 1:
        (adapter,) = adapters
        return output + adapter(inputs[0]), bias
    # A grouped layer: the tokens of each expert, one after another, and their numbers.
    tokens, num_tokens = inputs
    by_expert = tokens.split(list(map(int, num_tokens)))
    added = [adapter(part) for adapter, part in zip(adapters, by_expert, strict=True)]
    return output + torch.cat(added), bias


def _require_gradient(
    embedding: nn.Module, inputs: tuple[Any, ...], output: Tensor
) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def adapters_of(models: Sequence[GPTModel]) -> list[Adapter]:
    """Return the adapters of this rank in the order of the model; none without LoRA."""
    adapters = []
    for model in models:
        adapters += [part for part in model.modules() if isinstance(part, Adapter)]
    return adapters


class PolicyWeights(Mapping[str, Tensor]):
    """Weights by Megatron name, each on the device and with its adapter added when it is asked for.

    The last sum is kept, as a weight is asked for rectangle by rectangle; so an object serves one
    pass over the weights, between two updates.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        adapters: Mapping[str, Adapter],
        on_device: Whereabouts,
    ) -> None:
        """weights: all parameters. adapters: by the Megatron names of their weights."""
        self._weights = weights
        self._adapters = adapters
        self._on_device = on_device
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        weight = self._weights[name]
        adapter = self._adapters.get(name)
        if adapter is None:
            return self._on_device(weight)
        if self._last is None or self._last[0] != name:
            self._last = None  # before the next one is made
            self._last = name, adapter.merged_into(weight, self._on_device)
        return self._last[1]

    def is_adapted(self, name: str) -> bool:
        """True if the weight of this Megatron name has an adapter."""
        return name in self._adapters

    def __contains__(self, name: object) -> bool:
        return name in self._weights  # Mapping's own would compute the sum

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
