"""Everything a run needs, built once in the order in which it can fail cheaply: input first, model
last.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from operator import itemgetter

import torch

from megatron_opsft.config import Config
from megatron_opsft.data.mixture import ProblemSampler, order_of
from megatron_opsft.errors import NothingLeft, UserError
from megatron_opsft.models.architectures.config_from_hf import read_model_shape
from megatron_opsft.models.storage.model_paths import resolve_model
from megatron_opsft.records import NO_RANK, Message, Problem, Response, Rollout, Sample
from megatron_opsft.rollout.limits import (
    check_engine,
    engine_traits,
    fit_lengths,
    max_engine_tokens,
)
from megatron_opsft.rollout.open_engine import open_engine
from megatron_opsft.rollout.sample import Sampler
from megatron_opsft.run.start.check import is_finished
from megatron_opsft.run.start.disk import check_disk
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
from megatron_opsft.trainer.model.load import build_trainer
from megatron_opsft.trainer.model.reference import ReferenceModel
from megatron_opsft.trainer.model.shards import ModelShards
from megatron_opsft.trainer.model.step import Trainer
from megatron_opsft.verify.verifier import Verifier

log = logging.getLogger("megatron_opsft")

NUM_PROBES = 4
MAX_PROBE_TOKENS = (
    256  # of a response: enough to see wrong weights, little enough to cost nothing
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Session(RunInput):
    """A run on this rank: what it has read, and its live parts."""

    config: Config
    device: Device
    layout: Layout
    order: ProblemSampler
    sampler: Sampler
    verifier: Verifier
    trainer: Trainer
    reference: ReferenceModel | None
    shards: ModelShards
    sync: WeightSync
    checkpointer: Checkpointer

    def problems_of_draw(self, draw: int) -> list[Problem]:
        """A batch of problems by its number from 0; a step takes one, or several."""
        return [self.problems.problems[index] for index in self.order.indices(draw)]

    def prompt_of(self, problem: Problem, *, held_out: bool = False) -> tuple[int, ...]:
        """The prompt, with what the method adds to it. Errors: `UserError` if it is too long."""
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

    def example(self) -> tuple[list[Message], str]:
        """The first problem's messages and its prompt as text, as the model gets them now."""
        problem = self.problems.problems[0]
        change = self.method.prompt_change(problem.id)
        messages = self.encoder.messages(
            problem, system=change.system, suffix=change.suffix
        )
        return messages, self.encoder.chat.text(messages)

    def fetch(
        self,
        rollouts: Sequence[Rollout],
        problems: Sequence[Problem],
        responses: Sequence[Response],
        indices_of: Sequence[Sequence[int]],
    ) -> Mapping[int, Sample]:
        """See `fetch_samples`; fixed data every rank reads itself."""
        if self.stored is not None:
            mine = indices_of[self.layout.dp_rank]
            return {i: self.stored[responses[i].rollout_index] for i in mine}
        shape = self.shards.table.shape
        moe = shape.moe if self.config.train.routing_replay else None
        return fetch_samples(
            responses,
            indices_of,
            rollouts,
            problems,
            self.layout,
            self.device.torch_device,
            routing_width=shape.num_layers * moe.top_k if moe else 0,
        )

    def probes(
        self,
        step: int,
        accepted: Sequence[Response] = (),
        rollouts: Sequence[Rollout] = (),
    ) -> list[Sample]:
        """What engine and trainer are compared on after `step` updates: some of the accepted
        responses, of different problems, or prompts where there is none. As much of them as is
        worth scoring, and as the engine takes. The same on every rank; collective over the world.
        """
        held = {r.problem_index: r for r in accepted if r.rank != NO_RANK}
        samples: list[Sample]
        if held:
            mine = [
                (
                    response.problem_index,
                    replace(rollouts[response.rollout_index], routing=b""),
                )
                for response in list(held.values())[:NUM_PROBES]
                if response.rank == self.layout.rank
            ]
            samples = [
                sample for _, sample in sorted(gather_from_all(mine), key=itemgetter(0))
            ]
        else:  # a prompt read as if all but its first token were a response
            problems = self.problems_of_draw(max(step, 1) - 1)[:NUM_PROBES]
            samples = [
                Sample(problem_id=problem.id, prompt_ids=ids[:1], response_ids=ids[1:])
                for problem in problems
                for ids in [self.encoder.encode(problem)]
            ]
        longest = (
            max_engine_tokens(self.config) - 1
        )  # the engine wants room for one more token
        probes = []
        for sample in samples:
            room = min(max(0, longest - len(sample.prompt_ids)), MAX_PROBE_TOKENS)
            if ids := sample.response_ids[:room]:
                probes.append(replace(sample, response_ids=ids))
        return probes


