"""What GPU runs import leaves vLLM's CPU worker alone, which replaces parts of torch; with the
packages of a GPU run: tests/gpu_contract.
"""

import json
import subprocess
import sys

import pytest
from processes import skip_without_vllm

pytestmark = pytest.mark.vllm

# In a process of its own: what is imported stays.
ASK = """
import importlib, json, sys
import torch
before = [torch.cuda.Stream, torch.accelerator.synchronize, torch.Tensor.pin_memory]
for name in sys.argv[1:]:
    importlib.import_module(name)
    after = [torch.cuda.Stream, torch.accelerator.synchronize, torch.Tensor.pin_memory]
    found = [name for name in sys.modules if name.startswith("vllm.v1.worker.cpu")]
    print(json.dumps([found, [a is b for a, b in zip(after, before)]]))
# The kernel that is replaced there: vLLM's own leaves values that are not int64 unset.
output, ends = torch.full((6,), torch.nan), torch.tensor([2, 2, 5, 6], dtype=torch.int32)
sys.modules[name].expand(output, torch.tensor([0.9, 0.5, 0.0, 0.8]), ends, 0, 1)
print(json.dumps(output.tolist()))
"""


def test_the_engine_imports_nothing_of_the_cpu_worker_which_would_be_seen() -> None:
    skip_without_vllm()
    names = [f"megatron_opsft.rollout.vllm.{name}" for name in ("engine", "cpu")]
    ended = subprocess.run(
        [sys.executable, "-c", ASK, *names], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    apart, (found, kept), top_p = map(json.loads, ended.stdout.splitlines()[-3:])
    assert apart == [[], [True, True, True]]
    assert "vllm.v1.worker.cpu.shm" in found
    assert kept == [False, False, False]
    assert top_p == pytest.approx([0.9, 0.9, 1.0, 1.0, 1.0, 0.8])
