"""Layouts that a model cannot be cut into are refused before any process group is made."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
from tiny_models import SHAPES

from megatron_opsft.config import ParallelConfig
from megatron_opsft.config.load import load_config
from megatron_opsft.errors import UserError
from megatron_opsft.models.architectures.shape import ModelShape
from megatron_opsft.models.architectures.sharding import (
    check_layout,
    check_rollout_tp,
    stage_layers,
)
from megatron_opsft.run.start.checked_run import (
    check_offload,
    check_routing_replay,
    check_world,
)


@pytest.mark.parametrize(
    ("model", "parallel", "message"),
    [
        ("qwen2", {"tp": 3}, r"parallel\.tp=3 .* 4 attention heads"),
        ("qwen2", {"tp": 4}, r"parallel\.tp=4 .* 2 key/value heads"),
        ("qwen2", {"pp": 3}, r"parallel\.pp=3 x vpp=1 .* 4 layers"),
        ("qwen2", {"vpp": 2}, r"parallel\.vpp=2 needs parallel\.pp"),
        ("qwen3_moe", {"tp": 2}, r"parallel\.tp=2 .*needs parallel\.sequence_parallel=true"),
        ("qwen3_moe", {"ep": 3}, r"parallel\.ep=3 .* 8 experts; use a divisor of 8"),
        ("qwen3_moe", {"ep": 2, "etp": 3}, r"parallel\.etp=3 .* 40 feed-forward size"),
        ("qwen3_moe", {"etp": 2}, r"parallel\.etp=2 other than parallel\.tp=1 needs parallel\.ep"),
        ("qwen2", {"ep": 2}, r"parallel\.ep=2: the model has no experts; leave it out"),
        ("qwen2", {"etp": 1}, r"parallel\.etp=1: the model has no experts; leave it out"),
        (
            "qwen3_5",
            {"cp": 2},
            r"parallel\.cp=2: a gated delta net .*; set parallel\.cp=1 and raise",
        ),
        ("qwen3_5", {"pp": 2, "vpp": 3}, r"parallel\.pp=2 x vpp=3 .* 8 layers"),
    ],
)
def test_a_layout_that_does_not_fit_is_named(
    model: str, parallel: dict[str, int], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_layout(SHAPES[model], ParallelConfig(**parallel))


def test_ranks_divide_a_shared_expert() -> None:
    shape = SHAPES["qwen3_5_moe"]
    assert shape.moe is not None
    odd = replace(shape, moe=replace(shape.moe, shared_ffn_size=57))
    tp2 = ParallelConfig(tp=2, sequence_parallel=True)
    check_layout(shape, tp2)
    with pytest.raises(UserError, match=r"parallel\.tp=2 .* 57 feed-forward size of the shared"):
        check_layout(odd, tp2)
    message = r"rollout\.tp=2 does not divide shared_expert_intermediate_size=57"
    with pytest.raises(UserError, match=message):
        check_rollout_tp(odd, 2)


@pytest.mark.parametrize(
    ("key_heads", "value_heads", "message"),
    [(2, 8, "4 .* 2 gated delta net key heads"), (1, 6, "4 .* 1 gated delta net key heads")],
)
def test_ranks_divide_the_heads_of_gated_delta_nets(
    key_heads: int, value_heads: int, message: str
) -> None:
    """And those of an engine, where the message names the field."""
    shape = replace(SHAPES["qwen3_5"], num_heads=8, num_kv_heads=4)
    assert shape.delta is not None
    changed = replace(shape.delta, num_key_heads=key_heads, num_value_heads=value_heads)
    shape = replace(shape, delta=changed)
    with pytest.raises(UserError, match=rf"parallel\.tp={message}"):
        check_layout(shape, ParallelConfig(tp=4))
    field = f"rollout.tp=4 does not divide linear_num_key_heads={key_heads}; choose a divisor"
    with pytest.raises(UserError, match=field):
        check_rollout_tp(shape, 4)
    check_layout(SHAPES["qwen3_5"], ParallelConfig(tp=2, pp=2, vpp=2))
    check_rollout_tp(SHAPES["qwen3_5"], 2)
    odd = replace(shape, delta=replace(changed, num_key_heads=4, num_value_heads=6))
    with pytest.raises(UserError, match="parallel.tp=4 .* 6 gated delta net value heads"):
        check_layout(odd, ParallelConfig(tp=4))
    with pytest.raises(UserError, match="rollout.tp=4 .* linear_num_value_heads=6"):
        check_rollout_tp(odd, 4)


def test_a_stage_has_its_own_mixture_of_layers() -> None:
    shape = SHAPES["qwen3_5"]
    parallel = ParallelConfig(pp=2, vpp=2)
    assert [stage_layers(8, parallel, stage) for stage in (0, 1)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    stages = [shape.with_layers(stage_layers(8, parallel, stage)) for stage in (0, 1)]
    assert [stage.num_attention_layers for stage in stages] == [0, 2]
    assert [stage.num_delta_layers for stage in stages] == [4, 2]
    assert stage_layers(8, ParallelConfig(pp=4), 2) == [4, 5]


@pytest.mark.parametrize(
    ("model", "method", "message"),
    [
        ("qwen2", "on_policy_sft", "the model has no experts; leave it out"),
        ("qwen3_moe", "crst", "method.name=crst trains on fixed data"),
        ("qwen3_moe", "on_policy_sft", ""),
    ],
)
def test_there_must_be_a_routing_to_replay(model: str, method: str, message: str) -> None:
    keys = ["model.path=x", "data.train=arithmetic", "train.routing_replay=true"]
    config = load_config(None, [*keys, f"method.name={method}"])
    with pytest.raises(UserError, match=message) if message else nullcontext():
        check_routing_replay(SHAPES[model], config)


def test_replayed_choices_of_experts_fit_into_a_byte() -> None:
    config = load_config(
        None, ["model.path=x", "data.train=arithmetic", "train.routing_replay=true"]
    )
    moe = SHAPES["qwen3_moe"].moe
    assert moe is not None

    def with_experts(count: int) -> ModelShape:
        return replace(SHAPES["qwen3_moe"], moe=replace(moe, num_experts=count))

    check_routing_replay(with_experts(256), config)
    with pytest.raises(UserError, match="the model has 257 experts, and choices are kept in one"):
        check_routing_replay(with_experts(257), config)


def test_ranks_must_hold_all_experts() -> None:
    check_world(8, ParallelConfig(ep=4, tp=2))
    check_world(4, ParallelConfig(ep=4, etp=1, tp=2))
    with pytest.raises(UserError, match=r"not a multiple of the 8 ranks .* = 2 x 4 x 1\); lower"):
        check_world(4, ParallelConfig(ep=4, tp=2))


def test_weights_that_a_proof_needs_are_not_given_up() -> None:
    """With the engine's routing the trainer scores last, when the engine is awake."""
    words = ["model.path=x", "data.train=arithmetic"]
    replay, everything = "train.routing_replay=true", "train.offload=all"
    for keys in ([everything], [replay, "train.offload=optimizer"]):
        check_offload(load_config(None, [*words, *keys]))
    check_offload(load_config(None, [*words, replay, everything, "sync.verify=checksum"]))
    message = "train.offload=all: with train.routing_replay=true .* set sync.verify=checksum, or"
    with pytest.raises(UserError, match=message):
        check_offload(load_config(None, [*words, replay, everything]))
