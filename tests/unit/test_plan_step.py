"""A step against closed forms, and what its ranks wait for."""

import time
from dataclasses import replace

import pytest
from plan_cases import make_job
from real_shapes import REAL_SHAPES

from megatron_opsft.architectures.flops import forward_flops
from megatron_opsft.plan.job import TrainingJob
from megatron_opsft.plan.lengths import Workload, make_workload
from megatron_opsft.plan.seconds import (
    decode_step_seconds,
    engine_sizes,
    optimizer_seconds,
    prefill_seconds,
    ring_seconds,
)
from megatron_opsft.plan.stages import count_stages
from megatron_opsft.plan.step import StepEstimate, estimate_step
from megatron_opsft.plan.training import TrainingEstimate, estimate_training

SMALL = REAL_SHAPES["DeepSeek-R1-Distill-Qwen-1.5B"]
LARGE = REAL_SHAPES["DeepSeek-R1-Distill-Qwen-7B"]
# Four sequences of 500 tokens in a micro-batch.
FOUR = "train.max_tokens_per_microbatch=2110"


def equal(job: TrainingJob, length: int = 400, prompt: int = 100) -> Workload:
    """All responses of one length, and all of them accepted."""
    lengths = (length,) * job.num_responses
    return Workload(lengths=lengths, accepted=lengths, prompt_tokens=prompt, limit=3500)


def drawn(job: TrainingJob, seed: int = 0, sigma: float = 0.9) -> Workload:
    return make_workload(
        job.num_responses,
        mean_tokens=1000.0,
        sigma=sigma,
        limit=job.config.rollout.max_response_tokens,
        acceptance=0.6,
        prompt_tokens=100,
        seed=seed,
    )


@pytest.mark.parametrize(
    "layout",
    [
        (),
        ("parallel.tp=4", "parallel.sequence_parallel=true"),
        ("rollout.tp=2", "train.recompute=full"),
        ("parallel.overlap_grad_reduce=false", "parallel.overlap_param_gather=false"),
        ("rollout.engine=hf", "model.dtype=float32", "rollout.batch_size=32"),
    ],
)
def test_without_variance_nobody_waits(layout: tuple[str, ...]) -> None:
    job = make_job(SMALL, 16, FOUR, *layout)
    step = estimate_step(job, equal(job))
    assert step.waiting == pytest.approx(0.0, abs=1e-9)
    assert step.total == pytest.approx(step.rollout + step.verify + step.train + step.push)
    # 512 responses on 16 ranks, verified on each one's own cores.
    of_rank = 32 * job.hardware.verify_seconds / job.hardware.cpu_cores
    assert step.verify == pytest.approx(of_rank)


@pytest.mark.parametrize("overlap", [True, False])
def test_training_is_passes_exchange_and_update(overlap: bool) -> None:
    switches = [f"parallel.overlap_{what}={overlap}" for what in ("grad_reduce", "param_gather")]
    job = make_job(SMALL, 16, FOUR, *switches)
    workload, (stage,) = equal(job), count_stages(job)
    hardware = job.hardware
    rate = hardware.peak_flops * hardware.training_fraction
    # 32 accepted responses a rank, four to a micro-batch.
    flops = 3 * forward_flops(SMALL, [500] * 32, 400 * 32)
    passes = flops / rate + 8 * hardware.step_overhead_seconds
    # Facts of all responses and a plan of all accepted ones; tokens of 32 over two hops.
    exchange = 5e-6 * 512 + (2.5e-6 + 13e-6) * 512 + 0.06e-6 * 500 * 32
    exchange += ring_seconds(32 * 512 + 2 * 4 * 500 * 32, 16, 16, hardware)
    if not overlap:
        exchange += ring_seconds(stage.gradient_bytes + stage.weight_bytes, 16, 16, hardware)
    step = estimate_step(job, workload)
    assert step.update == pytest.approx(optimizer_seconds(stage.num_parameters, 16, hardware))
    if overlap:  # nearly all of the reduction is behind the last backward pass
        ring = ring_seconds(stage.gradient_bytes, 16, 16, hardware)
        last = 2 * (passes - 8 * hardware.step_overhead_seconds) / 8 / 3
        exchange += max(0.0, ring - last - hardware.step_overhead_seconds / 2)
    assert step.exchange == pytest.approx(exchange)
    assert step.train == pytest.approx(passes + exchange + step.update)
    assert step.num_microbatches == 8


def equal_stages(job: TrainingJob) -> TrainingEstimate:
    """Of stages none of which has an output layer."""
    stages = [replace(stage, has_output=False) for stage in count_stages(job)]
    return estimate_training(job, stages, equal(job))


@pytest.mark.parametrize(("pp", "dp"), [(2, 2), (4, 1), (4, 2), (7, 1)])
def test_the_bubble_of_1f1b(pp: int, dp: int) -> None:
    job = make_job(SMALL, pp * dp, FOUR, f"parallel.pp={pp}", "data.prompts_per_step=8")
    training, count = equal_stages(job), 16 // dp
    share = training.bubble / (training.bubble + training.passes)
    assert training.num_microbatches == count
    assert share == pytest.approx((pp - 1) / (count + pp - 1))


@pytest.mark.parametrize("vpp", [2, 7])
def test_the_bubble_of_the_interleaved_schedule(vpp: int) -> None:
    job = make_job(
        SMALL, 4, FOUR, "parallel.pp=4", f"parallel.vpp={vpp}", "data.prompts_per_step=8"
    )
    if SMALL.num_layers % (4 * vpp):
        job = replace(job, shape=replace(SMALL, num_layers=4 * vpp))
    training = equal_stages(job)
    share = training.bubble / (training.bubble + training.passes)
    assert training.num_microbatches == 16
    assert share == pytest.approx((3 / vpp) / (16 + 3 / vpp))


