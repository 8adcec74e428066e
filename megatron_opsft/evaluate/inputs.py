"""All that an evaluation reads before it computes anything: models, problems, prompts, limits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megatron_opsft.data.prompts import PromptEncoder
from megatron_opsft.errors import PromptError, UserError
from megatron_opsft.evaluate.benchmarks import Benchmark, load_benchmarks
from megatron_opsft.evaluate.deer import Deer
from megatron_opsft.evaluate.model import EvalModel, is_tiny_reasoner, open_model
from megatron_opsft.evaluate.settings import EvalSettings
from megatron_opsft.rollout.engine import SamplingSettings
from megatron_opsft.rollout.limits import engine_traits
from megatron_opsft.runtime.device import Device
from megatron_opsft.runtime.libraries import installed_versions
from megatron_opsft.verify.verifier import describe_judge

MAX_TOKENS = 32768  # the paper's
_IN_IDENTITY = {"method", "template", "temperature", "top_p", "seed", "engine", "verify_timeout"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """One model on the benchmarks, read and checked: what goes into `settings.out`.

    prompts: problem key -> ids. max_tokens: of a response, end token included.
    """

    settings: EvalSettings
    model: EvalModel
    benchmarks: tuple[Benchmark, ...]
    prompts: dict[str, tuple[int, ...]]
    max_tokens: int
    dtype: Literal["float32", "bfloat16"]
    device: Device

    @property
    def out(self) -> Path:
        """The directory of this model's evaluation."""
        return self.settings.out

    @property
    def batch_size(self) -> int:
        """Responses decoded at once."""
        return self.settings.batch_size or engine_traits(self.settings.engine).eval_batch_size

    @property
    def budgets(self) -> tuple[int, ...]:
        """Token budgets of the curves, ascending: what the samples, cut there, would have given.

        None for early exit: it tries an answer only where the room left is enough, so under a
        smaller limit it would exit less often than in the samples, and its curve would be too good.
        """
        if self.settings.method == "deer":
            return ()
        return tuple(sorted(set(self.settings.budgets))) or default_budgets(self.max_tokens)

    @property
    def sampling(self) -> SamplingSettings:
        return SamplingSettings(
            temperature=self.settings.temperature,
            top_p=self.settings.top_p,
            max_response_tokens=self.max_tokens,
            end_token_ids=self.model.end_tokens,
        )

    def comparable_settings(self) -> dict[str, Any]:
        """JSON of whatever two results may differ in, apart from model and size of benchmarks."""
        settings, versions = self.settings, installed_versions()
        engine = engine_traits(settings.engine)
        only_where_used = {
            "deer": settings.method == "deer",
            "system_prompt": settings.system_prompt,
            "tp": engine.tensor_parallel,
        }
        names = _IN_IDENTITY | {name for name, is_used in only_where_used.items() if is_used}
        return settings.model_dump(mode="json", include=names) | {
            "max_tokens": self.max_tokens,
            "engine_version": next(versions[name] for name in engine.packages if name in versions),
            "torch": versions["torch"],
            "dtype": self.dtype,
            "device": self.device.torch_device.type,
            "verifier": describe_judge(settings.verify, f"math-verify {versions['math-verify']}"),
            "data": {benchmark.name: benchmark.data.sha256 for benchmark in self.benchmarks},
        }

    def manifest(self) -> dict[str, Any]:
        """manifest.json but for its starts; `identity` is all that decides a sample. Reads the
        whole model for its hash: rank 0 alone calls it.
        """
        return {
            "model": self.model.name,
            "model_path": str(self.model.directory),
            "identity": self.comparable_settings() | self.model.identity(),
            "settings": self.settings.model_dump(mode="json"),
            "versions": installed_versions(),
            "example_prompt": self.model.tokenizer.decode(next(iter(self.prompts.values()))),
        }


def read_models(settings: EvalSettings, device: Device) -> list[Inputs]:
    """Of the model; and of its baseline where that is still to be evaluated, by the same settings
    in a directory below. Called by every rank. Errors: `UserError` for whatever would fail later.
    """
    own = read_inputs(settings, device)
    if settings.baseline is None or settings.earlier_baseline is not None:
        return [own]
    changed = {
        "model": settings.baseline,
        "name": None,
        "baseline": None,
        "benchmarks": tuple(benchmark.name for benchmark in own.benchmarks),
        "out": settings.out / "baseline",
    }
    base = read_inputs(settings.model_copy(update=changed), device, option="--baseline")
    can_reopen = engine_traits(settings.engine).reopens
    if not can_reopen and base.model.table.shape != own.model.table.shape:
        raise UserError(
            f"--baseline {settings.baseline} is of another architecture or size than the model, "
            f"and one {settings.engine} engine cannot hold both: evaluate it on its own with "
            "--out DIR, then give --baseline DIR"
        )
    both_fit = min(own.max_tokens, base.max_tokens)
    return [replace(each, max_tokens=both_fit) for each in (own, base)]


def read_inputs(settings: EvalSettings, device: Device, *, option: str = "--model") -> Inputs:
    """Of `settings.model` alone, whatever its baseline is. option: what errors call the model.
    Errors: `UserError`.
    """
    model = open_model(settings.model, settings.name, option=option)
    benchmarks = load_benchmarks(settings, is_tiny_reasoner=is_tiny_reasoner(model))
    prompts = _encode(model, settings, benchmarks)
    if settings.method == "deer":
        Deer(settings.deer, model.tokenizer)
    max_tokens = _max_tokens(settings.max_tokens, model, prompts)
    for budget in settings.budgets:
        if not 1 <= budget <= max_tokens:
            raise UserError(
                f"budgets={budget}: must be from 1 to {max_tokens}, the token limit of the run"
            )
    dtype = settings.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.is_cuda else "float32"
    return Inputs(
        settings=settings,
        model=model,
        benchmarks=benchmarks,
        prompts=prompts,
        max_tokens=max_tokens,
        dtype=dtype,
        device=device,
    )


def default_budgets(max_tokens: int) -> tuple[int, ...]:
    """The limit of the run and up to six powers of two below it: 1,024 ... 16,384, 32,768."""
    powers = [1 << e for e in range(max_tokens.bit_length())]
    return (*(p for p in powers if max_tokens < 64 * p and p < max_tokens), max_tokens)


def _encode(
    model: EvalModel, settings: EvalSettings, benchmarks: Sequence[Benchmark]
) -> dict[str, tuple[int, ...]]:
    encoder = PromptEncoder(
        tokenizer=model.tokenizer,
        template=settings.template,
        system_prompt=settings.system_prompt,
    )
    prompts = {}
    for benchmark in benchmarks:
        for problem in benchmark.problems:
            key = benchmark.key(problem.id)
            try:
                prompts[key] = encoder.encode(problem)
            except PromptError as error:
                raise UserError(f"problem {key}: {error}; change it, or leave it out") from None
    return prompts


def _max_tokens(wanted: int | None, model: EvalModel, prompts: dict[str, tuple[int, ...]]) -> int:
    """The limit of a response: what was asked for, else as much of the paper's as fits."""
    longest = max(prompts, key=lambda key: len(prompts[key]))
    num_tokens = len(prompts[longest])
    left = model.max_positions - num_tokens
    if left < (wanted or 1):
        fix = f"set max_tokens={left} or less" if left > 0 else "leave that problem out"
        raise UserError(
            f"{model.name} has {model.max_positions} positions (max_position_embeddings), and "
            f"problem {longest} takes {num_tokens} of them: no room for "
            f"{wanted or 1} response tokens; {fix}"
        )
    return wanted or min(MAX_TOKENS, left)
