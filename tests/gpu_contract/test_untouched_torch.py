"""What a run on GPUs imports leaves torch as it is."""

from collections.abc import Callable
from typing import Any


def test_imports_replace_nothing_of_torch(ran: Callable[..., Any]) -> None:
    told = ran("untouched_torch.py")
    assert told["platform"] == "NonNvmlCudaPlatform"
    assert told["checked"] > 1500
    assert told["replaced"] == []
    assert told["cpu_worker"] == []


def test_an_imported_cpu_worker_is_seen(ran: Callable[..., Any]) -> None:
    told = ran("untouched_torch.py", "megatron_opsft.rollout.vllm.cpu")
    assert "vllm.v1.worker.cpu.shm" in told["cpu_worker"]
    assert {"torch.cuda.Stream", "torch.accelerator.synchronize", "torch.Tensor.pin_memory"} <= set(
        told["replaced"]
    )
