"""What a rollout engine can be asked for, checked before one is started; also by plans, which start
none.
"""

from megatron_opsft.config import Config
from megatron_opsft.errors import UserError
from megatron_opsft.rollout.traits import check_engine_settings, check_installed, engine_traits


def check_engine(config: Config) -> None:
    """Errors: `UserError` for settings that contradict each other and for a missing engine."""
    rollout = config.rollout
    check_engine_settings(rollout.engine, rollout.tp, rollout.speculative)
    if config.model.load == "engine" and not engine_traits(rollout.engine).reads_files:
        raise UserError(
            "model.load=engine: weights come from vLLM alone; set rollout.engine=vllm, or "
            "model.load=disk"
        )
    check_installed(rollout.engine)


def check_engine_ranks(tp: int, world_size: int) -> None:
    """Errors: `UserError` where the ranks cannot be shared out among engines of `tp` ranks."""
    if world_size % tp:
        raise UserError(
            f"rollout.tp={tp} does not divide the world size {world_size}; choose a divisor"
        )


def max_engine_tokens(config: Config) -> int:
    """The longest prompt and response together that a run asks an engine for."""
    return config.data.max_prompt_tokens + _longest_response(config)[1]


def _longest_response(config: Config) -> tuple[str, int]:
    """Which key asks for it, and how long it is."""
    wanted = ("rollout.max_response_tokens", config.rollout.max_response_tokens)
    held_out = ("eval.max_response_tokens", config.eval.max_response_tokens or 0)
    return held_out if held_out[1] > wanted[1] else wanted


def fit_lengths(config: Config, max_positions: int) -> Config:
    """The configuration, with the lengths that nobody says.

    Prompts: less than the default where the model has no room for it beside the longest response,
    or where it would take more than half of the positions from held-out responses. Held-out
    responses: what prompts leave, up to what the engine can bear, and never less than training's.
    """
    data, held_out = config.data, config.eval
    prompt, longest = data.max_prompt_tokens, _longest_response(config)[1]
    if "max_prompt_tokens" not in data.model_fields_set and max_positions > longest:
        prompt = min(prompt, max_positions - longest)
        if held_out.max_response_tokens is None:
            prompt = min(prompt, -(-max_positions // 2))
        data = data.model_copy(update={"max_prompt_tokens": prompt})
    if held_out.max_response_tokens is None:
        bearable = engine_traits(config.rollout.engine).max_eval_tokens
        room = max(longest, min(bearable, max_positions - prompt))
        held_out = held_out.model_copy(update={"max_response_tokens": room})
    return config.model_copy(update={"data": data, "eval": held_out})


def check_lengths(config: Config, max_positions: int) -> None:
    """Errors: `UserError` where the model has too few positions (max_position_embeddings)."""
    key, response = _longest_response(config)
    prompt = config.data.max_prompt_tokens
    if prompt + response > max_positions:
        raise UserError(
            f"data.max_prompt_tokens={prompt} and {key}={response} together exceed the model's "
            f"{max_positions} positions (max_position_embeddings); lower one"
        )
