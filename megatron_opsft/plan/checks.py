"""Everything that can be wrong with a run before a device is there: the checks of the trainer."""

from megatron_opsft.errors import UserError
from megatron_opsft.methods.catalog import METHODS
from megatron_opsft.methods.settings import MethodSettings
from megatron_opsft.model.checks import check_layout, check_offload
from megatron_opsft.plan.job import TrainingJob
from megatron_opsft.rollout.limits import (
    check_engine_ranks,
    check_engine_settings,
    check_lengths,
)
from megatron_opsft.runtime.world_size import check_world
from megatron_opsft.weights.vllm_layout import check_rollout_tp


def check_job(job: TrainingJob) -> None:
    """Errors: `UserError`, as the trainer would raise it, and for a device that config or engine
    cannot use.
    """
    config, shape, hardware = job.config, job.shape, job.hardware
    if not hardware.is_cuda and config.run.device == "cuda":
        raise UserError("run.device=cuda, but the plan is for a CPU; give another --gpu")
    if hardware.is_cuda and config.run.device == "cpu":
        raise UserError(f"run.device=cpu, but the plan is for {hardware.name}; give --gpu cpu")
    rollout = config.rollout
    check_engine_settings(rollout.engine, rollout.tp, rollout.speculative)
    check_world(job.world_size, config.parallel)
    check_layout(shape, config.parallel)
    check_lengths(config, shape.max_position_embeddings)
    check_offload(shape, config.train, config.parallel, with_te=job.modules == "te")
    if config.train.cross_entropy == "te" and job.modules != "te":
        raise UserError(
            "train.cross_entropy=te needs TransformerEngine, on CUDA and in bfloat16; use auto or "
            "fused_linear"
        )
    _check_engines(job)


def _check_engines(job: TrainingJob) -> None:
    rollout = job.config.rollout
    check_rollout_tp(job.shape, rollout.tp)
    if job.shape.moe and not job.hardware.is_cuda and not job.engine.experts_on_cpu:
        raise UserError(
            f"rollout.engine={rollout.engine}: on a CPU use rollout.engine=hf for a mixture of "
            "experts"
        )
    check_engine_ranks(rollout.tp, job.world_size)


def _uncounted(settings: MethodSettings) -> list[str]:
    method = METHODS[settings.name]
    notes = []
    if method.refill is not None:
        notes.append(
            f"{settings.name} draws problems again, up to {method.refill.at_most(settings)} times "
            "a step, where groups teach nothing: one draw is counted"
        )
    if method.monitor is not None:
        problems, samples = method.monitor.size(settings)
        notes.append(
            f"{settings.name} samples {samples} responses to each of {problems} monitor problems "
            "from time to time: they are not counted"
        )
    return notes


def notes_of(job: TrainingJob) -> list[str]:
    """What is allowed but wasteful or unwise: one line each."""
    config, hardware = job.config, job.hardware
    notes = []
    if job.parallel.tp > hardware.gpus_per_node:
        notes.append(
            f"parallel.tp={job.parallel.tp} reaches beyond a node of {hardware.gpus_per_node} "
            "devices: every layer waits for the network"
        )
    if job.parallel.cp > 1 and job.parallel.tp * job.parallel.cp > hardware.gpus_per_node:
        notes.append(
            f"parallel.tp x parallel.cp = {job.parallel.tp} x {job.parallel.cp} reaches beyond a "
            f"node of {hardware.gpus_per_node} devices: every layer's keys and values cross the "
            "network"
        )
    if job.parallel.ep * job.parallel.expert_tp > hardware.gpus_per_node:
        notes.append(
            f"parallel.ep x etp = {job.parallel.ep} x {job.parallel.expert_tp} reaches beyond a "
            f"node of {hardware.gpus_per_node} devices: every layer's tokens cross the network"
        )
    if job.engine_tp > hardware.gpus_per_node:
        notes.append(f"rollout.tp={job.engine_tp} reaches beyond a node: decoding waits for it")
    if job.num_responses < job.dp:
        notes.append(
            f"{job.dp} data-parallel ranks share {job.num_responses} responses: some only get "
            "padding"
        )
    temperature = config.rollout.temperature
    if config.method.objective(temperature).temperature != temperature:
        notes.append(f"rollout.temperature={temperature} is not on-policy; use 1.0")
    notes += _uncounted(config.method)
    if job.hardware.is_cuda and config.model.dtype == "float32":
        notes.append("model.dtype=float32 takes plain torch layers, which are for comparisons")
    return notes
