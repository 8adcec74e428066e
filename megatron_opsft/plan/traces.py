"""Responses as they really were, from the rollouts of runs or from a file of lengths: a step as it
was, or steps of any size that are drawn from them.
"""

import gzip
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_opsft.errors import UserError
from megatron_opsft.plan.lengths import Workload
from megatron_opsft.runtime.step_names import rollout_files


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedResponse:
    """prompt_tokens: None where the trace does not say. accepted: correct, as far as it says."""

    num_tokens: int
    accepted: bool
    prompt_tokens: int | None = None


Group = Sequence[RecordedResponse]
"""The responses to one problem."""


def read_trace(path: Path) -> list[Group]:
    """A run directory (its rollouts of all steps), a directory or file of rollouts, or a JSONL(.gz)
    file of `num_tokens`, with `problem_id`, `outcome` and `num_prompt_tokens` where they are known.

    Responses without `problem_id` are each to a problem of its own; without `outcome` they count as
    correct. Errors: `UserError`.
    """
    files = [path]
    if path.is_dir():
        where = path / "rollouts" if (path / "rollouts").is_dir() else path
        files = [file for _, file in rollout_files(where)]
    if not files or not files[0].is_file():
        raise UserError(f"{path}: no rollouts/step_*.jsonl.gz there and no file of lengths")
    groups = [group for file in files for group in read_step(file)]
    if not groups:
        raise UserError(f"{path} holds no response")
    return groups


def read_step(file: Path) -> list[Group]:
    """The groups of one file, in their order."""
    groups: dict[Any, list[RecordedResponse]] = {}
    try:
        data = file.read_bytes()
        lines = (gzip.decompress(data) if file.suffix == ".gz" else data).decode().splitlines()
        for number, row in enumerate(json.loads(line) for line in lines if line.strip()):
            groups.setdefault(row.get("problem_id", number), []).append(_response(row))
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{file} is no JSONL of responses with num_tokens: {error!r}; see docs/scaling.md"
        ) from None
    return list(groups.values())


def _response(row: dict[str, Any]) -> RecordedResponse:
    prompt = row.get("num_prompt_tokens")
    return RecordedResponse(
        num_tokens=int(row["num_tokens"]),
        accepted=row.get("outcome", "correct") == "correct",
        prompt_tokens=None if prompt is None else int(prompt),
    )


def replay(groups: Sequence[Group], *, prompt_tokens: int, limit: int) -> Workload:
    """One step as it was. prompt_tokens: where the responses do not say.

    Engines get the problems with the longest prompts first (`RolloutEngine.generate`).
    """
    in_order = sorted(groups, key=lambda group: -(group[0].prompt_tokens or 0))
    responses = [response for group in in_order for response in group]
    known = [r.prompt_tokens for r in responses if r.prompt_tokens is not None]
    return Workload(
        lengths=tuple(response.num_tokens for response in responses),
        accepted=tuple(response.num_tokens for response in responses if response.accepted),
        prompt_tokens=round(sum(known) / len(known)) if known else prompt_tokens,
        limit=limit,
    )


def draw_from_trace(
    trace: Sequence[Group],
    *,
    num_prompts: int,
    group_size: int,
    limit: int,
    prompt_tokens: int,
    seed: int,
) -> Workload:
    """A step of any size: problems drawn with replacement, so that a long problem brings a group of
    long responses, and responses from those to the problem. What is longer than `limit` is cut and
    not accepted.

    prompt_tokens: where the trace does not say.
    """
    chance = random.Random(seed)
    groups = []
    for _ in range(num_prompts):
        group = chance.choice(trace)
        drawn = list(group) if len(group) == group_size else chance.choices(group, k=group_size)
        groups.append([_cut(response, limit) for response in drawn])
    return replay(groups, prompt_tokens=prompt_tokens, limit=limit)


def _cut(response: RecordedResponse, limit: int) -> RecordedResponse:
    if response.num_tokens < limit:
        return response
    return RecordedResponse(num_tokens=limit, accepted=False, prompt_tokens=response.prompt_tokens)
