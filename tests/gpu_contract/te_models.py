"""TransformerEngine's layers of real sizes, as a run on GPUs builds them, on the meta device:
against the weight tables and against Megatron's plain layers.

Prints JSON: for each case how much was compared and what differs. Usage: python te_models.py
dense|experts
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any
from unittest.mock import patch

import torch  # before TransformerEngine, which does not find libnccl without it
from model_cases import DENSE, EXPERTS, TeCase
from pretend_cuda import pretend

from megatron_opsft.config import ParallelConfig, TrainConfig
from megatron_opsft.runtime.device import Device
from megatron_opsft.weights.checkpoint_keys import entry_of, extra_state_keys, lead_sizes
from megatron_opsft.weights.rules import WeightTable, local_to_global
from megatron_opsft.weights.slicing import shard_shape

META = torch.device("meta")


class PretendedGpu(Device):
    """A GPU to everyone who asks; tensors on it have no memory."""

    @property
    def is_cuda(self) -> bool:
        return True


@contextmanager
def rank_of(case: TeCase, rank: int) -> Iterator[Any]:
    """Inside, this process is one rank of the case's world, which is returned as its layout."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_opsft.runtime import cpu_compat
    from megatron_opsft.runtime.distributed import make_groups, stop_distributed

    world_size = case.parallel.tp * case.parallel.pp * case.dp
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with patch.object(cpu_compat, "stands_for_cuda", META), META:
            yield make_groups(case.parallel)
    finally:
        stop_distributed()


def build(case: TeCase, *, te: bool) -> list[Any]:
    """The model chunks of this rank, of either layer spec."""
    from megatron_opsft.model import build, transformer_config

    gpu = PretendedGpu(torch_device=META, backend="fake")
    chosen = {"uses_transformer_engine": lambda device, dtype: te}
    with patch.multiple(transformer_config, **chosen), patch.multiple(build, **chosen):
        config = transformer_config.transformer_config(
            case.shape,
            dtype="bfloat16",
            parallel=case.parallel,
            train=TrainConfig(),
            device=gpu,
            deterministic=case.deterministic,
        )
        return build.build_model(case.shape, config, gpu)


def parameters(
    table: WeightTable, models: list[Any], experts: range, parallel: ParallelConfig
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Shapes of the parameters by global name: found, and as the table has them. What is marked
    how, tests/gpu_contract/test_pretended_te.py sees in gradients and their norms.
    """
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    found, wanted = {}, {}
    for model in models:
        offset = get_transformer_layer_offset(model.config, vp_stage=model.vp_stage)
        for name, parameter in model.named_parameters():
            found[local_to_global(name, offset, experts.start)] = tuple(parameter.shape)
        for rule in table.stage_rules(
            range(offset, offset + len(model.decoder.layers)),
            has_embedding=model.pre_process,
            has_output=model.post_process,
            experts=experts,
        ):
            size = parallel.expert_tp if rule.is_expert else parallel.tp
            wanted[rule.mcore_name] = shard_shape(rule, size)
    return found, wanted


def checkpoint_entries(models: list[Any]) -> tuple[dict[str, set[Any]], set[str]]:
    """What the models write: key -> (whole shape, offset, shape) of its pieces; object keys."""
    from megatron.core.dist_checkpointing import mapping
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    tensors: dict[str, set[Any]] = {}
    objects = set()
    for model in models:
        state = model.sharded_state_dict(metadata={})
        mapping.apply_factories(state)
        for entry in nested_values(state):
            if isinstance(entry, mapping.ShardedTensor):
                place = (tuple(entry.global_shape), tuple(entry.global_offset), entry.local_shape)
                tensors.setdefault(entry.key, set()).add(place)
            elif isinstance(entry, mapping.ShardedObject):
                objects.add(entry.unique_key)
    return tensors, objects


def differences(kind: str, found: dict[str, Any], wanted: dict[str, Any]) -> Iterator[str]:
    for name in found.keys() | wanted.keys():
        if found.get(name) != wanted.get(name):
            yield f"{kind} {name} has {found.get(name)}, not {wanted.get(name)}"


def compare(case: TeCase) -> dict[str, Any]:
    """All pipeline stages, on the first and on the last rank of each."""
    parallel = case.parallel
    table, problems, keys, count = WeightTable(case.shape, "te", parallel.tp), set(), set(), 0
    sizes, known = lead_sizes(table), set(extra_state_keys(table))
    elements = {
        entry_of(rule.mcore_name).key: prod(
            (*sizes[entry_of(rule.mcore_name).key], *rule.mcore_shape)
        )
        for rule in table.rules
        if not rule.replica
    }
    per_stage = parallel.tp * case.dp
    places = sorted({0, parallel.tp - 1} | ({per_stage - 1} if parallel.ep > 1 else set()))
    for rank in (stage * per_stage + place for stage in range(parallel.pp) for place in places):
        with rank_of(case, rank) as layout:
            te = build(case, te=True)
            experts = layout.own_experts(case.shape.moe.num_experts if case.shape.moe else 0)
            found, wanted = parameters(table, te, experts, parallel)
            (pieces, objects), (plain, of_plain) = map(
                checkpoint_entries, (te, build(case, te=False))
            )
        problems |= {*differences("parameter", found, wanted), *differences("key", pieces, plain)}
        problems |= {f"object {key} is unknown" for key in (objects | of_plain) - known}
        problems |= {
            f"{name} rounds its weight's gradient"
            for model in te
            for name, module in model.named_modules()
            if not getattr(module, "fuse_wgrad_accumulation", True)
        }
        # Gate and up lie on an axis of their own: the elements are the same.
        own = {key: prod(shape) for key, all in pieces.items() for shape, _, _ in all}
        problems |= {*differences("key", own, {key: elements.get(key) for key in own})}
        keys |= pieces.keys()
        count += len(found)
    problems |= {f"no rank writes checkpoint key {key}" for key in elements.keys() - keys}
    told = {"case": str(case), "parameters": count, "keys": len(keys)}
    return told | {"problems": sorted(problems)[:20]}


def main() -> None:
    """Build, compare, print."""
    import transformer_engine.pytorch  # noqa: F401

    pretend()
    from megatron_opsft.runtime import cpu_compat

    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"  # as `run.deterministic` sets it
    cpu_compat.install()
    print(json.dumps([compare(case) for case in {"dense": DENSE, "experts": EXPERTS}[sys.argv[1]]]))


if __name__ == "__main__":
    main()
