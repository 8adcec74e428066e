"""A simulated step against closed forms: without variance it is what a plan predicts."""

import time
from dataclasses import asdict, replace

import pytest
from plan_cases import make_job
from real_shapes import REAL_SHAPES

from megatron_opsft.plan.job import Job
from megatron_opsft.plan.lengths import Workload, draw_workload
from megatron_opsft.plan.memory import rank_memory
from megatron_opsft.plan.predict import StepSeconds, predict_step
from megatron_opsft.plan.seconds import decode_step_seconds, engine_sizes, prefill_seconds
from megatron_opsft.plan.simulate import simulate_step
from megatron_opsft.plan.simulated_training import simulate_training
from megatron_opsft.plan.stages import count_stages

SMALL = REAL_SHAPES["DeepSeek-R1-Distill-Qwen-1.5B"]
LARGE = REAL_SHAPES["DeepSeek-R1-Distill-Qwen-7B"]
# Four sequences of 500 tokens in a micro-batch.
FOUR = "train.max_tokens_per_microbatch=2110"


def equal(job: Job, length: int = 400, prompt: int = 100) -> Workload:
    """All responses of one length, and all of them accepted."""
    lengths = (length,) * job.num_responses
    return Workload(lengths=lengths, accepted=lengths, prompt_tokens=prompt, limit=3500)


def drawn(job: Job, seed: int = 0, sigma: float = 0.9) -> Workload:
    return draw_workload(
        job.num_responses,
        mean_tokens=1000.0,
        sigma=sigma,
        limit=job.config.rollout.max_response_tokens,
        acceptance=0.6,
        prompt_tokens=100,
        seed=seed,
    )


def predicted(job: Job, workload: Workload) -> StepSeconds:
    stages = count_stages(job)
    return predict_step(job, stages, [rank_memory(job, s, 1) for s in stages], workload)


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
def test_without_variance_it_is_what_a_plan_predicts(layout: tuple[str, ...]) -> None:
    job = make_job(SMALL, 16, FOUR, *layout)
    workload = equal(job)
    step, plan = simulate_step(job, workload), predicted(job, workload)
    assert step.phases.rollout == pytest.approx(plan.rollout)
    assert step.phases.verify == pytest.approx(plan.verify)
    assert step.phases.train == pytest.approx(plan.train)
    assert step.phases.push == pytest.approx(plan.push)
    assert step.on_rank_0.total == pytest.approx(step.total)
    assert step.mean.idle == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("vpp", [None, 2])
def test_a_pipeline_is_nearly_what_a_plan_predicts(vpp: int | None) -> None:
    job = make_job(SMALL, 16, FOUR, "parallel.pp=4", f"parallel.vpp={vpp or 'null'}")
    workload = equal(job)
    plan = predicted(job, workload)
    assert simulate_step(job, workload).phases.train == pytest.approx(plan.train, rel=0.1)


def equal_stages(job: Job, workload: Workload) -> tuple[float, int]:
    """(bubble's share of the pipeline's time, micro-batches) where no stage has an output layer."""
    stages = [replace(stage, has_output=False) for stage in count_stages(job)]
    training = simulate_training(job, stages, workload)
    shares = {rank.bubble / (rank.bubble + rank.passes) for rank in training.ranks}
    assert max(shares) == pytest.approx(min(shares))
    return max(shares), training.num_microbatches


@pytest.mark.parametrize(("pp", "dp"), [(2, 2), (4, 1), (4, 2), (7, 1)])
def test_the_bubble_of_1f1b(pp: int, dp: int) -> None:
    job = make_job(SMALL, pp * dp, FOUR, f"parallel.pp={pp}", "data.prompts_per_step=8")
    share, count = equal_stages(job, equal(job))
    assert count == 16 // dp
    assert share == pytest.approx((pp - 1) / (count + pp - 1))


@pytest.mark.parametrize("vpp", [2, 7])
def test_the_bubble_of_the_interleaved_schedule(vpp: int) -> None:
    job = make_job(
        SMALL, 4, FOUR, "parallel.pp=4", f"parallel.vpp={vpp}", "data.prompts_per_step=8"
    )
    if SMALL.num_layers % (4 * vpp):
        job = replace(job, shape=replace(SMALL, num_layers=4 * vpp))
    share, count = equal_stages(job, equal(job))
    assert count == 16
    assert share == pytest.approx((3 / vpp) / (count + 3 / vpp))


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
    assert simulate_step(job, workload).phases.rollout == pytest.approx(expected)


