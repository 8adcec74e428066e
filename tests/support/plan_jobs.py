"""What a plan predicts is measured here, on every rank of a process group of the run's size."""

from dataclasses import dataclass

from jobs import Built, Case, build, forward_logits
from live_memory import LiveMemory
from tiny_models import SHAPES
from torch.utils.flop_counter import FlopCounterMode

from megatron_opsft.commands.plan.assumptions import load_hardware
from megatron_opsft.commands.plan.job import PlannedRun
from megatron_opsft.config import Config
from megatron_opsft.records import MicroBatch, Sample
from megatron_opsft.trainer.batching.microbatch import build_microbatch

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


def planned_run(case: Case, tokens: int) -> PlannedRun:
    """The case as a plan sees it, with micro-batches of so many tokens."""
    settings = {
        "model": {"path": "tiny_reasoner", "dtype": case.dtype},
        "data": {"train": "arithmetic", "max_prompt_tokens": _PROMPT},
        "rollout": {"max_response_tokens": _response(case)},
        "parallel": case.parallel.model_dump(),
        "lora": case.lora.model_dump(),
        "train": {
            "max_tokens_per_microbatch": tokens,
            "recompute": case.recompute,
            "cross_entropy": case.cross_entropy,
        },
    }
    config = Config.model_validate(settings)
    return PlannedRun(
        config=config,
        shape=SHAPES[case.model],
        hardware=load_hardware("cpu"),
        world_size=case.world_size,
    )


def full_microbatch(built: Built, case: Case, tokens: int) -> MicroBatch:
    """So many tokens a rank, in short sequences."""
    vocab_size = SHAPES[case.model].vocab_size
    ids = tuple(n % vocab_size for n in range(_PROMPT + _response(case)))
    sample = Sample(
        problem_id="p", sample_index=0, prompt_ids=ids[:_PROMPT], response_ids=ids[_PROMPT:]
    )
    count = tokens * case.cp // len(ids)
    return build_microbatch(
        [sample] * count,
        [1.0] * count,
        align=1,
        device=case.device.torch_device,
        cp_rank=built.layout.cp_rank,
        cp_size=case.cp,
    )


def measure_rank(case: Case, tokens: int, num_microbatches: int) -> Measured:
    """A real pass of the trainer over full micro-batches of short sequences, and a small step."""
    built = build(case)
    trainer = built.trainer
    batch = full_microbatch(built, case, tokens)
    with LiveMemory() as memory:
        trainer.accumulate([batch] * num_microbatches, 1.0)
    trainer.step([batch] * case.pp, 1.0, lr=1e-3)
    buffers = [b for c in trainer.chunks for b in c.buffers + c.expert_parallel_buffers]
    # Of the optimizer all tensors of its state, and main weights that are not views of a buffer.
    views = {buffer.param_data.data_ptr() for buffer in buffers}
    parts = [part.optimizer for part in trainer.optimizer.chained_optimizers]  # type: ignore
    main = [weight for part in parts for group in part.param_groups for weight in group["params"]]
    own = [weight for weight in main if weight.untyped_storage().data_ptr() not in views]
    states = [state for part in parts for state in part.state.values()]
    own += [tensor for state in states for name, tensor in state.items() if name != "step"]
    parameters = [p for model in trainer.models for p in model.parameters()]
    frozen = sum(p.nbytes for p in parameters if not p.requires_grad)
    return Measured(
        pp_rank=built.layout.pp_rank,
        num_parameters=sum(p.numel() for p in parameters),
        weights=sum(buffer.param_data.nbytes for buffer in buffers) + frozen,
        gradients=sum(buffer.grad_data.nbytes for buffer in buffers),
        optimizer=sum(tensor.nbytes for tensor in own),
        activations=memory.peak_bytes,
    )


def count_operations(case: Case, tokens: int) -> dict[str, int]:
    """Floating-point operations of torch's products in a forward pass over a full micro-batch."""
    built = build(case)
    batch = full_microbatch(built, case, tokens)
    with FlopCounterMode(display=False) as counter:
        forward_logits(built.trainer.models, [batch], SHAPES[case.model].vocab_size)
    return {str(name): count for name, count in counter.get_flop_counts()["Global"].items()}