@contextmanager
def open_session(config: Config, *, resume: bool = False) -> Iterator[Session]:
    """Build every part; called by every rank. Closes processes and groups on exit.

    resume: where there is a checkpoint, the weights are left for it to bring. Errors: `NothingLeft`
    for a run that is finished, in which nothing is changed.
    """
    enter_phase("start", 0)
    model_dir = resolve_model(config.model.path)
    shape = read_model_shape(model_dir)
    config = fit_lengths(config, shape.max_position_embeddings)
    device = _choose_device(config)
    disk = (
        ""
        if resume and is_finished(config)
        else check_disk(config, shape, resume=resume)
    )
    announce("reading tokenizer and problems")
    given = read_input(config, model_dir, shape)
    layout = start_distributed(
        device, config.parallel, minutes=config.run.collective_minutes
    )
    if resume and broadcast_object(
        is_finished(config)
    ):  # another node may see older files
        stop_distributed()
        raise NothingLeft
    limits = Limits(
        hang_seconds=60 * config.run.hang_minutes,
        silence_seconds=config.run.silence_seconds,
    )
    with watched(current_job(), limits):
        for note in (disk, *given.notes) if layout.is_main else ():
            if note:
                log.warning(note)
        with Verifier(config.verify) as verifier:
            session = _build(config, given, device, layout, verifier, resume=resume)
            yield session
            session.sync.close()
            session.sampler.engine.close()
        # Only after success: a rank that fails must not wait in a collective for the others.
        stop_distributed()


def _choose_device(config: Config) -> Device:
    """The device, this process made ready for it. Errors: `UserError` for what it cannot do."""
    check_engine(config)
    prepare_environment(config)
    device = select_device(config.run.device)
    check_compiler(device)
    if config.run.deterministic:
        check_deterministic(device, config.model.dtype)
    if not device.is_cuda:
        from megatron_opsft.runtime import cpu_compat

        cpu_compat.install()
    torch.manual_seed(config.run.seed)
    return device


def _build(
    config: Config,
    given: RunInput,
    device: Device,
    layout: Layout,
    verifier: Verifier,
    *,
    resume: bool,
) -> Session:
    """Trainer, engine and what lies between them."""
    announce("building the model")
    parts = build_trainer(config, given.model_dir, device, layout)
    trainer, shards = parts.trainer, parts.shards
    announce(f"opening the rollout engine ({config.rollout.engine})")
    engine = open_engine(
        config, given.model_dir, given.encoder.tokenizer, shards.table, device, layout
    )
    sync = WeightSync(shards, engine, config.sync, trainer.score)
    checkpoints = config.run.dir / "checkpoints"
    resumes = resume and broadcast_object(bool(list_checkpoints(checkpoints)))
    # The reference model is what the run began with.
    if not resumes or trainer.objective.keeps_frozen_model:
        by_engine = (
            config.model.load != "disk"
            and engine_traits(config.rollout.engine).reads_files
        )
        load_first_weights(parts, sync, engine if by_engine else None)
    reference = (
        ReferenceModel(trainer, device)
        if trainer.objective.keeps_frozen_model
        else None
    )
    return Session(
        **{field.name: getattr(given, field.name) for field in fields(given)},
        config=config,
        device=device,
        layout=layout,
        order=order_of(given.problems, config.data, config.run.seed),
        sampler=Sampler(
            engine=engine, encoder=given.encoder, layout=layout, seed=config.run.seed
        ),
        verifier=verifier,
        trainer=trainer,
        reference=reference,
        shards=shards,
        sync=sync,
        checkpointer=Checkpointer(
            checkpoints,
            trainer.models,
            trainer.optimizer,
            keep=config.checkpoint.keep,
            reference=reference,
            model_dir=given.model_dir,
        ),
    )
