"""Builds everything that a run needs, once. Whatever can fail cheaply comes first."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import itemgetter

import torch

from megatron_opsft.config import Config
from megatron_opsft.data.mixture import ProblemSampler, order_of
from megatron_opsft.errors import NothingLeft, UserError, log
from megatron_opsft.models.storage.adapters import StoredAdapter
from megatron_opsft.models.storage.model_paths import resolve_model
from megatron_opsft.models.storage.stored_weights import open_adapter
from megatron_opsft.records import (
    NO_RANK,
    Problem,
    Response,
    Rollout,
    Sample,
    TokenIds,
    record,
)
from megatron_opsft.rollout.limits import engine_traits
from megatron_opsft.rollout.sample import Sampler
from megatron_opsft.rollout.token_use import TokenMeter
from megatron_opsft.run.start.check import is_finished
from megatron_opsft.run.start.checked_run import CheckedRun, max_engine_tokens
from megatron_opsft.run.start.checkpointer import make_checkpointer
from megatron_opsft.run.start.disk import check_disk
from megatron_opsft.run.start.engine import open_engine
from megatron_opsft.run.start.identity import check_finished
from megatron_opsft.run.start.input import RunInput, read_input
from megatron_opsft.run.sync.weight_sync import WeightSync, load_first_weights
from megatron_opsft.runtime.device import (
    Device,
    check_compiler,
    check_deterministic,
    prepare_environment,
    select_device,
)
from megatron_opsft.runtime.distributed import (
    Layout,
    any_over_world,
    broadcast_object,
    gather_from_all,
    start_distributed,
    stop_distributed,
)
from megatron_opsft.runtime.durable import list_checkpoints
from megatron_opsft.runtime.failed_rank import Limits
from megatron_opsft.runtime.job import current_job
from megatron_opsft.runtime.phase import announce, enter_phase
from megatron_opsft.runtime.watchdog import watched
from megatron_opsft.trainer.batching.exchange import fetch_samples
from megatron_opsft.trainer.model.checkpoint import Checkpointer
from megatron_opsft.trainer.model.load import TrainerParts, build_trainer
from megatron_opsft.trainer.model.offload import Offload
from megatron_opsft.trainer.model.reference import ReferenceModel
from megatron_opsft.trainer.model.shards import ModelShards
from megatron_opsft.trainer.model.step import Trainer
from megatron_opsft.verify.verifier import Verifier

NUM_PROBES = 4
# Of a probe's response: enough to see wrong weights, few enough to cost nothing.
MAX_PROBE_TOKENS = 256


@record
class Session(RunInput):
    """A run on this rank: its input (see `RunInput`), and the objects that do its work."""

    config: Config
    device: Device
    layout: Layout
    order: ProblemSampler
    """Which problems each draw takes."""
    sampler: Sampler
    verifier: Verifier
    meter: TokenMeter
    """Counts where the tokens of a judged response went."""
    trainer: Trainer
    reference: ReferenceModel | None
    """The frozen model, reference or teacher, if the objective keeps one."""
    offload: Offload
    """The trainer's sleep, while the engine samples."""
    shards: ModelShards
    sync: WeightSync
    checkpointer: Checkpointer

    def problems_of_draw(self, draw: int) -> list[Problem]:
        """Return a batch of problems. A step takes one draw or several; draws count from 0."""
        return [self.problems.problems[index] for index in self.order.indices(draw)]

    def prompt_of(self, problem: Problem, *, held_out: bool = False) -> TokenIds:
        """Return the token ids of a problem's prompt, with all that the method adds to it.

        held_out: the prompt of an evaluation. Errors: `UserError` if it is too long.
        """
        change = self.method.prompt_change(problem.id, held_out=held_out)
        prompt = self.encoder.encode(
            problem, system=change.system, suffix=change.suffix
        )
        limit = self.config.data.max_prompt_tokens
        if len(prompt) > limit:
            raise UserError(
                f"problem {problem.id}: its prompt, with what method.name="
                f"{self.config.method.name} adds, has {len(prompt)} tokens; raise "
                f"data.max_prompt_tokens={limit}"
            )
        return prompt

    def fetch(
        self,
        rollouts: Sequence[Rollout],
        problems: Sequence[Problem],
        responses: Sequence[Response],
        indices_of: Sequence[Sequence[int]],
    ) -> Mapping[int, Sample]:
        """Fetch the samples that this rank packs, by index; see `fetch_samples`.

        rollouts: this rank's. indices_of: for each data-parallel rank the indices into `responses`
        that it packs. Fixed data need no exchange: every rank reads them itself.
        """
        if self.stored is not None:
            return {
                index: self.stored[responses[index].rollout_index]
                for index in indices_of[self.layout.dp_rank]
            }
        shape = self.shards.table.shape
        routing_width = 0
        if self.config.train.routing_replay and shape.moe:
            routing_width = shape.num_layers * shape.moe.top_k
        return fetch_samples(
            responses,
            indices_of,
            rollouts,
            problems,
            self.layout,
            self.device.torch_device,
            routing_width=routing_width,
        )

    def probes(
        self,
        step: int,
        accepted: Sequence[Response] = (),
        rollouts: Sequence[Rollout] = (),
    ) -> list[Sample]:
        """Choose the samples on which engine and trainer are compared after `step` updates.

        They are accepted responses to different problems, or prompts if there is none; as much of
        them as is worth scoring and as the engine takes. accepted: those of all ranks; rollouts:
        this rank's. The same on every rank. Collective over the world.
        """
        last_of_problem = {
            response.problem_index: response
            for response in accepted
            if response.rank != NO_RANK
        }
        samples: list[Sample] = []
        if last_of_problem:
            rollouts_here = [
                (r.problem_index, replace(rollouts[r.rollout_index], routing=b""))
                for r in list(last_of_problem.values())[:NUM_PROBES]
                if r.rank == self.layout.rank
            ]
            gathered = sorted(gather_from_all(rollouts_here), key=itemgetter(0))
            samples += [rollout for _, rollout in gathered]
        else:
            for problem in self.problems_of_draw(max(step, 1) - 1)[:NUM_PROBES]:
                ids = self.encoder.encode(problem)
                # All but the first token of the prompt is taken for a response.
                samples.append(
                    Sample(
                        problem_id=problem.id, prompt_ids=ids[:1], response_ids=ids[1:]
                    )
                )
        # The engine wants room for one more token.
        max_tokens = max_engine_tokens(self.config) - 1
        probes = []
        for sample in samples:
            room = max_tokens - len(sample.prompt_ids)
            response_ids = sample.response_ids[: min(room, MAX_PROBE_TOKENS)]
            if response_ids:
                probes.append(replace(sample, response_ids=response_ids))
        return probes


