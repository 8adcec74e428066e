"""`megatron-opsft diagnose`, from models to the page, in one process.

A response is stored as soon as it is diagnosed, so the same command continues after a kill.
"""

from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_opsft.commands.diagnose.directory import (
    FORMAT,
    PAGE,
    TOKENS,
    DiagnosisDirectory,
)
from megatron_opsft.commands.diagnose.divergence import diverge, load_model
from megatron_opsft.commands.diagnose.page import describe_divergence
from megatron_opsft.commands.evaluate.inputs import (
    EvalModel,
    Inputs,
    open_model,
    read_inputs,
)
from megatron_opsft.commands.evaluate.run import evaluate
from megatron_opsft.commands.evaluate.settings import load_settings
from megatron_opsft.errors import UserError
from megatron_opsft.records import FinishReason, JsonObject, TokenIds
from megatron_opsft.rollout.requests import split_text_by_token
from megatron_opsft.runtime.device import select_device
from megatron_opsft.runtime.durable import json_lines
from megatron_opsft.runtime.journal import Journal
from megatron_opsft.runtime.owned_directory import OTHER_WEIGHTS, describe_change
from megatron_opsft.runtime.progress import Progress


class _Response(NamedTuple):
    """A response of the original model."""

    row: JsonObject
    """The line of tokens.jsonl, before the response is diagnosed."""
    prompt_ids: TokenIds
    ids: list[int]
    """The tokens of the response."""


_key = itemgetter("problem_id", "sample_index")  # of a line of tokens.jsonl


def diagnose(
    original: str,
    efficient: str,
    out: Path,
    keys: Sequence[str],
    *,
    overwrite: bool = False,
) -> str:
    """Sample and diagnose what is missing, then write the page; return the table for a terminal.

    keys: settings of the evaluation for which the original samples, as key=value. Errors:
    `UserError` before anything is computed.
    """
    options = {"model": original, "out": out / "responses"}
    settings = load_settings(None, ["limit=32", "samples=1", *keys], options)
    inputs = read_inputs(settings, select_device(settings.device), option="--original")
    p = inputs.model  # the original, as in `diverge`
    q = open_model(
        efficient, option="--efficient", chat_template=settings.chat_template
    )
    p_size = p.table.shape.vocab_size
    q_size = q.table.shape.vocab_size
    if p_size != q_size or p.tokenizer.get_vocab() != q.tokenizer.get_vocab():
        raise UserError(
            f"--original {original} and --efficient {efficient} have different vocabularies "
            f"({p_size:,} and {q_size:,} tokens): D_t compares two distributions over the same "
            "one; give a model that was trained from the original"
        )
    q_name = q.name if q.name != p.name else f"{q.name} (efficient)"
    directory = DiagnosisDirectory(out)
    with directory.locked():
        directory.check()
        if overwrite:
            directory.clear()
        identity = {"efficient": q.weights_sha256(), "format": FORMAT}
        before = (directory.read_manifest() or {}).get("path")
        words = {
            "efficient": describe_change(
                OTHER_WEIGHTS, efficient, before, directory.kind
            )
        }
        directory.check_same(identity, explain=lambda name: words.get(name, ""))
        directory.write_manifest(
            {
                "original": original,
                "path": efficient,
                "names": (p.name, q_name),
                "identity": identity,
            }
        )
        evaluate(settings)
        responses = list(_responses(inputs))
        _diagnose_missing(responses, inputs, q, out / TOKENS)
        # An earlier command may have diagnosed other responses, too.
        wanted = {_key(response.row) for response in responses}
        rows = [row for row in json_lines(out / TOKENS) if _key(row) in wanted]
    contents = describe_divergence(rows, p.name, q_name)
    contents.write_page(out / PAGE)
    return contents.text


def _diagnose_missing(
    responses: Sequence[_Response], inputs: Inputs, efficient: EvalModel, path: Path
) -> None:
    """Append a line to tokens.jsonl, at `path`, for each response that has none yet."""
    journal = Journal(path)
    done = {_key(row) for row in journal.resume()}
    missing = [response for response in responses if _key(response.row) not in done]
    original = inputs.model
    with Progress("diagnose", len(missing), unit=" responses") as progress:
        if not missing:
            return
        dtype = getattr(torch, inputs.dtype)
        p = load_model(original, dtype, inputs.device)
        q = load_model(efficient, dtype, inputs.device)
        for row, prompt_ids, ids in missing:
            row["tokens"] = split_text_by_token(original.tokenizer, ids)
            row["kl"], row["alternatives"] = diverge(
                p, q, original.tokenizer, prompt_ids, ids
            )
            journal.append(row)
            progress.update(1)


def _responses(inputs: Inputs) -> Iterator[_Response]:
    """Yield the responses of the evaluation that have a token.

    The evaluation stores texts, which are tokenised again.
    """
    model = inputs.model
    end_token = model.tokenizer.eos_token_id
    if end_token not in model.end_tokens:
        end_token = model.end_tokens[0]
    for benchmark in inputs.benchmarks:
        problems = benchmark.problems_by_key()
        for sample in benchmark.read_samples(inputs.settings.out, benchmark.samples):
            ids = model.tokenizer.encode(sample.text, add_special_tokens=False)
            if sample.finish_reason is FinishReason.STOP:
                ids.append(end_token)
            if not ids:
                continue
            key = benchmark.key(sample.problem_id)
            row = {
                "problem_id": key,
                "sample_index": sample.sample_index,
                "problem": problems[key].text,
                "gold": sample.gold,
                "outcome": sample.outcome.value,
                "first_right_char": sample.first_right_char,
            }
            yield _Response(row, inputs.prompts[key], ids)
