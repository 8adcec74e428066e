"""tools/gpu_proof.sh itself on a CPU: every stage, one of them broken by a bad wheel."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from forked_cli import ROOT

BROKEN = "convert_speed"  # the one stage that needs the command line's package
# What runs on a CPU, but for `losses` and `vllm_quickstart`, which other tests of the suite are;
# and one stage that needs a GPU.
STAGES = "steps,steps_on_2_ranks,loss_speed,step_speed,push_speed,save_speed,quickstart,te_steps"


def write_broken_wheel(path: Path, package: str) -> None:
    """A wheel of a package that cannot be imported."""
    info = f"{package}-99.0.dist-info"
    with zipfile.ZipFile(path / f"{package}-99.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{package}/__init__.py", "raise ImportError('broken on purpose')\n")
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 99.0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def run(out: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    bash = shutil.which("bash")
    assert bash
    return subprocess.run(
        [bash, str(ROOT / "tools/gpu_proof.sh"), *options],
        env={**os.environ, "PYTHON": sys.executable, "OUT": str(out), **variables},
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.fixture(scope="module")
def proof(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """How the whole proof ended, one stage's package broken, and where its results are."""
    out, wheels = (tmp_path_factory.mktemp(name) for name in ("out", "wheels"))
    write_broken_wheel(wheels, "typer")
    only = f"{STAGES},{BROKEN}"
    return run(out, "--device", "cpu", "--only", only, WHEELS=str(wheels)), out


def stages_of(out: Path) -> dict[str, dict[str, Any]]:
    summary = json.loads((out / "gpu_proof.json").read_text())
    return {stage["name"]: stage for stage in summary["stages"]}


def test_every_stage_passes_that_is_not_broken_and_its_figures_are_numbers(proof: Any) -> None:
    ended, out = proof
    found = stages_of(out)
    outcomes = {name: stage["outcome"] for name, stage in found.items()}
    passed = {name for name, outcome in outcomes.items() if outcome == "passed"}
    message = ended.stdout[-3000:] + ended.stderr[-3000:]
    assert passed == {"environment", *STAGES.split(",")} - {"te_steps"}, message
    assert {n for n, outcome in outcomes.items() if outcome == "failed"} == {BROKEN}, message
    assert outcomes["te_steps"] == "left out", message
    for stage in found.values():
        assert all(isinstance(value, float | int) for value in stage["figures"].values())
        if stage["outcome"] == "passed":
            assert stage["figures"] and stage["seconds"] > 0
    assert found["environment"]["figures"]["gpus"] == 0
    assert found["steps"]["figures"]["float32_gradient_error"] < 1e-5
    assert 1e-4 < found["steps"]["figures"]["bfloat16_gradient_error"] < 0.1
    assert found["loss_speed"]["figures"]["ms"] > 0


def test_the_broken_stage_passes_without_the_bad_wheel(tmp_path: Path) -> None:
    ended = run(tmp_path, "--device", "cpu", "--only", BROKEN)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    found = stages_of(tmp_path)
    assert {name: stage["outcome"] for name, stage in found.items()} == {
        "environment": "passed",
        BROKEN: "passed",
    }
    assert found[BROKEN]["figures"]


def test_the_broken_stage_fails_the_proof_and_is_named(proof: Any) -> None:
    ended, out = proof
    assert ended.returncode == 1
    assert json.loads((out / "gpu_proof.json").read_text())["failed"] == [BROKEN]
    assert f"FAILED: {BROKEN}: exit code 1: subprocess.CalledProcessError" in ended.stdout
    log = (out / "logs" / ended.stdout.split("/logs/")[1].split()[0]).read_text()
    assert "broken on purpose" in log


def test_what_is_left_out_is_named_with_its_reason(proof: Any) -> None:
    ended, out = proof
    left_out = json.loads((out / "gpu_proof.json").read_text())["left_out"]
    assert left_out["te_steps"] == "needs a GPU"
    assert "te_steps: left out: needs a GPU" in ended.stdout


def test_each_result_was_written_before_the_next_stage_began(proof: Any) -> None:
    _, out = proof
    files = sorted(out.glob("stage_*.json"))
    assert len(files) == len(stages_of(out))
    began = [json.loads(path.read_text())["began"] for path in files]
    written = [path.stat().st_mtime for path in files]
    assert all(end <= start for end, start in zip(written, began[1:], strict=False))
    assert [path.name for path in out.glob(".*")] == []


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PYTHON": "no_such_python"}, "error: there is no no_such_python"),
        ({"WHEELS": "/no/such/folder"}, "error: WHEELS=/no/such/folder is no folder"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, variables: dict[str, str], message: str) -> None:
    ended = run(tmp_path, "--device", "cpu", **variables)
    assert ended.returncode == 2
    assert message in ended.stderr and ended.stderr.count("\n") == 1
