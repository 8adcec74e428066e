"""What a method trains on and keeps, in a plan: against closed forms and on-policy SFT's."""

from dataclasses import replace
from pathlib import Path

import pytest
from forked_cli import ROOT
from plan_cases import make_job, make_responses
from real_shapes import REAL_SHAPES

from megatron_opsft.architectures.flops import forward_flops
from megatron_opsft.config_file import load_config
from megatron_opsft.plan.checks import notes_of
from megatron_opsft.plan.estimate import RunEstimate, estimate_run, host_notes
from megatron_opsft.plan.job import TrainingJob
from megatron_opsft.plan.learning import learned_by, updates_of
from megatron_opsft.plan.lengths import Workload
from megatron_opsft.plan.presets import estimate_preset, with_methods_table
from megatron_opsft.plan.seconds import optimizer_seconds
from megatron_opsft.plan.stages import count_stages
from megatron_opsft.plan.tables import show_run

SHAPE = REAL_SHAPES["DeepSeek-R1-Distill-Qwen-1.5B"]
METHODS = ROOT / "examples/configs/methods"
# To be found without a network.
HERE = [p for p in sorted(METHODS.glob("*.yaml")) if "DeepSeek-R1" in p.read_text()]


def planned(*overrides: str, world_size: int = 8) -> RunEstimate:
    job = make_job(SHAPE, world_size, *overrides)
    workload = learned_by(job.config, make_responses(job))
    return estimate_run(job, count_stages(job), workload, 10)


def forward_seconds(job: TrainingJob, workload: Workload, num_microbatches: int) -> float:
    """Of a rank that has its even share of tokens."""
    lengths = [workload.prompt_tokens + n for n in workload.accepted]
    flops = forward_flops(job.shape, lengths, sum(workload.accepted)) / job.world_size
    rate = job.hardware.peak_flops * job.hardware.training_fraction
    return flops / rate + num_microbatches * job.hardware.step_overhead_seconds / 2


def test_a_policy_gradient_trains_on_all_responses_and_on_policy_sft_on_the_accepted() -> None:
    ours, grpo = planned(), planned("method.name=grpo", "method.beta=0")
    assert len(ours.workload.accepted) == 256
    assert grpo.workload.accepted == grpo.workload.lengths == ours.workload.lengths
    assert (grpo.step.rollout, grpo.step.push) == (ours.step.rollout, ours.step.push)
    longer = grpo.workload.trained_tokens / ours.workload.trained_tokens
    assert longer > 2
    assert grpo.step.train / ours.step.train == pytest.approx(longer, rel=0.1)
    assert grpo.step.reference == grpo.step.old_logprob == 0
    assert grpo.memory == ours.memory and grpo.reference_host_bytes == 0


def test_the_end_of_the_way_from_grpo_to_on_policy_sft_has_its_plan() -> None:
    ours = planned()
    same = planned("method.name=grpo", "method.beta=0", "method.advantage=identity")
    assert (same.step, same.memory) == (ours.step, ours.memory)
    diverging = planned("method.name=grpo", "method.beta=0.1", "method.advantage=identity")
    assert len(diverging.workload.accepted) == 512


def test_a_reference_costs_a_forward_pass_and_two_exchanges_of_weights() -> None:
    plan, without = planned("method.name=grpo"), planned("method.name=grpo", "method.beta=0")
    stage = plan.memory[0].stage
    # Bytes both ways, twice: 40 GB/s to the host.
    exchanges = 4 * stage.weight_bytes / 40e9
    count = plan.step.num_microbatches
    expected = forward_seconds(plan.job, plan.workload, count) + exchanges
    assert plan.step.reference == pytest.approx(expected, rel=0.03)  # ranks are not quite even
    assert plan.step.total - without.step.total == pytest.approx(plan.step.reference)
    assert plan.reference_host_bytes == 8 * stage.weight_bytes
    assert plan.memory[0].reference == 0 and plan.memory == without.memory


def test_a_reference_stays_on_a_device_with_room() -> None:
    """A tenth of what trainer and engine leave free."""
    few = ("rollout.gpu_memory_fraction=0.1", "method.name=grpo")
    plan, without = planned(*few), planned(*few, "method.beta=0")
    rank, alone = plan.memory[0], without.memory[0]
    assert rank.reference == rank.stage.weight_bytes > 3e9
    for phase in ("rollout", "train", "push"):
        assert getattr(rank, phase) == getattr(alone, phase) + rank.reference
    assert plan.reference_host_bytes == 0
    assert plan.step.reference < planned("method.name=grpo").step.reference - 0.3


def test_a_reference_counts_in_host_memory() -> None:
    plan = planned("method.name=grpo")
    small = replace(plan.job.hardware, host_memory_bytes=5e9)
    assert "a checkpoint and the reference model need 53 GB" in " ".join(
        host_notes(replace(plan, job=replace(plan.job, hardware=small)))
    )
    assert host_notes(plan) == []


def test_several_updates_share_the_batch_and_score_it_before() -> None:
    one = planned("method.name=dr_grpo")
    four = planned("method.name=dr_grpo", "method.updates_per_batch=4")
    parts = updates_of(four.job.config, four.workload)
    assert [len(part.accepted) for part in parts] == [128] * 4
    assert sorted(n for part in parts for n in part.accepted) == sorted(one.workload.accepted)
    stage = one.memory[0].stage
    assert four.step.update == pytest.approx(
        4 * optimizer_seconds(stage.num_parameters, 8, four.job.hardware)
    )
    assert four.step.num_microbatches >= one.step.num_microbatches
    assert four.step.train > one.step.train
    expected = forward_seconds(four.job, four.workload, four.step.num_microbatches)
    assert four.step.old_logprob == pytest.approx(expected, rel=0.05)
    assert one.step.old_logprob == 0
    assert four.memory == one.memory


def test_fixed_data_sample_nothing() -> None:
    plan = planned("method.name=off_policy_sft", "data.responses=file.parquet")
    assert plan.workload.lengths == () and len(plan.workload.accepted) == 512
    assert max(plan.workload.accepted) < plan.workload.limit
    step = plan.step
    assert step.rollout == step.verify == step.old_logprob == step.reference == 0
    assert step.total == pytest.approx(step.train + step.push)
    assert plan.bottleneck.startswith("train")
    show_run(plan, [])


def test_notes_say_what_is_not_counted() -> None:
    def notes(*overrides: str) -> str:
        return " ".join(notes_of(make_job(SHAPE, 8, *overrides)))

    assert "draws problems again, up to 8 times a step" in notes("method.name=dler")
    laser = notes("method.name=laser_d", "rollout.temperature=0.6")
    assert "8 responses to each of 500 monitor problems" in laser
    assert "not on-policy" not in laser  # its log-probs are of the tempered policy
    assert "not on-policy" in notes("rollout.temperature=0.6")


@pytest.mark.parametrize("path", HERE, ids=lambda path: path.stem)
def test_the_preset_of_a_method_fits_on_a_node(path: Path) -> None:
    config = load_config(path)
    for at_start in (False, True):
        assert estimate_preset(config, 1, "h100", at_start=at_start).is_safe


def test_the_table_in_the_docs_is_that_of_the_plans() -> None:
    """Otherwise: python tools/update_presets.py"""
    page = (ROOT / "docs/methods.md").read_text(encoding="utf-8")
    assert with_methods_table(page, METHODS) == page
    assert page.count("| `on_policy_sft` | 307 |") == 1
