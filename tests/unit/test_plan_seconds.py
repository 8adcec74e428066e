"""Seconds by formula, against numbers worked out by hand and closed forms."""

from dataclasses import replace

import pytest
from plan_cases import MIXTURE, SMALL, make_run

from megatron_opsft.commands.plan.assumptions import PHASES, Workload, load_hardware
from megatron_opsft.commands.plan.estimate import estimate_step
from megatron_opsft.commands.plan.job import PlannedRun
from megatron_opsft.commands.plan.passes import pass_seconds, pipeline_seconds, ring_seconds
from megatron_opsft.commands.plan.seconds import decode_seconds, step_seconds, sync_seconds
from megatron_opsft.models.architectures.shape import forward_flops

# Round figures: one operation, byte and second, and nothing but them.
PLAIN = load_hardware("h100").model_copy(
    update={
        "peak_flops": 1e15,
        "memory_bandwidth": 1e12,
        "link_bandwidth": 1e11,
        "network_bandwidth": 1e10,
        **dict.fromkeys(["token_seconds", "microbatch_seconds", "sync_seconds"], 0.0),
        **{f"{phase}_factor": 1.0 for phase in PHASES},
    }
)
WHOLE = 2 * 1_777_088_000
WEIGHTS = ((1536 * 128 * 28 + 3 * 1536 * 8960) * 28 + 1536 * 151936) * 2


def plain(world_size: int, *overrides: str, shape: str = SMALL) -> PlannedRun:
    return replace(make_run(shape, world_size, *overrides), hardware=PLAIN)


def passes(
    recompute: str = "none", tp: int = 1, pp: int = 1, stage_ranks: int = 1
) -> tuple[float, float]:
    """Of 1,000 tokens, 900 of them with a loss, through all layers."""
    layout = (f"train.recompute={recompute}", f"parallel.tp={tp}", f"parallel.pp={pp}")
    (whole,) = plain(1).stages
    return pass_seconds(plain(stage_ranks * pp, *layout), whole, [1000], 900)


def test_a_pass_is_its_products_at_peak() -> None:
    # q, k, v, output: 1536 x 128 x (12 + 2 + 2 + 12); gate, up, down: 3 x 1536 x 8960.
    products = 1000 * (1536 * 128 * 28 + 3 * 1536 * 8960) * 28
    attention = 1000 * 1000 * 12 * 128 * 28
    head = 900 * 1536 * 151936
    forward, backward = passes()
    assert forward == pytest.approx(2 * (products + attention + head) / 1e15)
    assert backward == pytest.approx(2 * forward)
    assert passes("full")[1] - backward == pytest.approx(2 * (products + attention) / 1e15)
    again = 2 * 1000 * 3 * 1536 * 8960 * 28 / 1e15
    assert passes("selective")[1] - backward == pytest.approx(again)


def test_tensor_parallel_ranks_exchange_hidden_states_twice_a_layer() -> None:
    forward, backward = passes()
    hidden = 1000 * 1536 * 2
    exchange = 28 * 2 * 2 * (3 / 4) * hidden / 1e11
    assert passes(tp=4)[0] == pytest.approx(forward / 4 + exchange)
    assert passes(tp=4)[1] == pytest.approx(backward / 4 + exchange)
    # Where a stage fills a node of eight the pipeline hands on over the network.
    for ranks, bandwidth in ((4, 1e11), (8, 1e10)):
        handed_on = passes(tp=4, pp=2, stage_ranks=ranks)[0] - passes(tp=4)[0]
        assert handed_on == pytest.approx(hidden / bandwidth)


@pytest.mark.parametrize(("pp", "vpp"), [(1, None), (4, None), (4, 7)])
def test_equal_stages_fill_and_drain_the_pipeline(pp: int, vpp: int | None) -> None:
    """(m + (p - 1) / v) x one micro-batch (Narayanan et al., 2021)."""
    run = plain(pp, f"parallel.pp={pp}", f"parallel.vpp={vpp or 'null'}")
    expected = 3 * (8 + (pp - 1) / (vpp or 1))
    assert pipeline_seconds(run, [8 * 3.0] * pp, 8) == pytest.approx(expected)


@pytest.mark.parametrize("overlap", [True, False])
def test_training_is_passes_exchange_and_update(overlap: bool) -> None:
    # Four sequences of 500 tokens in a micro-batch; 32 accepted responses a rank.
    lengths = (400,) * 512
    settings = ("train.max_tokens_per_microbatch=2000", f"parallel.overlap_grad_reduce={overlap}")
    work = Workload(lengths=lengths, trained=lengths, prompt_tokens=100)
    run = replace(make_run(SMALL, 16, *settings), workload=work)
    (stage,), hardware = run.stages, run.hardware
    flops = 3 * forward_flops(run.shape, [500] * 32, 400 * 32)
    passes = flops / hardware.peak_flops + 8 * hardware.microbatch_seconds
    reduced = ring_seconds(run, stage.gradient_bytes, 16, 16)
    if overlap:  # nearly all of the reduction is behind the last backward pass
        last = (2 * flops / 3 / hardware.peak_flops + 4 * hardware.microbatch_seconds) / 8
        reduced = max(0.0, reduced - last)
    step, factor, host = estimate_step(run), hardware.train_factor, 15e-6 * 512
    verify = 32 * hardware.verify_seconds / hardware.cpu_cores
    assert step["verify"] == pytest.approx(verify)
    moved = 30 * stage.updated_parameters + 16 * stage.num_parameters
    assert step["update"] == pytest.approx(factor * moved / hardware.memory_bandwidth)
    assert step["exchange"] == pytest.approx(factor * reduced)
    expected = factor * passes + step["exchange"] + step["update"] + host
    assert step["train"] == pytest.approx(expected)
    assert step["bubble"] == pytest.approx(0.0)


