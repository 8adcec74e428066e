"""`megatron-opsft eval`, from settings to results. Every rank runs it; rank 0 writes the results.

Samples are stored as soon as they are judged, so the same command continues after a kill: only
missing ones are sampled.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from itertools import chain
from pathlib import Path

from megatron_opsft.commands.evaluate.benchmarks import Benchmark
from megatron_opsft.commands.evaluate.comparison import compare
from megatron_opsft.commands.evaluate.deer import Deer
from megatron_opsft.commands.evaluate.inputs import MAX_TOKENS, Inputs, read_models
from megatron_opsft.commands.evaluate.results import (
    Results,
    build_results,
    read_results,
    to_json,
)
from megatron_opsft.commands.evaluate.settings import (
    JUDGE_KEYS,
    EvalSettings,
    EvaluationDirectory,
)
from megatron_opsft.commands.evaluate.trained_on import notes_on_training
from megatron_opsft.commands.evaluate.work import (
    COUNTERS,
    FinishedResponse,
    Scorer,
    WorkQueue,
    missing_requests,
)
from megatron_opsft.data.stored_samples import SampleFiles
from megatron_opsft.errors import UserError, log
from megatron_opsft.rollout.engine import (
    EngineSettings,
    RolloutEngine,
    SamplingSettings,
)
from megatron_opsft.rollout.open_engine import build_engine
from megatron_opsft.rollout.token_use import TokenMeter
from megatron_opsft.runtime.device import select_device
from megatron_opsft.runtime.durable import write_text
from megatron_opsft.runtime.failed_rank import Limits
from megatron_opsft.runtime.formatting import count_of
from megatron_opsft.runtime.job import Job, join_job, leave_job
from megatron_opsft.runtime.phase import enter_phase
from megatron_opsft.runtime.progress import Progress
from megatron_opsft.runtime.watchdog import watched
from megatron_opsft.verify.verifier import Verifier, share_of_cores

COLLECTIVE_HOURS = 24  # a rank that waits for the last long responses of another one
START_HOURS = 1  # a rank that has not come to the start after so long does not come


def evaluate(settings: EvalSettings, *, overwrite: bool = False) -> str:
    """Sample what is missing, then write every output.

    Called by every rank. Returns the table for a terminal; "" on ranks other than 0. Errors:
    `UserError` before anything is sampled.
    """
    device = select_device(settings.device)
    models = read_models(settings, device)
    job = join_job(
        device, timedelta(hours=COLLECTIVE_HOURS), timedelta(hours=START_HOURS)
    )
    with ExitStack() as stack:
        # Ranks go at their own pace: no limit on phases.
        stack.enter_context(watched(job, Limits()))
        enter_phase("evaluate", 0)
        _check_same_on_ranks(models[0], job)
        notes = {}
        if job.is_main:
            _begin_directories(models, stack, overwrite=overwrite)
            notes = {
                inputs.settings.out: notes_on_training(inputs) for inputs in models
            }
        # Its processes start while the engine does, and leave it one of the rank's cores.
        workers = max(1, share_of_cores() - 1)
        verify = settings.verify.model_copy(update={"workers": workers})
        verifier = stack.enter_context(Verifier(verify, JUDGE_KEYS))
        engine = None
        for number in range(len(models)):
            engine = _sample(models, number, job, verifier, engine)
        if engine is not None:
            engine.close()
        leave_job()
        return _write_outputs(models, notes) if job.is_main else ""


def _check_same_on_ranks(inputs: Inputs, job: Job) -> None:
    """Check that scripts have given every rank the same problems and judge. Called by every rank.

    Errors: `UserError` on all ranks if not.
    """
    hashes = [benchmark.data.sha256 for benchmark in inputs.benchmarks]
    given = json.dumps([hashes, inputs.settings.judge])
    job.put(f"given_{job.rank}", given)
    if job.is_main:
        others = (job.get(f"given_{rank}") for rank in range(job.world_size))
        job.put("same", str(all(other == given for other in others)))
    if job.get("same") != str(True):
        raise UserError("every rank must be given the same problems and judge")


def _begin_directories(
    models: Sequence[Inputs], stack: ExitStack, *, overwrite: bool
) -> None:
    """Lock the directories of all models until `stack` ends, and write their manifests.

    Called by rank 0 alone. Errors: `UserError`.
    """
    settings = models[0].settings
    max_tokens = models[0].max_tokens
    if settings.max_tokens is None and max_tokens < MAX_TOKENS:
        log.info(
            "the model's positions allow %d tokens, not %d", max_tokens, MAX_TOKENS
        )
    for inputs in models:
        stack.enter_context(EvaluationDirectory(inputs.settings.out).locked())
    needed = []
    if settings.earlier_baseline is not None:
        _check_baseline(settings.earlier_baseline, models[0].benchmarks)
        needed = [settings.earlier_baseline / "results.json"]
    for inputs in models:
        directory = EvaluationDirectory(inputs.settings.out)
        directory.begin(inputs.manifest(), overwrite=overwrite, needed=needed)
        files = SampleFiles(inputs.settings.out)
        for benchmark in inputs.benchmarks:
            files.add_problems(benchmark.name, benchmark.problems)


def _check_baseline(directory: Path, benchmarks: Sequence[Benchmark]) -> None:
    """Check an earlier evaluation that serves as the baseline.

    Errors: `UserError` if it is not of all problems of these benchmarks, or samples are missing.
    """
    results = read_results(directory).benchmarks
    hashes = EvaluationDirectory(directory).data()
    for benchmark in benchmarks:
        name = benchmark.name
        num_problems = len(benchmark.problems)
        is_same = (
            name in results
            and hashes.get(name) == benchmark.data.sha256
            and results[name].num_problems == num_problems
        )
        if not is_same:
            raise UserError(
                f"--baseline {directory}: its samples of {name} are not of the {num_problems} "
                f"problems of {benchmark.data.name}; use the same benchmarks, limit and data, or "
                "evaluate the baseline on these"
            )
        num_samples = results[name].samples_per_problem
        stored = benchmark.read_samples(directory, num_samples)
        if missing := num_problems * num_samples - len(stored):
            raise UserError(
                f"--baseline {directory}: its samples of {name} are incomplete: {missing} are "
                "missing; evaluate the baseline again, which samples these alone"
            )


def _sample(
    models: Sequence[Inputs],
    number: int,
    job: Job,
    verifier: Verifier,
    engine: RolloutEngine | None,
) -> RolloutEngine | None:
    """Make the missing samples of one of the models, on all ranks together.

    engine: the open engine of all models, if any. Returns the open engine.
    """
    inputs = models[number]
    name = f"model{number}"
    is_correct = _agree_on_done(inputs, job, name)
    num_done = len(is_correct)
    num_correct = sum(is_correct.values())
    # Of the last few samples of an evaluation the judge may fail at all.
    verifier.has_judged = verifier.has_judged or num_done > 0
    missing = missing_requests(
        inputs.benchmarks, inputs.prompts, is_correct, inputs.settings.seed
    )
    if not missing:
        return engine
    engine = engine or _open_engine(models, job)
    engine.load_weights(inputs.model.tensors(), version=0)
    engine.tokenizer = inputs.model.tokenizer
    if job.is_main:
        log.info(
            "%s: %s missing; engines: %d",
            inputs.model.name,
            count_of([len(missing)], "sample"),
            engine.share.count,
        )
    queue = WorkQueue(name, missing, job, engine.share)
    start = time.monotonic()

    def read_progress() -> tuple[int, str]:
        """Return how many samples are stored, and a few words about them."""
        new, correct, tokens = (job.count(f"{name}/{what}") for what in COUNTERS)
        share = (num_correct + correct) / max(num_done + new, 1)
        rate = tokens / (time.monotonic() - start)
        return num_done + new, f"accuracy {100 * share:.1f} %, {rate:,.0f} tokens/s"

    with Progress(
        inputs.model.name,
        num_done + len(missing),
        unit=" samples",
        done=num_done,
        read=read_progress,
        shown=job.is_main,
    ) as progress:
        with _make_scorer(inputs, job, verifier, name) as scorer:
            for responses in _finished_responses(inputs, engine, queue):
                scorer.put(responses)
                progress.look()
        job.meet(f"{name}/end", waiting=progress.look)
    return engine


def _make_scorer(inputs: Inputs, job: Job, verifier: Verifier, name: str) -> Scorer:
    """Return what judges and stores the responses of a model. name: prefix of its counters."""
    meter = TokenMeter(
        inputs.model.tokenizer, prompts_open_think=inputs.encoder.opens_think
    )
    files = SampleFiles(inputs.settings.out)
    return Scorer(verifier, meter, inputs.benchmarks, files, job, name)


def _agree_on_done(inputs: Inputs, job: Job, name: str) -> dict[tuple[str, int], bool]:
    """Return (problem key, sample index) -> True if correct, of the stored samples as rank 0 reads
    them. Called by every rank.
    """
    key = f"{name}/there"
    if job.is_main:
        stored = []
        for benchmark in inputs.benchmarks:
            samples = benchmark.read_samples(inputs.settings.out, benchmark.samples)
            for sample in samples:
                problem_key = benchmark.key(sample.problem_id)
                stored.append((problem_key, sample.sample_index, sample.correct))
        job.put(key, json.dumps(stored))
    return {
        (problem_key, index): correct
        for problem_key, index, correct in json.loads(job.get(key))
    }


def _open_engine(models: Sequence[Inputs], job: Job) -> RolloutEngine:
    """Open an engine for all of the models, which have one shape.

    Called by every rank after it joined the job. Errors: `UserError` for what the engine refuses.
    """
    inputs = models[0]
    settings = inputs.settings
    model = inputs.model
    prompts = chain.from_iterable(inputs.prompts.values() for inputs in models)
    longest = max(map(len, prompts))
    positions = model.table.shape.max_position_embeddings
    return build_engine(
        settings.engine,
        EngineSettings(
            model_dir=model.directory,
            dtype=inputs.dtype,
            is_cuda=inputs.device.is_cuda,
            tp=settings.tp,
            max_tokens=min(longest + inputs.max_tokens, positions),
            batch_size=inputs.batch_size,
            gpu_memory_fraction=settings.gpu_memory_fraction,
            kv_cache_bytes=None,
            seed=settings.seed,
            collective_minutes=COLLECTIVE_HOURS * 60,
            rank=job.rank,
            world_size=job.world_size,
            job_id=job.id,
        ),
        model.table,
        model.tokenizer,
        inputs.device,
    )


def _finished_responses(
    inputs: Inputs, engine: RolloutEngine, queue: WorkQueue
) -> Iterator[list[FinishedResponse]]:
    """Yield responses as they finish, by the method of the settings; empty lists in between."""
    settings = inputs.settings
    sampling = SamplingSettings(
        temperature=settings.temperature,
        top_p=settings.top_p,
        max_response_tokens=inputs.max_tokens,
        end_token_ids=inputs.model.end_tokens,
    )
    if settings.method == "deer":
        deer = Deer(settings.deer, inputs.model.tokenizer)
        while requests := queue.take(inputs.batch_size):
            yield deer.generate(engine, requests, sampling)
    else:
        for rollouts in engine.stream(queue.take, sampling):
            yield [(rollout, 0) for rollout in rollouts]


def _write_outputs(
    models: Sequence[Inputs], notes: Mapping[Path, tuple[str, ...]]
) -> str:
    """Write all files of a finished evaluation; return the table for a terminal.

    notes: those of the results in each directory.
    """
    results: dict[Path, Results] = {}  # the baseline first
    earlier = models[0].settings.earlier_baseline
    if earlier is not None:
        results[earlier] = read_results(earlier)
    for inputs in reversed(models):  # the baseline is the last of them
        out = inputs.settings.out
        baseline = next(iter(results.items()), None)
        built = _build_results(inputs, baseline)
        results[out] = built.model_copy(update={"notes": notes[out]})
        write_text(out / "results.json", to_json(results[out]))
    comparison = compare(list(results.values()))
    comparison.write(models[0].settings.out, list(results))
    return comparison.text()


def _build_results(inputs: Inputs, baseline: tuple[Path, Results] | None) -> Results:
    """Build results from the stored samples that the settings ask for.

    baseline: directory and results of its evaluation.
    """
    out = inputs.settings.out
    samples = {}
    for benchmark in inputs.benchmarks:
        SampleFiles(out).combine(benchmark.name)
        samples[benchmark.name] = benchmark.read_samples(out, benchmark.samples)
    base = None
    if baseline is not None:
        directory, results = baseline
        base_samples = {}
        for benchmark in inputs.benchmarks:
            num_samples = results.benchmarks[benchmark.name].samples_per_problem
            base_samples[benchmark.name] = benchmark.read_samples(
                directory, num_samples
            )
        base = results.model, base_samples
    settings = inputs.comparable_settings()
    return build_results(
        inputs.model.name, samples, settings, budgets=inputs.budgets, baseline=base
    )
