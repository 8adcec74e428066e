"""A GPU that is not there, for libraries that only ask about it.

Nothing computes: tensors "on CUDA" are on the meta device. In a process of its own, always: what is
pretended stays pretended.
"""

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from no_driver import load_driver

NUM_GPUS = 8
H100 = SimpleNamespace(
    major=9,
    minor=0,
    name="NVIDIA H100 80GB HBM3",
    total_memory=85_000_000_000,
    multi_processor_count=132,
    is_integrated=0,
    uuid="GPU-0",
)


def pretend() -> None:
    """torch says that there are H100s; TransformerEngine and Megatron believe it."""
    import torch

    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = cuda._device_count_nvml = lambda: NUM_GPUS
    cuda.current_device = lambda: 0
    cuda.set_device = lambda device: None
    cuda.get_device_capability = lambda device=None: (H100.major, H100.minor)
    cuda.get_device_properties = lambda device=None: H100
    cuda.get_device_name = lambda device=None: H100.name


def pretend_to_vllm() -> str:
    """vLLM takes its CUDA platform, the one that asks torch and not the driver. Says what stands
    for the driver.
    """
    import vllm
    import vllm.platforms as platforms

    with tempfile.TemporaryDirectory() as directory:
        driver = load_driver(Path(vllm.__file__).parent, Path(directory))
    platforms.builtin_platform_plugins["cuda"] = lambda: "vllm.platforms.cuda.CudaPlatform"
    return driver
