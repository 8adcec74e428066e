"""`megatron-opsft diagnose`, from settings to pictures, in one process.

A response is on disk as soon as it is diagnosed, so the same command continues after a kill.
"""

import json
import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from megatron_opsft.diagnose.directory import DiagnosisDirectory, keys_of_whole_lines
from megatron_opsft.diagnose.divergence import diverge, load_model
from megatron_opsft.diagnose.outputs import write_outputs
from megatron_opsft.diagnose.responses import Response, sampled_responses, sha256_of
from megatron_opsft.diagnose.settings import DiagnoseSettings
from megatron_opsft.errors import UserError
from megatron_opsft.evaluate.model import EvalModel, open_model
from megatron_opsft.evaluate.run import evaluate
from megatron_opsft.evaluate.settings import load_settings
from megatron_opsft.report.diagnosis import TOKENS, Alternative
from megatron_opsft.rollout.pieces import pieces_of
from megatron_opsft.runtime.device import select_device
from megatron_opsft.runtime.durable import append_line
from megatron_opsft.runtime.libraries import installed_versions

log = logging.getLogger("megatron_opsft")


def diagnose(settings: DiagnoseSettings, *, overwrite: bool = False) -> str:
    """Diagnose what is not done, then write every output. Returns the table for a terminal.

    Errors: `UserError` before anything is computed.
    """
    device = select_device(settings.device)
    original, efficient = _open_models(settings)
    directory = DiagnosisDirectory(settings.out)
    with directory.locked():
        directory.check()
        if overwrite:
            directory.clear()
        source = settings.responses or directory.responses
        if settings.responses is None:
            _sample(settings, source)
        responses = sampled_responses(
            source,
            original,
            settings.data,
            samples=settings.samples,
            limit=settings.limit,
            device=device,
        )
        dtype = settings.dtype
        if dtype == "auto":
            dtype = "bfloat16" if device.is_cuda else "float32"
        identity = {
            "original": original.weights_sha256(),
            "efficient": efficient.weights_sha256(),
            "responses": sha256_of(responses),
            "dtype": dtype,
        }
        facts = {
            "original": str(original.directory),
            "efficient": str(efficient.directory),
            "labels": [original.name, efficient.name],
            "responses": str(source),
            "versions": installed_versions(),
        }
        directory.check_same(identity)
        directory.write_manifest({**facts, "identity": identity})
        tokens = settings.out / TOKENS
        done = keys_of_whole_lines(tokens)
        if left := [each for each in responses if each.key not in done]:
            log.info("loading %s and %s (%s)", original.name, efficient.name, dtype)
            p, q = (
                load_model(each, dtype=getattr(torch, dtype), device=device)
                for each in (original, efficient)
            )
            for each in track(left, "diagnose", console=Console(stderr=True)):
                found = diverge(p, q, original.tokenizer, each.sample)
                row = _row(each, *found, original.tokenizer)
                append_line(tokens, json.dumps(row, ensure_ascii=False))
        return write_outputs(settings.out)


def _open_models(settings: DiagnoseSettings) -> tuple[EvalModel, EvalModel]:
    """Errors: `UserError` for two models that do not share a vocabulary."""
    original = open_model(settings.original, option="--original")
    efficient = open_model(settings.efficient, option="--efficient")
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
        efficient = replace(efficient, name=f"{efficient.name} (efficient)")
    return original, efficient


def _sample(settings: DiagnoseSettings, out: Path) -> None:
    """Evaluate the original model, whose responses are then in `out`."""
    same = {"benchmarks", "data", "samples", "limit", "max_tokens", "dtype", "device", "seed"}
    asked = {"model": settings.original, "out": out}
    evaluate(load_settings(None, (), asked | settings.model_dump(include=same)))


def _row(
    response: Response, kl: list[float], alternatives: list[Alternative], tokenizer: Any
) -> dict[str, Any]:
    """A line of tokens.jsonl; docs/evaluation.md says what is what."""
    sample = response.sample
    return {
        "problem_id": sample.problem_id,
        "sample_index": sample.sample_index,
        "problem": response.problem.text,
        "gold": response.problem.answer,
        "outcome": response.outcome,
        "tokens": pieces_of(tokenizer, sample.response_ids),
        "kl": [_short(value) for value in kl],
        "alternatives": [
            {
                **asdict(each),
                "p_original": _short(each.p_original),
                "p_efficient": _short(each.p_efficient),
                "preferred": [[text, _short(p)] for text, p in each.preferred],
            }
            for each in alternatives
        ],
    }


def _short(value: float) -> float:
    """As many digits as a float32 has."""
    return float(f"{value:.7g}")
