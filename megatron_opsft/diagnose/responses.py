"""The original model's responses, from the samples of an evaluation."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from megatron_opsft.errors import UserError
from megatron_opsft.evaluate.directory import EvaluationDirectory, read_manifest
from megatron_opsft.evaluate.inputs import read_inputs
from megatron_opsft.evaluate.model import EvalModel
from megatron_opsft.evaluate.samples import SampleFiles, StoredSample
from megatron_opsft.evaluate.settings import EvalSettings
from megatron_opsft.records import FinishReason, Problem, Sample
from megatron_opsft.runtime.device import Device

log = logging.getLogger("megatron_opsft")


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """One response to be diagnosed. outcome: its verdict, a value of `records.Outcome`."""

    problem: Problem
    sample: Sample
    outcome: str

    @property
    def key(self) -> tuple[str, int]:
        return self.sample.problem_id, self.sample.sample_index


def check_source(directory: Path) -> None:
    """Errors: `UserError` unless it holds an evaluation."""
    is_there = EvaluationDirectory(directory).read_manifest() is not None
    if not is_there or not (directory / "samples").is_dir():
        raise UserError(
            f"--responses {directory}: not an evaluation (samples/ and manifest.json); name one, "
            "or leave it out: the original then samples"
        )


def sha256_of(responses: Sequence[Response]) -> str:
    """Hash of the tokens of all, in their order."""
    digest = hashlib.sha256()
    for each in responses:
        digest.update(
            json.dumps([*each.key, each.sample.prompt_ids, each.sample.response_ids]).encode()
        )
    return digest.hexdigest()


def sampled_responses(
    directory: Path,
    original: EvalModel,
    data: Mapping[str, str],
    *,
    samples: int,
    limit: int,
    device: Device,
) -> list[Response]:
    """The first samples of the first problems of each benchmark, those with a token.

    An evaluation stores texts, so they are tokenised again; the log says how many are then of
    another length. data: where its problems lie now, where that is elsewhere. Errors: `UserError`.
    """
    inputs = read_inputs(_settings_of(directory, original, data, limit), device)
    hashes = read_manifest(directory)["identity"]["data"]
    found, num_other = [], 0
    for benchmark in inputs.benchmarks:
        stored = SampleFiles(directory).read(benchmark.name)
        if hashes[benchmark.name] != benchmark.data.sha256:
            raise UserError(
                f"--responses {directory}: its {benchmark.name} is from other data than "
                f"{benchmark.data.name}; give the file with --data {benchmark.name}=FILE"
            )
        problems = {problem.id: problem for problem in benchmark.problems}
        order = {name: place for place, name in enumerate(problems)}
        chosen = [s for s in stored if s.problem_id in problems and s.sample_index < samples]
        for each in sorted(chosen, key=lambda s: (order[s.problem_id], s.sample_index)):
            key, ids = benchmark.key(each.problem_id), _tokenised(each, original)
            num_other += len(ids) != each.num_tokens
            sample = Sample(
                problem_id=key,
                sample_index=each.sample_index,
                prompt_ids=inputs.prompts[key],
                response_ids=ids,
            )
            problem = problems[each.problem_id]
            if ids:
                found.append(Response(problem=problem, sample=sample, outcome=each.outcome.value))
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
    """Those of the evaluation, for the original model. Errors: `UserError`."""
    manifest = read_manifest(directory)
    try:
        given = manifest["settings"]
        settings = EvalSettings.model_validate(
            {
                **given,
                **{"model": str(original.directory), "name": None, "baseline": None},
                **{"engine": "hf", "tp": 1, "limit": min(limit, given["limit"] or limit)},
                **{"data": given["data"] | dict(data), "out": directory},
            }
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