def test_a_decoding_step_reads_weights_and_cache() -> None:
    run = plain(1)
    kv_bytes = 2 * 28 * 2 * 128 * 2
    assert step_seconds(run, 8, 5000) == pytest.approx((WEIGHTS + 5000 * kv_bytes) / 1e12)
    # So many sequences that the products take longer than the reading.
    assert step_seconds(run, 4000, 0) == pytest.approx(4000 * WEIGHTS / 1e15)
    # Four ranks: a quarter of the weights, but each key/value head on two of them, and exchanges.
    four = plain(4, "rollout.tp=4")
    read = (WEIGHTS / 4 + 5000 * kv_bytes / 2) / 1e12
    assert step_seconds(four, 8, 5000) == pytest.approx(read + 2 * 28 * 6e-6)


def test_a_mixture_reads_the_experts_that_its_batch_meets() -> None:
    run = plain(8, shape=MIXTURE)
    expert = 3 * 2048 * 768 * 48 * 2
    shared = (2048 * 128 * 72 + 2048 * 128) * 48 * 2 + 2048 * 151936 * 2
    assert step_seconds(run, 1, 0) == pytest.approx((shared + 8 * expert) / 1e12)
    assert step_seconds(run, 200, 0) == pytest.approx((shared + 128 * expert) / 1e12, rel=1e-4)


def test_a_step_reads_and_writes_the_states_of_gated_delta_nets() -> None:
    """However long the sequences are, beside the keys and values of 8 layers of 32."""
    run, states = plain(1, shape="Qwen3.5-9B"), 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    attention = 4096 * 256 * (3 * 16 + 2 * 4)
    delta_net = 4096 * (8192 + 4096 + 2 * 32 + 4096) + 4 * 8192
    weights = 8 * attention + 24 * delta_net + 32 * 3 * 4096 * 12288 + 4096 * 248_320
    read = 2 * weights + 2 * 8 * states + 5000 * 8 * 2 * 4 * 256 * 2
    assert step_seconds(run, 8, 5000) == pytest.approx(read / 1e12)
    two = plain(2, "rollout.tp=2", shape="Qwen3.5-9B")
    assert step_seconds(two, 8, 5000) == pytest.approx(read / 2 / 1e12 + 2 * 32 * 6e-6)


def test_an_engine_decodes_token_by_token() -> None:
    run = plain(1)
    lengths, prompt, expected = (2, 5, 9), 100, 0.0
    for token in range(9):
        alive = [n for n in lengths if n > token]
        expected += step_seconds(run, len(alive), len(alive) * (prompt + token + 0.5))
    assert decode_seconds(run, lengths, prompt, 4) == (pytest.approx(expected), 9)
    # With equal lengths in two slots: three rounds, refilled or batch by batch.
    for engine in ("vllm", "hf"):
        run = plain(1, f"rollout.engine={engine}")
        once, _ = decode_seconds(run, [50] * 2, prompt, 2)
        seconds, steps = decode_seconds(run, [50] * 6, prompt, 2)
        assert (seconds, steps) == (pytest.approx(3 * once, rel=1e-6), 150)


def test_a_weight_sync_gathers_and_takes_the_slower_of_both_links() -> None:
    assert sync_seconds(plain(1)) == 0.0
    # Every rank holds the whole model: what it did not update is gathered.
    assert sync_seconds(plain(8)) == pytest.approx(7 / 8 * WHOLE / 1e11)
    halves = ("parallel.tp=2", "parallel.sequence_parallel=true")
    gathered = 3 / 4 * WHOLE / 2 / 1e11
    assert sync_seconds(plain(8, *halves)) == pytest.approx(gathered + WHOLE / 2 / 1e11, rel=1e-3)
    # An engine of two ranks wants half as much of each.
    two = sync_seconds(plain(8, *halves, "rollout.tp=2"))
    assert two == pytest.approx(gathered + WHOLE / 4 / 1e11, rel=1e-2)
    stages = plain(64, "parallel.pp=4")  # on nodes of their own
    gathered = 15 / 16 * max(stage.weight_bytes for stage in stages.stages) / 1e10
    received = 3 / 4 * WHOLE * 3 / 4 / 1e10
    assert sync_seconds(stages) == pytest.approx(gathered + received)
