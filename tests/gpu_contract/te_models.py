"""TransformerEngine's layers as a run on GPUs builds them, on the meta device, against the weight
tables and against Megatron's plain layers.

Prints JSON: for each case how much was compared and what differs. Usage: python te_models.py
dense|experts
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from model_cases import DENSE, EXPERTS, TeCase
from pretend_cuda import pretend
from te_checkpoints import checkpoint_entries, key_problems

from megatron_opsft.architectures.template import Rule, ShardKind
from megatron_opsft.config import OptimizerConfig, ParallelConfig, TrainConfig
from megatron_opsft.runtime.device import Device
from megatron_opsft.weights.checkpoint_keys import entry_of
from megatron_opsft.weights.rules import WeightTable, local_to_global
from megatron_opsft.weights.slicing import shard_shape


class PretendedGpu(Device):
    """A GPU to everyone who asks; tensors on it have no memory."""

    @property
    def is_cuda(self) -> bool:
        return True


@contextmanager
def rank_of(case: TeCase, rank: int) -> Iterator[tuple[Any, PretendedGpu, ParallelConfig]]:
    """Inside, this process is one rank of the case's world: its layout, its GPU."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_opsft.runtime import cpu_compat
    from megatron_opsft.runtime.distributed import make_groups, stop_distributed

    parallel = ParallelConfig(
        tp=case.tp,
        pp=case.pp,
        cp=case.cp,
        ep=case.ep,
        etp=case.etp,
        vpp=case.vpp,
        sequence_parallel=case.sequence_parallel,
    )
    world_size = case.tp * case.pp * case.cp * case.dp
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        layout = make_groups(parallel)
        meta = torch.device("meta")
        with patch.object(cpu_compat, "stands_for_cuda", meta), meta:
            yield layout, PretendedGpu(torch_device=meta, backend="fake"), parallel
    finally:
        stop_distributed()


def build(case: TeCase, gpu: PretendedGpu, parallel: ParallelConfig, *, te: bool) -> list[Any]:
    """The model chunks of this rank, of either layer spec."""
    from megatron_opsft.model import build, transformer_config

    chosen = {"uses_transformer_engine": lambda device, dtype: te}
    with patch.multiple(transformer_config, **chosen), patch.multiple(build, **chosen):
        config = transformer_config.transformer_config(
            case.shape,
            dtype="bfloat16",
            parallel=parallel,
            train=TrainConfig.model_validate(case.train),
            device=gpu,
            deterministic=case.deterministic,
        )
        if not case.grouped:
            config.moe_grouped_gemm = False
        models = build.build_model(case.shape, config, gpu)
    for model in models:
        mark_norms(model)
    return models


def mark_norms(model: Any) -> None:
    """What TransformerEngine's norms do when they fill their weights, which it leaves out on the
    meta device.
    """
    from transformer_engine.pytorch import RMSNorm
    from transformer_engine.pytorch.ops import RMSNorm as Filled

    with patch.object(Filled, "reset_parameters", lambda self: None):
        for module in model.modules():
            if isinstance(module, RMSNorm):
                module.reset_parameters()


def named(models: list[Any]) -> dict[str, Any]:
    """The parameters by global name."""
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    found = {}
    first_expert = experts_of(models[0].config).start
    for model in models:
        offset = get_transformer_layer_offset(model.config, vp_stage=model.vp_stage)
        for name, parameter in model.named_parameters():
            found[local_to_global(name, offset, first_expert)] = parameter
    return found


def experts_of(config: Any) -> range:
    """Those of this rank."""
    from megatron_opsft.runtime.distributed import current_layout

    return current_layout().own_experts(config.num_moe_experts or 0)


def mark_problems(case: TeCase, rule: Rule, parameter: Any) -> Iterator[str]:
    """Shape, dtype and tensor-parallel marks against a rule of the weight table."""
    import torch

    tp = (case.etp or case.tp) if rule.is_expert else case.tp
    if tuple(parameter.shape) != shard_shape(rule, tp):
        yield f"has shape {list(parameter.shape)}, not {list(shard_shape(rule, tp))}"
    if getattr(parameter, "allreduce", True) == (rule.is_expert and case.ep > 1):
        yield f"is {'not ' * rule.is_expert}shared out over expert-parallel ranks"
    if parameter.dtype != torch.bfloat16:
        yield f"is {parameter.dtype}"
    if case.tp == 1:
        return
    is_cut = rule.kind is not ShardKind.COPY
    if bool(getattr(parameter, "tensor_model_parallel", False)) != is_cut:
        yield f"has tensor_model_parallel={not is_cut}"
    axis = 1 if rule.kind is ShardKind.ROW else 0
    if is_cut and parameter.partition_dim != axis:
        yield f"has partition_dim={parameter.partition_dim}, not {axis}"
    # What each rank computes from its part of the tokens; Megatron adds those gradients up, and
    # the ones of norms over heads by their names.
    sums = "q_layernorm" in rule.mcore_name or "k_layernorm" in rule.mcore_name
    is_marked = getattr(parameter, "sequence_parallel", False)
    if not is_cut and case.sequence_parallel and not sums and not is_marked:
        yield "is not marked for sequence parallelism"
    if is_cut and is_marked:
        yield "is marked for sequence parallelism"


