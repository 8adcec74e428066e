"""`data METHOD`: samples responses to chunks of problems, and chooses rows from them. The rows of
each chunk are stored at once, so that a killed job continues; one file is written at the end.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from pydantic import TypeAdapter

from megatron_opsft.commands.make_data.samples import collect_rows, o1_rows, shortest
from megatron_opsft.commands.make_data.step_entropy import (
    check_separator,
    step_entropy_rows,
)
from megatron_opsft.commands.make_data.stop import stop_rows
from megatron_opsft.commands.make_data.tokenskip import open_llmlingua, tokenskip_rows
from megatron_opsft.config import Config
from megatron_opsft.config.load import config_hash
from megatron_opsft.data.problems import shuffled_subset
from megatron_opsft.data.stored_responses import StoredResponse, write_stored_responses
from megatron_opsft.errors import UserError, log
from megatron_opsft.methods.advantages import z_score
from megatron_opsft.methods.catalog.fixed_data import (
    Crst,
    OffPolicySft,
    StepEntropy,
    Stop,
    TokenSkip,
)
from megatron_opsft.methods.catalog.o1_pruner import O1Pruner
from megatron_opsft.methods.catalog.on_policy_sft import OnPolicySft
from megatron_opsft.methods.facts import select
from megatron_opsft.records import JsonObject
from megatron_opsft.run.start.check import check_on_job
from megatron_opsft.run.start.session import Session, open_session
from megatron_opsft.run.step.judged_problems import JudgedProblems, judge_problems
from megatron_opsft.run.step.sleep import push
from megatron_opsft.runtime.distributed import broadcast_object
from megatron_opsft.runtime.journal import Journal
from megatron_opsft.runtime.launched import launched_rank
from megatron_opsft.runtime.owned_directory import OwnedDirectory
from megatron_opsft.runtime.phase import Stopwatch

# Keys of `data` that make the prompts.
_PROMPT_KEYS = {"template", "system_prompt", "chat_template", "template_arguments"}
_ENGINE_BATCHES = 4  # a chunk of problems fills so many batches of every rank's engine


def _rows_by(
    config: Config, s: Session
) -> Callable[[JudgedProblems], list[StoredResponse]]:
    """Return the function that makes the method's rows from the responses to a chunk of problems.
    Its result is the same on every rank.
    """
    limit = s.settings.max_response_tokens
    match method := config.method:
        case Crst():
            return lambda judged: collect_rows(
                s, judged, shortest(judged.responses, limit, method.length_of)
            )
        case OffPolicySft():
            return lambda judged: collect_rows(
                s, judged, select(judged.responses, limit)
            )
        case O1Pruner():
            return lambda judged: o1_rows(s, judged, method)
        case StepEntropy():
            check_separator(s.sampler.encoder.tokenizer, method.separator)
            return lambda judged: step_entropy_rows(s, judged, method)
        case Stop():
            return lambda judged: stop_rows(s, judged, method)
        case TokenSkip():
            shorten = open_llmlingua(method.scorer, s.device.torch_device)
            return lambda judged: tokenskip_rows(s, judged, method, shorten)
    raise AssertionError(f"no data are made for {method.name}")


class _DataFile(OwnedDirectory):
    """The directory of a file of fixed data; the lock is of this file alone."""

    kind = "data set"
    names = ()

    def __init__(self, out: Path) -> None:
        super().__init__(out.parent)
        self.lock = f".{out.name}.lock"


def make_data(config: Config, out: Path, limit: int | None) -> None:
    """Sample responses to all problems, choose rows from them, and write the rows; the lock of the
    file is held meanwhile. Called by every rank.

    limit: at most so many problems, the first of a shuffle by run.seed. After a kill, the same call
    continues. Errors: `UserError` before anything is sampled, if another process writes the file,
    or if no response was chosen.
    """
    with ExitStack() as stack:
        if launched_rank() == 0:
            stack.enter_context(_DataFile(out).locked())
        checked = check_on_job(_sampling_config(config, out))
        opened = stack.enter_context(open_session(checked))
        temperature = config.rollout.temperature
        s = replace(opened, settings=replace(opened.settings, temperature=temperature))
        make_rows = _rows_by(config, s)
        push(s, 0, s.probes(0), Stopwatch(s.device))
        problems = s.problems.problems
        problems = shuffled_subset(problems, limit or len(problems), config.run.seed)
        partial = out.with_name(f"{out.name}.partial.jsonl")
        journal = Journal(partial, _identity(config, s, limit), _words(config))
        num_done = 0
        rows: list[StoredResponse] = []
        if s.layout.is_main:
            num_done, rows = _rows_of_earlier_starts(journal)
        num_samples = config.method.num_data_samples
        chunk_size = _problems_at_a_time(config, s.layout.world_size)
        for first in range(broadcast_object(num_done), len(problems), chunk_size):
            chunk = problems[first : first + chunk_size]
            judged = judge_problems(
                s,
                chunk,
                Stopwatch(s.device),
                num_samples=num_samples,
                limit=s.settings.max_response_tokens,
                seed_step=1,
            )
            # The file has no routing.
            new_rows = [replace(row, routing=b"") for row in make_rows(judged)]
            if s.layout.is_main:
                journal.append(_as_json(len(chunk), new_rows))
                rows += new_rows
                log.info(
                    "%d of %d problems, %d more responses",
                    first + len(chunk),
                    len(problems),
                    len(new_rows),
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


def _problems_at_a_time(config: Config, world_size: int) -> int:
    """Return how many problems have enough responses to fill every engine's batch several times."""
    num_responses = _ENGINE_BATCHES * config.rollout.batch_size * world_size
    return max(1, num_responses // config.method.num_data_samples)


def _rows_of_earlier_starts(journal: Journal) -> tuple[int, list[StoredResponse]]:
    """Return how many problems are done, and their rows. Errors: those of `Journal.resume`."""
    num_done = 0
    rows: list[JsonObject] = []
    for chunk in journal.resume():
        num_done += chunk["num_problems"]
        rows += chunk["rows"]
    return num_done, TypeAdapter(list[StoredResponse]).validate_python(rows)


def _as_json(num_problems: int, rows: Sequence[StoredResponse]) -> JsonObject:
    """Return the line of the journal for a chunk of problems."""
    fields_of_rows = [asdict(row) for row in rows]
    for fields in fields_of_rows:
        del fields["routing"]  # bytes, which the written file does not have
    return {"num_problems": num_problems, "rows": fields_of_rows}


def _identity(config: Config, s: Session, limit: int | None) -> JsonObject:
    """Return the settings, problems and weights that two starts of one job must share."""
    files = sorted(s.model_dir.glob("*.safetensors"))
    return {
        "config_hash": config_hash(config),
        "data_sha256": s.problems.sha256,
        "limit": limit,
        "weights": [
            [file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files
        ],
    }


def _words(config: Config) -> dict[str, str]:
    """Return what errors call the parts of `_identity`."""
    return {
        "config_hash": "settings",
        "data_sha256": f"problems than those in {config.data.name}",
        "limit": "--limit",
        "weights": f"weights than those in {config.model.path}",
    }


def _write(
    config: Config, rows: Sequence[StoredResponse], num_problems: int, out: Path
) -> None:
    """Write the rows, and a manifest of what they were made from and how."""
    method, data, rollout = config.method, config.data, config.rollout
    manifest = {
        "method": method.model_dump(mode="json"),
        "model": config.model.path,
        "problems": data.name,
        "num_problems": num_problems,
        **data.model_dump(include=_PROMPT_KEYS),
        "seed": config.run.seed,
        **rollout.model_dump(include={"temperature", "top_p", "max_response_tokens"}),
        "samples": config.method.num_data_samples,
    }
    if isinstance(method, O1Pruner):
        if method.z_score:  # over the whole data set; population deviation
            (advantages,) = z_score([[row.advantage for row in rows]])
            rows = [
                replace(row, advantage=advantage)
                for row, advantage in zip(rows, advantages, strict=True)
            ]
        objective = method.objective(rollout.temperature)
        manifest["log_prob_temperature"] = objective.temperature
    write_stored_responses(out, rows, manifest)
    log.info("%d responses: %s", len(rows), out)


def _sampling_config(config: Config, out: Path) -> Config:
    """Return the configuration of a session that samples and scores but does not train.

    The method is on-policy SFT, which needs no fixed data. rollout.temperature is 1 here only
    because a session warns about any other: the warning is about training. Responses are sampled
    at the user's temperature, which `make_data` sets in the session's settings. The trainer keeps
    its weights, with which it scores while the engine is awake; its optimizer leaves once.
    """
    train = config.train
    if train.offload in ("auto", "all"):
        train = train.model_copy(update={"offload": "optimizer"})
    return config.model_copy(
        update={
            "method": OnPolicySft(),
            "train": train,
            "data": config.data.model_copy(update={"responses": None}),
            "rollout": config.rollout.model_copy(update={"temperature": 1.0}),
            "run": config.run.model_copy(update={"dir": out.parent}),
        }
    )