def test_who_waits_for_whom() -> None:
    job = make_job(SMALL, 4, "data.prompts_per_step=4", "rollout.group_size=1")
    even = Workload(lengths=(500,) * 4, accepted=(500,) * 4, prompt_tokens=100, limit=3500)
    assert simulate_step(job, even).mean.rollout_tail == pytest.approx(0.0)
    tail = replace(even, lengths=(500, 500, 500, 1000))
    step = simulate_step(job, tail)
    # Three of four engines wait for half of the rollout.
    waited = step.mean.rollout_tail * step.total / step.phases.rollout
    assert waited == pytest.approx(0.75 * 0.5, rel=0.02)
    # Rank 0 has its own responses early, and its stopwatch counts the waiting as training.
    assert step.on_rank_0.rollout < 0.6 * step.phases.rollout
    assert step.on_rank_0.total == pytest.approx(step.total)
    # One rank has nothing to train on: it waits for the three others.
    fewer = replace(even, accepted=(500,) * 3)
    step = simulate_step(job, fewer)
    assert step.mean.slowest_rank * step.total > 0.2 * step.mean.passes * step.total


@pytest.mark.parametrize(
    "layout", [(), ("parallel.pp=2",), ("parallel.pp=2", "parallel.vpp=2"), ("rollout.tp=4",)]
)
def test_shares_of_a_step_add_up(layout: tuple[str, ...]) -> None:
    job = make_job(SMALL, 16, *layout)
    step = simulate_step(job, drawn(job))
    for shares in (*step.stages, step.mean):
        assert sum(asdict(shares).values()) == pytest.approx(1.0, abs=1e-6)
        assert min(asdict(shares).values()) >= -1e-9
    assert len(step.stages) == job.parallel.pp


def test_the_same_seed_gives_the_same_step() -> None:
    job = make_job(SMALL, 16, "parallel.pp=2")
    assert simulate_step(job, drawn(job)) == simulate_step(job, drawn(job))
    assert simulate_step(job, drawn(job)) != simulate_step(job, drawn(job, seed=1))


def test_more_work_takes_longer_and_more_ranks_do_not() -> None:
    job = make_job(SMALL, 16)
    base = simulate_step(job, drawn(job))
    longer = replace(drawn(job), lengths=tuple(n + 200 for n in drawn(job).lengths), limit=4000)
    assert simulate_step(job, longer).phases.rollout > base.phases.rollout
    more = replace(drawn(job), accepted=drawn(job).accepted * 2)
    assert simulate_step(job, more).phases.train > base.phases.train
    wide = simulate_step(replace(job, world_size=64), drawn(job))
    assert wide.phases.rollout <= base.phases.rollout
    assert wide.phases.train < base.phases.train
    assert wide.mean.rollout_tail > base.mean.rollout_tail
    slow = replace(job, hardware=replace(job.hardware, decode_overhead_seconds=0.01))
    assert simulate_step(slow, drawn(job)).phases.rollout > base.phases.rollout


def test_nothing_accepted_is_nothing_trained() -> None:
    job = make_job(SMALL, 8, "parallel.pp=2")
    step = simulate_step(job, replace(drawn(job), accepted=()))
    assert step.phases.train == 0.0
    assert step.num_microbatches == 0


def test_ranks_on_cpus_share_the_cores_of_their_node() -> None:
    job = make_job(
        SMALL, 4, FOUR, "rollout.engine=hf", "rollout.batch_size=128", "model.dtype=float32",
        gpu="cpu",
    )  # fmt: skip
    workload = equal(job)
    step = {
        cores: simulate_step(
            replace(job, hardware=replace(job.hardware, node_cores=cores)), workload
        )
        for cores in (4, 2)
    }
    for phase in ("rollout", "push"):
        assert getattr(step[2].phases, phase) == pytest.approx(2 * getattr(step[4].phases, phase))
    # The exchanges are no work of the cores.
    assert 1.8 < step[2].phases.train / step[4].phases.train <= 2.0
    # One slow engine has a core to itself as soon as the others are through.
    long = replace(workload, lengths=(400,) * 384 + (800,) * 128)
    tail = {
        cores: simulate_step(replace(job, hardware=replace(job.hardware, node_cores=cores)), long)
        for cores in (4, 2)
    }
    assert tail[2].phases.rollout < 1.7 * tail[4].phases.rollout


@pytest.mark.parametrize("layout", [(), ("parallel.pp=4", "data.prompts_per_step=2048")])
def test_4096_gpus_take_seconds(layout: tuple[str, ...]) -> None:
    job = make_job(LARGE, 4096, "parallel.tp=4", "parallel.sequence_parallel=true", *layout)
    begin = time.process_time()
    step = simulate_step(job, drawn(job))
    assert time.process_time() - begin < 10.0
    assert 0.5 < step.mean.idle < 1.0