@contextmanager
def open_session(checked: CheckedRun, *, resume: bool = False) -> Iterator[Session]:
    """Build a session. Called by every rank. Closes processes and groups on exit.

    resume: if there is a checkpoint, the weights are not read: loading it brings them. Errors:
    `UserError`; `NothingLeft` for a run that is finished, in whose directory nothing is changed.
    """
    enter_phase("start", 0)
    config = checked.config
    model_dir = resolve_model(config.model.path)
    device = _choose_device(config)
    disk_warning = ""
    finished = resume and is_finished(config)
    if not finished:
        disk_warning = check_disk(config, checked.shape, resume=resume)
    announce("reading tokenizer and problems")
    run_input = read_input(checked, model_dir)
    layout = start_distributed(
        device, config.parallel, minutes=config.run.collective_minutes
    )
    # Rank 0 decides: another node may see older files.
    if broadcast_object(finished):
        refusal = broadcast_object(_refusal(checked) if layout.is_main else "")
        stop_distributed()
        raise UserError(refusal) if refusal else NothingLeft
    limits = Limits(
        hang_seconds=60 * config.run.hang_minutes,
        silence_seconds=config.run.silence_seconds,
    )
    with watched(current_job(), limits):
        given = run_input.problems.sha256, config.verify.judge
        if any_over_world(broadcast_object(given) != given):
            raise UserError("every rank must be given the same problems and judge")
        if layout.is_main:
            for note in (disk_warning, *run_input.notes):
                if note:
                    log.warning(note)
        with Verifier(config.verify) as verifier:
            session = _build(
                checked, run_input, device, layout, verifier, resume=resume
            )
            yield session
            session.sync.close()
            session.sampler.engine.close()
        # Only after success: a rank that fails must not wait in a collective for the others.
        stop_distributed()


