"""tools/gpu_proof.sh itself on a CPU: its stages, and what a broken package leads to."""

import json
import os
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from forked_cli import ROOT, ForkedCli
from proof import stages
from proof.stage import Stage

# Of the other stages other tests of the suite run what is in them.
STEPS = ["steps_on_2_ranks", "preset"]
ALONE = ["quickstart", "loss_speed", "step_speed", "push_speed", "save_speed"]
ALONE += ["offload_speed", "convert_speed"]
INFO = "transformers-99.0.dist-info"


def run(out: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "tools/gpu_proof.sh"), "--device", "cpu", *options],
        env={**os.environ, "PYTHON": sys.executable, "OUT": str(out), **variables},
        capture_output=True,
        text=True,
        timeout=580,
    )


def test_every_stage_passes_and_its_figures_are_numbers(tmp_path: Path) -> None:
    ended = run(tmp_path, "--only", ",".join(STEPS))
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    found = json.loads((tmp_path / "gpu_proof.json").read_text())
    assert found["machine"]["versions"].keys() >= {"python", "torch", "megatron-core"}
    stages = {stage["name"]: stage for stage in found["stages"]}
    assert stages.keys() == {"environment", *STEPS}
    for name, stage in stages.items():
        assert f"\n{name} " in ended.stdout
        assert stage["outcome"] == "passed" and stage["seconds"] > 0
        assert stage["figures"] and all(v >= 0 for v in stage["figures"].values()), name
    assert stages["environment"]["figures"]["gpus"] == 0
    assert stages["steps_on_2_ranks"]["figures"]["float32_gradient_error"] < 1e-5


@pytest.mark.parametrize("name", ALONE)
def test_a_stage_of_one_process_passes_and_its_figures_are_numbers(
    cli: ForkedCli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """In a fork, which has imported what takes longer than the stage."""

    def run_forked(self: Stage, words: str, before: str = "") -> int:
        script, *options = shlex.split(
            words.replace("-m proof.quickstart", "tests/gpu/proof/quickstart.py")
        )
        ended = cli.run_script(script, *options)
        (tmp_path / f"logs/{name}.out").write_text(ended.stdout)
        (tmp_path / f"logs/{name}.err").write_text(ended.stderr)
        return ended.exit_code

    monkeypatch.setattr(Stage, "_run", run_forked)
    (tmp_path / "logs").mkdir()
    found: dict[str, Any] = {}
    stage = Stage(name=name, device="cpu", out=tmp_path, seconds=0, record=found.__setitem__)
    getattr(stages, f"test_{name}")(stage)
    assert found["figures"] and all(value >= 0 for value in found["figures"].values())


@pytest.mark.parametrize("where", ["WHEELS", "PYTHONPATH"])
def test_a_broken_package_fails_its_stage_and_is_named(tmp_path: Path, where: str) -> None:
    """One that lies in the folder of wheels, or where the caller says that packages are."""
    out, packages = tmp_path / "out", tmp_path / "packages"
    packages.mkdir()
    files = {
        "transformers/__init__.py": "raise ImportError('broken on purpose')\n",
        f"{INFO}/METADATA": "Metadata-Version: 2.1\nName: transformers\nVersion: 99.0\n",
        f"{INFO}/WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any\n",
        f"{INFO}/RECORD": "",
    }
    wheel = packages / "transformers-99.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    if where == "PYTHONPATH":
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(packages)
    ended = run(out, "--only", "environment", **{where: str(packages)})
    assert ended.returncode == 1
    why = "transformers is installed but cannot be imported: ImportError: broken on purpose"
    assert f"FAILED: environment: {why}" in ended.stdout


def test_ranks_that_a_stage_starts_import_from_where_the_proof_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as from the wheels that the proof has put on PYTHONPATH."""
    monkeypatch.syspath_prepend(str(ROOT / "tests/gpu"))
    monkeypatch.setenv("PYTHONPATH", "/wheels")
    import test_runs_gpu

    started: list[dict[str, str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda *_, env, **__: started.append(env))
    test_runs_gpu.start(tmp_path, "no.yaml")
    folders = started[0]["PYTHONPATH"].split(os.pathsep)
    assert folders == [str(ROOT / "tests/support"), str(ROOT), "/wheels"]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PYTHON": "no_such_python"}, "error: there is no no_such_python"),
        ({"WHEELS": "/no/such/folder"}, "error: WHEELS=/no/such/folder is no folder"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, variables: dict[str, str], message: str) -> None:
    ended = run(tmp_path, **variables)
    assert ended.returncode == 2
    assert message in ended.stderr and ended.stderr.count("\n") == 1
