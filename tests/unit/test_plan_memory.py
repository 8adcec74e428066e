"""Bytes by formula, and whether they fit; `tests/gloo/test_plan_against_runs` has real steps."""

import pytest
from forked_cli import ROOT
from plan_cases import LARGE, MIXTURE, SMALL, make_run, planned

from megatron_opsft.commands.plan.estimate import Plan
from megatron_opsft.commands.plan.job import check_planned_run
from megatron_opsft.commands.plan.memory import (
    GRAPH_BYTES,
    engine_elements,
    kv_bytes_per_token,
    kv_cache_bytes,
    max_engine_tokens,
    reference_bytes,
)
from megatron_opsft.commands.plan.show import verdict_line
from megatron_opsft.errors import UserError


def terms(*overrides: str, gpu: str = "h100") -> dict[str, float]:
    """Of the first stage, on 8 ranks."""
    return planned(make_run(SMALL, 8, *overrides, gpu=gpu)).memory[0].terms


# Model, ranks, tp, pp, vpp; then the parameters of its published weights.
REAL = [
    ("DeepSeek-R1-Distill-Qwen-7B", 32, 4, 1, None, 7_615_616_512),
    (LARGE, 512, 8, 4, 2, 72_706_203_648),
    (MIXTURE, 64, 4, 2, None, 30_532_122_624),
]


@pytest.mark.parametrize(("model", "world_size", "tp", "pp", "vpp", "published"), REAL)
def test_parameters_are_those_of_the_published_weights(
    model: str, world_size: int, tp: int, pp: int, vpp: int | None, published: int
) -> None:
    """On all ranks together: beside them padding and what tensor-parallel ranks share."""
    layout = (f"parallel.tp={tp}", f"parallel.pp={pp}", f"parallel.vpp={vpp or 'null'}")
    run = make_run(model, world_size, *layout)
    assert run.num_parameters == published
    assert 1 <= tp * sum(stage.num_parameters for stage in run.stages) / published < 1.01
    assert (
        1 <= run.num_copies * run.stages[0].updated_parameters / run.stages[0].num_parameters < 1.01
    )


def test_the_shipped_example_of_1_5_b_on_a_node() -> None:
    """As examples/configs/r1_distill_1p5b_paper.yaml has it."""
    (rank,) = planned(make_run(SMALL, 8)).memory
    of = rank.terms
    held = [of[name] for name in ("weights", "gradients", "optimizer")]
    assert [round(part / 1e9, 1) for part in (*held, of["activations"])] == [3.6, 7.1, 2.7, 33.6]
    always = sum(held) + 3e9
    passes = of["activations"] + max(of["backward_pass"], of["loss"])
    assert rank.phases["rollout"] == pytest.approx(always + 0.5 * 84.9e9)
    assert rank.phases["train"] == pytest.approx(always + passes + 1.5e9)
    assert rank.phases["sync"] == pytest.approx(always + 2 * 2**28 + of["engine_weights"] + 1.5e9)


def test_recomputation_and_sequence_parallelism_save_activations() -> None:
    def kept(*overrides: str) -> float:
        return terms(*overrides)["activations"]

    none, selective, full = (
        kept(f"train.recompute={how}") for how in ("none", "selective", "full")
    )
    assert full == 28 * 16384 * 1536 * 2
    # Full: only the input of every layer. Selective: without fc1's output, activation and norm.
    assert none - selective == pytest.approx(28 * 16384 * (2 * (3 * 8960 + 1536) + 4))
    tp2 = kept("parallel.tp=2")
    assert kept("parallel.tp=2", "parallel.sequence_parallel=true") < tp2 < none


def test_the_engine_sets_aside_its_largest_batch_of_prompts() -> None:
    """One layer's feed-forward part of it; vLLM's batches are smaller on an A100."""
    token = 2 * (3 * 8960 + 4 * 1536)
    longer = "eval.max_response_tokens=30000"  # comes in parts
    assert terms(longer)["engine_prefill"] == 16384 * token
    assert terms(longer, gpu="a100")["engine_prefill"] == 8192 * token
    few = ("rollout.batch_size=1", "rollout.max_response_tokens=3000")
    assert terms(*few)["engine_prefill"] == 4024 * token
    assert terms("rollout.kv_cache_bytes=1000000000")["kv_cache"] == 1e9


