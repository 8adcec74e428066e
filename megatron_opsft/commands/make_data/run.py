"""`data METHOD`: problems sampled in chunks, responses chosen from each and kept at once, one file
at the end.
"""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from megatron_opsft.commands.make_data.samples import o1_rows, rows_of, shortest
from megatron_opsft.commands.make_data.step_entropy import (
    check_separator,
    step_entropy_rows,
)
from megatron_opsft.commands.make_data.tokenskip import open_llmlingua, tokenskip_rows
from megatron_opsft.config import Config
from megatron_opsft.config.load import config_hash
from megatron_opsft.data.problems import shuffled_subset
from megatron_opsft.data.stored_responses import StoredResponse, write_stored_responses
from megatron_opsft.errors import UserError
from megatron_opsft.methods.advantages import z_score
from megatron_opsft.methods.catalog.fixed_data import (
    Crst,
    OffPolicySft,
    StepEntropy,
    TokenSkip,
)
from megatron_opsft.methods.catalog.o1_pruner import O1Pruner
from megatron_opsft.methods.catalog.on_policy_sft import OnPolicySft
from megatron_opsft.methods.facts import select
from megatron_opsft.run.start.session import Session, open_session
from megatron_opsft.run.step.judged_problems import JudgedProblems, judge_problems
from megatron_opsft.runtime.distributed import broadcast_object
from megatron_opsft.runtime.durable import append_line, json_lines, write_text
from megatron_opsft.runtime.phase import Stopwatch

log = logging.getLogger("megatron_opsft")

_ENGINE_BATCHES = 4  # of a chunk of problems, on every rank


def _rows_by(
    config: Config, s: Session
) -> Callable[[JudgedProblems], list[StoredResponse]]:
    """What the method makes of the responses to a chunk of problems, the same on every rank."""
    limit = s.settings.max_response_tokens
    match method := config.method:
        case Crst():
            return lambda judged: rows_of(s, judged, shortest(judged.responses, limit))
        case OffPolicySft():
            return lambda judged: rows_of(s, judged, select(judged.responses, limit))
        case O1Pruner():
            temperature = method.objective(config.rollout.temperature).temperature
            return lambda judged: o1_rows(s, judged, method, temperature)
        case StepEntropy():
            check_separator(s.sampler.encoder.tokenizer, method.separator)
            return lambda judged: step_entropy_rows(s, judged, method)
        case TokenSkip():
            shorten = open_llmlingua(method.scorer, s.device.torch_device)
            return lambda judged: tokenskip_rows(s, judged, method, shorten)
    raise AssertionError(f"no data are made for {method.name}")


