"""The GPU path held against the packages that it is written for, on a machine without a GPU.

The packages are the real ones of the GPU version set; only the GPU is pretended (`pretend_cuda` for
what asks about it, `pretend_gpu` for what computes), in processes of their own, which `ran` starts.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from processes import python_path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
WANTED = {
    "torch": "2.13.0",
    "megatron-core": "0.19.2",
    "transformer-engine": "2.20.2",
    "fla-core": "0.6.0",
    "vllm": "0.32.0",
}

LONGEST_SECONDS = 1800  # of a test of this folder, on two cores that also do other work


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """More time than other tests have, where a test does not say otherwise."""
    for item in items:
        if item.path.parent == HERE and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LONGEST_SECONDS))


@pytest.fixture(scope="session", autouse=True)
def _gpu_packages() -> None:
    try:  # without what a build adds behind a +
        found = {package: version(package).partition("+")[0] for package in WANTED}
    except PackageNotFoundError as error:
        found = {str(error.name): "none"}
    if found != WANTED:
        pytest.fail(f"wants {WANTED}, has {found}: run bash tools/gpu_bench.sh", pytrace=False)


@pytest.fixture(scope="session")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Runs a script of this folder, or `-m MODULE`, in a new process; the last line that it
    printed, read as JSON if it is.

    num_gpus: on pretended GPUs, one rank each. te: with TransformerEngine. interpret: Triton's
    kernels without a GPU.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(HERE, HERE.parent / "support", ROOT, ROOT / "tests/gpu"),
        "PYTHONWARNINGS": "ignore",
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "VLLM_NO_USAGE_STATS": "1",
    }
    torchrun = "-m torch.distributed.run --standalone --local-addr=localhost --nproc-per-node"

    def run(
        script: str, *words: object, num_gpus: int = 0, te: bool = False, interpret: bool = False
    ) -> Any:
        command = [sys.executable]
        if num_gpus > 1:
            command += [*torchrun.split(), str(num_gpus)]
        if num_gpus:
            command += ["-m", "pretend_gpu", str(num_gpus), *["--te"] * te]
        command += [script if script == "-m" else str(HERE / script), *map(str, words)]
        interpreted = {"TRITON_INTERPRET": "1"} if num_gpus or interpret else {}
        done = subprocess.run(
            command, cwd=ROOT, env=environment | interpreted, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]} {done.stderr[-6000:]}"
        (*_, last) = done.stdout.splitlines()
        return json.loads(last) if last.startswith(("{", "[")) else last

    return run
