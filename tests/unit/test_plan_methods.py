"""What a method trains on and keeps, in a plan: against closed forms and on-policy SFT's."""

from pathlib import Path

import pytest
from forked_cli import ROOT
from plan_cases import SMALL, make_run
from plan_cases import planned as planned_run

from megatron_opsft.commands.plan.assumptions import load_hardware, measured_workload
from megatron_opsft.commands.plan.estimate import Plan
from megatron_opsft.commands.plan.job import PlannedRun, make_planned_run
from megatron_opsft.commands.plan.seconds import num_microbatches
from megatron_opsft.commands.plan.show import show_plan
from megatron_opsft.config.load import load_config
from megatron_opsft.models.architectures.shape import forward_flops

METHODS = ROOT / "examples/configs/methods"
# To be found without a network.
HERE = [
    path
    for path in sorted(METHODS.glob("*.yaml"))
    if "self_distillation" in path.name or "DeepSeek-R1" in load_config(path).model.path
]
GRPO, WITHOUT = "method.name=grpo", ("method.name=grpo", "method.beta=0")


def planned(*overrides: str) -> Plan:
    return planned_run(make_run(SMALL, 8, *overrides))


def forward_seconds(run: PlannedRun) -> float:
    """Of a rank that has its even share of tokens, for all updates."""
    work, hardware = run.workload, run.hardware
    flops = forward_flops(run.shape, work.sequences, sum(work.trained)) / run.world_size
    count = num_microbatches(run) * run.config.method.num_updates
    fixed = count * hardware.microbatch_seconds / 2
    return hardware.train_factor * (flops / hardware.peak_flops + fixed)


def test_a_policy_gradient_trains_on_all_responses_and_on_policy_sft_on_the_accepted() -> None:
    ours, grpo = planned(), planned(*WITHOUT)
    assert len(ours.run.workload.trained) == 256
    work = grpo.run.workload
    assert work.trained == work.lengths == ours.run.workload.lengths
    assert [grpo.step[name] - ours.step[name] for name in ("rollout", "sync")] == [0, 0]
    longer = sum(work.sequences) / sum(ours.run.workload.sequences)
    assert grpo.step["train"] / ours.step["train"] == pytest.approx(longer, rel=0.1)
    assert grpo.step["reference"] == grpo.step["old_logprob"] == grpo.reference_host_bytes == 0
    assert grpo.memory == ours.memory
    same = planned(*WITHOUT, "method.advantage=identity")
    assert (same.step, same.memory) == (ours.step, ours.memory)


def test_a_reference_costs_a_forward_pass_and_two_exchanges_of_weights() -> None:
    plan, without = planned(GRPO), planned(*WITHOUT)
    weights = plan.memory[0].terms["weights"]
    # Bytes both ways, twice.
    exchanges = plan.run.hardware.train_factor * 4 * weights / 64e9
    assert plan.step["reference"] == pytest.approx(forward_seconds(plan.run) + exchanges)
    added = plan.step["total"] - without.step["total"]
    assert added == pytest.approx(plan.step["reference"])
    assert plan.reference_host_bytes == 8 * weights
    assert plan.memory == without.memory
    pinned = "a node pins 24.9 GB of its host memory for the copy of a checkpoint"
    assert f"{pinned} and 28.4 GB for the reference model: 53.3 GB in all\n" in show_plan(plan)
    assert f"{pinned}\n" in show_plan(without)


def test_a_reference_stays_on_a_device_with_room() -> None:
    """A tenth of what trainer and engine leave free."""
    few = "rollout.gpu_memory_fraction=0.1"
    plan, without = planned(few, GRPO), planned(few, *WITHOUT)
    rank, alone = plan.memory[0], without.memory[0]
    held = rank.terms["reference_model"]
    assert held == rank.terms["weights"] > 3e9
    assert rank.phases == {phase: taken + held for phase, taken in alone.phases.items()}
    assert plan.reference_host_bytes == 0
    assert plan.step["reference"] < planned(GRPO).step["reference"] - 0.3