def parameter_problems(case: TeCase, table: WeightTable, models: list[Any]) -> Iterator[str]:
    """Missing, surplus and wrong parameters, and modules that round weight gradients."""
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    found = named(models)
    rules: dict[str, Rule] = {}
    for model in models:
        offset = get_transformer_layer_offset(model.config, vp_stage=model.vp_stage)
        layers = range(offset, offset + len(model.decoder.layers))
        stage = table.stage_rules(
            layers,
            has_embedding=model.pre_process,
            has_output=model.post_process,
            experts=experts_of(model.config),
        )
        rules |= {rule.mcore_name: rule for rule in stage}
        for name, module in model.named_modules():
            if not getattr(module, "fuse_wgrad_accumulation", True):
                yield f"{name} rounds its weight's gradient"
    yield from (f"{name} is missing" for name in rules.keys() - found.keys())
    yield from (f"{name} is in no table" for name in found.keys() - rules.keys())
    for name in rules.keys() & found.keys():
        yield from (f"{name} {what}" for what in mark_problems(case, rules[name], found[name]))


def optimizer_problems(case: TeCase, models: list[Any], parallel: ParallelConfig) -> Iterator[str]:
    """Of Megatron's distributed optimizer over these parameters: one part, each parameter once."""
    import torch

    from megatron_opsft.model.build import wrap_for_training
    from megatron_opsft.model.optimizer import build_optimizer

    def type_of(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Any:
        """What the optimizer looks at."""
        kind = "BFloat16" if tensor.dtype == torch.bfloat16 else "Float"
        return tensor.to(dtype) if dtype else f"torch.cuda.{kind}Tensor"

    chunks = wrap_for_training(models, models[0].config, parallel)
    with patch.object(torch.Tensor, "type", type_of):
        optimizer = build_optimizer(chunks, OptimizerConfig(), bf16=True)
    kind = type(optimizer.chained_optimizers[0].optimizer)
    if not kind.__module__.startswith("transformer_engine."):
        yield f"the optimizer is {kind.__module__}.{kind.__name__}, not TransformerEngine's"
    yield from share_problems(models, optimizer)
    inside = sum(len(b.params) for c in chunks for b in c.buffers + c.expert_parallel_buffers)
    if inside != len(named(models)):
        yield f"{inside} of {len(named(models))} parameters have a gradient buffer"


def share_problems(models: list[Any], optimizer: Any) -> Iterator[str]:
    """A data-parallel rank's share of a checkpoint: what it updates, each moment and weight."""
    from megatron_opsft.model.checkpoint_share import MOMENTS, describe_models, own_share

    share = own_share(describe_models(models), optimizer, is_loading=False)
    groups = [
        group for part in optimizer.chained_optimizers for group in part.optimizer.param_groups
    ]
    owned = sum(p.numel() for group in groups for p in group["params"])
    for name in (*MOMENTS, "fp32_param"):
        prefix = f"optimizer.state.{name}."
        found = sum(r.data.numel() for r in share if r.key.startswith(prefix))
        if found != owned:
            yield f"of {owned} elements that the rank updates {name} has {found} in the checkpoint"
    weights = sum(r.data.numel() for r in share if not r.key.startswith("optimizer."))
    if weights != owned:
        yield f"of {owned} weights that the rank updates {weights} are in the checkpoint"


def compare(case: TeCase, table: WeightTable) -> dict[str, Any]:
    """All pipeline stages, on the first and on the last rank of each."""
    problems: list[str] = []
    keys: set[str] = set()
    count = 0
    for stage in range(case.pp):
        per_stage = case.tp * case.cp * case.dp
        for place in sorted({0, case.tp - 1} | ({per_stage - 1} if case.ep > 1 else set())):
            with rank_of(case, stage * per_stage + place) as (_, gpu, parallel):
                models = build(case, gpu, parallel, te=True)
                count += len(named(models))
                keys |= checkpoint_entries(models)[0].keys()
                if case.grouped:
                    problems += parameter_problems(case, table, models)
                problems += key_problems(table, models, build(case, gpu, parallel, te=False))
                if stage == place == 0 and case.grouped:
                    problems += optimizer_problems(case, models, parallel)
    wanted = {entry_of(r.mcore_name).key for r in table.rules if not r.replica}
    problems += [f"no rank writes checkpoint key {key}" for key in wanted - keys]
    return {
        "case": str(case),
        "parameters": count,
        "keys": len(keys),
        "problems": sorted(set(problems))[:20],
    }


def main() -> None:
    """Build, compare, print."""
    import os

    import torch  # before TransformerEngine, which does not find libnccl without it  # noqa: F401
    import transformer_engine.pytorch  # noqa: F401

    pretend()
    from megatron_opsft.runtime import cpu_compat

    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"  # as `run.deterministic` sets it
    cpu_compat.install()
    cases = {"dense": DENSE, "experts": EXPERTS}[sys.argv[1]]
    print(json.dumps([compare(case, WeightTable(case.shape, "te", case.tp)) for case in cases]))


if __name__ == "__main__":
    main()
