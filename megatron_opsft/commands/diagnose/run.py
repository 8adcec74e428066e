"""`megatron-opsft diagnose`, from models to the page, in one process.

A response is on disk as soon as it is diagnosed, so the same command continues after a kill.
"""

import json
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from megatron_opsft.commands.diagnose.directory import (
    FORMAT,
    PAGE,
    TOKENS,
    DiagnosisDirectory,
)
from megatron_opsft.commands.diagnose.divergence import diverge, load_model
from megatron_opsft.commands.diagnose.page import write_page
from megatron_opsft.commands.evaluate.inputs import Inputs, open_model, read_inputs
from megatron_opsft.commands.evaluate.run import evaluate
from megatron_opsft.commands.evaluate.settings import load_settings
from megatron_opsft.data.stored_samples import SampleFiles
from megatron_opsft.errors import UserError
from megatron_opsft.records import FinishReason
from megatron_opsft.rollout.requests import split_text_by_token
from megatron_opsft.runtime.device import select_device
from megatron_opsft.runtime.durable import (
    append_line,
    json_lines,
    whole_lines,
    write_bytes,
)
from megatron_opsft.runtime.progress import Progress


def diagnose(
    original: str,
    efficient: str,
    out: Path,
    keys: Sequence[str],
    *,
    overwrite: bool = False,
) -> str:
    """Sample and diagnose what is missing, then write the page. Returns the table for a terminal.

    keys: settings of the evaluation for which the original samples, as key=value. Errors:
    `UserError` before anything is computed.
    """
    given = {"model": original, "out": out / "responses"}
    settings = load_settings(None, ["limit=32", "samples=1", *keys], given)
    inputs = read_inputs(settings, select_device(settings.device), option="--original")
    p, q = inputs.model, open_model(efficient, option="--efficient")
    sizes = [each.table.shape.vocab_size for each in (p, q)]
    if sizes[0] != sizes[1] or p.tokenizer.get_vocab() != q.tokenizer.get_vocab():
        raise UserError(
            f"--original {original} and --efficient {efficient} have different vocabularies "
            f"({sizes[0]:,} and {sizes[1]:,} tokens): D_t compares two distributions over the same "
            "one; give a model that was trained from the original"
        )
    directory, tokens = DiagnosisDirectory(out), out / TOKENS
    with directory.locked():
        directory.check()
        if overwrite:
            directory.clear()
        identity = {"efficient": q.weights_sha256(), "format": FORMAT}
        directory.check_same(identity)
        names = p.name, q.name if q.name != p.name else f"{q.name} (efficient)"
        told = {"original": original, "path": efficient, "names": names}
        directory.write_manifest({**told, "identity": identity})
        evaluate(settings)
        whole = b"".join(b"%s\n" % line for line in whole_lines(tokens))
        write_bytes(tokens, whole)  # without a torn line
        key = itemgetter("problem_id", "sample_index")
        done = set(map(key, json_lines(tokens)))
        wanted = list(_responses(inputs))
        left = [response for response in wanted if key(response[0]) not in done]
        with Progress("diagnose", len(left), unit=" responses") as progress:
            dtype = getattr(torch, inputs.dtype)
            models = [load_model(m, dtype, inputs.device) for m in (p, q) if left]
            for row, prompt_ids, ids in left:
                row["tokens"] = split_text_by_token(p.tokenizer, ids)
                found = diverge(models[0], models[1], p.tokenizer, prompt_ids, ids)
                row["kl"], row["alternatives"] = found
                append_line(tokens, json.dumps(row, ensure_ascii=False))
                progress.update(1)
        shown = {
            key(row) for row, _, _ in wanted
        }  # an earlier command may have wanted others
        responses = [row for row in json_lines(tokens) if key(row) in shown]
    return write_page(out / PAGE, responses, *names)


def _responses(
    inputs: Inputs,
) -> Iterator[tuple[dict[str, Any], tuple[int, ...], list[int]]]:
    """What tokens.jsonl says of each response of the evaluation before it is diagnosed, its prompt
    and its tokens. The evaluation stores texts, which are tokenised again.
    """
    model, files = inputs.model, SampleFiles(inputs.settings.out)
    eos = model.tokenizer.eos_token_id
    for benchmark in inputs.benchmarks:
        texts = {problem.id: problem.text for problem in benchmark.problems}
        for stored in files.read_first(
            benchmark.name, benchmark.problem_ids, benchmark.samples
        ):
            ids = model.tokenizer.encode(stored.text, add_special_tokens=False)
            if stored.finish_reason is FinishReason.STOP:
                ids.append(eos if eos in model.end_tokens else model.end_tokens[0])
            row: dict[str, Any] = {
                "problem_id": benchmark.key(stored.problem_id),
                "sample_index": stored.sample_index,
                "problem": texts[stored.problem_id],
                "gold": stored.gold,
                "outcome": stored.outcome.value,
            }
            if ids:
                yield row, inputs.prompts[row["problem_id"]], ids
