"""Imports everything that a run on GPUs imports, in its order, and says what that did to torch.

Prints JSON: what was replaced, and which modules of vLLM's CPU worker were imported.
Usage: python untouched_torch.py [MODULE...], more modules to import.
"""

import importlib
import json
import sys
from typing import Any

# vLLM makes this one remember the stream that it is given.
BY_VLLM = {"torch.cuda.set_stream"}
CPU_WORKER = "vllm.v1.worker.cpu"

# What a rank of a run imports before its first step, in order. vLLM's part starts where
# `start_llm` imports it.
TRAINER = [
    "megatron_opsft.cli",
    "megatron_opsft.train",
    "transformer_engine.pytorch",
    "megatron.core.extensions.transformer_engine",
    "megatron_opsft.model.load",
    "megatron_opsft.model.checkpoint",
    "megatron_opsft.rollout.vllm.engine",
    "megatron_opsft.sync.weight_sync",
]
VLLM = [
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.device_allocator.cumem",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.mistral",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.qwen3_moe",
]


def attributes() -> dict[str, Any]:
    """Every attribute of torch that a CPU worker could replace, by dotted name."""
    import torch

    spaces: dict[str, Any] = {
        "torch.cuda": torch.cuda,
        "torch.accelerator": torch.accelerator,
        "torch.Tensor": torch.Tensor,
        "torch": torch,
    }
    return {
        f"{name}.{key}": getattr(space, key)
        for name, space in spaces.items()
        for key in dir(space)
        if not key.startswith("__") and callable(getattr(space, key))
    }


def main() -> None:
    """Import, compare, print."""
    import torch._dynamo  # replaces torch.manual_seed, whoever imports it first  # noqa: F401
    from pretend_cuda import pretend, pretend_to_vllm

    pretend()
    before = attributes()
    for module in TRAINER:
        importlib.import_module(module)
    pretend_to_vllm()
    from vllm import LLM, SamplingParams  # noqa: F401

    for module in [*VLLM, *sys.argv[1:]]:
        importlib.import_module(module)
    after = attributes()
    replaced = {name for name, value in before.items() if after.get(name) != value}
    from vllm.platforms import current_platform

    told = {
        "platform": type(current_platform).__name__,
        "checked": len(before),
        "replaced": sorted(replaced - BY_VLLM),
        "cpu_worker": sorted(name for name in sys.modules if name.startswith(CPU_WORKER)),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
