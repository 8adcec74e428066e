"""Logits of a model with gated delta nets, in one pack, against transformers' of each sequence by
itself; and the faults that such a model invites are found.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hf_reference import evaluated_hf_model
from jobs import Case, build, forward_logits
from tiny_models import SHAPES
from torch import Tensor
from world import World

from megatron_opsft.models.architectures.template import ShardKind
from megatron_opsft.models.weights import slicing
from megatron_opsft.records import MicroBatch
from megatron_opsft.trainer.model import delta_net, delta_spec
from megatron_opsft.trainer.model.attention import RMSNorm

MODEL = "qwen3_5"
LIMIT = 1e-4  # largest absolute difference, float32; the logits themselves reach about 4
LENGTHS = [5, 130, 1, 64]
TOKENS = torch.arange(sum(LENGTHS)) * 37 % SHAPES[MODEL].vocab_size


def one_pack() -> MicroBatch:
    nothing = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(
        tokens_T=TOKENS,
        positions_T=torch.cat([torch.arange(length) for length in LENGTHS]),
        cu_seqlens=torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32),
        max_seqlen=max(LENGTHS),
        loss_indices_R=nothing,
        labels_R=nothing,
        weights_R=nothing.float(),
        response_lengths=(),
    )


def other_shape(**changes: Any) -> AbstractContextManager[Any]:
    return patch.dict(SHAPES, {MODEL: replace(SHAPES[MODEL], **changes)})


def on_one_sequence(function: str) -> AbstractContextManager[Any]:
    """A part of the delta net that takes the pack for one sequence."""
    true: Callable[..., Tensor] = getattr(delta_net, function)

    def joined(*inputs: Any) -> Tensor:
        return true(*inputs[:-1], [sum(inputs[-1])])

    return patch.object(delta_net, function, joined)


def gates_behind_their_queries() -> AbstractContextManager[Any]:
    """Rows of a query group in Hugging Face's order instead of Megatron's."""
    true = slicing._strips_of_group

    def in_order(rule: Any, group: int) -> Any:
        return true(replace(rule, kind=ShardKind.QKV), group)

    return patch.object(slicing, "_strips_of_group", in_order)


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "gates behind their queries": gates_behind_their_queries,
    "norms without 1 +": partial(
        patch.object,
        RMSNorm,
        "forward",
        lambda norm, x: F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps),
    ),
    "rotary positions on all dimensions": partial(other_shape, rotary_dim=None),
    "attention without its gate's sigmoid": partial(
        patch.object, torch, "sigmoid", lambda gate: torch.ones_like(gate)
    ),
    "a delta net's norm with 1 +": partial(
        patch.object, delta_spec, "not_zero_centered", lambda config: config
    ),
    "a state that passes a border": partial(on_one_sequence, "gated_delta_rule"),
    "a convolution across a border": partial(on_one_sequence, "causal_convolution"),
}


def logits_with(fault: str, case: Case) -> Any:
    with FAULTS[fault]():
        built = build(case)
        found = forward_logits(built.trainer.chunks, [one_pack()], SHAPES[MODEL].vocab_size)
    return found if built.layout.is_loss_rank else []


@torch.no_grad()
def differences(world: World, fault: str, case: Case) -> list[float]:
    """For each sequence the largest difference of a logit."""
    ((tokens, _, values),) = world.run(logits_with, case.world_size, fault, case)[-case.tp]
    assert tokens == TOKENS.tolist()
    found = torch.from_numpy(values).split(LENGTHS)
    model = evaluated_hf_model(MODEL)
    expected = [model(input_ids=ids[None]).logits[0] for ids in TOKENS.split(LENGTHS)]
    return [float((f - e).abs().max()) for f, e in zip(found, expected, strict=True)]


@pytest.mark.parametrize(
    "case", [Case(model=MODEL), Case(model=MODEL, tp=2, pp=2, sequence_parallel=True)], ids=str
)
def test_logits_match_hf(world: World, case: Case) -> None:
    assert max(differences(world, "none", case)) < LIMIT


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "none"])
def test_a_fault_changes_the_logits(world: World, fault: str) -> None:
    found = differences(world, fault, Case(model=MODEL))
    assert max(found) > 100 * LIMIT
    if "border" in fault:
        assert found[0] < LIMIT  # nothing is before the first sequence
        assert min(found[1:]) > 10 * LIMIT
