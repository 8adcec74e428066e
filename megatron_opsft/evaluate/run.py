"""`megatron-opsft eval`, from settings to results. Every rank runs it; rank 0 writes the results.

What is sampled is on disk at once, so the same command continues after a kill; what is there
already is not sampled again.
"""

import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta

from megatron_opsft.errors import UserError
from megatron_opsft.evaluate.benchmarks import Benchmark
from megatron_opsft.evaluate.deer import Deer
from megatron_opsft.evaluate.directory import EvaluationDirectory
from megatron_opsft.evaluate.identity import identity, manifest
from megatron_opsft.evaluate.inputs import MAX_TOKENS, Earlier, Inputs, Subject, read_inputs
from megatron_opsft.evaluate.outputs import write_outputs
from megatron_opsft.evaluate.samples import SampleFiles, num_missing, other_data
from megatron_opsft.evaluate.scoring import Scorer
from megatron_opsft.evaluate.settings import EvalSettings
from megatron_opsft.evaluate.work import Tally, WorkQueue, missing_requests
from megatron_opsft.records import Rollout
from megatron_opsft.rollout.engine import EngineSettings, RolloutEngine
from megatron_opsft.rollout.open_engine import build_engine
from megatron_opsft.runtime.device import select_device
from megatron_opsft.runtime.diagnosis import Limits
from megatron_opsft.runtime.job import Job, join_job, leave_job
from megatron_opsft.runtime.phase import enter_phase
from megatron_opsft.runtime.progress import Progress
from megatron_opsft.runtime.watchdog import watched
from megatron_opsft.verify.cores import share_of_cores
from megatron_opsft.verify.verifier import Verifier

log = logging.getLogger("megatron_opsft")
COLLECTIVE_HOURS = 24  # a rank that waits for the last long responses of another one
START_HOURS = 1  # a rank that has not come to the start after so long does not come
_Done = dict[str, set[tuple[str, int]]]


def evaluate(settings: EvalSettings, *, overwrite: bool = False) -> str:
    """Sample what is missing, then write every output. Returns the table for a terminal; ""
    elsewhere than on rank 0. Errors: `UserError` before anything is sampled.
    """
    device = select_device(settings.device)
    inputs = read_inputs(settings, device)
    job = join_job(device, timedelta(hours=COLLECTIVE_HOURS), timedelta(hours=START_HOURS))
    with ExitStack() as held:
        held.enter_context(watched(job, Limits()))  # ranks go at their own pace: no limit on phases
        enter_phase("evaluate", 0)
        if job.is_main:
            if settings.max_tokens is None and inputs.max_tokens < MAX_TOKENS:
                log.info(
                    "the model's positions allow %d response tokens, not %d",
                    *(inputs.max_tokens, MAX_TOKENS),
                )
            for subject in inputs.subjects:
                held.enter_context(EvaluationDirectory(subject.out).locked())
            if isinstance(inputs.baseline, Earlier):
                _check_earlier(inputs.baseline, inputs.benchmarks)
            _open_directories(inputs, overwrite=overwrite)
        # First, so that its processes start while the engine does.
        verifier = held.enter_context(open_verifier(settings))
        engine = None
        for number, subject in enumerate(inputs.subjects):
            engine = sample(inputs, subject, job, f"model{number}", verifier, engine)
        if engine is not None:
            engine.close()
        leave_job()
        return write_outputs(inputs) if job.is_main else ""


