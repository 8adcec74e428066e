"""The device that a run uses, what differs between devices, and peak memory."""

import importlib.util
import os
import platform
import re
import shutil
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path

import torch

from megatron_opsft.config.training import ParallelConfig
from megatron_opsft.errors import UserError
from megatron_opsft.records import record


@record
class Device:
    """The device on which this rank computes."""

    torch_device: torch.device
    backend: str
    """torch.distributed's backend for process groups of this device."""

    @property
    def is_cuda(self) -> bool:
        return self.torch_device.type == "cuda"

    def synchronize(self) -> None:
        """Wait for the device's queued work, so that wall-clock times include it."""
        if self.is_cuda:
            torch.cuda.synchronize()


def select_device(wanted: str) -> Device:
    """Return the device for `run.device` on this rank; CUDA ranks take the GPU of their LOCAL_RANK.

    Errors: `UserError` if cuda is required and there is none, or SLURM has given this job more
    GPUs of the node than torch sees.
    """
    if wanted != "cpu":
        _check_all_gpus_seen(wanted)
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise UserError(
            f"run.device=cuda: torch sees no GPU; {why_no_gpu()}; use run.device=auto or cpu"
        )
    if wanted == "cpu" or not available:
        return Device(torch_device=torch.device("cpu"), backend="gloo")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    num_gpus = torch.cuda.device_count()
    if index >= num_gpus:
        raise UserError(
            f"run.device={wanted}: this rank is number {index} of its node, and torch sees "
            f"{num_gpus} GPU(s) there; start at most that many ranks on a node (torchrun "
            "--nproc-per-node, sbatch --ntasks-per-node), and let each see all GPUs of its node "
            "(no --gpus-per-task, no --gpu-bind)"
        )
    torch.cuda.set_device(index)
    return Device(
        torch_device=torch.device("cuda", index), backend="cpu:gloo,cuda:nccl"
    )


def gpu_memory_bytes(wanted: str) -> int | None:
    """Return the memory of this rank's GPU for `run.device`; None on a CPU. Errors: those of
    `select_device`.
    """
    device = select_device(wanted)
    if not device.is_cuda:
        return None
    return int(torch.cuda.get_device_properties(device.torch_device).total_memory)


def _check_all_gpus_seen(wanted: str) -> None:
    """Errors: `UserError` if a SLURM job has GPUs that torch does not see: the run would use the
    CPU instead, or lack a rank's GPU. `slurm/failed_node.sh` searches for this message.
    """
    if "SLURM_GPUS_ON_NODE" not in os.environ or torch.version.cuda is None:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    num_given = len([name for name in visible.split(",") if name])
    num_seen = torch.cuda.device_count()
    if num_seen < num_given:
        raise UserError(
            f"run.device={wanted}: a GPU of this node has failed: SLURM gave this job {num_given} "
            f"of {platform.node()}, and torch sees {num_seen}; `nvidia-smi` there says more, and "
            "the job can leave the node out (sbatch --exclude)"
        )


# CUDA's major version -> the oldest driver that runs it (NVIDIA: CUDA release notes).
_OLDEST_DRIVER = {"11": 450, "12": 525, "13": 580}
_DRIVER = Path("/proc/driver/nvidia/version")


def why_no_gpu() -> str:
    """Describe which driver torch needs to see a GPU, and which one this machine has."""
    cuda = torch.version.cuda
    if cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    loaded = "no NVIDIA driver is loaded"
    with suppress(OSError):
        if version := re.search(r"\b\d{3,}\.[\d.]+", _DRIVER.read_text()):
            loaded = f"driver {version[0]} is loaded"
    needed = _OLDEST_DRIVER.get(cuda.partition(".")[0], "a recent one")
    return f"CUDA {cuda} of torch {torch.__version__} needs driver {needed} or newer, and {loaded}"


def check_compiler(device: Device) -> None:
    """Check for a C compiler and Python's headers, with which Triton compiles kernels' launchers
    on every node. Does nothing without a GPU or Triton. Errors: `UserError`.
    """
    if not device.is_cuda or importlib.util.find_spec("triton") is None:
        return
    version = sysconfig.get_python_version()  # such as 3.11
    compiler = os.environ.get("CC", "gcc")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    has_clang = "CC" not in os.environ and shutil.which("clang")
    if not shutil.which(compiler) and not has_clang:
        missing, package = "C compiler (gcc)", "gcc"
    elif not header.is_file():
        missing, package = f"Python.h of Python {version}", f"python{version}-dev"
    else:
        return
    raise UserError(
        f"run.device=cuda: {platform.node()} has no {missing}, with which Triton compiles its "
        f"kernels' launchers; on Debian and Ubuntu: apt-get install {package}; or use a container"
    )


