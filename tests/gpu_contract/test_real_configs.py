"""The shipped configurations in the real classes of vLLM and Megatron, read back."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

CONFIGS = {p.stem for p in (Path(__file__).parents[2] / "examples/configs").glob("*.yaml")}


@pytest.mark.parametrize("what", ["vllm", "megatron", "deterministic"])
def test_every_shipped_configuration_is_taken(ran: Callable[..., Any], what: str) -> None:
    told = ran("real_configs.py", what)
    assert what == "deterministic" or told.keys() >= CONFIGS
    assert {case: wrong for case, wrong in told.items() if wrong} == {}


def test_packed_sequences_hold_the_micro_batch() -> None:
    from megatron_opsft.model.passes import packed_params

    lengths = torch.tensor([0, 5, 12, 16], dtype=torch.int32)
    for places in (None, torch.arange(3)):  # a rank of a context-parallel group has some places
        batch: Any = SimpleNamespace(cu_seqlens=lengths, max_seqlen=7, response_indices_R=places)
        found = packed_params(batch)
        assert found.qkv_format == "thd"
        assert found.cu_seqlens_q is lengths and found.cu_seqlens_kv is lengths
        # TransformerEngine looks whether they are the same tensors: then there are no gaps.
        padded = (found.cu_seqlens_q_padded, found.cu_seqlens_kv_padded)
        assert all(borders is (None if places is None else lengths) for borders in padded)
        assert (found.max_seqlen_q, found.max_seqlen_kv) == (7, 7)
