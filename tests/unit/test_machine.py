"""What is said of GPUs, on a stand-in for torch's two, and of the driver."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_opsft.runtime import machine
from megatron_opsft.runtime.device import Device

PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    total_memory=85_000_000_000,
    major=9,
    minor=0,
    multi_processor_count=132,
)


def fake_torch(*, available: bool) -> SimpleNamespace:
    """Two GPUs, of which the first can address the second and not the other way round."""
    cuda = SimpleNamespace(
        is_available=lambda: available,
        device_count=lambda: 2,
        get_device_properties=lambda index: PROPERTIES,
        can_device_access_peer=lambda index, other: index == 0 and other == 1,
        nccl=SimpleNamespace(version=lambda: (2, 28, 3)),
    )
    backends = SimpleNamespace(cudnn=SimpleNamespace(version=lambda: 91300))
    return SimpleNamespace(
        cuda=cuda, backends=backends, version=SimpleNamespace(cuda="13.0" if available else None)
    )


def test_every_gpu_is_listed_with_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "torch", fake_torch(available=True))
    first, second = machine.list_gpus()
    assert (first.name, first.compute_capability) == ("NVIDIA H100 80GB HBM3", "9.0")
    assert (first.memory_bytes, first.num_multiprocessors) == (85_000_000_000, 132)
    assert (first.peers, second.peers) == ((1,), ())


def test_nothing_is_listed_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "torch", fake_torch(available=False))
    assert machine.list_gpus() == []
    assert machine.cuda_versions().keys() == {"driver", "cuda"}
    assert machine.cuda_versions()["cuda"] == "none"
    cpu = Device(torch_device=torch.device("cpu"), backend="gloo")
    assert machine.free_gpu_bytes(cpu) == 0


def test_versions_of_driver_and_libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 580.159.04\necho 580.159.04\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(machine, "torch", fake_torch(available=True))
    assert machine.cuda_versions() == {
        "driver": "580.159.04",
        "cuda": "13.0",
        "nccl": "2.28.3",
        "cudnn": "91300",
    }


def test_driver_without_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    file = tmp_path / "version"
    monkeypatch.setattr(machine, "_DRIVER_FILE", file)
    assert machine.driver_version() == "none"
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release\n")
    assert machine.driver_version() == "580.95.05"
