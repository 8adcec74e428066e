"""`megatron-opsft diagnose`, from models to the page, in one process.

A response is on disk as soon as it is diagnosed, so the same command continues after a kill.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from megatron_opsft.diagnose.divergence import diverge, load_model
from megatron_opsft.diagnose.page import PAGE, TOKENS, DiagnosedResponse, read_responses, write_page
from megatron_opsft.errors import UserError
from megatron_opsft.evaluate.benchmarks import SampleFiles, StoredSample
from megatron_opsft.evaluate.inputs import EvalModel, Inputs, open_model, read_inputs
from megatron_opsft.evaluate.run import evaluate
from megatron_opsft.evaluate.settings import load_settings
from megatron_opsft.records import FinishReason, Problem, Sample
from megatron_opsft.rollout.requests import pieces_of
from megatron_opsft.runtime.device import select_device
from megatron_opsft.runtime.durable import append_line, whole_lines, write_bytes
from megatron_opsft.runtime.libraries import installed_versions
from megatron_opsft.runtime.owned_directory import OwnedDirectory

log = logging.getLogger("megatron_opsft")


class DiagnosisDirectory(OwnedDirectory):
    """responses: the evaluation for which the original model samples."""

    kind = "diagnosis"
    names = ("responses", TOKENS, PAGE)


def diagnose(
    original_path: str,
    efficient_path: str,
    out: Path,
    sampling: Mapping[str, Any],
    *,
    overwrite: bool = False,
) -> str:
    """Sample and diagnose what is missing, then write the page. Returns the table for a terminal.

    sampling: settings of the evaluation for which the original samples. Errors: `UserError` before
    anything is computed.
    """
    original, efficient = _open_models(original_path, efficient_path)
    directory = DiagnosisDirectory(out)
    with directory.locked():
        directory.check()
        if overwrite:
            directory.clear()
        settings = load_settings(
            None, (), {**sampling, "model": original_path, "out": out / "responses"}
        )
        inputs = read_inputs(settings, select_device(settings.device), option="--original")
        identity = {
            "original": original.weights_sha256(),
            "efficient": efficient.weights_sha256(),
            "dtype": inputs.dtype,
            "limit": settings.limit,
            "samples": settings.samples,
        }
        directory.check_same(identity)
        models = {"original": str(original.directory), "efficient": str(efficient.directory)}
        directory.write_manifest({**models, "versions": installed_versions(), "identity": identity})
        evaluate(settings)
        _diagnose_left(original, efficient, inputs, out)
        return write_page(out, original.name, efficient.name)


def _diagnose_left(original: EvalModel, efficient: EvalModel, inputs: Inputs, out: Path) -> None:
    """Add the missing responses to tokens.jsonl."""
    tokens = out / TOKENS
    whole = b"".join(b"%s\n" % line for line in whole_lines(tokens))
    write_bytes(tokens, whole)  # without a torn line
    done = {(each.problem_id, each.sample_index) for each in read_responses(out)}
    left = [
        (problem, stored, sample)
        for problem, stored, sample in _responses(inputs)
        if (sample.problem_id, sample.sample_index) not in done
    ]
    if not left:
        return
    log.info("loading %s and %s (%s)", original.name, efficient.name, inputs.dtype)
    p, q = (
        load_model(each, dtype=getattr(torch, inputs.dtype), device=inputs.device)
        for each in (original, efficient)
    )
    for problem, stored, sample in track(left, "diagnose", console=Console(stderr=True)):
        kl, alternatives = diverge(p, q, original.tokenizer, sample)
        row = DiagnosedResponse(
            problem_id=sample.problem_id,
            sample_index=sample.sample_index,
            problem=problem.text,
            gold=problem.answer,
            outcome=stored.outcome.value,
            tokens=tuple(pieces_of(original.tokenizer, sample.response_ids)),
            kl=kl,
            alternatives=alternatives,
        )
        append_line(tokens, json.dumps(asdict(row), ensure_ascii=False))


def _open_models(original_path: str, efficient_path: str) -> tuple[EvalModel, EvalModel]:
    """Errors: `UserError` for two models that do not share a vocabulary."""
    original = open_model(original_path, option="--original")
    efficient = open_model(efficient_path, option="--efficient")
    sizes = [each.table.shape.vocab_size for each in (original, efficient)]
    if sizes[0] != sizes[1] or original.tokenizer.get_vocab() != efficient.tokenizer.get_vocab():
        raise UserError(
            f"--original {original_path} and --efficient {efficient_path} have different "
            f"vocabularies ({sizes[0]:,} and {sizes[1]:,} tokens): D_t compares two distributions "
            "over the same one; give a model that was trained from the original"
        )
    if original.name == efficient.name:
        efficient = replace(efficient, name=f"{efficient.name} (efficient)")
    return original, efficient


def _responses(inputs: Inputs) -> Iterator[tuple[Problem, StoredSample, Sample]]:
    """Those that the evaluation holds, problem by problem, without empty ones. It stores texts,
    which are tokenised again.
    """
    model = inputs.model
    eos = model.tokenizer.eos_token_id
    for benchmark in inputs.benchmarks:
        problems = {problem.id: problem for problem in benchmark.problems}
        found: dict[str, list[StoredSample]] = {problem: [] for problem in problems}
        for stored in SampleFiles(inputs.settings.out).wanted(benchmark, benchmark.samples):
            found[stored.problem_id].append(stored)
        for stored in (each for samples in found.values() for each in samples):
            ids = model.tokenizer.encode(stored.text, add_special_tokens=False)
            if stored.finish_reason is FinishReason.STOP:
                ids.append(eos if eos in model.end_tokens else model.end_tokens[0])
            key = benchmark.key(stored.problem_id)
            sample = Sample(
                problem_id=key,
                sample_index=stored.sample_index,
                prompt_ids=inputs.prompts[key],
                response_ids=tuple(ids),
            )
            if ids:
                yield problems[stored.problem_id], stored, sample