def open_verifier(settings: EvalSettings) -> Verifier:
    """This rank's verifier; close it, or use it in a `with`. By default it leaves the engine, which
    works at the same time, one of the rank's cores.
    """
    cores = share_of_cores(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    workers = settings.verify_workers or max(1, cores - 1)
    return Verifier(settings.verify.model_copy(update={"workers": workers}))


def _open_directories(inputs: Inputs, *, overwrite: bool) -> None:
    identities = [identity(inputs, subject) for subject in inputs.subjects]
    for subject, identified in zip(inputs.subjects, identities, strict=True):
        EvaluationDirectory(subject.out).open(identified, overwrite=overwrite)
        _check_stored(inputs, subject)
    for subject, identified in zip(inputs.subjects, identities, strict=True):
        EvaluationDirectory(subject.out).remember(manifest(inputs, subject, identified))


def _check_stored(inputs: Inputs, subject: Subject) -> None:
    """`UserError` where samples that are there are from other data, whatever the manifest says."""
    for benchmark in inputs.benchmarks:
        if found := other_data(SampleFiles(subject.out).read(benchmark.name), benchmark):
            raise UserError(
                f"--out {subject.out} holds samples of {benchmark.name} from other data: {found}; "
                "give the data that they are from, name another directory, or give --overwrite"
            )


def _check_earlier(earlier: Earlier, benchmarks: Sequence[Benchmark]) -> None:
    """`UserError` where the samples of an earlier baseline are not those of these problems."""
    for benchmark in benchmarks:
        samples = SampleFiles(earlier.out).read(benchmark.name)
        each = earlier.results.benchmarks[benchmark.name].samples_per_problem
        found = other_data(samples, benchmark)
        if missing := 0 if found else num_missing(samples, benchmark, each):
            found = f"{missing} samples of these problems are not there"
        if found:
            raise UserError(
                f"--baseline {earlier.out}: its samples of {benchmark.name} do not fit: {found}; "
                "use the same limit and data, or evaluate the baseline on these"
            )


def sample(
    inputs: Inputs,
    subject: Subject,
    job: Job,
    name: str,
    verifier: Verifier,
    engine: RolloutEngine | None,
) -> RolloutEngine | None:
    """Make the missing samples of one model, on all ranks together.

    name: of this part of the job. engine: one that is open, if any. Returns the open engine.
    """
    files = SampleFiles(subject.out)
    done, num_correct = _agree_on_done(inputs, files, job, name)
    missing = missing_requests(inputs.benchmarks, subject.prompts, done, inputs.settings.seed)
    if not missing:
        return engine
    engine = _load(inputs, subject, job, engine)
    queue = WorkQueue(name, missing, job, engine.share)
    problems = {b.key(p.id): (b.name, p) for b in inputs.benchmarks for p in b.problems}
    num_done = sum(map(len, done.values()))
    tally = Tally(job, name)
    start = time.monotonic()

    def read() -> tuple[int, str]:
        new, correct, tokens = tally.read()
        share = (num_correct + correct) / max(num_done + new, 1)
        rate = tokens / (time.monotonic() - start)
        return num_done + new, f"samples, accuracy {100 * share:.1f} %, {rate:,.0f} tokens/s"

    total = num_done + len(missing)
    with Progress(
        subject.model.name, total, done=num_done, read=read, shown=job.is_main
    ) as progress:
        with Scorer(verifier, problems, files, tally) as scorer:
            for finished in _finished(inputs, subject, engine, queue):
                scorer.put(finished)
                progress.look()
        job.meet(f"{name}/end", waiting=progress.look)
        if job.is_main:
            seconds = time.monotonic() - start
            num_samples, _, num_tokens = tally.read()
            EvaluationDirectory(subject.out).note_start(
                {
                    "num_samples": num_samples,
                    "num_tokens": num_tokens,
                    "seconds": round(seconds, 3),
                    "tokens_per_second": round(num_tokens / seconds, 1),
                    "num_engines": engine.share.count,
                    "batch_size": inputs.batch_size,
                },
            )
    return engine


def _agree_on_done(inputs: Inputs, files: SampleFiles, job: Job, name: str) -> tuple[_Done, int]:
    """benchmark -> (problem id, index) of the samples that are there, as rank 0 sees them; and how
    many of these are correct.
    """
    if job.is_main:
        found = {
            b.name: [(s.problem_id, s.sample_index, s.scored().correct) for s in files.read(b.name)]
            for b in inputs.benchmarks
        }
        job.put(f"{name}/there", json.dumps(found))
    reported = json.loads(job.get(f"{name}/there"))
    done: _Done = {}
    num_correct = 0
    for benchmark in inputs.benchmarks:
        wanted = {problem.id for problem in benchmark.problems}
        there = [s for s in reported[benchmark.name] if s[0] in wanted and s[1] < benchmark.samples]
        done[benchmark.name] = {(problem_id, index) for problem_id, index, _ in there}
        num_correct += sum(correct for _, _, correct in there)
    return done, num_correct


def _load(
    inputs: Inputs, subject: Subject, job: Job, engine: RolloutEngine | None
) -> RolloutEngine:
    """An engine with the subject's weights: the open one where it can hold them."""
    fits = engine is not None and inputs.model.model.table.shape == subject.model.table.shape
    if engine is None or not fits:
        if engine is not None:
            engine.close()
        engine = open_engine(inputs, subject, job)
    engine.load_weights(subject.model.tensors(), version=0)
    engine.tokenizer = subject.model.tokenizer
    return engine


def _finished(
    inputs: Inputs, subject: Subject, engine: RolloutEngine, queue: WorkQueue
) -> Iterator[list[tuple[Rollout, int]]]:
    """Rollouts and what each cost beyond its tokens, by the method of the settings; empty lists in
    between.
    """
    sampling = inputs.sampling(subject)
    if inputs.settings.method == "deer":
        deer = Deer(inputs.settings.deer, engine, subject.model.tokenizer)
        while requests := queue.take(inputs.batch_size):
            exits = deer.generate(requests, sampling)
            yield [(exited.rollout, exited.extra_tokens) for exited in exits]
    else:
        for rollouts in engine.stream(queue.take, sampling):
            yield [(rollout, 0) for rollout in rollouts]


def open_engine(inputs: Inputs, subject: Subject, job: Job) -> RolloutEngine:
    """An engine without weights. Called by every rank after it joined the job. Errors: `UserError`
    for what the engine refuses.
    """
    settings, model = inputs.settings, subject.model
    longest = max(len(ids) for subject in inputs.subjects for ids in subject.prompts.values())
    return build_engine(
        settings.engine,
        EngineSettings(
            model_dir=model.directory,
            dtype=inputs.dtype,
            is_cuda=inputs.device.is_cuda,
            tp=settings.tp,
            max_tokens=min(longest + inputs.max_tokens, model.max_positions),
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
