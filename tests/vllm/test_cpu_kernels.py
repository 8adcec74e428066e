"""The kernel of vLLM's CPU build that is replaced."""

import pytest

pytestmark = pytest.mark.vllm


def test_every_draft_token_has_its_request_s_top_p() -> None:
    """vLLM's own kernel leaves them unset on a CPU."""
    torch = pytest.importorskip("torch")
    kernels = pytest.importorskip(
        "megatron_opsft.rollout.vllm.cpu_kernels", reason="bash tools/install_vllm_cpu.sh"
    )
    output = torch.full((6,), torch.nan)
    ends = torch.tensor([2, 2, 5, 6], dtype=torch.int32)
    kernels.expand(output, torch.tensor([0.9, 0.5, 0.0, 0.8]), ends, 0, 1)
    assert output.tolist() == pytest.approx([0.9, 0.9, 1.0, 1.0, 1.0, 0.8])
