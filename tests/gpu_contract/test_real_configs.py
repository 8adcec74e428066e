"""The shipped configurations in the real classes of vLLM and Megatron, read back."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_opsft.rollout.engine import SamplingSettings

pytestmark = pytest.mark.gpu_contract
CONFIGS = {p.stem for p in (Path(__file__).parents[2] / "examples/configs").glob("*.yaml")}


def wrong_pairs(told: dict[str, Any]) -> dict[str, Any]:
    """What was read back and is not what it must be."""
    pairs = {key: value for key, value in told.items() if isinstance(value, list)}
    assert len(pairs) > 8
    return {key: value for key, value in pairs.items() if value[0] != value[1]}


def check_engine(told: dict[str, Any], architecture: str = "Qwen2ForCausalLM") -> None:
    """Of vLLM's whole configuration for CUDA."""
    assert wrong_pairs(told) == {}
    assert told["device"] == "cuda" and not told["eager"]
    assert told["worker_cls"] == "vllm.v1.worker.gpu_worker.Worker"
    assert told["architecture"] == architecture
    assert told["load_format"] == "dummy" and told["prefix_caching"]
    assert told["backend"] == "external_launcher"


def test_vllm_takes_every_shipped_configuration(ran: Callable[..., Any]) -> None:
    told = ran("real_configs.py", "vllm")
    assert {case.partition(",")[0] for case in told} == CONFIGS
    for case, found in told.items():
        check_engine(found, "Qwen3MoeForCausalLM" if "qwen3_30b" in case else "Qwen2ForCausalLM")


def test_vllm_takes_a_deterministic_run(ran: Callable[..., Any]) -> None:
    told = ran("real_configs.py", "deterministic")
    assert told["batch_invariant"] == "1"
    check_engine(told)


def test_megatron_takes_every_shipped_configuration(ran: Callable[..., Any]) -> None:
    told = ran("real_configs.py", "megatron")
    assert told.keys() == CONFIGS
    assert {name: wrong_pairs(found) for name, found in told.items()} == dict.fromkeys(told, {})


def test_sampling_parameters_hold_the_settings() -> None:
    from megatron_opsft.rollout.vllm.options import sampling_params

    settings = SamplingSettings(
        temperature=0.6, top_p=0.95, max_response_tokens=3500, end_token_ids=(151643, 7)
    )
    found = sampling_params(settings, 2**62 + 5)
    assert sampling_params(replace(settings, seeded=False), 5).seed is None
    assert (found.temperature, found.top_p, found.max_tokens) == (0.6, 0.95, 3500)
    assert found.seed == 2**62 + 5 and found.ignore_eos and not found.detokenize
    assert found.stop_token_ids == [151643, 7]
    assert found.output_kind.name == "FINAL_ONLY"


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
