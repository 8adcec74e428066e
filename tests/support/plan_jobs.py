"""What a plan predicts is measured here, on every rank of a process group of the job's size."""

from dataclasses import dataclass

from jobs import Case, build
from live_memory import LiveMemory
from tiny_models import SHAPES

from megatron_opsft.batching.microbatch import build_microbatch
from megatron_opsft.config_file import load_config
from megatron_opsft.plan.hardware import load_hardware
from megatron_opsft.plan.job import TrainingJob
from megatron_opsft.plan.memory import Stage
from megatron_opsft.plan.ranks import (
    build_buffers,
    build_stage,
    build_stages,
    fake_rank,
    per_peer,
)
from megatron_opsft.records import Sample
from megatron_opsft.runtime import cpu_compat
from megatron_opsft.runtime.device import Device
from megatron_opsft.weights.rules import WeightTable

_PROMPT = 1


def _response(case: Case) -> int:
    """Tokens: more where context parallelism cuts each response, which takes long with many."""
    return 31 if case.cp == 1 else 127


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Bytes on one rank. activations: the most at one time in a forward and backward pass."""

    pp_rank: int
    num_parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int


def planned_job(case: Case, tokens: int) -> TrainingJob:
    """The case as a plan sees it, with micro-batches of so many tokens."""
    config = load_config(
        None,
        [
            "model.path=tiny_reasoner",
            f"model.dtype={case.dtype}",
            "data.train=arithmetic",
            f"data.max_prompt_tokens={_PROMPT}",
            f"rollout.max_response_tokens={_response(case)}",
            f"parallel.tp={case.tp}",
            f"parallel.pp={case.pp}",
            f"parallel.cp={case.cp}",
            f"parallel.ep={case.ep}",
            f"parallel.etp={case.etp or 'null'}",
            f"parallel.vpp={case.vpp or 'null'}",
            f"parallel.sequence_parallel={case.sequence_parallel}",
            f"train.max_tokens_per_microbatch={tokens}",
            f"train.recompute={case.recompute}",
            f"train.cross_entropy={case.cross_entropy}",
        ],
    )
    return TrainingJob(
        config=config,
        shape=SHAPES[case.model],
        hardware=load_hardware("cpu"),
        world_size=case.world_size,
    )


def planned_stages(job: TrainingJob) -> list[Stage]:
    """`build_stages`, for a process of its own."""
    return build_stages(job)


def planned_ranks(job: TrainingJob, ranks: list[int]) -> list[Stage]:
    """What some global ranks hold, each built for itself."""
    cpu_compat.install()
    table = WeightTable(job.shape, "local", job.parallel.tp)
    return [build_stage(job, rank, table) for rank in ranks]


def updated_elements(job: TrainingJob, rank: int) -> list[int]:
    """Elements that each data-parallel peer of a rank updates."""
    cpu_compat.install()
    with fake_rank(job, rank), cpu_compat.without_memory() as meta:
        _, buffers, _ = build_buffers(job, Device(torch_device=meta, backend="fake"))
        return per_peer(buffers).tolist()


def measure_rank(case: Case, tokens: int, num_microbatches: int) -> Measured:
    """A real pass of the trainer over full micro-batches of short sequences, and a small step."""
    built = build(case)
    trainer, device = built.trainer, case.device.torch_device
    vocab_size = SHAPES[case.model].vocab_size
    ids = tuple(n % vocab_size for n in range(_PROMPT + _response(case)))
    sample = Sample(
        problem_id="p", sample_index=0, prompt_ids=ids[:_PROMPT], response_ids=ids[_PROMPT:]
    )
    count = tokens * case.cp // len(ids)
    batch = build_microbatch(
        [sample] * count,
        [1.0] * count,
        align=1,
        device=device,
        cp_rank=built.layout.cp_rank,
        cp_size=case.cp,
    )
    with LiveMemory() as memory:
        trainer.accumulate([batch] * num_microbatches, 1.0)
    trainer.step([batch] * case.pp, 1.0, lr=1e-3)
    trainer.finish_gathering_weights()
    buffers = [b for c in trainer.chunks for b in c.buffers + c.expert_parallel_buffers]
    return Measured(
        pp_rank=built.layout.pp_rank,
        num_parameters=sum(p.numel() for m in trainer.models for p in m.parameters()),
        weights=sum(b.param_data.nbytes for b in buffers),
        gradients=sum(b.grad_data.nbytes for b in buffers),
        optimizer=_optimizer_bytes(trainer.optimizer, {b.param_data.data_ptr() for b in buffers}),
        activations=memory.peak_bytes,
    )


def _optimizer_bytes(optimizer: object, buffers: set[int]) -> int:
    """Of all tensors of the state, and of main weights that are not views of the model's buffer."""
    total = 0
    for part in optimizer.chained_optimizers:  # type: ignore[attr-defined]
        for group in part.optimizer.param_groups:
            for main in group["params"]:
                if main.untyped_storage().data_ptr() not in buffers:
                    total += main.nbytes
        for state in part.optimizer.state.values():
            total += sum(t.nbytes for name, t in state.items() if name != "step")
    return total
