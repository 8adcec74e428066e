"""What a rollout engine can be asked for, checked before one is started; also by plans, which start
none.
"""

from megatron_opsft.config import Config
from megatron_opsft.errors import UserError


def check_colocated(tp: int, world_size: int) -> None:
    """Errors: `UserError` where the ranks cannot be shared out among engines of `tp` ranks."""
    if world_size % tp:
        raise UserError(
            f"rollout.tp={tp} does not divide the world size {world_size}; choose a divisor"
        )


def check_separate(num_engines: int, world_size: int) -> None:
    """Errors: `UserError` for more engines than ranks."""
    if num_engines > world_size:
        raise UserError(
            f"rollout.num_engines={num_engines}: each engine needs a training rank that asks "
            f"it, and there are {world_size}"
        )


def max_engine_tokens(config: Config) -> int:
    """The longest prompt and response together that a run asks an engine for."""
    response = max(config.rollout.max_response_tokens, config.eval.max_response_tokens or 0)
    return config.data.max_prompt_tokens + response


def check_lengths(config: Config, max_positions: int) -> None:
    """Errors: `UserError` where the model has too few positions (max_position_embeddings)."""
    tokens = max_engine_tokens(config)
    prompt = config.data.max_prompt_tokens
    if tokens > max_positions:
        raise UserError(
            f"data.max_prompt_tokens={prompt} and max_response_tokens="
            f"{tokens - prompt} together exceed the model's {max_positions} positions "
            "(max_position_embeddings); lower one"
        )
