"""tools/gpu_proof.sh itself on a CPU, one of its stages broken by a bad wheel; and every stage."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from forked_cli import ROOT, ForkedCli

BROKEN = "convert_speed"  # the one stage that needs the command line's package
# Each as if vLLM were not installed, in a process that has imported what it needs; `losses` and
# `vllm_quickstart` are other tests of the suite.
ALONE = ["steps", "loss_speed", "step_speed", "push_speed", "save_speed", "quickstart", BROKEN]
# By the script: one stage of two ranks, and one that needs a GPU.
STAGES = "steps_on_2_ranks,te_steps"
RUN_ALONE = """
import os, runpy, sys
os.environ["TMPDIR"] = {work!r}
sys.modules["vllm"] = None
sys.path[:0] = {paths!r}
is_module, *sys.argv = {words!r}
run = runpy.run_module if is_module else runpy.run_path
run(sys.argv[0], run_name="__main__")
sys.exit(0)
"""


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
    write_broken_wheel(wheels, "click")
    only = f"{STAGES},{BROKEN}"
    return run(out, "--device", "cpu", "--only", only, WHEELS=str(wheels)), out


def stages_of(out: Path) -> dict[str, dict[str, Any]]:
    summary = json.loads((out / "gpu_proof.json").read_text())
    return {stage["name"]: stage for stage in summary["stages"]}


def test_the_stage_passes_that_is_not_broken_and_its_figures_are_numbers(proof: Any) -> None:
    ended, out = proof
    found = stages_of(out)
    outcomes = {name: stage["outcome"] for name, stage in found.items()}
    message = ended.stdout[-3000:] + ended.stderr[-3000:]
    assert outcomes == {
        "environment": "passed",
        "steps_on_2_ranks": "passed",
        "te_steps": "left out",
        BROKEN: "failed",
    }, message
    for stage in found.values():
        assert all(isinstance(value, float | int) for value in stage["figures"].values())
        if stage["outcome"] == "passed":
            assert stage["figures"] and stage["seconds"] > 0
    assert found["environment"]["figures"]["gpus"] == 0
    assert found["steps_on_2_ranks"]["figures"]["float32_gradient_error"] < 1e-5


@pytest.mark.parametrize("name", ALONE)
def test_every_other_stage_passes_and_its_figures_are_numbers(
    cli: ForkedCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The broken one among them, without the bad wheel."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from proof.commands import Place
    from proof.readings import strict
    from proof.stages import STAGES as ALL

    (command,) = [stage.on_cpu for stage in ALL if stage.name == name]
    assert command is not None
    words = [word.format(work=tmp_path, device="cpu") for word in command.words]
    is_module = words[0] == "-m"
    if is_module:
        del words[0]
    folders = ["tools", "tests/support", "benchmarks"]
    prelude = RUN_ALONE.format(
        work=str(tmp_path),
        paths=[str(ROOT / folder) for folder in folders],
        words=[is_module, *words],
    )
    ended = cli.start([], prelude).wait(command.limit_seconds)
    assert ended.exit_code == 0, ended.stderr
    place = Place(logs=tmp_path / "log", work=tmp_path)
    (tmp_path / "log.out").write_text(ended.stdout)
    reading = strict(command.read(place))
    assert reading.figures and not reading.problems and not reading.nothing_ran
    if name == "steps":
        assert reading.figures["float32_gradient_error"] < 1e-5
        assert 1e-4 < reading.figures["bfloat16_gradient_error"] < 0.1
    if name == "loss_speed":
        assert reading.figures["ms"] > 0


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
