"""`megatron-opsft eval`, from settings to results. Every rank runs it; rank 0 writes the results.

What is sampled is on disk at once, so the same command continues after a kill; what is there
already is not sampled again.
"""

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

from megatron_opsft.commands.evaluate.benchmarks import Benchmark
from megatron_opsft.commands.evaluate.comparison import compare
from megatron_opsft.commands.evaluate.deer import Deer
from megatron_opsft.commands.evaluate.inputs import MAX_TOKENS, Inputs, read_models
from megatron_opsft.commands.evaluate.results import (
    Results,
    Samples,
    build_results,
    read_results,
    to_json,
)
from megatron_opsft.commands.evaluate.settings import (
    JUDGE_KEYS,
    EvalSettings,
    EvaluationDirectory,
)
from megatron_opsft.commands.evaluate.work import (
    COUNTED,
    Scorer,
    WorkQueue,
    missing_requests,
)
from megatron_opsft.data.stored_samples import SampleFiles
from megatron_opsft.errors import UserError
from megatron_opsft.records import Rollout
from megatron_opsft.rollout.engine import (
    EngineSettings,
    RolloutEngine,
    SamplingSettings,
)
from megatron_opsft.rollout.open_engine import build_engine
from megatron_opsft.runtime.device import select_device
from megatron_opsft.runtime.durable import write_text
from megatron_opsft.runtime.failed_rank import Limits
from megatron_opsft.runtime.job import Job, join_job, leave_job
from megatron_opsft.runtime.phase import enter_phase
from megatron_opsft.runtime.progress import Progress
from megatron_opsft.runtime.watchdog import watched
from megatron_opsft.verify.verifier import Verifier, share_of_cores

log = logging.getLogger("megatron_opsft")
COLLECTIVE_HOURS = 24  # a rank that waits for the last long responses of another one
START_HOURS = 1  # a rank that has not come to the start after so long does not come


def evaluate(settings: EvalSettings, *, overwrite: bool = False) -> str:
    """Sample what is missing, then write every output. Returns the table for a terminal; "" on
    ranks other than 0. Errors: `UserError` before anything is sampled.
    """
    device = select_device(settings.device)
    models = read_models(settings, device)
    job = join_job(
        device, timedelta(hours=COLLECTIVE_HOURS), timedelta(hours=START_HOURS)
    )
    with ExitStack() as held:
        held.enter_context(
            watched(job, Limits())
        )  # ranks go at their own pace: no limit on phases
        enter_phase("evaluate", 0)
        if job.is_main:
            if (
                settings.max_tokens is None
                and (fits := models[0].max_tokens) < MAX_TOKENS
            ):
                log.info(
                    "the model's positions allow %d tokens, not %d", fits, MAX_TOKENS
                )
            for inputs in models:
                held.enter_context(EvaluationDirectory(inputs.settings.out).locked())
            baseline, needed = settings.earlier_baseline, []
            if baseline is not None:
                _check_baseline(baseline, models[0].benchmarks)
                needed = [baseline / "results.json"]
            for inputs in models:
                directory = EvaluationDirectory(inputs.settings.out)
                directory.begin(inputs.manifest(), overwrite=overwrite, needed=needed)
        # Its processes start while the engine does, and leave it one of the rank's cores.
        cores = share_of_cores()
        workers = {"workers": max(1, cores - 1)}
        verifier = held.enter_context(
            Verifier(settings.verify.model_copy(update=workers), JUDGE_KEYS)
        )
        engine = None
        for number in range(len(models)):
            engine = _sample(models, number, job, verifier, engine)
        if engine is not None:
            engine.close()
        leave_job()
        return _write_outputs(models) if job.is_main else ""


def _check_baseline(directory: Path, benchmarks: Sequence[Benchmark]) -> None:
    """`UserError` where an earlier evaluation is not of these problems, or not whole."""
    results = read_results(directory).benchmarks
    hashes = EvaluationDirectory(directory).data()
    for benchmark in benchmarks:
        name, count = benchmark.name, len(benchmark.problems)
        is_same = name in results and hashes.get(name) == benchmark.data.sha256
        if not is_same or results[name].num_problems != count:
            found = f"are not of the {count} problems of {benchmark.data.name}"
        else:
            each = results[name].samples_per_problem
            missing = count * each - len(
                SampleFiles(directory).read_first(
                    benchmark.name, benchmark.problem_ids, each
                )
            )
            found = f"are incomplete: {missing} are missing" if missing else ""
        if found:
            raise UserError(
                f"--baseline {directory}: its samples of {name} {found}; use the same benchmarks, "
                "limit and data, or evaluate the baseline on these"
            )


