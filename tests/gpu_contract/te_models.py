"""TransformerEngine's layers of real sizes, as a run on GPUs builds them, on the meta device:
against the weight tables and against Megatron's plain layers.

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

from megatron_opsft.architectures.template import Rule
from megatron_opsft.config import ParallelConfig, TrainConfig
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
        ep=case.ep,
        etp=case.etp,
        vpp=case.vpp,
        sequence_parallel=case.sequence_parallel,
    )
    world_size = case.tp * case.pp * case.dp
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
            train=TrainConfig(),
            device=gpu,
            deterministic=case.deterministic,
        )
        if not case.grouped:
            config.moe_grouped_gemm = False
        return build.build_model(case.shape, config, gpu)


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


def parameter_problems(case: TeCase, table: WeightTable, models: list[Any]) -> Iterator[str]:
    """Missing and surplus parameters, other shapes, and modules that round weight gradients.

    What is marked how, tests/gpu_contract/test_pretended_te.py sees in gradients and their norms.
    """
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
        rule, shape = rules[name], tuple(found[name].shape)
        wanted = shard_shape(rule, (case.etp or case.tp) if rule.is_expert else case.tp)
        if shape != wanted:
            yield f"{name} has shape {shape}, not {wanted}"


def compare(case: TeCase, table: WeightTable) -> dict[str, Any]:
    """All pipeline stages, on the first and on the last rank of each."""
    problems: list[str] = []
    keys: set[str] = set()
    count = 0
    for stage in range(case.pp):
        per_stage = case.tp * case.dp
        for place in sorted({0, case.tp - 1} | ({per_stage - 1} if case.ep > 1 else set())):
            with rank_of(case, stage * per_stage + place) as (_, gpu, parallel):
                models = build(case, gpu, parallel, te=True)
                count += len(named(models))
                keys |= checkpoint_entries(models)[0].keys()
                if case.grouped:
                    problems += parameter_problems(case, table, models)
                problems += key_problems(table, models, build(case, gpu, parallel, te=False))
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
