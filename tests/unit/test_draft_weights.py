"""What a push may and may not change of a draft model; with vLLM: tests/vllm."""

import torch

from megatron_opsft.rollout.vllm.weights import DraftWeights


def models() -> tuple[torch.nn.ModuleDict, torch.nn.ModuleDict]:
    """A draft that shares its embedding with a policy, and the policy."""
    policy = torch.nn.ModuleDict({"embed": torch.nn.Embedding(7, 4), "up": torch.nn.Linear(4, 8)})
    draft = torch.nn.ModuleDict({"embed": policy["embed"], "up": torch.nn.Linear(4, 8)})
    draft.register_buffer("table", torch.arange(5.0))
    return draft, policy


def test_an_embedding_that_pushes_no_longer_reach_is_a_fault() -> None:
    draft, policy = models()
    weights = DraftWeights(draft, policy)
    for parameter in policy.parameters():  # as a push does
        parameter.data.add_(1.0)
    assert weights.fault() == ""
    draft["embed"] = torch.nn.Embedding.from_pretrained(policy["embed"].weight.clone())
    assert "no longer shares embed.weight with the policy" in weights.fault()
