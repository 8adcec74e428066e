"""What a plan takes from vLLM's sources is what the installed vLLM does."""

import json
import subprocess
import sys

import pytest
from processes import skip_without_vllm

from megatron_opsft.commands.plan.assumptions import load_hardware

pytestmark = pytest.mark.vllm

# In a process of its own, which vLLM may change: the defaults on a device of such name and memory.
ASK = """
import json, sys
from types import SimpleNamespace
import vllm.engine.arg_utils as arguments
from vllm.usage.usage_lib import UsageContext
found = {}
for name, memory in json.loads(sys.argv[1]).items():
    arguments.current_platform = SimpleNamespace(
        get_device_total_memory=lambda: memory,
        get_device_name=lambda: f"NVIDIA {name.upper()}",
        is_tpu=lambda: False,
        is_cpu=lambda: False,
    )
    defaults, _ = arguments.EngineArgs.get_batch_defaults(1)
    found[name] = defaults[UsageContext.LLM_CLASS]
print(json.dumps(found))
"""


def test_batches_of_prompts_are_as_large_as_a_plan_assumes() -> None:
    skip_without_vllm()
    devices = {name: load_hardware(name) for name in ("h100", "h200", "a100", "b200")}
    memory = {name: device.memory_bytes for name, device in devices.items()}
    ended = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(memory)], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    assumed = {name: device.engine_batch_tokens for name, device in devices.items()}
    assert json.loads(ended.stdout.splitlines()[-1]) == assumed