def make_data(config: Config, out: Path, limit: int | None = None) -> None:
    """Write a method's fixed data. Called by every rank.

    limit: how many problems at most, the first of a shuffle by run.seed. Continues after a
    kill. Errors: `UserError` before anything is sampled, and where no response
    was chosen.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with open_session(_sampling_alone(config, out)) as opened:
        settings = replace(opened.settings, temperature=config.rollout.temperature)
        s = replace(opened, settings=settings)
        rows_by_method = _rows_by(config, s)
        s.sync.push(0, s.probes(0))
        all_problems = s.problems.problems
        problems = shuffled_subset(
            all_problems, limit or len(all_problems), config.run.seed
        )
        num_samples = getattr(config.method, "samples", 1)
        at_once = _ENGINE_BATCHES * config.rollout.batch_size * s.layout.world_size
        size = max(
            1, at_once // num_samples
        )  # problems that keep every engine's batches full
        partial = out.with_name(f"{out.name}.partial.jsonl")
        done, rows = 0, list[StoredResponse]()
        if s.layout.is_main:
            done, rows = _continue(partial, _identity(config, s, limit))
        for first in range(broadcast_object(done), len(problems), size):
            chunk = problems[first : first + size]
            judged = judge_problems(
                s,
                chunk,
                Stopwatch(s.device),
                num_samples=num_samples,
                limit=settings.max_response_tokens,
                seed_step=1,
            )
            found = rows_by_method(judged)
            if s.layout.is_main:
                _append(partial, len(chunk), found)
                rows += found
                done = first + len(chunk)
                log.info(
                    "%d of %d problems, %d more responses",
                    done,
                    len(problems),
                    len(found),
                )
        if s.layout.is_main:
            if rows:
                _write(config, rows, len(problems), out)
            partial.unlink()
        if not broadcast_object(bool(rows)):
            raise UserError(
                f"method.name={config.method.name}: none of the responses to {len(problems)} "
                "problems was correct within rollout.max_response_tokens="
                f"{config.rollout.max_response_tokens}; raise it, or give more problems or "
                "method.samples"
            )


def _append(partial: Path, num_problems: int, rows: Sequence[StoredResponse]) -> None:
    """Append the rows of some problems to the file that a killed job continues from."""
    fields_of_rows = [asdict(row) for row in rows]
    for fields in fields_of_rows:
        del fields["routing"]  # bytes, which fixed data do not have
    append_line(
        partial, json.dumps({"num_problems": num_problems, "rows": fields_of_rows})
    )


def _continue(
    partial: Path, identity: dict[str, Any]
) -> tuple[int, list[StoredResponse]]:
    """Begin or continue the file of what was chosen so far; the problems that are done, and their
    rows. It has a line for `identity` and one for each chunk of problems. Errors: `UserError` for a
    file of another identity.
    """
    lines = [*json_lines(partial)] or [identity]
    if lines[0] != identity:
        raise UserError(
            f"{partial} has responses of other settings, problems or weights; remove it, or name "
            "another --out"
        )
    write_text(
        partial, "".join(f"{json.dumps(line)}\n" for line in lines)
    )  # without a torn one
    rows = [row for chunk in lines[1:] for row in chunk["rows"]]
    stored = TypeAdapter(list[StoredResponse]).validate_python(rows)
    return sum(chunk["num_problems"] for chunk in lines[1:]), stored


def _identity(config: Config, s: Session, limit: int | None) -> dict[str, Any]:
    """What rows of an earlier start must have in common with those of this one."""
    files = sorted(s.model_dir.glob("*.safetensors"))
    return {
        "config_hash": config_hash(config),
        "data_sha256": s.problems.sha256,
        "limit": limit,
        "weights": [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files],
    }


def _write(
    config: Config, rows: Sequence[StoredResponse], num_problems: int, out: Path
) -> None:
    """The rows, with what they were made of and how."""
    method, rollout = config.method, config.rollout
    manifest = {
        "method": method.model_dump(mode="json"),
        "model": config.model.path,
        "problems": config.data.name,
        "num_problems": num_problems,
        **config.data.model_dump(include={"template", "system_prompt"}),
        "seed": config.run.seed,
        **rollout.model_dump(include={"temperature", "top_p", "max_response_tokens"}),
        "samples": getattr(method, "samples", 1),
    }
    if isinstance(method, O1Pruner):
        if method.z_score:  # over the whole data set; population deviation
            (advantages,) = z_score([[row.advantage for row in rows]])
            rows = [
                replace(row, advantage=a)
                for row, a in zip(rows, advantages, strict=True)
            ]
        manifest["log_prob_temperature"] = method.objective(
            rollout.temperature
        ).temperature
    write_stored_responses(out, rows, manifest)
    log.info("%d responses: %s", len(rows), out)


def _sampling_alone(config: Config, out: Path) -> Config:
    """The configuration of a session that samples and scores, at temperature 1, and reads no data
    of the method's.
    """
    return config.model_copy(
        update={
            "method": OnPolicySft(),
            "data": config.data.model_copy(update={"responses": None}),
            "rollout": config.rollout.model_copy(update={"temperature": 1.0}),
            "run": config.run.model_copy(update={"dir": out.parent}),
        }
    )
