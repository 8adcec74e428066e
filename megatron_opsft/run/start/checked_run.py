"""The one door of a run: `plan`, `launch`, `train --check` and `train` all make a `CheckedRun`.

Nothing here needs torch or reads a file.
"""

from math import lcm

from megatron_opsft.config import Config, ParallelConfig
from megatron_opsft.errors import UserError
from megatron_opsft.models.architectures.shape import ModelShape
from megatron_opsft.models.architectures.sharding import check_layout, check_rollout_tp
from megatron_opsft.records import record
from megatron_opsft.rollout.limits import (
    check_engine_ranks,
    check_engine_settings,
    engine_traits,
)
from megatron_opsft.runtime.rounding import ceil_div


@record
class CheckedRun:
    """A run whose settings fit each other, its model and its ranks."""

    config: Config
    """The configuration, with the lengths that the user did not set."""
    shape: ModelShape
    world_size: int


def make_checked_run(config: Config, shape: ModelShape, world_size: int) -> CheckedRun:
    """Check a configuration against the model's shape and the number of ranks.

    Errors: `UserError` for the first setting that cannot work.
    """
    config = fit_lengths(config, shape.max_position_embeddings)
    rollout = config.rollout
    check_layout(shape, config.parallel)
    check_adapters(shape, config)
    check_routing_replay(shape, config)
    check_offload(config)
    check_lengths(config, shape.max_position_embeddings)
    check_world(world_size, config.parallel)
    engine = check_engine_settings(
        rollout.engine, rollout.tp, rollout.speculative, seeded=rollout.seeded
    )
    check_engine_ranks(rollout.tp, world_size)
    check_rollout_tp(shape, rollout.tp)
    if config.model.load == "engine" and not engine.reads_files:
        raise UserError(
            "model.load=engine: it works only with vLLM; set rollout.engine=vllm, or "
            "model.load=disk"
        )
    return CheckedRun(config=config, shape=shape, world_size=world_size)


def check_world(world_size: int, parallel: ParallelConfig) -> None:
    """Errors: `UserError` if this number of ranks cannot hold the layout."""
    if world_size % parallel.replica_size:
        raise UserError(
            f"world size {world_size} is not a multiple of parallel.tp x pp x cp = "
            f"{parallel.tp} x {parallel.pp} x {parallel.cp}; start {parallel.replica_size} (or a "
            "multiple) ranks with torchrun --nproc-per-node"
        )
    if parallel.ep == 1:
        return
    if world_size % parallel.expert_ranks:
        raise UserError(
            f"world size {world_size} is not a multiple of the {parallel.expert_ranks} ranks that "
            f"hold all experts (etp x ep x pp = {parallel.expert_tp} x {parallel.ep} x "
            f"{parallel.pp}); lower parallel.ep or start more ranks"
        )


def fewest_ranks(config: Config) -> int:
    """Return the smallest number of ranks that can have the layout and its engine."""
    parallel = config.parallel
    expert_ranks = 1
    if parallel.ep > 1:
        expert_ranks = parallel.expert_ranks
    return lcm(parallel.replica_size, expert_ranks, config.rollout.tp)


def check_adapters(shape: ModelShape, config: Config) -> None:
    """Check that the adapters of a mixture of experts can be trained, and loaded by PEFT.

    Errors: `UserError` for adapters on experts alone under expert parallelism, which leave nothing
    to Megatron's first optimizer, unless there is a shared expert; for one of gate_proj and up_proj
    alone, which transformers holds as one tensor.
    """
    lora = config.lora
    if shape.moe is None or not lora.rank:
        return
    on_attention = set(lora.targets) - lora.feed_forward_targets
    on_others = on_attention or shape.moe.shared_ffn_size
    if config.parallel.ep > 1 and not on_others:
        raise UserError(
            f"lora.targets={','.join(lora.targets)} with parallel.ep={config.parallel.ep}: the "
            "optimizer needs an adapter outside of the experts; name o_proj too, or set "
            "parallel.ep=1"
        )
    if ("gate_proj" in lora.targets) != ("up_proj" in lora.targets):
        raise UserError(
            f"lora.targets={','.join(lora.targets)}: the gate_proj and up_proj of experts get "
            "adapters together; name both or none"
        )


MOST_REPLAYED_EXPERTS = 256
"""Experts of a model whose routing can be replayed: `records.Sample.routing` is uint8."""


def check_routing_replay(shape: ModelShape, config: Config) -> None:
    """Check that `train.routing_replay`, if set, has a routing to replay.

    Errors: `UserError` if it has none.
    """
    if not config.train.routing_replay:
        return
    if shape.moe is None:
        problem = "the model has no experts"
    elif config.method.has_fixed_data:
        name = config.method.name
        problem = f"method.name={name} trains on fixed data, which no engine has routed"
    elif shape.moe.num_experts > MOST_REPLAYED_EXPERTS:
        problem = f"the model has {shape.moe.num_experts} experts, and choices are kept in one byte"
    else:
        return
    raise UserError(f"train.routing_replay=true: {problem}; leave it out")


def check_offload(config: Config) -> None:
    """Errors: `UserError` if the proof of a weight sync needs the weights that `train.offload`
    gives up: with the engine's routing the trainer scores after the engine.
    """
    needs_weights = config.train.routing_replay and config.sync.verify == "full"
    if config.train.offload == "all" and needs_weights:
        raise UserError(
            "train.offload=all: with train.routing_replay=true the proof of a weight sync needs "
            "the trainer's weights while the engine is awake; set sync.verify=checksum, or "
            "train.offload=optimizer"
        )


def max_engine_tokens(config: Config) -> int:
    """Return the longest prompt and response together that a run asks an engine for."""
    return config.data.max_prompt_tokens + _longest_response(config)


def _longest_response(config: Config) -> int:
    """Return the longest response that a run asks for, in training or evaluation."""
    in_evaluation = config.eval.max_response_tokens or 0
    return max(config.rollout.max_response_tokens, in_evaluation)


def fit_lengths(config: Config, max_positions: int) -> Config:
    """Return the configuration with the lengths that the user did not set.

    The longest prompt becomes shorter than its default if the model has no room for it beside the
    longest response, or if it would leave held-out responses less than half of the positions.
    Held-out responses get the positions that prompts leave, up to the engine's default, and at
    least as many as training's.
    """
    data, evaluation = config.data, config.eval
    prompt, response = data.max_prompt_tokens, _longest_response(config)
    sets_response = evaluation.max_response_tokens is not None
    if "max_prompt_tokens" not in data.model_fields_set and max_positions > response:
        prompt = min(prompt, max_positions - response)
        if not sets_response:
            prompt = min(prompt, ceil_div(max_positions, 2))
        data = data.model_copy(update={"max_prompt_tokens": prompt})
    if not sets_response:
        default = engine_traits(config.rollout.engine).max_eval_tokens
        response = max(response, min(default, max_positions - prompt))
        evaluation = evaluation.model_copy(update={"max_response_tokens": response})
    return config.model_copy(update={"data": data, "eval": evaluation})


def check_lengths(config: Config, max_positions: int) -> None:
    """Check that the model has enough positions (max_position_embeddings). Errors: `UserError`."""
    if max_engine_tokens(config) > max_positions:
        response = _longest_response(config)
        section = "eval"
        if response == config.rollout.max_response_tokens:
            section = "rollout"
        raise UserError(
            f"data.max_prompt_tokens={config.data.max_prompt_tokens} and "
            f"{section}.max_response_tokens={response} together exceed the model's "
            f"{max_positions} positions (max_position_embeddings); lower one"
        )
