"""Imports everything that a run on GPUs imports, in its order, and says what that did to torch.

Prints JSON: what was replaced, and which modules of vLLM's CPU worker were imported.
"""

import importlib
import json
import sys

# vLLM makes this one remember the stream that it is given.
BY_VLLM = {"torch.cuda.set_stream"}
SPACES = ("torch", "torch.cuda", "torch.accelerator", "torch.Tensor")
# What a rank of a run imports before its first step. vLLM's part starts where `start_llm` imports
# it.
TRAINER = [
    "megatron_opsft.cli",
    "megatron_opsft.train",
    "transformer_engine.pytorch",
    "megatron.core.extensions.transformer_engine",
    "megatron_opsft.session",
    "megatron_opsft.rollout.vllm.engine",
]
VLLM = [
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.gpu_worker",
    "vllm.device_allocator.cumem",
    "vllm.v1.attention.backends.flash_attn",
    *(f"vllm.model_executor.models.{n}" for n in ("llama", "mistral", "qwen2", "qwen3_moe")),
]


def attributes() -> dict[str, object]:
    """Every attribute of torch that a CPU worker could replace, by dotted name."""
    import torch

    return {
        f"{name}.{key}": getattr(space, key)
        for name in SPACES
        for space in [eval(name, {"torch": torch})]
        for key in dir(space)
        if not key.startswith("__") and callable(getattr(space, key))
    }


def main() -> None:
    """Import, compare, print."""
    import torch._dynamo  # replaces torch.manual_seed, whoever imports it first  # noqa: F401
    from pretend_cuda import pretend, pretend_to_vllm

    pretend()
    before = attributes()
    assert len(before) > 1500
    for module in TRAINER:
        importlib.import_module(module)
    pretend_to_vllm()
    from vllm import LLM, SamplingParams  # noqa: F401

    for module in VLLM:
        importlib.import_module(module)
    after = attributes()
    replaced = {name for name, value in before.items() if after.get(name) != value}
    cpu_worker = sorted(name for name in sys.modules if name.startswith("vllm.v1.worker.cpu"))
    print(json.dumps({"replaced": sorted(replaced - BY_VLLM), "cpu_worker": cpu_worker}))


if __name__ == "__main__":
    main()