def test_a_sleeping_engine_keeps_its_graphs_on_the_gpu_unless_it_sleeps_deeply() -> None:
    """By what the phases need: all while the trainer trains, or less by the assumed graphs."""
    plain, deep = (
        planned(make_run(SMALL, 8, f"rollout.deep_sleep={deep}")).worst.phases
        for deep in ("false", "true")
    )
    assert plain["train"] - deep["train"] == GRAPH_BYTES
    assert plain["rollout"] == deep["rollout"] and plain["sync"] == deep["sync"]


def test_a_reference_stays_on_the_gpu_where_it_takes_no_more_than_a_tenth_of_what_is_free() -> None:
    """Free of weights, gradients, optimizer, the engine's memory and what the system reserves."""
    places = []
    for percent in range(5, 96):
        share = f"rollout.gpu_memory_fraction={percent / 100}"
        run = make_run(SMALL, 8, "method.name=grpo", share)
        of, stage = planned(run).memory[0].terms, run.stages[0]
        held = sum(of[name] for name in ("weights", "gradients", "optimizer", "kv_cache"))
        held += sum(of[name] for name in ("engine_weights", "engine_graphs", "engine_prefill"))
        free = run.hardware.memory_bytes - run.hardware.reserved_bytes - held
        on_gpu = stage.weight_bytes <= free / 10
        expected = (stage.weight_bytes, 0) if on_gpu else (0, stage.weight_bytes)
        assert reference_bytes(run, stage) == expected
        places.append(on_gpu)
    assert places == sorted(places, reverse=True) and len({*places}) == 2
    sft = make_run(SMALL, 8)
    assert reference_bytes(sft, sft.stages[0]) == (0, 0)


def test_ranks_beyond_the_heads_of_keys_and_values_hold_a_whole_one_each() -> None:
    """Two heads in bfloat16, of 128 numbers, in 28 layers."""
    whole = 2 * 28 * 2 * 128 * 2
    for tp, share in ((1, 1.0), (2, 0.5), (4, 0.5)):
        assert kv_bytes_per_token(make_run(SMALL, 8, f"rollout.tp={tp}")) == share * whole


def test_an_engine_holds_its_share_of_the_weights_and_one_of_transformers_all() -> None:
    assert engine_elements(make_run(SMALL, 8, "rollout.engine=hf")) == 1_777_088_000
    whole, half = (engine_elements(make_run(SMALL, 8, f"rollout.tp={tp}")) for tp in (1, 2))
    assert whole == 1_777_088_000
    assert half == pytest.approx(whole / 2, rel=1e-3)


def test_vllm_on_a_cpu_has_room_for_a_full_batch_or_a_quarter_of_the_memory() -> None:
    """Of sequences of the longest length, and one more."""
    few, many = (make_run(SMALL, 1, f"rollout.batch_size={size}", gpu="cpu") for size in (2, 512))
    longest = max_engine_tokens(few.config)
    assert kv_cache_bytes(few) == 3 * longest * 28 * 2 * 2 * 128 * 2
    assert kv_cache_bytes(many) == many.hardware.memory_bytes / 4


def test_a_cache_of_a_hybrid_model_holds_states_for_each_sequence() -> None:
    """Their bytes do not grow with a sequence."""
    few = make_run("Qwen3.5-0.8B", 1, "rollout.batch_size=2", gpu="cpu")
    longest = max_engine_tokens(few.config)
    state = 18 * (16 * 128 * 128 * 4 + 3 * 6144 * 2)
    assert kv_cache_bytes(few) == 3 * (longest * 12_288 + state)
    hf = make_run("Qwen3.5-0.8B", 1, "rollout.batch_size=2", "rollout.engine=hf", gpu="cpu")
    assert kv_cache_bytes(hf) == 2 * (1.25 * longest * 12_288 + state)
    on_gpu = planned(make_run("Qwen3.5-0.8B", 8))
    assert on_gpu.kv_tokens == int((kv_cache_bytes(on_gpu.run) - state) / 12_288)


def test_host_memory_of_a_checkpoint() -> None:
    """14 bytes of every parameter that a rank updates, on each rank of a node."""
    assert planned(make_run(SMALL, 8)).checkpoint["saved_bytes"] == 14 * 1_777_088_000
    half = planned(make_run(SMALL, 16, "parallel.pp=2"))
    largest = max(rank.stage.num_parameters for rank in half.memory)
    assert half.checkpoint["saved_bytes"] == 14 * largest
    assert largest < 0.51 * 1_777_088_000


