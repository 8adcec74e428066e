"""The original model's responses, where they lie: an evaluation's samples, a run's rollouts."""

import gzip
import hashlib
import json
import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron_opsft.config_file import load_config
from megatron_opsft.data.prompts import PromptEncoder
from megatron_opsft.errors import PromptError, UserError
from megatron_opsft.evaluate.directory import MANIFEST, read_manifest
from megatron_opsft.evaluate.inputs import read_inputs
from megatron_opsft.evaluate.model import EvalModel
from megatron_opsft.evaluate.samples import SampleFiles, StoredSample, other_data
from megatron_opsft.evaluate.settings import EvalSettings
from megatron_opsft.records import FinishReason, Problem, Sample
from megatron_opsft.runtime.device import Device
from megatron_opsft.runtime.step_names import rollout_files
from megatron_opsft.storage.model_paths import resolve_model

log = logging.getLogger("megatron_opsft")


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """One response to be diagnosed. outcome: its verdict, where there is one."""

    problem: Problem
    sample: Sample
    outcome: str | None

    @property
    def key(self) -> tuple[str, int]:
        return self.sample.problem_id, self.sample.sample_index

    @property
    def num_tokens(self) -> int:
        """Prompt and response."""
        return len(self.sample.prompt_ids) + len(self.sample.response_ids)


def check_source(directory: Path) -> None:
    """Errors: `UserError` unless it holds an evaluation or a run with rollouts."""
    if is_run(directory):
        return
    if not (directory / MANIFEST).is_file() or not (directory / "samples").is_dir():
        raise UserError(
            f"--responses {directory}: neither an evaluation (samples/) nor a run (rollouts/); "
            "name one, or leave it out: the original then samples"
        )
    read_manifest(directory)


def is_run(directory: Path) -> bool:
    """Whether it is the directory of a run, with what was sampled."""
    return (directory / "rollouts").is_dir() and (directory / "config.yaml").is_file()


def sha256_of(responses: Sequence[Response]) -> str:
    """Hash of the tokens of all, in their order."""
    digest = hashlib.sha256()
    for each in responses:
        digest.update(
            json.dumps([*each.key, each.sample.prompt_ids, each.sample.response_ids]).encode()
        )
    return digest.hexdigest()


def evaluated_responses(
    directory: Path,
    original: EvalModel,
    data: Mapping[str, str],
    *,
    samples: int,
    limit: int,
    device: Device,
) -> list[Response]:
    """Of an evaluation directory: the first samples of the first problems of each benchmark.

    An evaluation stores texts, so they are tokenised again; the log says how many are then of
    another length. data: where its problems lie now, where that is elsewhere. Errors: `UserError`.
    """
    inputs = read_inputs(_settings_of(directory, original, data, limit), device)
    found, num_other = [], 0
    for benchmark in inputs.benchmarks:
        stored = SampleFiles(directory).read(benchmark.name)
        if reason := other_data(stored, benchmark):
            raise UserError(
                f"--responses {directory}: its {benchmark.name} is from other data: {reason}; give "
                f"the file with --data {benchmark.name}=FILE"
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
                prompt_ids=inputs.model.prompts[key],
                response_ids=ids,
            )
            problem = problems[each.problem_id]
            found.append(Response(problem=problem, sample=sample, outcome=each.outcome.value))
    if num_other:
        log.warning(
            "%d of %d responses have another number of tokens than were sampled: an evaluation "
            "stores texts, which were tokenised again",
            *(num_other, len(found)),
        )
    return _some(found, directory)


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
        raise UserError(f"{directory / MANIFEST}: its settings cannot be read: {error}") from None
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


def run_responses(
    directory: Path, original: EvalModel, *, samples: int, limit: int
) -> list[Response]:
    """What a run sampled before its first update, as token ids. Errors: `UserError`."""
    config = load_config(directory / "config.yaml", [])
    if resolve_model(config.model.path) != original.directory:
        log.warning(
            "--responses %s: the run began with %s; D_t is of what that model wrote",
            *(directory, config.model.path),
        )
    encoder = PromptEncoder(
        tokenizer=original.tokenizer,
        template=config.data.template,
        system_prompt=config.data.system_prompt,
    )
    found: list[Response] = []
    problems: dict[str, int] = {}
    for where, row in _first_rollouts(directory):
        try:
            place = problems.setdefault(row["problem_id"], len(problems))
            if place < limit and row["sample_index"] < samples:
                found.append(_of_rollout(row, encoder))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{where}: not a response ({error!r}); restore the file") from None
        except PromptError as error:
            raise UserError(f"{where}: {error}") from None
    return _some(found, directory)


def _of_rollout(row: Mapping[str, Any], encoder: PromptEncoder) -> Response:
    problem = Problem(id=row["problem_id"], text=str(row["problem"]), answer=str(row["gold"]))
    prompt = encoder.encode(problem)
    if len(prompt) != row["num_prompt_tokens"]:
        raise PromptError(
            f"its prompt had {row['num_prompt_tokens']} tokens and would now have {len(prompt)}: "
            "of another model or chat, or changed by the method; give an evaluation of the original"
        )
    sample = Sample(
        problem_id=problem.id,
        sample_index=int(row["sample_index"]),
        prompt_ids=prompt,
        response_ids=tuple(map(int, row["response_ids"])),
    )
    return Response(problem=problem, sample=sample, outcome=row["outcome"])


def _first_rollouts(directory: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file:line, fields) of what the run's first weights wrote."""
    for _, path in rollout_files(directory / "rollouts"):
        try:
            with gzip.open(path) as lines:
                for number, line in enumerate(lines, start=1):
                    where = f"{path}:{number}"
                    row = json.loads(line)
                    if row["weight_version"] > 0:
                        return
                    yield where, row
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{path} cannot be read: {error}; restore it") from None
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"{where}: not a response ({error!r}); restore the file") from None


def _some(found: list[Response], directory: Path) -> list[Response]:
    """Those with a token. Errors: `UserError` where there is none."""
    found = [each for each in found if each.sample.response_ids]
    if not found:
        raise UserError(
            f"--responses {directory}: no response of these problems is there; raise --samples or "
            "--limit, or name a directory with the original's responses"
        )
    return found
