"""What a method trains on and keeps, in a plan: against closed forms and on-policy SFT's."""

from dataclasses import replace
from pathlib import Path

import pytest
from forked_cli import ROOT
from plan_cases import make_job, make_responses
from real_shapes import REAL_SHAPES

from megatron_opsft.architectures.flops import forward_flops
from megatron_opsft.config.load import load_config
from megatron_opsft.plan.checks import notes_of
from megatron_opsft.plan.estimate import RunEstimate, estimate_run
from megatron_opsft.plan.hardware import load_hardware
from megatron_opsft.plan.job import TrainingJob
from megatron_opsft.plan.job import make_job as read_job
from megatron_opsft.plan.tables import show_run
from megatron_opsft.plan.training import optimizer_seconds
from megatron_opsft.plan.workload import Workload, make_workload

SHAPE = REAL_SHAPES["DeepSeek-R1-Distill-Qwen-1.5B"]
METHODS = ROOT / "examples/configs/methods"
# To be found without a network.
HERE = [p for p in sorted(METHODS.glob("*.yaml")) if "DeepSeek-R1" in p.read_text()]


def planned(*overrides: str, world_size: int = 8) -> RunEstimate:
    job = make_job(SHAPE, world_size, *overrides)
    return estimate_run(job, make_responses(job), 10)


def forward_seconds(job: TrainingJob, workload: Workload, num_microbatches: int) -> float:
    """Of a rank that has its even share of tokens."""
    flops = forward_flops(job.shape, workload.sequences, sum(workload.trained)) / job.world_size
    fixed = num_microbatches * job.hardware.microbatch_seconds / 2
    return job.hardware.train_factor * (flops / job.hardware.peak_flops + fixed)


def test_a_policy_gradient_trains_on_all_responses_and_on_policy_sft_on_the_accepted() -> None:
    ours, grpo = planned(), planned("method.name=grpo", "method.beta=0")
    assert len(ours.workload.trained) == 256
    assert grpo.workload.trained == grpo.workload.lengths == ours.workload.lengths
    assert (grpo.step.rollout, grpo.step.sync) == (ours.step.rollout, ours.step.sync)
    longer = sum(grpo.workload.sequences) / sum(ours.workload.sequences)
    assert longer > 2
    assert grpo.step.train / ours.step.train == pytest.approx(longer, rel=0.1)
    assert grpo.step.reference == grpo.step.old_logprob == 0
    assert grpo.memory == ours.memory and grpo.reference_host_bytes == 0


def test_the_end_of_the_way_from_grpo_to_on_policy_sft_has_its_plan() -> None:
    ours = planned()
    same = planned("method.name=grpo", "method.beta=0", "method.advantage=identity")
    assert (same.step, same.memory) == (ours.step, ours.memory)
    diverging = planned("method.name=grpo", "method.beta=0.1", "method.advantage=identity")
    assert len(diverging.workload.trained) == 512


def test_a_reference_costs_a_forward_pass_and_two_exchanges_of_weights() -> None:
    plan, without = planned("method.name=grpo"), planned("method.name=grpo", "method.beta=0")
    stage = plan.memory[0].stage
    # Bytes both ways, twice.
    exchanges = plan.job.hardware.train_factor * 4 * stage.weight_bytes / 64e9
    count = plan.step.training.num_microbatches
    expected = forward_seconds(plan.job, plan.workload, count) + exchanges
    assert plan.step.reference == pytest.approx(expected)
    assert plan.step.total - without.step.total == pytest.approx(plan.step.reference)
    assert plan.reference_host_bytes == 8 * stage.weight_bytes
    assert plan.memory[0].reference == 0 and plan.memory == without.memory


def test_a_reference_stays_on_a_device_with_room() -> None:
    """A tenth of what trainer and engine leave free."""
    few = ("rollout.gpu_memory_fraction=0.1", "method.name=grpo")
    plan, without = planned(*few), planned(*few, "method.beta=0")
    rank, alone = plan.memory[0], without.memory[0]
    assert rank.reference == rank.stage.weight_bytes > 3e9
    for phase in ("rollout", "train", "sync"):
        assert rank.phases[phase] == alone.phases[phase] + rank.reference
    assert plan.reference_host_bytes == 0
    assert plan.step.reference < planned("method.name=grpo").step.reference - 0.3


def test_a_reference_counts_in_host_memory() -> None:
    plan = planned("method.name=grpo")
    small = plan.job.hardware.model_copy(update={"host_memory_bytes": 5e9})
    assert "a checkpoint and the reference model need 53 GB" in " ".join(
        notes_of(replace(plan, job=replace(plan.job, hardware=small)))
    )
    assert notes_of(plan) == []


def test_several_updates_share_the_batch_and_score_it_before() -> None:
    one = planned("method.name=dr_grpo")
    four = planned("method.name=dr_grpo", "method.updates_per_batch=4")
    assert four.workload == one.workload
    training, stage = four.step.training, one.memory[0].stage
    factor = four.job.hardware.train_factor
    assert training.update == pytest.approx(4 * factor * optimizer_seconds(four.job, stage))
    assert training.num_microbatches >= one.step.training.num_microbatches
    assert four.step.train > one.step.train
    expected = forward_seconds(four.job, four.workload, training.num_microbatches)
    assert four.step.old_logprob == pytest.approx(expected)
    assert one.step.old_logprob == 0
    assert four.memory == one.memory


def test_fixed_data_sample_nothing() -> None:
    plan = planned("method.name=off_policy_sft", "data.responses=file.parquet")
    assert plan.workload.lengths == () and len(plan.workload.trained) == 512
    assert max(plan.workload.trained) < plan.workload.limit
    step = plan.step
    assert step.rollout == step.verify == step.old_logprob == step.reference == 0
    assert step.total == pytest.approx(step.train + step.sync)
    assert plan.bottleneck.startswith("train")
    show_run(plan, [])


def test_notes_say_what_is_not_counted() -> None:
    def notes(*overrides: str) -> str:
        return " ".join(notes_of(planned(*overrides)))

    assert "draws problems again, up to 8 times a step" in notes("method.name=dler")
    laser = notes("method.name=laser_d", "rollout.temperature=0.6")
    assert "8 responses to each of 500 monitor problems" in laser
    assert "not on-policy" not in laser  # its log-probs are of the tempered policy
    assert "not on-policy" in notes("rollout.temperature=0.6")


@pytest.mark.parametrize("path", HERE, ids=lambda path: path.stem)
def test_the_preset_of_a_method_fits_on_a_node(path: Path) -> None:
    config = load_config(path)
    job = read_job(config, load_hardware("h100"), 8)
    for long in ({}, {"mean_tokens": 10_000.0, "acceptance": 0.3}):
        assert estimate_run(job, make_workload(config, **long), 1).is_safe
