"""The GPU path held against the packages of a GPU run, which compute nothing here: names, shapes,
configurations and imports. Scripts of this folder look, each in a process of its own.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import python_path

ROOT = Path(__file__).parents[2]
CONFIGS = {path.stem for path in (ROOT / "examples/configs").glob("*.yaml")}
Ran = Callable[..., Any]


@pytest.mark.parametrize("what", ["vllm", "megatron", "deterministic"])
def test_every_shipped_configuration_is_taken(ran: Ran, what: str) -> None:
    """By the real classes of vLLM and Megatron, and reads back as it was."""
    told = ran("real_configs.py", what)
    assert what == "deterministic" or told.keys() >= CONFIGS
    assert {case: wrong for case, wrong in told.items() if wrong} == {}


def test_vllm_s_models_have_the_parameters_that_a_push_writes_in_place(ran: Ran) -> None:
    told = ran("vllm_models.py")
    assert len(told) == 9 and not any(told.values()), told


def test_flash_linear_attention_s_kernels_compute_what_ours_do(ran: Ran) -> None:
    """Forward and backward, in Triton's interpreter."""
    told = ran("fla_interpreted.py", interpret=True)
    assert {name: len(found) for name, found in told.items()} == {
        "causal_conv1d": 3,
        "chunk_gated_delta_rule": 6,
    }
    assert all(difference < 1e-5 for found in told.values() for difference in found), told


def test_every_gpu_test_can_be_imported() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-m", "gpu", "tests/gpu"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": python_path(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout[-4000:]
    modules = {line.partition("::")[0] for line in found.stdout.splitlines() if "::" in line}
    assert modules == {f"tests/gpu/{path.name}" for path in (ROOT / "tests/gpu").glob("test_*.py")}
