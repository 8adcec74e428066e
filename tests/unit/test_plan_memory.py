"""Bytes by formula, and whether they fit; `tests/gloo/test_plan_against_runs` has real steps."""

from dataclasses import replace

import pytest
from plan_cases import LARGE, SMALL, make_job, planned

from megatron_opsft.errors import UserError
from megatron_opsft.plan.activations import num_in_flight
from megatron_opsft.plan.assumptions import load_hardware
from megatron_opsft.plan.commands import verdict_line
from megatron_opsft.plan.job import check_job


def terms(world_size: int, *overrides: str, gpu: str = "h100") -> dict[str, float]:
    """Of the first stage."""
    return planned(make_job(SMALL, world_size, *overrides, gpu=gpu)).memory[0].terms


def test_the_shipped_example_of_1_5_b_on_a_node() -> None:
    """As examples/configs/r1_distill_1p5b_paper.yaml has it."""
    (rank,) = planned(make_job(SMALL, 8)).memory
    held = [rank.terms[name] for name in ("weights", "gradients", "optimizer")]
    assert [round(part / 1e9, 1) for part in held] == [3.6, 7.1, 2.7]
    assert round(rank.terms["activations"] / 1e9, 1) == 33.6
    always, of = sum(held) + 3e9, rank.terms
    passes = of["activations"] + max(of["backward_pass"], of["loss"])
    assert rank.phases["rollout"] == pytest.approx(always + 0.5 * 84.9e9)
    assert rank.phases["train"] == pytest.approx(always + passes + 1.5e9)
    assert rank.phases["sync"] == pytest.approx(always + 2 * 2**28 + of["engine_weights"])


def test_recomputation_and_sequence_parallelism_save_activations() -> None:
    def kept(*overrides: str) -> float:
        return terms(8, *overrides)["activations"]

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


def test_the_engine_sets_aside_its_largest_batch_of_prompts() -> None:
    """One layer's feed-forward part of it; vLLM's batches are smaller on an A100."""

    def set_aside(gpu: str, *overrides: str) -> float:
        return terms(8, *overrides, gpu=gpu)["engine_prefill"]

    token = 2 * (3 * 8960 + 4 * 1536)
    longer = "eval.max_response_tokens=30000"  # comes in parts
    assert set_aside("h100") == set_aside("h100", longer) == 16384 * token
    assert set_aside("a100", longer) == 8192 * token
    few = ("rollout.batch_size=1", "rollout.max_response_tokens=3000")
    assert set_aside("h100", *few) == 4024 * token
    assert terms(8, "rollout.kv_cache_bytes=1000000000")["kv_cache"] == 1e9


def test_host_memory_of_a_checkpoint() -> None:
    """14 bytes of every parameter that a rank updates, on each rank of a node."""
    whole = planned(make_job(SMALL, 8))
    assert whole.checkpoint["saved_bytes"] == 14 * 1_777_088_000
    assert whole.notes == []
    for layout in (("parallel.tp=2",), ("parallel.pp=2",)):
        half = planned(make_job(SMALL, 16, *layout))
        largest = max(rank.stage.num_parameters for rank in half.memory)
        assert half.checkpoint["saved_bytes"] == 14 * largest
        assert largest < 0.51 * 1_777_088_000
    little = whole.job.hardware.model_copy(update={"host_memory_bytes": 2e9})
    assert planned(replace(whole.job, hardware=little)).notes == [
        "a checkpoint needs 25 GB of a node's host memory, of which there are 16; use more nodes"
    ]


def test_what_does_not_fit_says_where_and_what_to_do() -> None:
    plan = planned(make_job(LARGE, 8, "parallel.tp=8", "parallel.sequence_parallel=true"))
    assert plan.worst.margin < 0
    assert any("fewer than one sequence" in line for line in plan.problems)
    assert verdict_line(plan).startswith("DOES NOT FIT. rollout: stage 0 needs ")


def test_what_fits_says_what_it_costs() -> None:
    plan = planned(make_job(SMALL, 8))
    total = plan.step["total"]
    assert plan.price == pytest.approx(3.0 * plan.device_hours)
    assert 0 < plan.utilization(total) < plan.utilization(plan.step["train"]) < 0.55
    nothing = planned(make_job(SMALL, 8, "parallel.pp=2", acceptance=0.0))
    assert nothing.step["train"] == nothing.utilization(nothing.step["total"]) == 0
    assert nothing.as_json()["num_microbatches"] == 0


@pytest.mark.parametrize(
    ("overrides", "world_size", "message"),
    [
        (["parallel.pp=3"], 9, r"parallel\.pp=3 x vpp=1 does not divide .* 28 layers"),
        (["parallel.tp=2", "parallel.pp=2"], 6, "world size 6 is not a multiple"),
        (["rollout.tp=2"], 7, r"rollout\.tp=2 does not divide the world size 7"),
        (["rollout.engine=hf", "rollout.tp=2"], 8, r"rollout\.tp=2 works only with vLLM"),
        (["train.cross_entropy=te", "model.dtype=float32"], 8, "TransformerEngine needs"),
        (["run.device=cpu"], 8, "give --gpu cpu"),
    ],
)
def test_what_the_trainer_would_refuse_is_refused(
    overrides: list[str], world_size: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_job(make_job(SMALL, world_size, *overrides))


def test_waste_is_noted() -> None:
    job = make_job(SMALL, 128, "parallel.tp=2")
    assert planned(job).notes == []
    (note,) = planned(make_job(SMALL, 128, "parallel.tp=2", "rollout.engine=hf")).notes
    assert "set rollout.engine=vllm" in note
    single = replace(job, hardware=load_hardware("h100", gpus_per_node=1))
    assert "parallel.tp x parallel.cp = 2 reaches beyond a node of 1" in planned(single).notes[0]
