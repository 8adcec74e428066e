"""What a push may and may not change of a draft model; and vLLM's counters."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_opsft.rollout.vllm.draft_weights import DraftWeights
from megatron_opsft.rollout.vllm.engine import VllmEngine


def models() -> tuple[torch.nn.ModuleDict, torch.nn.ModuleDict]:
    """A draft that shares its embedding with a policy, and the policy."""
    policy = torch.nn.ModuleDict({"embed": torch.nn.Embedding(7, 4), "up": torch.nn.Linear(4, 8)})
    draft = torch.nn.ModuleDict({"embed": policy["embed"], "up": torch.nn.Linear(4, 8)})
    draft.register_buffer("table", torch.arange(5.0))
    return draft, policy


def test_a_push_changes_what_is_shared_and_nothing_else() -> None:
    draft, policy = models()
    weights = DraftWeights(draft, policy)
    for parameter in policy.parameters():
        parameter.data.add_(1.0)
    assert weights.fault() == ""


@pytest.mark.parametrize("name", ["up.weight", "up.bias", "table"])
def test_one_other_bit_is_a_fault(name: str) -> None:
    draft, policy = models()
    weights = DraftWeights(draft, policy)
    tensor = {**dict(draft.named_parameters()), **dict(draft.named_buffers())}[name].data
    value = tensor.flatten()[3].clone()
    tensor.view(-1)[3] = torch.nextafter(value, value + 1)
    assert weights.fault() == f"{name} has changed"
    tensor.view(-1)[3] = value
    assert weights.fault() == ""


def test_an_embedding_that_pushes_no_longer_reach_is_a_fault() -> None:
    draft, policy = models()
    weights = DraftWeights(draft, policy)
    draft["embed"] = torch.nn.Embedding.from_pretrained(policy["embed"].weight.clone())
    assert "no longer shares embed.weight with the policy" in weights.fault()


def metric(name: str, value: int) -> Any:
    return SimpleNamespace(name=f"vllm:{name}", value=value)


def test_counters_of_a_name_are_added() -> None:
    """vLLM's counters are the process's, one for each engine in it."""
    metrics = [
        metric("spec_decode_num_drafts", 10),
        metric("spec_decode_num_draft_tokens", 30),
        metric("spec_decode_num_accepted_tokens", 5),
        SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=[3, 2]),
        metric("spec_decode_num_drafts", 4),
    ]
    engine: Any = SimpleNamespace(
        _is_speculative=True,
        share=SimpleNamespace(answers=True),
        _llm=SimpleNamespace(get_metrics=lambda: metrics),
    )
    found = VllmEngine.spec_counts(engine)
    assert found == Counter(drafts=14, draft_tokens=30, accepted=5)
