"""The tests that need a GPU can at least be imported with a GPU run's packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu_contract
ROOT = Path(__file__).parents[2]


def collected(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What pytest finds; nothing runs."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-m", "gpu", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )


def test_every_gpu_test_is_collected() -> None:
    found = collected("tests/gpu")
    assert found.returncode == 0, found.stdout[-4000:]
    modules = {line.partition("::")[0] for line in found.stdout.splitlines() if "::" in line}
    assert modules == {f"tests/gpu/{path.name}" for path in (ROOT / "tests/gpu").glob("test_*.py")}


def test_a_gpu_test_that_cannot_be_imported_is_seen(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("from vllm import LargeLanguageModel\n")
    assert collected(str(tmp_path)).returncode != 0