def _refusal(checked: CheckedRun) -> str:
    """Return why a finished run is not the one that is resumed; "" if it is."""
    try:
        check_finished(checked)
    except UserError as error:
        return str(error)
    return ""


def _choose_device(config: Config) -> Device:
    """Choose the device, and prepare this process for it.

    Errors: `UserError` if the device cannot do what the configuration asks for.
    """
    run = config.run
    prepare_environment(run.device, config.parallel, deterministic=run.deterministic)
    device = select_device(run.device)
    check_compiler(device)
    if run.deterministic:
        check_deterministic(device, config.model.dtype)
    if not device.is_cuda:
        from megatron_opsft.runtime import cpu_compat

        cpu_compat.install()
    torch.manual_seed(config.run.seed)
    return device


def _build(
    checked: CheckedRun,
    run_input: RunInput,
    device: Device,
    layout: Layout,
    verifier: Verifier,
    *,
    resume: bool,
) -> Session:
    """Build trainer, engine and weight sync, and load the weights. Called by every rank."""
    config = checked.config
    model_dir, encoder, seed = run_input.model_dir, run_input.encoder, config.run.seed
    adapter = open_adapter(
        config.model, config.lora, checked.shape, warns=layout.is_main
    )
    announce("building the model")
    unfilled = build_trainer(config, checked.shape, model_dir, device, layout)
    trainer, shards = unfilled.trainer, unfilled.shards
    offload = Offload(trainer, config.train.offload_level)
    engine = open_engine(config, run_input, unfilled, offload, device, layout)
    replays = config.train.routing_replay
    sync = WeightSync(
        shards, engine, config.sync, trainer.score, offload.on_device, replays
    )
    _load_weights(config, unfilled, sync, adapter, resume=resume)
    reference = None
    if trainer.objective.keeps_frozen_model:
        reference = ReferenceModel(trainer, device, offload)
    return Session(
        model_dir=model_dir,
        model_files=run_input.model_files,
        encoder=encoder,
        teacher=run_input.teacher,
        settings=run_input.settings,
        problems=run_input.problems,
        held_out=run_input.held_out,
        more_held_out=run_input.more_held_out,
        stored=run_input.stored,
        method=run_input.method,
        bad_rows=run_input.bad_rows,
        notes=run_input.notes,
        config=config,
        device=device,
        layout=layout,
        order=order_of(run_input.problems, config.data, seed),
        sampler=Sampler(engine=engine, encoder=encoder, layout=layout, seed=seed),
        verifier=verifier,
        meter=TokenMeter(encoder.tokenizer, prompts_open_think=encoder.opens_think),
        trainer=trainer,
        reference=reference,
        offload=offload,
        shards=shards,
        sync=sync,
        checkpointer=make_checkpointer(config, run_input, unfilled, offload, reference),
    )


def _load_weights(
    config: Config,
    parts: TrainerParts,
    sync: WeightSync,
    adapter: StoredAdapter | None,
    *,
    resume: bool,
) -> None:
    """Load the weights that the run began with, unless loading a checkpoint replaces them. Called
    by every rank.

    adapter: the one that the run starts from, if any.
    """
    checkpoints = list_checkpoints(config.run.dir / "checkpoints")
    resumes = resume and broadcast_object(bool(checkpoints))
    # A frozen model is a copy of the weights that the run began with, also if it is resumed. And a
    # checkpoint of adapters does not hold the weights that they are added to.
    shards = parts.shards
    needs_start = not resumes or parts.trainer.objective.keeps_frozen_model
    if needs_start or shards.adapters:
        reads_files = engine_traits(config.rollout.engine).reads_files
        by_engine = reads_files and config.model.load != "disk"
        load_first_weights(parts, sync, by_engine=by_engine)
    if needs_start and adapter is not None:
        parts.fill_adapters(adapter)