def test_a_teacher_costs_what_a_reference_does_and_its_part_of_the_loss() -> None:
    """Its pass and its weights, and on the device its output layer for as long as the loss."""
    plan = planned("method.name=self_distillation", "method.responses=all")
    reference, alone = planned(GRPO), planned(*WITHOUT)
    assert plan.run.workload == reference.run.workload
    assert plan.step["reference"] == reference.step["reference"] > 0
    assert plan.reference_host_bytes == reference.reference_host_bytes > 0
    assert plan.phases["reference"] == "hidden states of the teacher, in the model's place"
    assert plan.run.cross_entropy.kind == "fused_linear"
    loss = plan.memory[0].terms["loss"] - alone.memory[0].terms["loss"]
    shape, tokens = plan.run.shape, plan.run.microbatch_tokens
    head, states = (2 * shape.hidden_size * n for n in (plan.run.rows_per_rank, tokens))
    assert loss == pytest.approx(head + states, rel=0.6)
    accepted = planned("method.name=self_distillation")
    assert accepted.run.workload == planned().run.workload


def test_several_updates_share_the_batch_and_score_it_before() -> None:
    one, four = (planned("method.name=dr_grpo", f"method.updates_per_batch={n}") for n in (1, 4))
    assert four.run.workload == one.run.workload and four.memory == one.memory
    assert four.step["update"] == pytest.approx(4 * one.step["update"])
    assert four.step["train"] > one.step["train"]
    assert four.step["old_logprob"] == pytest.approx(forward_seconds(four.run))
    assert one.step["old_logprob"] == 0


def test_a_divergence_in_each_token_s_advantage_scores_the_batch_before() -> None:
    without, penalized = (planned("method.name=er_rl", f"method.beta={b}") for b in (0, 0.001))
    in_loss = planned("method.name=dr_grpo", "method.beta=0.001")
    assert without.step["old_logprob"] == in_loss.step["old_logprob"] == 0
    assert penalized.step["old_logprob"] == pytest.approx(forward_seconds(penalized.run))
    assert penalized.step["reference"] == pytest.approx(in_loss.step["reference"])


def test_what_a_method_samples_in_place_of_dropped_groups_is_not_trained_on() -> None:
    """A measured step of DLER that drew three times."""
    config = planned("method.name=dler").run.config
    line = {"num_rollouts": 3 * 512, "mean_response_tokens": 900.0, "num_accepted": 300}
    work = measured_workload(config, line | {"mean_accepted_tokens": 700.0})
    assert len(work.lengths) == 3 * 512 and len(work.trained) == 512
    assert sum(work.trained) / 512 == pytest.approx(sum(work.lengths) / (3 * 512), rel=0.01)


def test_fixed_data_sample_nothing() -> None:
    plan = planned("method.name=off_policy_sft", "data.responses=file.parquet")
    work, step = plan.run.workload, plan.step
    assert work.lengths == () and len(work.trained) == 512
    assert max(work.trained) < plan.run.config.rollout.max_response_tokens
    assert step["rollout"] == step["verify"] == step["old_logprob"] == step["reference"] == 0
    assert step["total"] == pytest.approx(step["train"] + step["sync"])
    assert plan.bottleneck.startswith("train")
    assert "nothing is sampled" in show_plan(plan)


def test_notes_say_what_is_not_counted() -> None:
    for words, times in ((["method.name=dler"], 8), ([GRPO, "method.max_refills=3"], 3)):
        (note,) = planned(*words).notes
        assert f"draws problems again, up to {times} times a step" in note
    assert planned(GRPO).notes == []


@pytest.mark.parametrize("path", HERE, ids=lambda path: path.stem)
def test_the_preset_of_a_method_fits_on_a_node(path: Path) -> None:
    for long in ({}, {"mean_tokens": 10_000.0, "acceptance": 0.3}):
        run = make_planned_run(load_config(path), load_hardware("h100"), 8, **long)
        assert planned_run(run).is_safe


def test_the_disk_of_a_plan_holds_the_responses_of_evaluations_too() -> None:
    """100 steps of 256 responses, 3 evaluations of 800, each of 5 bytes a token."""
    words = ["run.steps=100", "run.eval_every=50", "data.prompts_per_step=32"]
    words += ["rollout.group_size=8", "rollout.max_response_tokens=8000", "eval.data=e"]
    words += ["eval.num_problems=400", "eval.samples_per_problem=2"]
    plan = planned(*words)
    rollouts, held_out = 5 * 100 * 256 * 8000, 5 * 3 * 800 * 8000
    disk = plan.as_json()["disk"]
    assert (disk["rollouts"], disk["held_out"]) == (rollouts, held_out)
    assert f"and {(rollouts + held_out) / 1e9:.1f} GB of responses if all" in show_plan(plan)
    assert f"and {rollouts / 1e9:.1f} GB" not in show_plan(plan)
