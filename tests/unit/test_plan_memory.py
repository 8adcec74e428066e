"""Bytes by formula, and whether they fit; `tests/gloo/test_plan_against_runs` has real steps."""

from dataclasses import replace

import pytest
from plan_cases import make_job, make_responses
from real_shapes import REAL_SHAPES

from megatron_opsft.errors import UserError
from megatron_opsft.plan.checks import check_job, notes_of
from megatron_opsft.plan.estimate import RunEstimate, estimate_run
from megatron_opsft.plan.hardware import load_hardware
from megatron_opsft.plan.job import TrainingJob
from megatron_opsft.plan.memory import kv_bytes_per_token, num_in_flight, rank_memory
from megatron_opsft.plan.stages import count_stages
from megatron_opsft.plan.tables import verdict_line

SMALL = REAL_SHAPES["DeepSeek-R1-Distill-Qwen-1.5B"]
LARGE = REAL_SHAPES["Qwen2.5-72B"]


def planned(job: TrainingJob) -> RunEstimate:
    return estimate_run(job, make_responses(job), 100)


def gigabytes(num_bytes: float) -> float:
    return round(num_bytes / 1e9, 1)


def test_the_shipped_example_of_1_5_b_on_a_node() -> None:
    """As examples/configs/r1_distill_1p5b_paper.yaml has it."""
    job = make_job(SMALL, 8)
    (rank,) = planned(job).memory
    held = rank.stage.weight_bytes, rank.stage.gradient_bytes, rank.stage.optimizer_bytes
    assert [gigabytes(part) for part in held] == [3.6, 7.1, 2.7]
    assert gigabytes(rank.activations) == 33.6
    assert rank.phases["rollout"] == pytest.approx(sum(held) + 3e9 + 0.5 * 84.9e9)
    assert rank.phases["train"] == pytest.approx(
        sum(held) + 3e9 + rank.activations + max(rank.recompute, rank.loss) + 1.5e9
    )
    assert rank.phases["sync"] == pytest.approx(sum(held) + 3e9 + 2 * 2**28 + rank.engine.weights)


def test_recomputation_and_sequence_parallelism_save_activations() -> None:
    def kept(*overrides: str) -> float:
        return planned(make_job(SMALL, 8, *overrides)).memory[0].activations

    none, selective, full = (
        kept(f"train.recompute={how}") for how in ("none", "selective", "full")
    )
    assert full == 28 * 16384 * 1536 * 2
    # Full: only the input of every layer. Selective: without fc1's output, activation and norm.
    assert none - selective == pytest.approx(28 * 16384 * (2 * (3 * 8960 + 1536) + 4))
    tp2 = kept("parallel.tp=2")
    assert kept("parallel.tp=2", "parallel.sequence_parallel=true") < tp2 < none


