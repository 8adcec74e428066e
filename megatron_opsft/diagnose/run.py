"""`megatron-opsft diagnose`, from settings to pictures, in one process.

A response is on disk as soon as it is diagnosed, so the same command continues after a kill.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch
from rich.console import Console
from rich.progress import track

from megatron_opsft.diagnose.directory import DiagnosisDirectory, keys_of_whole_lines
from megatron_opsft.diagnose.divergence import diverge, load_model
from megatron_opsft.diagnose.outputs import write_outputs
from megatron_opsft.diagnose.responses import Response, find_responses
from megatron_opsft.diagnose.settings import DiagnoseSettings
from megatron_opsft.errors import UserError
from megatron_opsft.evaluate.inputs import EvalModel, open_model
from megatron_opsft.report.diagnosis import TOKENS, DiagnosedResponse
from megatron_opsft.rollout.pieces import pieces_of
from megatron_opsft.runtime.device import select_device
from megatron_opsft.runtime.durable import append_line
from megatron_opsft.runtime.libraries import installed_versions

log = logging.getLogger("megatron_opsft")


def diagnose(asked: DiagnoseSettings) -> str:
    """Diagnose what is not done, then write every output. Returns the table for a terminal.

    Errors: `UserError` before anything is computed.
    """
    device = select_device(asked.device)
    original, efficient = _open_models(asked)
    directory = DiagnosisDirectory(asked.out)
    with directory.locked():
        directory.check()
        if asked.overwrite:
            directory.clear()
        responses = find_responses(asked, original, device)
        dtype = asked.dtype
        if dtype == "auto":
            dtype = "bfloat16" if device.is_cuda else "float32"
        identity = {
            "original": original.weights_sha256(),
            "efficient": efficient.weights_sha256(),
            "responses": _sha256_of(responses),
            "dtype": dtype,
        }
        facts = {
            "original": str(original.directory),
            "efficient": str(efficient.directory),
            "labels": [original.name, efficient.name],
            "responses": str(asked.responses or directory.responses),
            "versions": installed_versions(),
        }
        directory.check_same(identity)
        directory.write_manifest({**facts, "identity": identity})
        tokens = asked.out / TOKENS
        done = keys_of_whole_lines(tokens)
        samples = [(each, each.sample) for each in responses]
        left = [each for each, s in samples if (s.problem_id, s.sample_index) not in done]
        if left:
            log.info("loading %s and %s (%s)", original.name, efficient.name, dtype)
            p, q = (
                load_model(each, dtype=getattr(torch, dtype), device=device)
                for each in (original, efficient)
            )
            for each in track(left, "diagnose", console=Console(stderr=True)):
                kl, alternatives = diverge(p, q, original.tokenizer, each.sample)
                row = DiagnosedResponse(
                    problem_id=each.sample.problem_id,
                    sample_index=each.sample.sample_index,
                    problem=each.problem.text,
                    gold=each.problem.answer,
                    outcome=each.outcome,
                    tokens=tuple(pieces_of(original.tokenizer, each.sample.response_ids)),
                    kl=kl,
                    alternatives=alternatives,
                )
                append_line(tokens, json.dumps(asdict(row), ensure_ascii=False))
        return write_outputs(asked.out)


def _open_models(asked: DiagnoseSettings) -> tuple[EvalModel, EvalModel]:
    """Errors: `UserError` for two models that do not share a vocabulary."""
    original = open_model(asked.original, option="--original")
    efficient = open_model(asked.efficient, option="--efficient")
    sizes = [each.table.shape.vocab_size for each in (original, efficient)]
    same = original.tokenizer.get_vocab() == efficient.tokenizer.get_vocab()
    if sizes[0] != sizes[1] or not same:
        what = f"{sizes[0]:,} and {sizes[1]:,} tokens" if sizes[0] != sizes[1] else "other tokens"
        raise UserError(
            f"--original {asked.original} and --efficient {asked.efficient} have different "
            f"vocabularies ({what}): D_t compares two distributions over the same one; give a "
            "model that was trained from the original"
        )
    if original.name == efficient.name:
        efficient = replace(efficient, name=f"{efficient.name} (efficient)")
    return original, efficient


def _sha256_of(responses: Sequence[Response]) -> str:
    """Hash of the tokens of all, in their order."""
    digest = hashlib.sha256()
    for s in (each.sample for each in responses):
        told = [s.problem_id, s.sample_index, s.prompt_ids, s.response_ids]
        digest.update(json.dumps(told).encode())
    return digest.hexdigest()
