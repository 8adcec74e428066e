"""Everything that can be wrong with a run before a device is there: the checks of the trainer."""

from megatron_opsft.errors import UserError
from megatron_opsft.model.checks import check_layout, check_offload
from megatron_opsft.plan.estimate import RunEstimate
from megatron_opsft.plan.job import TrainingJob
from megatron_opsft.rollout.limits import (
    check_engine_ranks,
    check_engine_settings,
    check_lengths,
)
from megatron_opsft.runtime.launcher import check_world
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
    check_offload(shape, config.train, config.parallel, with_te=job.with_te)
    if config.train.cross_entropy == "te" and not job.with_te:
        raise UserError(
            "train.cross_entropy=te needs TransformerEngine, on CUDA and in bfloat16; use auto or "
            "fused_linear"
        )
    check_rollout_tp(shape, rollout.tp)
    if shape.moe and not hardware.is_cuda and not job.engine.experts_on_cpu:
        raise UserError(
            f"rollout.engine={rollout.engine}: on a CPU use rollout.engine=hf for a mixture of "
            "experts"
        )
    check_engine_ranks(rollout.tp, job.world_size)


def notes_of(run: RunEstimate) -> list[str]:
    """What is allowed but wasteful or unwise, and what is not counted: one line each."""
    job = run.job
    config, parallel, node = job.config, job.parallel, job.hardware.gpus_per_node
    notes = []
    for key, size, moves in (
        ("parallel.tp x parallel.cp", parallel.tp * parallel.cp, "hidden states, keys and values"),
        ("parallel.ep x etp", parallel.ep * parallel.expert_tp, "tokens"),
        ("rollout.tp", job.engine_tp, "hidden states of every token's step"),
    ):
        if size > node:
            notes.append(
                f"{key} = {size} reaches beyond a node of {node} devices: every layer's {moves} "
                "cross the network"
            )
    if job.num_responses < job.dp:
        notes.append(
            f"{job.dp} data-parallel ranks share {job.num_responses} responses: some only get "
            "padding"
        )
    temperature = config.rollout.temperature
    if config.method.objective(temperature).temperature != temperature:
        notes.append(f"rollout.temperature={temperature} is not on-policy; use 1.0")
    if job.hardware.is_cuda and config.model.dtype == "float32":
        notes.append("model.dtype=float32 takes plain torch layers, which are for comparisons")
    method = config.method
    if method.most_refills:
        notes.append(
            f"{method.name} draws problems again, up to {method.most_refills} "
            "times a step, where groups teach nothing: one draw is counted"
        )
    if (monitored := method.monitor_size(method.first_state())) is not None:
        problems, samples = monitored
        notes.append(
            f"{method.name} samples {samples} responses to each of {problems} monitor problems "
            "from time to time: they are not counted"
        )
    # Devices decide whether a run fits: how much CPU memory a node has is not theirs to say.
    there = job.host_bytes_per_node
    needed = run.checkpoint.saved_bytes + run.reference_host_bytes
    if needed > there:
        both = run.reference_host_bytes > 0
        what = "a checkpoint and the reference model need" if both else "a checkpoint needs"
        notes.append(
            f"{what} {needed / 1e9:,.0f} GB of a node's host memory, of which there are "
            f"{there / 1e9:,.0f}; use more nodes"
        )
    return notes