# Environment variables that libraries read at start. TransformerEngine: no attention whose backward
# pass sums in varying order. vLLM: kernels in which a row does not depend on the rest of the batch.
# cuBLAS: workspaces of a fixed size.
_DETERMINISTIC = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "VLLM_BATCH_INVARIANT": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


def prepare_environment(
    device_name: str, parallel: ParallelConfig, *, deterministic: bool
) -> None:
    """Set the environment variables that CUDA and its libraries read when they start: call it
    before `select_device`. Does nothing for a run on a CPU.

    device_name, deterministic: `run.device`, `run.deterministic`.

    Errors: `UserError` if the environment contradicts `run.deterministic`.
    """
    if device_name == "cpu" or not torch.cuda.is_available():
        return
    if parallel.tp > 1 and parallel.sequence_parallel:
        # Megatron overlaps communication and matrix products; it relies on the order of launches.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if deterministic:
        for name, value in _DETERMINISTIC.items():
            if os.environ.setdefault(name, value) != value:
                raise UserError(
                    f"run.deterministic=true needs {name}={value}, and the environment says "
                    f"{os.environ[name]}; unset it"
                )


def check_deterministic(device: Device, dtype: str) -> None:
    """Errors: `UserError` if TransformerEngine would refuse to train packed sequences with
    `run.deterministic`.

    On compute capability 9.0 it has cuDNN's deterministic backward pass only for small packs
    (number of sequences x heads x longest length squared below 2^30).
    """
    if dtype != "bfloat16" or not has_transformer_engine(device):
        return
    is_hopper = torch.cuda.get_device_capability(device.torch_device) == (9, 0)
    if is_hopper and importlib.util.find_spec("flash_attn") is None:
        raise UserError(
            "run.deterministic=true: on this GPU TransformerEngine's own deterministic attention "
            "refuses long packed sequences; pip install --no-build-isolation "
            "'flash-attn>=2.4.1', or leave it false"
        )


def has_room_for_good(device: Device, num_bytes: int) -> bool:
    """True if this many bytes may stay on the GPU for the whole run: at most a tenth of the free
    memory, since activations and an engine come later.
    """
    free_bytes, _ = torch.cuda.mem_get_info(device.torch_device)
    return 10 * num_bytes <= free_bytes


def has_transformer_engine(device: Device) -> bool:
    """True if TransformerEngine can be imported, which raises without CUDA."""
    return transformer_engine_version(device) is not None


def transformer_engine_version(device: Device) -> tuple[int, int] | None:
    """Return (major, minor) of TransformerEngine; None if it cannot be imported."""
    if not device.is_cuda:
        return None
    try:
        import transformer_engine
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, RuntimeError, OSError):
        return None
    major, minor = transformer_engine.__version__.split(".")[:2]
    return int(major), int(minor)


def why_no_delta_kernels(device: Device) -> str | None:
    """Return why Megatron-Core's gated delta nets, which compute with flash-linear-attention's
    kernels, are of no use here; None if they can train packed sequences.
    """
    if not device.is_cuda:
        return "flash-linear-attention needs CUDA"
    import megatron.core

    if _numbers(megatron.core.__version__) < (0, 19):
        return "Megatron-Core's take packed sequences from version 0.19 on"
    try:
        from megatron.core.ssm.gated_delta_net import HAVE_FLA
    except (ImportError, RuntimeError, OSError):
        HAVE_FLA = False
    if not HAVE_FLA:
        return "flash-linear-attention cannot be imported"
    triton: str = sys.modules["triton"].__version__  # which it has imported
    # That Triton compiles a backward kernel wrongly: fla-org/flash-linear-attention, issue 640.
    is_hopper = torch.cuda.get_device_capability(device.torch_device)[0] == 9
    if is_hopper and (3, 4) <= _numbers(triton) < (3, 7, 1):
        return (
            f"with Triton {triton} flash-linear-attention's gradients are wrong on "
            "this GPU; 3.7.1 mends it"
        )
    return None


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first three numbers of a version such as 3.7.1+git5."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def has_fused_weight_gradient() -> bool:
    """True if NVIDIA Apex's gradient-accumulation kernel is installed."""
    return importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None


def peak_memory_bytes(device: Device) -> int:
    """Peak memory of this rank since its start: of the CUDA allocator, or resident on a CPU."""
    if device.is_cuda:
        return torch.cuda.max_memory_allocated()
    return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Peak resident memory of this process since its start; 0 if the kernel does not tell."""
    # Not getrusage: its value begins, in a child process, with the parent's peak.
    with suppress(FileNotFoundError):
        if peak := re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text()):
            return int(peak[1]) * 1024
    return 0
