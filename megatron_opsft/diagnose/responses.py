"""The original model's responses, from the samples of an evaluation."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from megatron_opsft.diagnose.settings import DiagnoseSettings
from megatron_opsft.errors import UserError
from megatron_opsft.evaluate.benchmarks import SampleFiles, StoredSample
from megatron_opsft.evaluate.inputs import EvalModel, read_inputs
from megatron_opsft.evaluate.run import evaluate
from megatron_opsft.evaluate.settings import (
    EvalSettings,
    EvaluationDirectory,
    load_settings,
)
from megatron_opsft.records import FinishReason, Problem, Sample
from megatron_opsft.runtime.device import Device

log = logging.getLogger("megatron_opsft")
_SAMPLING = {"benchmarks", "data", "samples", "limit", "max_tokens", "dtype", "device", "seed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """One response to be diagnosed. outcome: its verdict, a value of `records.Outcome`."""

    problem: Problem
    sample: Sample
    outcome: str


def find_responses(asked: DiagnoseSettings, original: EvalModel, device: Device) -> list[Response]:
    """The first samples of the first problems of each benchmark, those with a token; the original
    samples them first, where no evaluation is given.

    An evaluation stores texts, so they are tokenised again; the log says how many are then of
    another length. Errors: `UserError`.
    """
    directory = asked.responses or asked.out / "responses"
    if asked.responses is None:
        sampling = asked.model_dump(include=_SAMPLING)
        evaluate(load_settings(None, (), {"model": asked.original, "out": directory} | sampling))
    settings = _settings_of(directory, original, asked.data, asked.limit)
    inputs = read_inputs(settings, device)
    hashes = EvaluationDirectory(directory).identified()["identity"]["data"]
    found, num_other = [], 0
    for benchmark in inputs.benchmarks:
        stored = SampleFiles(directory).read(benchmark.name)
        if hashes[benchmark.name] != benchmark.data.sha256:
            raise UserError(
                f"--responses {directory}: its {benchmark.name} is from other data than "
                f"{benchmark.data.name}; give the file with --data {benchmark.name}=FILE"
            )
        of_problem = {(each.problem_id, each.sample_index): each for each in stored}
        for problem in benchmark.problems:
            for index in range(asked.samples):
                if (each := of_problem.get((problem.id, index))) is None:
                    continue
                key, ids = benchmark.key(problem.id), _tokenised(each, original)
                num_other += len(ids) != each.num_tokens
                sample = Sample(
                    problem_id=key,
                    sample_index=index,
                    prompt_ids=inputs.prompts[key],
                    response_ids=ids,
                )
                if ids:
                    outcome = each.outcome.value
                    found.append(Response(problem=problem, sample=sample, outcome=outcome))
    if not found:
        raise UserError(
            f"--responses {directory}: no response of these problems is there; raise --samples or "
            "--limit, or name a directory with the original's responses"
        )
    if num_other:
        log.warning(
            "%d of %d responses have another number of tokens than were sampled: an evaluation "
            "stores texts, which were tokenised again",
            *(num_other, len(found)),
        )
    return found


def _settings_of(
    directory: Path, original: EvalModel, data: Mapping[str, str], limit: int
) -> EvalSettings:
    """Those of the evaluation, for the original model. data: where its problems lie now. Errors:
    `UserError`.
    """
    manifest = EvaluationDirectory(directory).read_manifest()
    if manifest is None:
        raise UserError(
            f"--responses {directory}: not an evaluation (no manifest.json); name one, or leave "
            "it out: the original then samples"
        )
    try:
        given = manifest["settings"]
        settings = EvalSettings.model_validate(
            given
            | {"model": str(original.directory), "name": None, "baseline": None, "out": directory}
            | {"engine": "hf", "tp": 1, "limit": min(limit, given["limit"] or limit)}
            | {"data": given["data"] | dict(data)}
        )
    except (KeyError, TypeError, ValidationError) as error:
        raise UserError(
            f"{directory}/manifest.json: its settings cannot be read: {error}"
        ) from None
    if manifest["identity"].get("tokenizer_sha256") != original.tokenizer_sha256():
        raise UserError(
            f"--responses {directory}: sampled by {manifest.get('model_path')}, which has another "
            f"tokenizer than --original {original.name}; give the original's own responses"
        )
    return settings


def _tokenised(stored: StoredSample, original: EvalModel) -> tuple[int, ...]:
    ids = original.tokenizer.encode(stored.text, add_special_tokens=False)
    if stored.finish_reason is FinishReason.STOP:
        usual = original.tokenizer.eos_token_id
        ids.append(usual if usual in original.end_tokens else original.end_tokens[0])
    return tuple(ids)
