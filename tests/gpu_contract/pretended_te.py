"""TransformerEngine's layers in float32 on a pretended GPU, beside plain layers with the same
weights; gated delta nets ours, and Megatron-Core's in cases "core-...".

Prints JSON, the largest differences: absolute of a logit; relative of a tensor of the gradient, and
of the losses and gradient norms of some steps. What both write into checkpoints is the same, or an
AssertionError. Usage: pretended_te.py (CASE... | faults); started
by `python -m pretend_gpu NUM_GPUS --te`, for several GPUs by torchrun.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import jobs
import numpy
import torch
from jobs import Case
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import mapping
from megatron.core.dist_checkpointing.dict_utils import nested_values
from pretend_gpu import fla_kernels
from tiny_models import SHAPES

from megatron_opsft.config import LoraConfig
from megatron_opsft.models.weights.checkpoint_keys import extra_state_keys
from megatron_opsft.models.weights.rules import WeightTable
from megatron_opsft.runtime.distributed import gather_from_all
from megatron_opsft.trainer.model import build, delta_spec, transformer_config
from megatron_opsft.trainer.model.checkpoint_share import describe_models

CASES = {
    "dense": Case(),
    "moe": Case(model="qwen3_moe"),
    "delta": Case(model="qwen3_5"),
    "tp2": Case(model="qwen3_yarn", tp=2, sequence_parallel=True, recompute="selective"),
    "moe-tp2": Case(model="qwen3_moe", tp=2, sequence_parallel=True),
    "delta-tp2": Case(model="qwen3_5", tp=2),
    "delta-tp2sp": Case(model="qwen3_5", tp=2, sequence_parallel=True, recompute="selective"),
    "delta-moe-ep2": Case(model="qwen3_5_moe", dp=2, ep=2),
    "delta-vpp2": Case(model="qwen3_5_tied", pp=2, vpp=2, deterministic=True),
    "cp2": Case(cp=2),
    "yarn-cp2": Case(model="qwen3_yarn", cp=2),
    "ep2": Case(model="qwen3_moe", dp=2, ep=2),
    "etp1": Case(model="qwen3_moe", tp=2, ep=2, etp=1, sequence_parallel=True),
    "vpp2": Case(model="qwen2_tied", pp=2, vpp=2, deterministic=True),
}
LORA = LoraConfig(rank=4, alpha=8.0)
CASES |= {f"lora-{name}": replace(case, lora=LORA) for name, case in CASES.items()}
# As if in bfloat16.
CORE = {f"core-{name}": case for name, case in CASES.items() if "delta" in name}
del CORE["core-delta-vpp2"], CORE["core-lora-delta-vpp2"]  # deterministic
CORE_DELTA_NET = "megatron.core.ssm.gated_delta_net.gdn.GatedDeltaNet"
NUM_STEPS = 2
Differences = tuple[float, ...]


def _transposed(args: list[Any]) -> None:
    args[1] = args[1] != (args[0].shape[0] == args[0].shape[-1])  # where that changes no shape


# What a stand-in is called with instead, in place.
FAULTS: dict[str, Callable[[list[Any]], object]] = {
    "generic_gemm: a transposed layout": _transposed,
    "fused_attn_fwd: a mask that is not causal": lambda args: args.__setitem__(
        10, type(args[10]).NVTE_PADDING_MASK
    ),
    "rmsnorm_bwd: an argument left out": list.pop,
    "rmsnorm_bwd: a number for a tensor": lambda args: args.__setitem__(2, 1.0),
}


class _Float32IsHalf:
    """torch, to modules whose fused attention takes two dtypes: float32 passes for float16."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, "float32" if name == "float16" else name)


