"""`megatron-opsft diagnose`, from settings to pictures. Every rank runs it; rank 0 writes results.

A response is on disk as soon as it is diagnosed, so the same command continues after a kill.
"""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

from megatron_opsft.config import ParallelConfig
from megatron_opsft.diagnose.directory import Parts, check_out, open_directory
from megatron_opsft.diagnose.divergence import Divergence, diverge
from megatron_opsft.diagnose.outputs import write_outputs
from megatron_opsft.diagnose.responses import (
    Response,
    evaluated_responses,
    is_run,
    run_responses,
    sha256_of,
)
from megatron_opsft.diagnose.settings import DiagnoseSettings
from megatron_opsft.errors import UserError
from megatron_opsft.evaluate.directory import locked
from megatron_opsft.evaluate.engines import COLLECTIVE_HOURS, START_HOURS
from megatron_opsft.evaluate.identity import model_identity
from megatron_opsft.evaluate.model import EvalModel, open_model
from megatron_opsft.evaluate.progress_line import ProgressLine, Tally
from megatron_opsft.evaluate.run import evaluate
from megatron_opsft.evaluate.settings import load_settings
from megatron_opsft.model.frozen import load_frozen, tensor_parallel
from megatron_opsft.records import Sample
from megatron_opsft.rollout.pieces import pieces_of
from megatron_opsft.runtime.device import Device, select_device
from megatron_opsft.runtime.distributed import Layout, make_groups, stop_distributed
from megatron_opsft.runtime.heartbeat import announce
from megatron_opsft.runtime.job import Job, join_job
from megatron_opsft.runtime.versions import installed_versions
from megatron_opsft.runtime.world_size import check_world

log = logging.getLogger("megatron_opsft")
PACK_TOKENS = 8192  # of the responses that are read together; a longer one is read alone


def diagnose(settings: DiagnoseSettings, *, overwrite: bool = False) -> str:
    """Diagnose what is not done, then write every output. Returns the table for a terminal; ""
    elsewhere than on rank 0. Errors: `UserError` before anything is computed.
    """
    device = select_device(settings.device)
    if not device.is_cuda:
        from megatron_opsft.runtime import cpu_compat

        cpu_compat.install()
    original, efficient = _open_models(settings)
    job = join_job(device, timedelta(hours=COLLECTIVE_HOURS), timedelta(hours=START_HOURS))
    check_world(job.world_size, ParallelConfig(tp=settings.tp))
    with ExitStack() as held:
        if job.is_main:
            check_out(settings.out, overwrite=overwrite)
            held.enter_context(locked(settings.out))
        job.meet("diagnose/free")
        responses = _find_responses(settings, original, device, job)
        dtype = settings.dtype
        if dtype == "auto":
            dtype = "bfloat16" if device.is_cuda else "float32"
        parts = Parts(settings.out)
        if job.is_main:
            _open(settings, original, efficient, responses, dtype)
            job.put("diagnose/finished", json.dumps(sorted(parts.done())))
        done = {(name, index) for name, index in json.loads(job.get("diagnose/finished"))}
        left = [each for each in responses if each.key not in done]
        if left:
            layout = make_groups(ParallelConfig(tp=settings.tp), minutes=60 * COLLECTIVE_HOURS)
            announce(f"loading {original.name} and {efficient.name} ({dtype})")
            p, q = (
                load_frozen(each.directory, dtype=dtype, device=device, layout=layout)
                for each in (original, efficient)
            )
            _work(
                left,
                lambda samples: diverge(p, q, samples, align=settings.tp),
                original,
                parts,
                layout,
                job,
                num_done=len(responses) - len(left),
            )
        stop_distributed()
        if not job.is_main:
            return ""
        parts.combine([each.key for each in responses])
        return write_outputs(settings.out, original=original.name, efficient=efficient.name)


def _open_models(settings: DiagnoseSettings) -> tuple[EvalModel, EvalModel]:
    """Errors: `UserError` for two models that do not share a vocabulary."""
    original = open_model(settings.original, option="--original")
    efficient = open_model(settings.efficient, option="--efficient")
    for each in (original, efficient):
        tensor_parallel(each.directory, settings.tp)
    sizes = [each.table.shape.vocab_size for each in (original, efficient)]
    same = original.tokenizer.get_vocab() == efficient.tokenizer.get_vocab()
    if sizes[0] != sizes[1] or not same:
        what = f"{sizes[0]:,} and {sizes[1]:,} tokens" if sizes[0] != sizes[1] else "other tokens"
        raise UserError(
            f"--original {settings.original} and --efficient {settings.efficient} have different "
            f"vocabularies ({what}): D_t compares two distributions over the same one; give a "
            "model that was trained from the original"
        )
    if original.name == efficient.name:
        return original, EvalModel(
            name=f"{efficient.name} (efficient)",
            directory=efficient.directory,
            tokenizer=efficient.tokenizer,
            end_tokens=efficient.end_tokens,
            table=efficient.table,
        )
    return original, efficient


