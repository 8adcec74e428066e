"""Checkpoints as earlier versions wrote them: Megatron's "fully_reshardable" format, of which every
rank reads its TP x PP shard's whole optimizer state. They are loaded, never written.
"""

from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.optimizer import MegatronOptimizer

from megatron_opsft.model.checkpoint_share import describe_models
from megatron_opsft.model.optimizer import load_settings

_FORMAT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def load_gathered(models: list[Any], optimizer: MegatronOptimizer, path: Path) -> None:
    """Restore weights, main weights, moments and step count; every rank calls it."""
    metadata = dict(_FORMAT)  # a copy: Megatron adds its process groups to it
    described = describe_models(models, metadata)
    moments = optimizer.sharded_state_dict(described, is_loading=True, metadata=metadata)
    state = dist_checkpointing.load({**described, "optimizer": moments}, str(path))
    for key, model in zip(described, models, strict=True):
        model.load_state_dict(state[key], strict=True)
    _load_optimizer(optimizer, state["optimizer"])


def _load_optimizer(optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
    """Megatron's `load_state_dict` would do, but for torch's AdamW: it looks among the loaded
    moments for the step count, which is kept apart from them.
    """
    (part,) = optimizer.chained_optimizers
    load_settings(optimizer, {key: value for key, value in state.items() if key != "param_state"})
    states = part.optimizer.state.values()
    steps = [moments.pop("step", None) for moments in states]
    part.load_parameter_state_from_fully_reshardable(state["param_state"])
    for moments, step in zip(states, steps, strict=True):
        if step is not None:
            moments["step"] = step