@contextmanager
def layers(*, te: bool, core: bool = False) -> Iterator[None]:
    """Inside, models in float32 are built of those of either kind. core: with Megatron-Core's gated
    delta nets.
    """
    from transformer_engine.pytorch.attention.dot_product_attention import backends, utils

    with ExitStack() as stack:
        for module in (jobs, build, transformer_config):
            patched = patch.object(module, "uses_transformer_engine", lambda *_: te)
            stack.enter_context(patched)
        for module in (utils, backends):
            stack.enter_context(patch.object(module, "torch", _Float32IsHalf()))
        if core:
            stack.enter_context(fla_kernels.replaced())
            stack.enter_context(patch.object(delta_spec, "why_own_delta_net", lambda *_: None))
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Of each micro-batch its logits; of each step loss and gradient norm; `checkpoint_entries`."""

    logits: list[Any]
    gradients: dict[str, Any]
    steps: list[list[float]]
    entries: tuple[set[Any], set[str]]


def results(case: Case, *, te: bool, core: bool = False) -> Results:
    """Called by every rank."""
    with layers(te=te, core=core):
        logits = jobs.logits(case)
        parallel_state.destroy_model_parallel()
        _, _, gradients = jobs.gradient(case)
        parallel_state.destroy_model_parallel()
        built = jobs.build(case)
        entries = checkpoint_entries(built.trainer.models)
        names = {module_name(m) for model in built.trainer.models for m in model.modules()}
        assert (CORE_DELTA_NET in names) == core
        steps = jobs.train_steps(built, case, range(NUM_STEPS))
        parallel_state.destroy_model_parallel()
    return Results(
        logits=[each[2] for each in logits],
        gradients=gradients,
        steps=[[step.loss, step.grad_norm] for step in steps],
        entries=entries,
    )


def module_name(module: Any) -> str:
    """Such as torch.nn.modules.conv.Conv1d."""
    return f"{type(module).__module__}.{type(module).__name__}"


def checkpoint_entries(models: list[Any]) -> tuple[set[Any], set[str]]:
    """(key, whole shape, offset, shape) of tensors' pieces in a checkpoint; its other keys."""
    pieces, objects = set(), set()
    for model, state in zip(models, describe_models(models).values(), strict=False):
        mapping.apply_factories(state)
        for entry in nested_values(state):
            if isinstance(entry, mapping.ShardedTensor):
                shape, offset = map(tuple, (entry.global_shape, entry.global_offset))
                pieces.add((entry.key, shape, offset, entry.local_shape))
            elif isinstance(entry, mapping.ShardedObject):
                objects.add(entry.unique_key)
        fused = [getattr(m, "fuse_wgrad_accumulation", True) for m in model.modules()]
        assert all(fused), "a weight's gradient is rounded"
    return pieces, objects


def _relative(found: Any, wanted: Any) -> float:
    return float(numpy.linalg.norm(numpy.subtract(found, wanted)) / numpy.linalg.norm(wanted))


def differences(case: Case, plain: Results | None = None, *, core: bool = False) -> Differences:
    """The largest on any rank, from the plain layers' results. Called by every rank."""
    plain, found = plain or results(case, te=False), results(case, te=True, core=core)
    (pieces, objects), (plain_pieces, plain_objects) = found.entries, plain.entries
    assert pieces == plain_pieces, pieces ^ plain_pieces
    known = extra_state_keys(WeightTable(SHAPES[case.model], "te", case.tp))
    assert (objects | plain_objects) <= {*known}
    pairs = zip(found.logits, plain.logits, strict=True)
    gradients = [(found.gradients[name], wanted) for name, wanted in plain.gradients.items()]
    here = (
        max((float(numpy.abs(one - two).max()) for one, two in pairs), default=0.0),
        max((_relative(*pair) for pair in gradients), default=0.0),
        _relative(found.steps, plain.steps),
    )
    return tuple(map(max, zip(*gather_from_all([here]), strict=True)))


@contextmanager
def planted(function: str, change: Callable[[list[Any]], object]) -> Iterator[None]:
    """Inside, the stand-in is called with changed arguments, from every module that imports it."""
    import transformer_engine_torch as extension

    stand_in = getattr(extension, function)

    def called(*args: Any, **kwargs: Any) -> Any:
        given = [*args]
        change(given)
        return stand_in(*given, **kwargs)

    with ExitStack() as stack:
        for module in [*sys.modules.values()]:
            if vars(module).get(function) is stand_in:
                stack.enter_context(patch.object(module, function, called))
        yield


def with_faults(case: Case) -> dict[str, Differences | str]:
    """What becomes of each planted fault: differences, or the TypeError that it was."""
    plain = results(case, te=False)
    told: dict[str, Differences | str] = {}
    for name, change in FAULTS.items():
        with planted(name.partition(":")[0], change):
            try:
                told[name] = differences(case, plain)
            except TypeError as error:
                told[name] = str(error)
                parallel_state.destroy_model_parallel()
    return told


def main() -> None:
    """Run, compare, print."""
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"  # as `run.deterministic` sets it
    cases = {name: replace(c, device_name="cuda") for name, c in (CASES | CORE).items()}
    if sys.argv[1] == "faults":
        told: dict[str, Any] = with_faults(cases["dense"])
    else:
        told = {name: differences(cases[name], core=name in CORE) for name in sys.argv[1:]}
    if torch.distributed.get_rank() == 0:
        print(json.dumps(told))


if __name__ == "__main__":
    main()