def _find_responses(
    settings: DiagnoseSettings, original: EvalModel, device: Device, job: Job
) -> list[Response]:
    """The same on every rank; sampled first, where they are not given."""
    directory = settings.responses
    if directory is None:
        directory = settings.out / "responses"
        asked = {
            "model": settings.original,
            "out": directory,
            "benchmarks": settings.benchmarks,
            "data": settings.data,
            "samples": settings.samples,
            "limit": settings.limit,
            "max_tokens": settings.max_tokens,
            "dtype": settings.dtype,
            "device": settings.device,
            "seed": settings.seed,
        }
        evaluate(load_settings(None, (), asked), within=job)
        job.meet("diagnose/sampled")
    some = {"samples": settings.samples, "limit": settings.limit}
    if is_run(directory):
        return run_responses(directory, original, **some)
    return evaluated_responses(directory, original, settings.data, device=device, **some)


def _open(
    settings: DiagnoseSettings,
    original: EvalModel,
    efficient: EvalModel,
    responses: Sequence[Response],
    dtype: str,
) -> None:
    identity = {
        "original": model_identity(original)["model_sha256"],
        "efficient": model_identity(efficient)["model_sha256"],
        "responses": sha256_of(responses),
        "dtype": dtype,
    }
    facts = {
        "original": str(original.directory),
        "efficient": str(efficient.directory),
        "responses": str(settings.responses or settings.out / "responses"),
        "versions": installed_versions(),
    }
    open_directory(settings.out, identity, facts)


def _work(
    left: Sequence[Response],
    compare: Callable[[Sequence[Sample]], list[Divergence]],
    original: EvalModel,
    parts: Parts,
    layout: Layout,
    job: Job,
    *,
    num_done: int,
) -> None:
    """Every replica takes packs in turn; its first rank writes. Returns when all are done."""
    tally = Tally(job, "diagnose")
    total = num_done + len(left)
    with ProgressLine(
        "diagnose", tally, shown=job.is_main, total=total, done=num_done, correct=None
    ) as progress:
        for pack in list(packs_of(left))[layout.dp_rank :: layout.dp_size]:
            found = compare([each.sample for each in pack])
            if layout.tp_rank == 0:
                for each, divergence in zip(pack, found, strict=True):
                    parts.append(_row(each, divergence, original))
                num_tokens = sum(len(each.sample.response_ids) for each in pack)
                tally.add(samples=len(pack), tokens=num_tokens)
            progress.look()
        job.meet("diagnose/end", waiting=progress.look)


def packs_of(responses: Sequence[Response]) -> Iterator[list[Response]]:
    """Those that are read together, of about one length each time: least work is lost in a kill."""
    pack: list[Response] = []
    for each in sorted(responses, key=lambda each: each.num_tokens):
        if pack and sum(e.num_tokens for e in pack) + each.num_tokens > PACK_TOKENS:
            yield pack
            pack = []
        pack.append(each)
    if pack:
        yield pack


def _row(response: Response, divergence: Divergence, original: EvalModel) -> dict[str, Any]:
    """A line of tokens.jsonl; docs/diagnose.md says what is what."""
    tokenizer, sample = original.tokenizer, response.sample
    return {
        "problem_id": sample.problem_id,
        "sample_index": sample.sample_index,
        "problem": response.problem.text,
        "gold": response.problem.answer,
        "outcome": response.outcome,
        "tokens": pieces_of(tokenizer, sample.response_ids),
        "kl": [_short(value) for value in divergence.kl],
        "alternatives": [
            {
                "position": each.position,
                "p_original": _short(each.p_original),
                "p_efficient": _short(each.p_efficient),
                "preferred": [[tokenizer.decode([i]), _short(p)] for i, p in each.preferred],
            }
            for each in divergence.preferences
        ],
    }


def _short(value: float) -> float:
    """As many digits as a float32 has."""
    return float(f"{value:.7g}")
