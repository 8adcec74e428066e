"""AdamW on Megatron's distributed optimizer; the learning rate as a function of the step."""

import math
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from megatron_opsft.config import OptimizerConfig


def learning_rate(step: int, num_steps: int, config: OptimizerConfig) -> float:
    """The rate of update `step`, counted from 1; no state, so resuming is exact."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant" or num_steps <= config.warmup_steps:
        return config.lr
    done = min(1.0, (step - config.warmup_steps) / (num_steps - config.warmup_steps))
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (
        1.0 + math.cos(math.pi * done)
    )


def build_optimizer(
    chunks: list[DistributedDataParallel], config: OptimizerConfig, *, bf16: bool
) -> ChainedOptimizer:
    """Float32 main weights and moments, sharded over the data-parallel ranks.

    The moments are there from the start (zeros), not from the first update on: a checkpoint before
    it needs them, and memory that is taken amid the first step's activations would keep a GPU's
    allocator from giving its neighbourhood to a waking engine.
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
    """Set it and the weight decay for the next update; biases and norms have decay multiplier 0."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_mult", 1.0)
        group["weight_decay"] = optimizer.config.weight_decay * group.get(
            "wd_mult", 1.0
        )


def update(optimizer: ChainedOptimizer, grad_norm: Any) -> None:
    """The rest of `optimizer.step()` after `prepare_grads` and `get_grad_norm`, which it would call
    again: clip the gradients and apply them. Called by every rank.

    grad_norm: what `get_grad_norm` returned, a number or a tensor.
    """
    clip_grad = optimizer.config.clip_grad
    if clip_grad > 0:
        for part in optimizer.chained_optimizers:
            clip_grad_by_total_norm_fp32(part.get_parameters(), clip_grad, grad_norm)
    optimizer.step_with_ready_grads()


def _allocate_state(optimizer: ChainedOptimizer) -> None:
    """Give every parameter its (zero) moments and step count; weights do not change.

    Megatron's own function leaves the step count to the optimizer. torch's AdamW keeps one for
    each parameter, which Megatron reads from there; TransformerEngine's and Apex's keep one for a
    group, and make it in their first update.
    """
    for part in optimizer.chained_optimizers:
        part.init_state_fn(part.optimizer, part.config)
        if isinstance(part.optimizer, torch.optim.Adam):
            for state in part.optimizer.state.values():
                state.setdefault("step", torch.tensor(0.0))


def _fuse(optimizer: ChainedOptimizer) -> None:
    """Let torch's AdamW, which stands in for TransformerEngine's on CPUs, update each parameter in
    one pass, without temporaries as large as the largest one. Megatron asks for no kind of it.
    """
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, torch.optim.Adam):
            for group in part.optimizer.param_groups:
                group["fused"], group["foreach"] = True, False


def forget_moments(optimizer: ChainedOptimizer) -> None:
    """As if nothing had been learned yet: zero moments and step counts; weights do not change."""
    for part in optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
    for group in optimizer.param_groups:
        if "step" in group:
            group["step"] = (
                0 if isinstance(group["step"], int) else torch.zeros_like(group["step"])
            )


def settings_of(optimizer: ChainedOptimizer) -> dict[str, Any]:
    """Everything but weights and moments, in any layout: with expert parallelism the experts have
    an optimizer of their own, with the same settings.
    """
    return optimizer.chained_optimizers[0].state_dict()


def load_settings(optimizer: ChainedOptimizer, settings: dict[str, Any]) -> None:
    """Restore what `settings_of` gave.

    Megatron hands all parameters of torch's AdamW the same step count, which each of them would
    then raise in place.
    """
    for number, part in enumerate(optimizer.chained_optimizers):
        groups = [
            {**group, "is_expert_parallel": number > 0}
            for group in settings["optimizer"]["param_groups"]
        ]
        part.load_state_dict({**settings, "optimizer": {"param_groups": groups}})
        for moments in part.optimizer.state.values():
            if "step" in moments:
                moments["step"] = moments["step"].clone()
    _fuse(optimizer)  # settings of an earlier version may say otherwise
