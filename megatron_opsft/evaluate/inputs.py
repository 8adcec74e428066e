"""All that an evaluation reads before it computes anything: models, problems, prompts, limits."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_opsft.data.prompts import PromptEncoder
from megatron_opsft.errors import PromptError, UserError
from megatron_opsft.evaluate.benchmarks import Benchmark, choose_names, load_benchmark
from megatron_opsft.evaluate.budgets import check_budgets, default_budgets
from megatron_opsft.evaluate.deer_settings import DeerTokens
from megatron_opsft.evaluate.model import EvalModel, is_tiny_reasoner, open_model
from megatron_opsft.evaluate.results import Results, read_results
from megatron_opsft.evaluate.settings import EvalSettings
from megatron_opsft.rollout.engine import SamplingSettings
from megatron_opsft.rollout.limits import check_engine_settings, check_installed, engine_traits
from megatron_opsft.runtime.device import Device
from megatron_opsft.verify.verifier import check_row_judges

MAX_TOKENS = 32768  # the paper's


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model to be sampled, and the directory of what comes out. prompts: problem key -> ids."""

    model: EvalModel
    out: Path
    prompts: dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """A baseline that was evaluated before."""

    out: Path
    results: Results


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """One evaluation, read and checked."""

    settings: EvalSettings
    benchmarks: tuple[Benchmark, ...]
    model: Subject
    baseline: Subject | Earlier | None
    dtype: Literal["float32", "bfloat16"]
    max_tokens: int
    batch_size: int
    budgets: tuple[int, ...]
    device: Device

    @property
    def subjects(self) -> tuple[Subject, ...]:
        """What is sampled, in this order."""
        if isinstance(self.baseline, Subject):
            return (self.model, self.baseline)
        return (self.model,)

    def sampling(self, subject: Subject) -> SamplingSettings:
        return SamplingSettings(
            temperature=self.settings.temperature,
            top_p=self.settings.top_p,
            max_response_tokens=self.max_tokens,
            end_token_ids=subject.model.end_tokens,
        )


def read_inputs(settings: EvalSettings, device: Device) -> Inputs:
    """Called by every rank. Errors: `UserError` for whatever would fail later."""
    check_engine_settings(settings.engine, settings.tp, section="")
    check_installed(settings.engine, section="")
    model = open_model(settings.model, settings.name)
    names = choose_names(
        settings.benchmarks, settings.data, is_tiny_reasoner=is_tiny_reasoner(model)
    )
    benchmarks = tuple(
        load_benchmark(
            name,
            settings.data,
            samples=1 if settings.temperature == 0 else settings.samples,
            limit=settings.limit,
            problem_field=settings.problem_field,
            answer_field=settings.answer_field,
            template=settings.template,
            with_fields=settings.verify.needs_fields,
        )
        for name in names
    )
    for benchmark in benchmarks:
        check_row_judges(settings.verify, benchmark.problems)
    subject = _subject(model, settings, benchmarks, settings.out)
    baseline = _read_baseline(settings, subject.model, benchmarks)
    subjects = [subject, baseline] if isinstance(baseline, Subject) else [subject]
    if settings.method == "deer":
        for each in subjects:
            DeerTokens.read(settings.deer, each.model.tokenizer)
    max_tokens = _max_tokens(settings.max_tokens, subjects)
    dtype = settings.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.is_cuda else "float32"
    return Inputs(
        settings=settings,
        benchmarks=benchmarks,
        model=subject,
        baseline=baseline,
        dtype=dtype,
        max_tokens=max_tokens,
        batch_size=settings.batch_size or engine_traits(settings.engine).eval_batch_size,
        budgets=check_budgets(settings.budgets or default_budgets(max_tokens), max_tokens),
        device=device,
    )


def _read_baseline(
    settings: EvalSettings, model: EvalModel, benchmarks: Sequence[Benchmark]
) -> Subject | Earlier | None:
    if settings.baseline is None:
        return None
    directory = Path(settings.baseline).expanduser()
    if (directory / "results.json").is_file() and (directory / "samples").is_dir():
        earlier = Earlier(out=directory, results=read_results(directory))
        _check_earlier(earlier, benchmarks)
        return earlier
    baseline = open_model(settings.baseline, option="--baseline")
    can_reopen = engine_traits(settings.engine).reopens
    if not can_reopen and baseline.table.shape != model.table.shape:
        raise UserError(
            f"--baseline {settings.baseline} is of another architecture or size than the model, "
            f"and one {settings.engine} engine cannot hold both: evaluate it on its own with "
            "--out DIR, then give --baseline DIR"
        )
    return _subject(baseline, settings, benchmarks, settings.out / "baseline")


def _check_earlier(baseline: Earlier, benchmarks: Sequence[Benchmark]) -> None:
    hashes = baseline.results.settings.get("data")
    for benchmark in benchmarks:
        scores = baseline.results.benchmarks.get(benchmark.name)
        if scores is None:
            there = ", ".join(baseline.results.benchmarks)
            raise UserError(
                f"--baseline {baseline.out} has no {benchmark.name}, only {there}; leave "
                f"{benchmark.name} out, or evaluate the baseline on it"
            )
        if scores.num_problems != len(benchmark.problems):
            raise UserError(
                f"--baseline {baseline.out}: {scores.num_problems} problems of {benchmark.name}, "
                f"here are {len(benchmark.problems)}; use the same limit and data"
            )
        own = benchmark.data.sha256
        if isinstance(hashes, dict) and hashes.get(benchmark.name, own) != own:
            raise UserError(
                f"--baseline {baseline.out}: its {benchmark.name} is of other data (hash "
                f"{str(hashes[benchmark.name])[:12]}, {benchmark.data.name} has {own[:12]}); use "
                "the same data, or evaluate the baseline on these"
            )


def _subject(
    model: EvalModel, settings: EvalSettings, benchmarks: Sequence[Benchmark], out: Path
) -> Subject:
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
    return Subject(model=model, out=out, prompts=prompts)


def _max_tokens(wanted: int | None, subjects: Sequence[Subject]) -> int:
    """The limit of a response: what was asked for, else as much of the paper's as fits."""
    room = MAX_TOKENS
    for subject in subjects:
        longest, num_tokens = max(
            ((key, len(ids)) for key, ids in subject.prompts.items()), key=lambda prompt: prompt[1]
        )
        positions = subject.model.max_positions
        left = positions - num_tokens
        if left < (wanted or 1):
            fix = f"set max_tokens={left} or less" if left > 0 else "leave that problem out"
            raise UserError(
                f"{subject.model.name} has {positions} positions (max_position_embeddings), and "
                f"problem {longest} takes {num_tokens} of them: no room for "
                f"{wanted or 1} response tokens; {fix}"
            )
        room = min(room, left)
    return wanted or room