def test_one_engine_decodes_step_by_step() -> None:
    job = make_job(SMALL, 1, "data.prompts_per_step=1", "rollout.group_size=3")
    lengths, prompt = (5, 9, 2), 100
    workload = Workload(lengths=lengths, accepted=(5, 9), prompt_tokens=prompt, limit=3500)
    engine = engine_sizes(SMALL, 1, 2)
    expected = prefill_seconds(SMALL, job.hardware, prompt, 1, 1)
    for token in range(9):
        alive = [n for n in lengths if n > token]
        context = len(alive) * (prompt + token + 0.5)
        expected += decode_step_seconds(engine, job.hardware, len(alive), context)
    assert estimate_step(job, workload).rollout == pytest.approx(expected)


def test_who_waits_for_whom() -> None:
    job = make_job(SMALL, 4, "data.prompts_per_step=4", "rollout.group_size=1")
    even = Workload(lengths=(500,) * 4, accepted=(500,) * 4, prompt_tokens=100, limit=3500)
    assert estimate_step(job, even).rollout_tail == pytest.approx(0.0)
    # Three of four engines wait for half of the rollout.
    step = estimate_step(job, replace(even, lengths=(500, 500, 500, 1000)))
    assert step.rollout_tail / step.rollout == pytest.approx(0.75 * 0.5, rel=0.02)
    # One rank has nothing to train on: it waits for the three others.
    step = estimate_step(job, replace(even, accepted=(500,) * 3))
    in_passes = step.train - step.exchange - step.update
    without = job.hardware.step_overhead_seconds  # of its micro-batch of padding
    assert step.slowest_rank == pytest.approx((in_passes - without) / 4, rel=1e-3)


@pytest.mark.parametrize(
    "layout", [(), ("parallel.pp=2",), ("parallel.pp=2", "parallel.vpp=2"), ("rollout.tp=4",)]
)
def test_waiting_is_a_part_of_its_phase(layout: tuple[str, ...]) -> None:
    job = make_job(SMALL, 16, *layout)
    step = estimate_step(job, drawn(job))
    assert 0.0 <= step.rollout_tail < step.rollout + step.verify
    assert 0.0 <= step.pipeline_bubble + step.slowest_rank < step.train - step.update
    assert (step.pipeline_bubble > 0) == (job.parallel.pp > 1)
    assert (step.bubble > 0) == (job.parallel.pp > 1)


def test_the_same_seed_gives_the_same_step() -> None:
    job = make_job(SMALL, 16, "parallel.pp=2")
    assert estimate_step(job, drawn(job)) == estimate_step(job, drawn(job))
    assert estimate_step(job, drawn(job)) != estimate_step(job, drawn(job, seed=1))


def test_more_work_takes_longer_and_more_ranks_do_not() -> None:
    job = make_job(SMALL, 16)
    base = estimate_step(job, drawn(job))
    longer = replace(drawn(job), lengths=tuple(n + 200 for n in drawn(job).lengths), limit=4000)
    assert estimate_step(job, longer).rollout > base.rollout
    more = replace(drawn(job), accepted=drawn(job).accepted * 2)
    assert estimate_step(job, more).train > base.train
    wide = estimate_step(replace(job, world_size=64), drawn(job))
    assert wide.rollout <= base.rollout
    assert wide.train < base.train
    assert wide.rollout_tail / wide.total > base.rollout_tail / base.total
    slow = replace(job, hardware=replace(job.hardware, decode_overhead_seconds=0.01))
    assert estimate_step(slow, drawn(job)).rollout > base.rollout


def test_nothing_accepted_is_nothing_trained() -> None:
    job = make_job(SMALL, 8, "parallel.pp=2")
    step = estimate_step(job, replace(drawn(job), accepted=()))
    assert step.train == 0.0
    assert step.num_microbatches == 0


def on_cores(job: TrainingJob, workload: Workload, cores: int) -> StepEstimate:
    return estimate_step(replace(job, hardware=replace(job.hardware, node_cores=cores)), workload)


@pytest.mark.parametrize(("pp", "least"), [(1, 1.8), (2, 1.5)])
def test_ranks_on_cpus_share_the_cores_of_their_node(pp: int, least: float) -> None:
    job = make_job(
        SMALL, 4, FOUR, "rollout.engine=hf", "rollout.batch_size=128", "model.dtype=float32",
        f"parallel.pp={pp}", gpu="cpu",
    )  # fmt: skip
    workload = equal(job)
    four, two = (on_cores(job, workload, cores) for cores in (4, 2))
    assert two.rollout == pytest.approx(2 * four.rollout)
    assert two.push == pytest.approx(2 * four.push)
    # The exchanges are no work of the cores, and a pipeline's ranks are not always busy.
    assert least < two.train / four.train <= 2.0
    # One slow engine has a core to itself as soon as the others are through.
    size = job.config.rollout.group_size
    dealt = [800 if n // size % 4 == 0 else 400 for n in range(512)]  # groups go to engines in turn
    long = replace(workload, lengths=tuple(dealt))
    assert on_cores(job, long, 2).rollout < 1.7 * on_cores(job, long, 4).rollout


@pytest.mark.parametrize("layout", [(), ("parallel.pp=4", "data.prompts_per_step=2048")])
def test_4096_gpus_take_seconds(layout: tuple[str, ...]) -> None:
    layout = ("parallel.tp=4", "parallel.sequence_parallel=true", *layout)
    job = make_job(LARGE, 4096, *layout)
    begin = time.process_time()
    step = estimate_step(job, drawn(job))
    assert time.process_time() - begin < 10.0
    assert 0.4 < step.waiting / step.total < 1.0
