"""AdamW on Megatron's distributed optimizer, and the learning rate of each step."""

import math
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from megatron_opsft.config import OptimizerConfig
from megatron_opsft.runtime.parked import Whereabouts, in_place


def learning_rate(step: int, num_steps: int, config: OptimizerConfig) -> float:
    """Return the learning rate of update `step`, counted from 1. It has no state, so resuming is
    exact.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant" or num_steps <= config.warmup_steps:
        return config.lr
    progress = (step - config.warmup_steps) / (num_steps - config.warmup_steps)
    height = 1.0 + math.cos(math.pi * min(1.0, progress))
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * height


def build_optimizer(
    chunks: list[DistributedDataParallel], config: OptimizerConfig, *, bf16: bool
) -> ChainedOptimizer:
    """Return AdamW with float32 main weights and moments, sharded over the data-parallel ranks.

    The moments are allocated (as zeros) at once, not by the first update: a checkpoint before it
    needs them, and allocated during the first step they would fragment the memory that vLLM needs
    to wake up.
    """
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            bf16=bf16,
            use_distributed_optimizer=True,
        ),
        chunks,
        use_gloo_process_groups=False,
    )
    assert isinstance(optimizer, ChainedOptimizer)
    _allocate_state(optimizer)
    _fuse(optimizer)
    return optimizer


def set_learning_rate(optimizer: ChainedOptimizer, lr: float) -> None:
    """Set the learning rate of the next update to `lr`, and the weight decay to the config's, each
    times the group's multiplier. Biases and norms have a decay multiplier of 0.
    """
    weight_decay = optimizer.config.weight_decay
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_mult", 1.0)
        group["weight_decay"] = weight_decay * group.get("wd_mult", 1.0)


def update(optimizer: ChainedOptimizer, grad_norm: Any) -> None:
    """Clip the gradients and apply them: the end of `optimizer.step()`, which would call
    `prepare_grads` and `get_grad_norm` a second time. Called by every rank.

    grad_norm: the result of `get_grad_norm`, a number or a tensor.
    """
    clip_grad = optimizer.config.clip_grad
    if clip_grad > 0:
        for member in optimizer.chained_optimizers:
            clip_grad_by_total_norm_fp32(member.get_parameters(), clip_grad, grad_norm)
    optimizer.step_with_ready_grads()


def _allocate_state(optimizer: ChainedOptimizer) -> None:
    """Give every parameter its moments (zeros) and step count; weights do not change.

    Megatron's own function leaves the step count to the optimizer. torch's AdamW keeps one for each
    parameter, where Megatron reads it; TransformerEngine's and Apex's keep one for each group and
    create it in their first update.
    """
    for member in optimizer.chained_optimizers:
        member.init_state_fn(member.optimizer, member.config)
        if isinstance(member.optimizer, torch.optim.Adam):
            for state in member.optimizer.state.values():
                state.setdefault("step", torch.tensor(0.0))


def _fuse(optimizer: ChainedOptimizer) -> None:
    """Let torch's AdamW, which replaces TransformerEngine's on CPUs, update each parameter in one
    pass, without temporaries as large as the largest parameter. Megatron does not request it.
    """
    for member in optimizer.chained_optimizers:
        if isinstance(member.optimizer, torch.optim.Adam):
            for group in member.optimizer.param_groups:
                group["fused"] = True
                group["foreach"] = False


def forget_moments(optimizer: ChainedOptimizer, stored: Whereabouts = in_place) -> None:
    """Set all moments and step counts to zero; weights do not change.

    stored: of the trainer's tensors while it sleeps, `Offload.stored`.
    """
    for member in optimizer.chained_optimizers:
        for state in member.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    stored(value).zero_()
    for group in optimizer.param_groups:
        if "step" in group:
            group["step"] = 0 * group["step"]  # an int, or a tensor


def optimizer_settings(optimizer: ChainedOptimizer) -> dict[str, Any]:
    """Return the optimizer's state except weights and moments; it fits every parallel layout.

    With expert parallelism the experts have an optimizer of their own, with the same settings.
    """
    return optimizer.chained_optimizers[0].state_dict()


def load_optimizer_settings(
    optimizer: ChainedOptimizer, settings: dict[str, Any]
) -> None:
    """Restore the result of `optimizer_settings`.

    Megatron gives all parameters of torch's AdamW one shared step count, which each parameter would
    then increase in place: they get copies.
    """
    for number, member in enumerate(optimizer.chained_optimizers):
        groups = [
            {**group, "is_expert_parallel": number > 0}
            for group in settings["optimizer"]["param_groups"]
        ]
        member.load_state_dict({**settings, "optimizer": {"param_groups": groups}})
        for state in member.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()
    _fuse(optimizer)  # settings of an earlier version may say otherwise