def test_host_memory_in_the_docs_is_the_plan_s() -> None:
    """What the ranks of a node pin, for 1.5B on one GPU and on eight, and for 7B on eight."""
    small = [planned(make_run(SMALL, ranks, "method.name=grpo")) for ranks in (1, 8)]
    node = planned(make_run("DeepSeek-R1-Distill-Qwen-7B", 8, "method.name=grpo", "parallel.tp=4"))
    saved = [f"{plan.checkpoint['saved_bytes'] / 1e9:.1f} GB" for plan in (*small, node)]
    frozen = [f"{plan.reference_host_bytes / 1e9:.1f} GB" for plan in (small[0], node)]
    assert saved[0] == saved[1]
    text = " ".join((ROOT / "docs/cluster.md").read_text(encoding="utf-8").split())
    assert (
        f"{saved[0]} for R1-Distill-Qwen-1.5B, on one GPU or on a node of 8, and {saved[2]} on a "
        "node of 8 for 7B."
    ) in text
    assert f"{frozen[0]} for 1.5B on one GPU, {frozen[1]} for 7B on a node of 8." in text
    for plan in (*small, node):
        pinned = plan.as_json()["pinned_bytes"]
        assert pinned == plan.checkpoint["saved_bytes"] + plan.reference_host_bytes
    assert planned(make_run(SMALL, 1, "method.name=grpo", gpu="cpu")).pinned_bytes == 0


def test_what_does_not_fit_says_where_and_what_to_do() -> None:
    plan = planned(make_run(LARGE, 8, "parallel.tp=8", "parallel.sequence_parallel=true"))
    assert plan.worst.margin < 0
    assert any("fewer than one sequence" in line for line in plan.problems)
    assert verdict_line(plan).startswith("DOES NOT FIT. rollout: stage 0 needs ")
    assert verdict_line(plan).endswith(
        " (`megatron-opsft plan CONFIG --search` looks for a layout)"
    )


def test_what_fits_says_what_it_costs() -> None:
    plan = planned(make_run(SMALL, 8))
    assert plan.price == pytest.approx(3.0 * plan.device_hours)
    rank = plan.worst
    spare = f"{rank.margin / 1e9:.1f} GB ({100 * rank.margin / rank.limit:.0f}%)"
    takes = f"100 steps take {60 * plan.hours:.1f} minutes, {plan.device_hours:,.1f} device-hours"
    costs = f"FITS, with {spare} to spare. {takes}, ${plan.price:,.0f}. Bottleneck: "
    assert verdict_line(plan).startswith(costs)
    longer = Plan(run=plan.run, num_steps=1000)
    assert f"1000 steps take {longer.hours:.1f} hours, " in verdict_line(longer)
    whole, train = (plan.utilization(plan.step[name]) for name in ("total", "train"))
    assert 0 < whole < train < 0.55
    nothing = planned(make_run(SMALL, 8, "parallel.pp=2", acceptance=0.0))
    assert nothing.step["train"] == nothing.utilization(nothing.step["total"]) == 0
    assert nothing.as_json()["num_microbatches"] == 0


@pytest.mark.parametrize(
    ("overrides", "world_size", "message"),
    [
        (["parallel.pp=3"], 9, r"parallel\.pp=3 x vpp=1 does not divide .* 28 layers"),
        (["parallel.tp=2", "parallel.pp=2"], 6, "world size 6 is not a multiple"),
        (["rollout.tp=2"], 7, r"rollout\.tp=2 does not divide the world size 7"),
        (["rollout.tp=8"], 8, r"rollout\.tp=8 does not divide num_attention_heads=12"),
        (["rollout.engine=hf", "rollout.tp=2"], 8, r"rollout\.tp=2 works only with vLLM"),
        (["train.cross_entropy=te", "model.dtype=float32"], 8, "TransformerEngine needs"),
        (["run.device=cpu"], 8, "give another --gpu than h100"),
    ],
)
def test_what_the_trainer_would_refuse_is_refused(
    overrides: list[str], world_size: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_planned_run(make_run(SMALL, world_size, *overrides))


def test_waste_is_noted() -> None:
    (note,) = planned(make_run(SMALL, 128, "parallel.tp=2", "rollout.engine=hf")).notes
    assert "set rollout.engine=vllm" in note