def test_micro_batches_in_flight() -> None:
    job = make_job(SMALL, 8, "parallel.pp=4")
    assert [num_in_flight(job, stage, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert [num_in_flight(job, stage, 2) for stage in range(4)] == [2, 2, 2, 1]
    virtual = make_job(SMALL, 8, "parallel.pp=4", "parallel.vpp=7")
    # Chunks: 2 (p - 1 - stage) + 6 p + 1 of seven.
    chunks = [num_in_flight(virtual, stage, 8) * 7 for stage in range(4)]
    assert chunks == pytest.approx([31, 29, 27, 25])


def test_the_cache_is_what_the_fraction_leaves() -> None:
    job = make_job(SMALL, 8, "rollout.gpu_memory_fraction=0.5", "rollout.tp=2")
    rank = rank_memory(job, count_stages(job)[0], 4)
    assert kv_bytes_per_token(job) == 2 * 28 * 1 * 128 * 2
    assert rank.engine.awake == pytest.approx(0.5 * 84.9e9)
    fixed = make_job(SMALL, 8, "rollout.kv_cache_bytes=1000000000")
    assert rank_memory(fixed, count_stages(fixed)[0], 4).engine.kv_cache == 1e9


def test_the_engine_sets_aside_its_largest_batch_of_prompts() -> None:
    """One layer's feed-forward part of it; vLLM's batches are smaller on an A100."""

    def set_aside(gpu: str, *overrides: str) -> float:
        job = make_job(SMALL, 8, *overrides, gpu=gpu)
        return rank_memory(job, count_stages(job)[0], 4).engine.extra - 1.5e9

    token = 2 * (3 * 8960 + 4 * 1536)
    longer = "eval.max_response_tokens=30000"  # comes in parts
    assert set_aside("h100") == set_aside("h100", longer) == 16384 * token
    assert set_aside("a100") == set_aside("a100", longer) == 8192 * token
    few = ("rollout.batch_size=1", "rollout.max_response_tokens=3000")
    assert set_aside("h100", *few) == 4024 * token


def test_host_memory_of_a_checkpoint() -> None:
    """14 bytes of every parameter that a rank updates, on each rank of a node."""
    whole = planned(make_job(SMALL, 8))
    assert whole.checkpoint.saved_bytes == 14 * 1_777_088_000
    assert notes_of(whole) == []
    for layout in (("parallel.tp=2",), ("parallel.pp=2",)):
        half = planned(make_job(SMALL, 16, *layout))
        largest = max(rank.stage.num_parameters for rank in half.memory)
        assert half.checkpoint.saved_bytes == 14 * largest
        assert largest < 0.51 * 1_777_088_000
    assert planned(make_job(SMALL, 2)).checkpoint.saved_bytes == 14 * 1_777_088_000
    little = whole.job.hardware.model_copy(update={"host_memory_bytes": 2e9})
    small_node = replace(whole.job, hardware=little)
    assert notes_of(planned(small_node)) == [
        "a checkpoint needs 25 GB of a node's host memory, of which there are 16; use more nodes"
    ]


def test_nothing_accepted_is_a_step_too() -> None:
    job = make_job(SMALL, 8)
    plan = estimate_run(job, make_responses(job, acceptance=0.0), 100)
    assert plan.step.train == 0
    assert plan.utilization(plan.step.total) == 0


def test_what_does_not_fit_says_where_and_what_to_do() -> None:
    plan = planned(make_job(LARGE, 8, "parallel.tp=8", "parallel.sequence_parallel=true"))
    assert not plan.fits
    assert plan.worst.margin < 0
    assert any(line.startswith("rollout: stage 0 needs") for line in plan.problems)
    assert any("fewer than one sequence" in line for line in plan.problems)
    assert verdict_line(plan).startswith("DOES NOT FIT. rollout: stage 0 needs ")


def test_what_fits_says_what_it_costs() -> None:
    plan = planned(make_job(SMALL, 8))
    assert plan.fits
    assert plan.device_hours == pytest.approx(plan.step.total * 100 * 8 / 3600)
    assert plan.price == pytest.approx(3.0 * plan.device_hours)
    line = verdict_line(plan)
    assert line.startswith("FITS, with ")
    assert "Bottleneck: rollout" in line
    step = plan.step
    assert 0 < plan.utilization(step.total) < plan.utilization(step.train) < 0.55


def test_context_parallelism_divides_activations_and_shares_the_optimizer_as_data_parallelism() -> (
    None
):
    long = ("rollout.max_response_tokens=31744", "train.max_tokens_per_microbatch=1")
    alone, shared = (
        planned(make_job(SMALL, world_size, *long, f"parallel.cp={cp}")).memory[0]
        for world_size, cp in ((4, 1), (8, 2))
    )
    assert shared.activations == pytest.approx(alone.activations / 2, rel=1e-6)
    same = planned(make_job(SMALL, 8)).memory[0].stage
    assert shared.stage.optimizer_bytes == same.optimizer_bytes < alone.stage.optimizer_bytes


@pytest.mark.parametrize(
    ("overrides", "world_size", "message"),
    [
        (["parallel.tp=3"], 9, r"parallel\.tp=3 does not divide .* 2 key/value heads"),
        (["parallel.pp=3"], 9, r"parallel\.pp=3 x vpp=1 does not divide .* 28 layers"),
        (["parallel.tp=2", "parallel.pp=2"], 6, "world size 6 is not a multiple"),
        (["rollout.tp=5"], 10, r"rollout\.tp=5 does not divide num_attention_heads"),
        (["rollout.tp=2"], 7, r"rollout\.tp=2 does not divide the world size 7"),
        (["rollout.engine=hf", "rollout.tp=2"], 8, r"rollout\.tp=2 is vLLM's"),
        (["rollout.max_response_tokens=131072"], 8, "131072 positions"),
        (["train.offload_layers=4", "parallel.pp=2"], 8, r"needs parallel\.pp=1"),
        (["train.cross_entropy=te", "model.dtype=float32"], 8, "needs TransformerEngine"),
        (["parallel.cp=3"], 8, r"parallel\.cp = 1 x 1 x 3"),
        (["run.device=cpu"], 8, "give --gpu cpu"),
    ],
)
def test_what_the_trainer_would_refuse_is_refused(
    overrides: list[str], world_size: int, message: str
) -> None:
    job = make_job(SMALL, world_size, *overrides)
    with pytest.raises(UserError, match=message):
        check_job(job)


def test_waste_is_noted() -> None:
    job = make_job(SMALL, 128, "parallel.tp=2")
    assert notes_of(planned(job)) == []
    single = replace(job, hardware=load_hardware("h100", gpus_per_node=1))
    assert (
        "parallel.tp x parallel.cp = 2 reaches beyond a node of 1" in notes_of(planned(single))[0]
    )
