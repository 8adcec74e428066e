"""The runner of tools/gpu_proof.sh on small stages; its own ones: tests/gloo/test_gpu_proof.py."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from forked_cli import ROOT

DRIVER = ROOT / "tests/support/proof_of_code.py"
REPORT = "import json; print(json.dumps({'figures': %s, 'problems': %s, 'details': {}}))"
GOOD = {"code": REPORT % ("{'figure': 1.5}", "[]")}
BAD = {"code": REPORT % ("{'figure': 2.5}", "['norm: relative error 0.5, bound 0.1']")}
SLEEPER = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"],
                         start_new_session=True)
print(child.pid, file=open(sys.argv[1] + "/../" + "%s", "w"), flush=True)
"""

Stages = dict[str, dict[str, Any]]


def start(out: Path, stages: Stages, *options: str, device: str = "cpu") -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tools")])
    out.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, str(DRIVER), json.dumps(stages), "--device", device, *options],
        env={**os.environ, "OUT": str(out), "PYTHONPATH": paths, "TMPDIR": str(out.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def prove(out: Path, stages: Stages, *options: str, device: str = "cpu") -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    process = start(out, stages, *options, device=device)
    stdout, stderr = process.communicate(timeout=60)
    return process.returncode, stdout, stderr


def results(out: Path) -> dict[str, dict[str, Any]]:
    summary = json.loads((out / "gpu_proof.json").read_text())
    return {stage["name"]: stage for stage in summary["stages"]}


def lives(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_figures_and_exit_code_of_a_proof_without_failure(tmp_path: Path) -> None:
    code, stdout, _ = prove(tmp_path / "out", {"environment": GOOD, "one": GOOD})
    assert code == 0
    assert stdout.count("passed") == 4 and "figure 1.5" in stdout
    summary = json.loads((tmp_path / "out/gpu_proof.json").read_text())
    assert (summary["outcome"], summary["failed"], summary["left_out"]) == ("passed", [], {})
    assert results(tmp_path / "out")["one"]["figures"] == {"figure": 1.5}


def test_a_failing_stage_is_named_and_the_next_one_runs(tmp_path: Path) -> None:
    crash = {"code": "import torch_that_is_not_there"}
    silent = {"code": "print('no report')"}
    stages = {"environment": GOOD, "beyond": BAD, "crash": crash, "silent": silent, "last": GOOD}
    code, stdout, _ = prove(tmp_path / "out", stages)
    assert code == 1
    found = results(tmp_path / "out")
    assert [stage["outcome"] for stage in found.values()] == [
        *("passed", "failed", "failed", "failed", "passed")
    ]
    assert found["beyond"]["reason"] == "norm: relative error 0.5, bound 0.1"
    assert "No module named 'torch_that_is_not_there'" in found["crash"]["reason"]
    assert found["silent"]["reason"] == "it printed no report"
    assert "FAILED: crash: exit code 1: ModuleNotFoundError" in stdout
    assert "stage_03_crash.err" in stdout
    summary = json.loads((tmp_path / "out/gpu_proof.json").read_text())
    assert summary["failed"] == ["beyond", "crash", "silent"]


def test_a_result_is_on_disk_before_the_next_stage_begins(tmp_path: Path) -> None:
    code = """
import json, os, pathlib
out = pathlib.Path(os.environ["OUT"])
before = json.loads((out / "stage_01_environment.json").read_text())
summary = json.loads((out / "gpu_proof.json").read_text())
figures = {"stages": len(summary["stages"]), "earlier": before["figures"]["figure"]}
print(json.dumps({"figures": figures, "problems": []}))
"""
    assert prove(tmp_path / "out", {"environment": GOOD, "second": {"code": code}})[0] == 0
    assert results(tmp_path / "out")["second"]["figures"] == {"stages": 1.0, "earlier": 1.5}


def test_a_stage_beyond_its_limit_is_killed_with_all_it_started(tmp_path: Path) -> None:
    code = SLEEPER % "pid" + "time.sleep(300)"
    stages = {"environment": GOOD, "late": {"code": code, "limit_seconds": 1.5}, "last": GOOD}
    exit_code, stdout, _ = prove(tmp_path / "out", stages)
    assert exit_code == 1
    late = results(tmp_path / "out")["late"]
    assert late["outcome"] == "timed out" and late["exit_code"] is None
    assert late["reason"] == "killed after 2 s, with all it had started"
    assert not lives(int((tmp_path / "pid").read_text()))
    assert results(tmp_path / "out")["last"]["outcome"] == "passed"
    assert "FAILED: late" in stdout


def test_what_a_stage_leaves_running_is_ended(tmp_path: Path) -> None:
    code = SLEEPER % "pid" + GOOD["code"]
    assert prove(tmp_path / "out", {"environment": GOOD, "untidy": {"code": code}})[0] == 0
    assert results(tmp_path / "out")["untidy"]["details"]["leftover_processes"] == 1
    assert not lives(int((tmp_path / "pid").read_text()))


def test_a_stopped_proof_leaves_nothing_running(tmp_path: Path) -> None:
    code = SLEEPER % "pid" + "time.sleep(300)"
    process = start(tmp_path / "out", {"environment": GOOD, "long": {"code": code}})
    deadline = time.monotonic() + 30
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 143
    assert not lives(int((tmp_path / "pid").read_text()))
    assert results(tmp_path / "out")["environment"]["outcome"] == "passed"
    assert not (tmp_path / "out/stage_02_long.json").exists()
    assert [path.name for path in tmp_path.glob("opsft-*")] == []


def test_what_is_left_out_is_named_with_its_reason(tmp_path: Path) -> None:
    skipped = """
import sys
open(sys.argv[1] + "/junit.xml", "w").write(
    '<testsuites><testsuite><testcase classname="a" name="b"><skipped message="needs X"/>'
    '</testcase></testsuite></testsuites>')
"""
    stages = {
        "environment": GOOD,
        "package": {**GOOD, "modules": ["json", "no_such_package"]},
        "gpu": {**GOOD, "gpus": 1},
        "gpus": {**GOOD, "gpus": 2},
        "skipped": {"code": skipped, "tests": True},
        "slow": {**GOOD, "expected_seconds": 7200},
    }
    code, stdout, _ = prove(tmp_path / "out", stages)
    assert code == 0
    left_out = json.loads((tmp_path / "out/gpu_proof.json").read_text())["left_out"]
    slow = left_out.pop("slow")
    assert left_out == {
        "package": "needs no_such_package",
        "gpu": "needs a GPU",
        "gpus": "needs 2 GPUs",
        "skipped": "needs X",
    }
    assert slow.startswith("no time: takes about 7200 s, 1") and slow.endswith(" s are left")
    assert "left out, so not proved: package, gpu, gpus, skipped, slow" in stdout


def test_the_time_of_all_stages_is_bounded(tmp_path: Path) -> None:
    stages = {"environment": GOOD, "long": {"code": "import time; time.sleep(300)"}, "last": GOOD}
    assert prove(tmp_path / "out", stages, "--minutes", "0.1")[0] == 1
    found = results(tmp_path / "out")
    assert found["long"]["outcome"] == "timed out" and found["long"]["seconds"] < 10
    assert found["last"]["reason"] == "no time: takes about 0 s, 0 s are left"


def test_a_figure_that_is_no_number_fails_its_stage(tmp_path: Path) -> None:
    code = REPORT % ("{'loss': float('nan'), 'norm': 1.0}", "[]")
    code = code.replace("'details': {}", "'details': {'losses': [float('inf'), 2.0]}")
    assert prove(tmp_path / "out", {"environment": GOOD, "diverged": {"code": code}})[0] == 1
    found = results(tmp_path / "out")["diverged"]
    assert (found["figures"], found["problems"]) == ({"norm": 1.0}, ["loss is nan"])
    assert found["details"]["losses"] == ["inf", 2.0]


def test_failing_tests_are_counted_and_named(tmp_path: Path) -> None:
    code = """
import sys
open(sys.argv[1] + "/junit.xml", "w").write(
    '<testsuites><testsuite><testcase classname="m" name="good"/>'
    '<testcase classname="m" name="bad"><failure message="assert 1 == 2&#10;more"/></testcase>'
    '<testcase classname="m" name="off"><skipped message="needs two GPUs"/></testcase>'
    '</testsuite></testsuites>')
sys.exit(1)
"""
    stages = {"environment": GOOD, "tests": {"code": code, "tests": True}}
    assert prove(tmp_path / "out", stages)[0] == 1
    found = results(tmp_path / "out")["tests"]
    assert found["figures"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert found["reason"] == "exit code 1: m.bad: assert 1 == 2"
    assert found["details"]["skipped"] == {"needs two GPUs": 1}


def test_only_and_continue_keep_what_is_there(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert prove(out, {"environment": GOOD, "one": GOOD, "two": BAD})[0] == 1
    began = {name: stage["began"] for name, stage in results(out).items()}
    now_good = {"environment": GOOD, "one": GOOD, "two": GOOD}
    code, stdout, _ = prove(out, now_good, "--only", "one")
    assert code == 1 and "two*" in stdout  # an earlier failure stays one
    assert results(out)["one"]["began"] > began["one"]
    assert results(out)["two"]["began"] == began["two"]
    began = {name: stage["began"] for name, stage in results(out).items()}
    assert prove(out, now_good, "--continue")[0] == 0
    assert results(out)["one"]["began"] == began["one"]
    assert results(out)["two"]["began"] > began["two"]
    prove(out, {"environment": GOOD, "one": BAD, "two": GOOD})  # all of them, anew
    assert results(out)["two"]["began"] > began["two"]
    assert results(out)["one"]["outcome"] == "failed"


def test_the_stages_name_files_and_options_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from proof.stages import STAGES

    assert len({stage.name for stage in STAGES}) == len(STAGES)
    checked = 0
    for command in [c for stage in STAGES for c in (stage.on_gpu, stage.on_cpu) if c]:
        assert 0 <= command.expected_seconds < command.limit_seconds
        module = [word for word in command.words if word.startswith("proof.")]
        files = [word for word in command.words if word.endswith(".py")]
        files += [f"tools/{word.replace('.', '/')}.py" for word in module]
        for name in files:
            text = (ROOT / name).read_text(encoding="utf-8")
            if name.startswith("tests/"):
                continue
            own = command.words[command.words.index(module[0] if module else name) + 1 :]
            for word in own:
                if word.startswith("--"):
                    assert f'"{word.split("=")[0]}"' in text, f"{name} has no {word}"
                    checked += 1
    assert checked > 50


def test_the_stages_and_their_limits_are_those_of_the_docs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from proof.stages import STAGES
    from proof.steps import BOUNDS

    docs = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\d+) \|.*\|$", docs, re.MULTILINE)
    assert rows == [(stage.name, f"{stage.on_gpu.limit_seconds:g}") for stage in STAGES]
    for dtype, bounds in BOUNDS.items():
        (row,) = re.findall(rf"^\| {dtype}, at most \|(.*)\|$", docs, re.MULTILINE)
        found = [float(cell) for cell in row.split("|")]
        assert found == [bounds.loss, bounds.norm, bounds.tensor, bounds.median]


@pytest.mark.parametrize(
    ("device", "options", "message"),
    [
        ("cpu", ["--only", "nine"], "error: --only nine: there is no such stage"),
        ("cuda", [], "error: torch sees no GPU here"),
        ("cuda", ["--continue"], "holds results of another device"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, device: str, options: list[str], message: str
) -> None:
    stages = {"environment": {"code": REPORT % ("{'gpus': 0}", "[]")}, "one": GOOD}
    if "--continue" in options:
        prove(tmp_path / "out", stages)
    code, _, stderr = prove(tmp_path / "out", stages, *options, device=device)
    assert code == 2
    assert message in stderr and stderr.count("\n") == 1
