"""The GPU path held against the packages that it is written for, on a machine without a GPU.

The packages are the real ones of the GPU version set; only the GPU is pretended (`pretend_cuda`),
and only in processes of their own, which `ran` starts.
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

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
WANTED = {
    "torch": "2.13.0",
    "megatron-core": "0.19.2",
    "transformer-engine": "2.20.2",
    "vllm": "0.32.0",
}


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
    """Runs a script of this folder in a new process; what it printed last, read as JSON."""

    def run(script: str, *arguments: str) -> Any:
        path = os.pathsep.join([str(HERE), str(HERE.parent / "support"), str(ROOT)])
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "PYTHONWARNINGS": "ignore",
            "CUDA_VISIBLE_DEVICES": "",
            "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
            "VLLM_NO_USAGE_STATS": "1",
        }
        done = subprocess.run(
            [sys.executable, HERE / script, *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{script}: {done.stderr[-6000:]}"
        return json.loads(done.stdout.splitlines()[-1])

    return run
