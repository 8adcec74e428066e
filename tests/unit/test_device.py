"""What is set before CUDA starts, and the one-line errors; with a pretended GPU."""

import os
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_opsft.config.load import load_config
from megatron_opsft.errors import UserError
from megatron_opsft.runtime.device import (
    Device,
    check_compiler,
    check_deterministic,
    has_room_for_good,
    prepare_environment,
    select_device,
    why_no_delta_kernels,
)
from megatron_opsft.runtime.job import join_job

CUDA = Device(torch_device=torch.device("cuda", 0), backend="nccl")
DETERMINISTIC = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "VLLM_BATCH_INVARIANT": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
NAMES = ("CUDA_DEVICE_MAX_CONNECTIONS", *DETERMINISTIC)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Eight of them, as far as torch says."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    for name in NAMES:  # so that it is restored
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def prepare(*overrides: str) -> None:
    """As the start of a run does."""
    words = ["model.path=tiny_reasoner", "data.train=arithmetic", *overrides]
    config = load_config(None, words)
    run = config.run
    prepare_environment(run.device, config.parallel, deterministic=run.deterministic)


OVERLAP = ["parallel.tp=2", "parallel.sequence_parallel=true"]


@pytest.mark.parametrize(
    ("overrides", "before", "expected"),
    [
        (OVERLAP, {}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        (OVERLAP, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}),
        (OVERLAP[:1], {}, {}),
        (OVERLAP[1:], {}, {}),
        (["run.deterministic=true"], {}, DETERMINISTIC),
        (["run.deterministic=true", "run.device=cpu"], {}, {}),
    ],
)
def test_what_is_set_before_cuda_starts(
    gpus: pytest.MonkeyPatch,
    overrides: list[str],
    before: dict[str, str],
    expected: dict[str, str],
) -> None:
    for name, value in before.items():
        gpus.setenv(name, value)
    prepare(*overrides)
    assert {name: os.environ[name] for name in NAMES if name in os.environ} == expected


@pytest.mark.parametrize(("before", "expected"), [(None, "0"), ("1", "1")])
def test_nccl_keeps_no_buffers_of_cuda_graphs_registered(
    gpus: pytest.MonkeyPatch, before: str | None, expected: str
) -> None:
    """Unless the environment says so; NCCL reads it when the job's groups are made."""
    name, told = "NCCL_GRAPH_REGISTER", []
    gpus.setenv(name, before or "")
    if before is None:
        gpus.delenv(name)
    module = "megatron_opsft.runtime.job"
    gpus.setattr(
        f"{module}.dist.init_process_group", lambda *_, **__: told.append(os.environ[name])
    )
    gpus.setattr(f"{module}.current_job", lambda: None)
    join_job(CUDA, timedelta(minutes=1))
    assert told == [expected]


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_a_gpu_that_slurm_gave_and_torch_does_not_see_has_failed(
    gpus: pytest.MonkeyPatch, wanted: str
) -> None:
    """Instead of a CPU in its place. Some of the node's GPUs, and a run on CPUs, are no failure."""
    gpus.setattr("torch.version.cuda", "13.0")
    gpus.setattr("torch.cuda.set_device", lambda index: None)
    gpus.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    gpus.setattr("torch.cuda.device_count", lambda: 7)
    assert select_device(wanted).is_cuda  # not a SLURM job
    gpus.setenv("SLURM_GPUS_ON_NODE", "8")
    failed = "a GPU of this node has failed: SLURM gave this job 8 of .*, and torch sees 7"
    with pytest.raises(UserError, match=f"run.device={wanted}: {failed}"):
        select_device(wanted)
    assert not select_device("cpu").is_cuda
    gpus.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    gpus.setattr("torch.cuda.device_count", lambda: 2)
    assert select_device(wanted).is_cuda


