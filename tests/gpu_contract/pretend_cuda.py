"""A GPU that is not there, for libraries that only ask about it.

Nothing computes here (it does in `pretend_gpu`): tensors "on CUDA" are on the meta device. In a
process of its own, always: what is pretended stays pretended. In the place of a missing CUDA
driver, a library of its name whose functions all fail: vLLM's extensions name them, so without one
they cannot even be loaded.
"""

import ctypes
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from pretend_gpu.marks import H100

_NAME = "libcuda.so.1"
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
NUM_GPUS = 8


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


def pretend_to_vllm() -> None:
    """vLLM takes its CUDA platform, the one that asks torch and not the driver."""
    import vllm
    import vllm.platforms as platforms

    with tempfile.TemporaryDirectory() as directory:
        _load_driver(Path(vllm.__file__).parent, Path(directory))
    platforms.builtin_platform_plugins["cuda"] = lambda: "vllm.platforms.cuda.CudaPlatform"


def _load_driver(extensions: Path, directory: Path) -> None:
    """extensions: a folder of libraries that need it; directory: an empty one to compile in."""
    try:
        ctypes.CDLL(_NAME, mode=ctypes.RTLD_GLOBAL)
        return
    except OSError:
        pass
    names = sorted({name for path in extensions.glob("*.so") for name in _wanted(path)})
    source, library = directory / "driver.c", directory / _NAME
    source.write_text("\n".join(f"int {name}(void) {{ return {_NO_DEVICE}; }}" for name in names))
    subprocess.run(
        ["cc", "-shared", "-fPIC", f"-Wl,-soname,{_NAME}", "-o", library, source], check=True
    )
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _wanted(path: Path) -> list[str]:
    """The driver's functions that a library names; its own runtime's are cuda..., cublas..."""
    command = ["nm", "-D", "--undefined-only", "--format=just-symbols", str(path)]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [name for name in listed.split() if name.startswith("cu") and name[2:3].isupper()]
