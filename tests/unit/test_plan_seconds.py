"""Seconds by formula, against numbers worked out by hand."""

import subprocess
import sys
from dataclasses import replace

import pytest
from plan_cases import make_job, make_responses
from real_shapes import REAL_SHAPES

from megatron_opsft.plan.hardware import load_hardware
from megatron_opsft.plan.seconds import (
    decode_step_seconds,
    engine_sizes,
    push_seconds,
    ring_seconds,
    sequence_seconds,
)
from megatron_opsft.plan.step import estimate_step, push_bytes

SMALL = REAL_SHAPES["DeepSeek-R1-Distill-Qwen-1.5B"]
MIXTURE = REAL_SHAPES["Qwen3-30B-A3B"]
# Round figures: one operation, byte and second.
PLAIN = replace(
    load_hardware("h100"),
    peak_flops=1e15,
    memory_bandwidth=1e12,
    link_bandwidth=1e11,
    network_bandwidth=1e10,
    training_fraction=1.0,
    prefill_fraction=1.0,
    decode_fraction=1.0,
    collective_fraction=1.0,
    push_fraction=1.0,
    decode_overhead_seconds=0.0,
    step_overhead_seconds=0.0,
    push_overhead_seconds=0.0,
)


def test_nothing_of_it_needs_megatron() -> None:
    modules = "hardware, seconds, lengths, memory, activations, stages, pipeline, step, estimate"
    code = (
        f"from megatron_opsft.plan import {modules}; import sys; "
        "print([n for n in sys.modules if n.split('.')[0] in ('megatron', 'transformers')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def passes(
    recompute: str = "none", tp: int = 1, pp: int = 1, stage_ranks: int = 1
) -> tuple[float, float]:
    """Of 1,000 tokens, 900 of them with a loss, through all layers."""
    layout = (f"train.recompute={recompute}", f"parallel.tp={tp}", f"parallel.pp={pp}")
    job = replace(make_job(SMALL, stage_ranks * pp, *layout), hardware=PLAIN)
    return sequence_seconds(job, SMALL.num_layers, 1000, 900)


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
    without = passes(tp=4)[0]
    assert passes(tp=4, pp=2, stage_ranks=4)[0] - without == pytest.approx(hidden / 1e11)
    assert passes(tp=4, pp=2, stage_ranks=8)[0] - without == pytest.approx(hidden / 1e10)


def test_a_ring_passes_all_but_its_own_part() -> None:
    assert ring_seconds(1e11, 4, 8, PLAIN) == pytest.approx(0.75)
    assert ring_seconds(1e11, 1, 1, PLAIN) == 0.0


def test_a_decoding_step_reads_weights_and_cache() -> None:
    engine = engine_sizes(SMALL, tp=1, dtype_bytes=2)
    weights = ((1536 * 128 * 28 + 3 * 1536 * 8960) * 28 + 1536 * 151936) * 2
    assert engine.read_bytes == weights
    assert engine.kv_bytes == 2 * 28 * 2 * 128 * 2
    seconds = decode_step_seconds(engine, PLAIN, 8, 5000)
    assert seconds == pytest.approx((weights + 5000 * engine.kv_bytes) / 1e12)
    # So many sequences that the products take longer than the reading.
    assert decode_step_seconds(engine, PLAIN, 4000, 0) == pytest.approx(4000 * weights / 1e15)
    # Four ranks: a quarter of the weights, but each key/value head on two of them.
    quarter = engine_sizes(SMALL, tp=4, dtype_bytes=2)
    assert quarter.read_bytes == weights / 4
    assert quarter.kv_bytes == engine.kv_bytes / 2


def test_a_mixture_reads_the_experts_that_its_batch_meets() -> None:
    engine = engine_sizes(MIXTURE, tp=1, dtype_bytes=2)
    expert = 3 * 2048 * 768 * 48 * 2
    assert engine.expert_bytes == expert
    shared = (2048 * 128 * 72 + 2048 * 128) * 48 * 2 + 2048 * 151936 * 2
    assert engine.read_bytes == shared
    assert decode_step_seconds(engine, PLAIN, 1, 0) == pytest.approx((shared + 8 * expert) / 1e12)
    many = decode_step_seconds(engine, PLAIN, 200, 0)
    assert many == pytest.approx((shared + 128 * expert) / 1e12, rel=1e-4)


def test_a_push_takes_the_slower_of_both_links() -> None:
    assert push_seconds(1e10, PLAIN, across_nodes=0.5) == pytest.approx(0.5)
    assert push_seconds(1e10, PLAIN, across_nodes=0.0) == pytest.approx(0.1)
    assert push_bytes(make_job(SMALL, 1)) == (0.0, 0.0)


def test_what_a_push_moves_shrinks_with_the_engines_tp() -> None:
    layout = ("parallel.tp=2", "parallel.sequence_parallel=true")
    one, _ = push_bytes(make_job(SMALL, 8, *layout))
    two, across = push_bytes(make_job(SMALL, 8, *layout, "rollout.tp=2"))
    assert 1.9 < one / two < 2.01
    assert across == 0.0
    alone, _ = push_bytes(make_job(SMALL, 8))
    assert alone == 0.0  # every rank holds the whole model
    assert push_bytes(make_job(SMALL, 64, "parallel.pp=4"))[1] == 0.75


def test_more_ranks_make_the_phases_shorter() -> None:
    steps = {}
    for world_size in (8, 16):
        job = make_job(SMALL, world_size)
        steps[world_size] = estimate_step(job, make_responses(job))
    assert steps[16].decode < steps[8].decode
    assert steps[16].train < 0.7 * steps[8].train