def _sample(
    models: Sequence[Inputs],
    number: int,
    job: Job,
    verifier: Verifier,
    engine: RolloutEngine | None,
) -> RolloutEngine | None:
    """Make the missing samples of one model, on all ranks together. engine: one that is open, if
    any. Returns the open engine.
    """
    inputs, name = models[number], f"model{number}"
    files = SampleFiles(inputs.settings.out)
    done, num_correct = _agree_on_done(inputs, files, job, name)
    missing = missing_requests(
        inputs.benchmarks, inputs.prompts, done, inputs.settings.seed
    )
    if not missing:
        return engine
    engine = engine or _open(models, job)
    engine.load_weights(inputs.model.tensors(), version=0)
    engine.tokenizer = inputs.model.tokenizer
    if job.is_main:
        told = (inputs.model.name, len(missing), engine.share.count)
        log.info("%s: %d samples are missing; engines: %d", *told)
    queue = WorkQueue(name, missing, job, engine.share)
    start = time.monotonic()

    def read() -> tuple[int, str]:
        new, correct, tokens = (job.add(f"{name}/{what}", 0) for what in COUNTED)
        share = (num_correct + correct) / max(len(done) + new, 1)
        rate = tokens / (time.monotonic() - start)
        return len(done) + new, f"accuracy {100 * share:.1f} %, {rate:,.0f} tokens/s"

    total = len(done) + len(missing)
    with Progress(
        inputs.model.name,
        total,
        unit=" samples",
        done=len(done),
        read=read,
        shown=job.is_main,
    ) as progress:
        with Scorer(verifier, inputs.benchmarks, files, job, name) as scorer:
            for finished in _finished(inputs, engine, queue):
                scorer.put(finished)
                progress.look()
        job.meet(f"{name}/end", waiting=progress.look)
    return engine


def _agree_on_done(
    inputs: Inputs, files: SampleFiles, job: Job, name: str
) -> tuple[set[tuple[str, int]], int]:
    """(problem key, index) of the samples that are there, as rank 0 sees them; and how many of
    these are correct.
    """
    if job.is_main:
        found = [
            (benchmark.key(sample.problem_id), sample.sample_index, sample.correct)
            for benchmark in inputs.benchmarks
            for sample in files.read_first(
                benchmark.name, benchmark.problem_ids, benchmark.samples
            )
        ]
        job.put(f"{name}/there", json.dumps(found))
    there = json.loads(job.get(f"{name}/there"))
    return {(key, index) for key, index, _ in there}, sum(
        correct for *_, correct in there
    )


def _open(models: Sequence[Inputs], job: Job) -> RolloutEngine:
    """An engine for all of the models, which have one shape. Called by every rank after it joined
    the job. Errors: `UserError` for what the engine refuses.
    """
    inputs = models[0]
    settings, model = inputs.settings, inputs.model
    longest = max(len(ids) for each in models for ids in each.prompts.values())
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


def _finished(
    inputs: Inputs, engine: RolloutEngine, queue: WorkQueue
) -> Iterator[list[tuple[Rollout, int]]]:
    """Rollouts and what each cost beyond its tokens, by the method of the settings; empty lists in
    between.
    """
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


def _write_outputs(models: Sequence[Inputs]) -> str:
    """All files of a finished evaluation; returns the table for a terminal."""
    earlier = models[0].settings.earlier_baseline
    found = {} if earlier is None else {earlier: read_results(earlier)}
    for inputs in reversed(models):  # a baseline first
        results = _results(inputs, next(iter(found.items()), None))
        write_text(inputs.settings.out / "results.json", to_json(results))
        found[inputs.settings.out] = results
    comparison = compare(list(found.values()))
    comparison.write(models[0].settings.out, list(found))
    return comparison.text()


def _results(inputs: Inputs, baseline: tuple[Path, Results] | None) -> Results:
    """Of the stored samples that the settings ask for. baseline: its directory, and its results."""
    files = SampleFiles(inputs.settings.out)
    for benchmark in inputs.benchmarks:
        files.combine(benchmark.name)
    samples: Samples = {
        each.name: files.read_first(each.name, each.problem_ids, each.samples)
        for each in inputs.benchmarks
    }
    base = None
    if baseline is not None:
        files, before = SampleFiles(baseline[0]), baseline[1]
        theirs = {
            each.name: files.read_first(
                each.name,
                each.problem_ids,
                before.benchmarks[each.name].samples_per_problem,
            )
            for each in inputs.benchmarks
        }
        base = before.model, theirs
    settings = inputs.comparable_settings()
    return build_results(
        inputs.model.name, samples, settings, budgets=inputs.budgets, baseline=base
    )
