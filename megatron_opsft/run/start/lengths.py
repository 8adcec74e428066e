"""How long prompts and responses of a run may be."""

from megatron_opsft.config import Config
from megatron_opsft.errors import UserError
from megatron_opsft.rollout.limits import engine_traits
from megatron_opsft.runtime.rounding import ceil_div


def max_engine_tokens(config: Config) -> int:
    """Return the longest prompt and response together that a run asks an engine for."""
    return config.data.max_prompt_tokens + _longest_response(config)[1]


def _longest_response(config: Config) -> tuple[str, int]:
    """Return the longest response that a run asks for, and before it the key that says so."""
    in_training = config.rollout.max_response_tokens
    in_evaluation = config.eval.max_response_tokens or 0
    if in_evaluation > in_training:
        return "eval.max_response_tokens", in_evaluation
    return "rollout.max_response_tokens", in_training


def fit_lengths(config: Config, max_positions: int) -> Config:
    """Return the configuration with the lengths that the user did not set.

    The longest prompt becomes shorter than its default if the model has no room for it beside the
    longest response, or if it would leave held-out responses less than half of the positions.
    Held-out responses get the positions that prompts leave, up to the engine's default, and at
    least as many as training's.
    """
    data, evaluation = config.data, config.eval
    prompt, response = data.max_prompt_tokens, _longest_response(config)[1]
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
    key, response = _longest_response(config)
    prompt = config.data.max_prompt_tokens
    if prompt + response > max_positions:
        raise UserError(
            f"data.max_prompt_tokens={prompt} and {key}={response} together exceed the model's "
            f"{max_positions} positions (max_position_embeddings); lower one"
        )