def test_what_contradicts_the_configuration_is_one_line(
    gpus: pytest.MonkeyPatch,
) -> None:
    gpus.setenv("VLLM_BATCH_INVARIANT", "0")
    with pytest.raises(UserError, match="needs VLLM_BATCH_INVARIANT=1, .* says 0; unset it"):
        prepare("run.deterministic=true")
    gpus.setenv("LOCAL_RANK", "8")
    with pytest.raises(UserError, match="number 8 of its node, and torch sees 8 GPU"):
        select_device("auto")
    gpus.setattr("megatron_opsft.runtime.device.has_transformer_engine", lambda device: True)
    gpus.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))  # Hopper
    with pytest.raises(UserError, match=r"run.deterministic=true: .*flash-attn>=2.4.1"):
        check_deterministic(CUDA, "bfloat16")
    check_deterministic(CUDA, "float32")
    gpus.setattr("torch.cuda.get_device_capability", lambda device: (10, 0))
    check_deterministic(CUDA, "bfloat16")


@pytest.mark.parametrize(
    ("cuda", "driver", "said"),
    [
        (None, "", "was built without CUDA"),
        ("13.0", "", "CUDA 13.0 of torch .* needs driver 580 or newer, and no NVIDIA driver is"),
        ("13.0", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue", "550.54.15 is"),
    ],
)
def test_no_gpu_says_which_driver_is_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cuda: str | None, driver: str, said: str
) -> None:
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr("megatron_opsft.runtime.device._DRIVER", tmp_path / "version")
    if driver:
        (tmp_path / "version").write_text(driver)
    with pytest.raises(UserError, match=f"run.device=cuda: torch sees no GPU; .*{said}"):
        select_device("cuda")


def test_triton_needs_a_compiler_and_python_s_headers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setattr("shutil.which", lambda name: name if name == "gcc" else None)
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(UserError, match=r"has no Python.h .*apt-get install python3\.\d+-dev"):
        check_compiler(CUDA)
    (tmp_path / "Python.h").touch()
    check_compiler(CUDA)
    monkeypatch.setenv("CC", "no_such_compiler")
    with pytest.raises(UserError, match=r"has no C compiler \(gcc\)"):
        check_compiler(CUDA)
    check_compiler(Device(torch_device=torch.device("cpu"), backend="gloo"))


def test_room_for_good_is_a_tenth_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (1000, 8000))
    assert has_room_for_good(CUDA, 100) and not has_room_for_good(CUDA, 101)


@pytest.mark.parametrize(
    ("megatron", "has_fla", "triton", "capability", "why_not"),
    [
        (
            "0.16.1",
            True,
            "3.7.1",
            (9, 0),
            "Megatron-Core's take packed sequences from version 0.19 on",
        ),
        ("0.19.2", False, "3.7.1", (9, 0), "flash-linear-attention cannot be imported"),
        ("0.19.2", True, "3.7.1", (9, 0), None),
        ("0.19.0", True, "3.6.0", (8, 0), None),
        ("0.20.0rc1", True, "3.3.1", (9, 0), None),
        (
            "0.19.2",
            True,
            "3.6.0+git1",
            (9, 0),
            "with Triton 3.6.0+git1 flash-linear-attention's gradients are wrong on this GPU; "
            "3.7.1 mends it",
        ),
    ],
)
def test_kernels_of_gated_delta_nets_are_used_where_they_are_right(
    gpus: pytest.MonkeyPatch,
    megatron: str,
    has_fla: bool,
    triton: str,
    capability: tuple[int, int],
    why_not: str | None,
) -> None:
    gpus.setattr("megatron.core.__version__", megatron)
    gpus.setattr("torch.cuda.get_device_capability", lambda device: capability)
    nets = SimpleNamespace(HAVE_FLA=has_fla)
    gpus.setitem(sys.modules, "megatron.core.ssm.gated_delta_net", nets)
    gpus.setitem(sys.modules, "triton", SimpleNamespace(__version__=triton))
    assert why_no_delta_kernels(CUDA) == why_not
    assert why_no_delta_kernels(select_device("cpu")) == "flash-linear-attention needs CUDA"
