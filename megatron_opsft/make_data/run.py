"""`data METHOD`: problems sampled in chunks, responses chosen from each and kept at once, one file
at the end.
"""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron_opsft.config import Config
from megatron_opsft.config.identity import config_hash
from megatron_opsft.data.problems import shuffled_subset
from megatron_opsft.data.stored_responses import StoredResponse, write_stored_responses
from megatron_opsft.errors import UserError
from megatron_opsft.make_data.chosen import crst_rows, o1_rows, off_policy_rows, with_z_scores
from megatron_opsft.make_data.draw import Draw, draw_responses
from megatron_opsft.make_data.step_entropy import marks_of, step_entropy_rows
from megatron_opsft.make_data.tokenskip import open_llmlingua, tokenskip_rows
from megatron_opsft.methods.catalog.fixed_data import Crst, OffPolicySft, StepEntropy, TokenSkip
from megatron_opsft.methods.catalog.o1_pruner import O1Pruner
from megatron_opsft.methods.catalog.on_policy_sft import OnPolicySft
from megatron_opsft.methods.settings import MethodSettings
from megatron_opsft.runtime.distributed import broadcast_object
from megatron_opsft.runtime.durable import append_line, whole_lines, write_bytes
from megatron_opsft.session import Session, open_session

log = logging.getLogger("megatron_opsft")

_ENGINE_BATCHES = 4  # of a chunk, on every rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a method makes data. samples: responses to each problem; rows: what it makes of those to
    a chunk of problems, the same on every rank; whole: what it makes of all rows; notes: what the
    manifest says besides.
    """

    samples: int
    rows: Callable[[Draw], list[StoredResponse]]
    whole: Callable[[Sequence[StoredResponse]], list[StoredResponse]] = list
    notes: dict[str, Any] | None = None


def recipe_of(method: MethodSettings, temperature: float, session: Session) -> Recipe:
    """temperature: of the sampling."""
    limit = session.settings.max_response_tokens
    match method:
        case Crst():
            return Recipe(samples=method.samples, rows=crst_rows)
        case OffPolicySft():
            return Recipe(samples=method.samples, rows=lambda d: off_policy_rows(d, limit))
        case O1Pruner():
            of_loss = method.objective(temperature).temperature
            return Recipe(
                samples=method.samples,
                rows=lambda d: o1_rows(d, method, of_loss),
                whole=with_z_scores if method.z_score else list,
                notes={"log_prob_temperature": of_loss},
            )
        case StepEntropy():
            marks = marks_of(session.sampler.encoder.tokenizer, method.separator)
            return Recipe(samples=1, rows=lambda d: step_entropy_rows(d, method, marks))
        case TokenSkip():
            shorten = open_llmlingua(method.scorer, session.device.torch_device)
            return Recipe(samples=1, rows=lambda d: tokenskip_rows(d, method, shorten))
    raise AssertionError(f"no data are made for {method.name}")


def make_data(config: Config, out: Path, limit: int | None = None) -> None:
    """Write a method's fixed data. Called by every rank.

    limit: how many problems at most, the first of a shuffle by run.seed. Continues what a start
    that was killed has left. Errors: `UserError` before anything is sampled, and where no response
    was chosen.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with open_session(_sampling_alone(config, out)) as opened:
        settings = replace(opened.settings, temperature=config.rollout.temperature)
        s = replace(opened, settings=settings)
        recipe = recipe_of(config.method, config.rollout.temperature, s)
        s.sync.push(0, s.probes(0))
        all_problems = s.problems.problems
        problems = shuffled_subset(all_problems, limit or len(all_problems), config.run.seed)
        size = chunk_size(config.rollout.batch_size, s.layout.world_size, recipe.samples)
        partial = out.with_name(f"{out.name}.partial.jsonl")
        done, rows = 0, list[StoredResponse]()
        if s.layout.is_main:
            done, rows = _continue(partial, _identity(config, s, limit))
        done = broadcast_object(done)
        for first in range(done, len(problems), size):
            chunk = problems[first : first + size]
            drawn = draw_responses(s, chunk, recipe.samples, settings.max_response_tokens)
            found = recipe.rows(drawn)
            if s.layout.is_main:
                of_chunk = {"num_problems": len(chunk), "rows": [asdict(row) for row in found]}
                append_line(partial, json.dumps(of_chunk))
                done += len(chunk)
                rows += found
                log.info("%d of %d problems, %d more responses", done, len(problems), len(found))
        if s.layout.is_main and rows:
            write_stored_responses(
                out, recipe.whole(rows), manifest_of(config, recipe, len(problems))
            )
            log.info("%d responses: %s", len(rows), out)
        any_rows = broadcast_object(bool(rows))
        if s.layout.is_main:
            partial.unlink()
        if not any_rows:
            raise UserError(_why_none(config, len(problems)))


def _continue(partial: Path, identity: dict[str, Any]) -> tuple[int, list[StoredResponse]]:
    """Begin or continue the file of what was chosen so far; the problems that are done, and their
    rows. It has a line for `identity` and one for each chunk of problems. Errors: `UserError` for a
    file of another identity.
    """
    lines = [*whole_lines(partial)] or [json.dumps(identity).encode()]
    if json.loads(lines[0]) != json.loads(json.dumps(identity)):
        raise UserError(
            f"{partial} has responses of other settings, problems or weights; remove it, or name "
            "another --out"
        )
    write_bytes(partial, b"".join(b"%s\n" % line for line in lines))  # without a torn line
    chunks = [json.loads(line) for line in lines[1:]]
    rows: list[dict[str, Any]] = [
        {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
        for chunk in chunks
        for row in chunk["rows"]
    ]
    return sum(chunk["num_problems"] for chunk in chunks), [StoredResponse(**row) for row in rows]


def _identity(config: Config, s: Session, limit: int | None) -> dict[str, Any]:
    """What rows of an earlier start must have in common with those of this one."""
    files = sorted(s.model_dir.glob("*.safetensors"))
    return {
        "config_hash": config_hash(config),
        "data_sha256": s.problems.sha256,
        "limit": limit,
        "weights": [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files],
    }


def chunk_size(batch_size: int, world_size: int, num_samples: int) -> int:
    """Problems that are sampled together: enough to keep every engine's batches full."""
    return max(1, _ENGINE_BATCHES * batch_size * world_size // num_samples)


def manifest_of(config: Config, recipe: Recipe, num_problems: int) -> dict[str, Any]:
    """What the data were made of and how, for the file."""
    rollout = config.rollout
    return {
        "method": config.method.model_dump(mode="json"),
        "model": config.model.path,
        "problems": config.data.name,
        "num_problems": num_problems,
        "template": config.data.template,
        "system_prompt": config.data.system_prompt,
        "seed": config.run.seed,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "max_response_tokens": rollout.max_response_tokens,
        "samples": recipe.samples,
        **(recipe.notes or {}),
    }


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


def _why_none(config: Config, num_problems: int) -> str:
    return (
        f"method.name={config.method.name}: of the responses to {num_problems} problems none was "
        f"correct within rollout.max_response_tokens={config.rollout.max_response_tokens}; raise "
        "it, or give more problems or method.samples"
    )
