"""The tests that need a GPU can at least be imported with a GPU run's packages."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_gpu_test_is_collected() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-m", "gpu", "tests/gpu"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout[-4000:]
    modules = {line.partition("::")[0] for line in found.stdout.splitlines() if "::" in line}
    assert modules == {f"tests/gpu/{path.name}" for path in (ROOT / "tests/gpu").glob("test_*.py")}
