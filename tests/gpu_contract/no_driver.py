"""In the place of a missing CUDA driver, a library of its name whose functions all fail.

vLLM's extensions name the driver's functions, so without one they cannot even be loaded.
"""

import ctypes
import subprocess
from pathlib import Path

_NAME = "libcuda.so.1"
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


def load_driver(extensions: Path, directory: Path) -> str:
    """Load the driver, or what stands for it; says which.

    extensions: the folder of the libraries that need it; directory: an empty one to compile in.
    """
    try:
        ctypes.CDLL(_NAME, mode=ctypes.RTLD_GLOBAL)
        return "the driver of this machine"
    except OSError:
        pass
    names = sorted({name for path in extensions.glob("*.so") for name in _wanted(path)})
    source, library = directory / "driver.c", directory / _NAME
    source.write_text("\n".join(f"int {name}(void) {{ return {_NO_DEVICE}; }}" for name in names))
    subprocess.run(
        ["cc", "-shared", "-fPIC", f"-Wl,-soname,{_NAME}", "-o", library, source], check=True
    )
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    return f"a library with {len(names)} functions of the driver that all fail"


def _wanted(path: Path) -> list[str]:
    """The driver's functions that a library names; its own runtime's are cuda..., cublas..."""
    command = ["nm", "-D", "--undefined-only", "--format=just-symbols", str(path)]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [name for name in listed.split() if name.startswith("cu") and name[2:3].isupper()]
