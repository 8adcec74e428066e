"""How tools/gpu_proof.sh runs stages, on small ones; its own: tests/gloo/test_gpu_proof.py."""

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

MAIN = "import pathlib, sys, gpu_proof; gpu_proof.main(pathlib.Path(sys.argv.pop(1)))"
REPORT = "import json; print(json.dumps({'figures': %s, 'problems': %s, 'details': {}}))"
GOOD = REPORT % ("{'figure': 1.5}", "[]")
BAD = REPORT % ("{'figure': 2.5}", "['norm: relative error 0.5, bound 0.1']")
SLEEPER = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"],
                         start_new_session=True)
print(child.pid, file=open(os.environ["OUT"] + "/pid", "w"), flush=True)
"""
STAGE = """
@needs({needs})
def test_{name}(stage):
    '''that {name} runs'''
    stage.{act}
"""

Stages = dict[str, str | dict[str, Any]]  # its code, or also what it needs


def start(out: Path, stages: Stages, *options: str, device: str = "cpu") -> subprocess.Popen[str]:
    """The proof of stages that are pieces of Python."""
    out.mkdir(exist_ok=True)
    text = "import shlex\nfrom proof.test_stages import needs\n"
    for name, given in {"environment": GOOD, **stages}.items():
        wanted = {"code": given} if isinstance(given, str) else dict(given)
        if code := wanted.pop("code", GOOD):
            act = f"run('-c ' + shlex.quote({code!r}))"
        else:
            (out.parent / "test_of_stage.py").write_text(wanted.pop("tests"))
            act = f"run_tests({str(out.parent / 'test_of_stage.py')!r})"
        wanted = {"seconds": 0, "limit": 60, "modules": (), "gpus": 0, **wanted}
        needs = ", ".join(f"{key}={value!r}" for key, value in wanted.items())
        text += STAGE.format(needs=needs, name=name, act=act)
    file = out.parent / "test_made_stages.py"
    file.write_text(text)
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tools")])
    return subprocess.Popen(
        [sys.executable, "-c", MAIN, str(file), "--device", device, *options],
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


def summary(out: Path) -> dict[str, Any]:
    return json.loads((out / "gpu_proof.json").read_text())


def results(out: Path) -> dict[str, dict[str, Any]]:
    return {stage["name"]: stage for stage in summary(out)["stages"]}


def lives(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_every_outcome_has_its_reason_and_the_next_stage_runs(tmp_path: Path) -> None:
    tests = "import pytest\ndef test_a(): pytest.skip('needs X')"
    stages: Stages = {
        "good": GOOD,
        "beyond": BAD,
        "crash": "import torch_that_is_not_there",
        "silent": "print('no report')",
        "package": {"modules": ["json", "no_such_package"]},
        "gpu": {"cpu": False},
        "skipped": {"code": "", "tests": tests},
        "slow": {"seconds": 7200},
        "last": GOOD,
    }
    code, stdout, _ = prove(tmp_path / "out", stages)
    assert code == 1
    found = results(tmp_path / "out")
    failed, left_out = ["beyond", "crash", "silent"], ["package", "gpu", "skipped", "slow"]
    for name, stage in found.items():
        outcome = "failed" if name in failed else "left out" if name in left_out else "passed"
        assert stage["outcome"] == outcome and stage["proves"] == f"that {name} runs"
    assert found["good"]["figures"] == {"figure": 1.5} and "figure 1.5" in stdout
    assert found["beyond"]["figures"] == {"figure": 2.5}
    assert found["beyond"]["reason"] == "norm: relative error 0.5, bound 0.1"
    missing = "exit code 1: ModuleNotFoundError: No module named 'torch_that_is_not_there'"
    assert found["crash"]["reason"] == missing
    assert found["silent"]["reason"] == "it printed no figures"
    assert f"FAILED: crash: {missing}" in stdout and "logs/crash.err" in stdout
    whole = summary(tmp_path / "out")
    assert (whole["outcome"], whole["failed"]) == ("failed", failed)
    slow = whole["left_out"].pop("slow")
    assert slow.startswith("no time: takes about 7200 s, 1") and slow.endswith(" s are left")
    assert whole["left_out"] == {
        "package": "needs no_such_package",
        "gpu": "needs a GPU",
        "skipped": "needs X",
    }
    assert "left out, so not proved: package, gpu, skipped, slow" in stdout


def test_a_result_is_on_disk_before_the_next_stage_begins(tmp_path: Path) -> None:
    code = """
import json, os, pathlib
found = json.loads((pathlib.Path(os.environ["OUT"]) / "gpu_proof.json").read_text())["stages"]
figures = {"stages": len(found), "earlier": found[0]["figures"]["figure"]}
print(json.dumps({"figures": figures, "problems": []}))
"""
    assert prove(tmp_path / "out", {"second": code})[0] == 0
    assert results(tmp_path / "out")["second"]["figures"] == {"stages": 1, "earlier": 1.5}
    assert summary(tmp_path / "out")["outcome"] == "passed"


def test_a_stage_beyond_its_limit_is_killed_with_all_it_started(tmp_path: Path) -> None:
    code = SLEEPER + "time.sleep(300)"
    stages: Stages = {"late": {"code": code, "limit": 1.5}, "last": GOOD}
    exit_code, stdout, _ = prove(tmp_path / "out", stages)
    assert exit_code == 1
    late = results(tmp_path / "out")["late"]
    assert late["outcome"] == "failed"
    assert late["reason"] == "killed after 2 s, with all it had started"
    assert not lives(int((tmp_path / "out/pid").read_text()))
    assert results(tmp_path / "out")["last"]["outcome"] == "passed"
    assert "FAILED: late" in stdout


def test_what_a_stage_leaves_running_is_ended(tmp_path: Path) -> None:
    assert prove(tmp_path / "out", {"untidy": SLEEPER + GOOD})[0] == 0
    assert not lives(int((tmp_path / "out/pid").read_text()))


def test_a_stopped_proof_leaves_nothing_running(tmp_path: Path) -> None:
    process = start(tmp_path / "out", {"long": SLEEPER + "time.sleep(300)"})
    pid, deadline = tmp_path / "out/pid", time.monotonic() + 30
    while not pid.exists() or not pid.read_text().strip():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 143
    assert not lives(int(pid.read_text()))
    assert {n: s["outcome"] for n, s in results(tmp_path / "out").items()} == {
        "environment": "passed"
    }
    assert [path.name for path in tmp_path.glob("opsft-*")] == []


def test_the_time_of_all_stages_is_bounded(tmp_path: Path) -> None:
    stages: Stages = {"long": "import time; time.sleep(300)", "last": GOOD}
    assert prove(tmp_path / "out", stages, "--minutes", "0.1")[0] == 1
    found = results(tmp_path / "out")
    assert found["long"]["outcome"] == "failed" and found["long"]["seconds"] < 10
    assert found["last"]["reason"] == "no time: takes about 0 s, 0 s are left"


def test_a_figure_that_is_no_number_fails_its_stage(tmp_path: Path) -> None:
    code = REPORT % ("{'loss': float('nan'), 'norm': 1.0}", "[]")
    code = code.replace("'details': {}", "'details': {'losses': [float('inf'), 2.0]}")
    assert prove(tmp_path / "out", {"diverged": code})[0] == 1
    found = results(tmp_path / "out")["diverged"]
    assert (found["figures"], found["reason"]) == ({"norm": 1.0}, "loss is NaN")
    assert found["details"]["losses"] == ["Infinity", 2.0]


def test_failing_tests_are_counted_and_named(tmp_path: Path) -> None:
    tests = """
import pytest
def test_good(): pass
def test_bad(): assert 1 == 2, "more"
def test_off(): pytest.skip("needs two GPUs")
"""
    stages: Stages = {"tests": {"code": "", "tests": tests}}
    assert prove(tmp_path / "out", stages)[0] == 1
    found = results(tmp_path / "out")["tests"]
    assert found["figures"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert found["reason"].startswith("exit code 1: ")
    assert found["reason"].endswith("test_of_stage.py::test_bad - AssertionError: more")
    assert found["details"]["skipped"] == ["needs two GPUs"]


def test_only_and_continue_keep_what_is_there(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert prove(out, {"one": GOOD, "two": BAD, "three": {"seconds": 7200}})[0] == 1
    began = {name: stage["began"] for name, stage in results(out).items()}
    now_good: Stages = {"one": GOOD, "two": GOOD, "three": GOOD}
    code, stdout, _ = prove(out, now_good, "--only", "one")
    assert code == 1 and "two*" in stdout  # an earlier failure stays one
    assert results(out)["one"]["began"] > began["one"]
    assert results(out)["two"]["began"] == began["two"]
    began = {name: stage["began"] for name, stage in results(out).items()}
    assert prove(out, now_good, "--continue")[0] == 0
    found = results(out)
    assert found["one"]["began"] == began["one"] and found["two"]["began"] > began["two"]
    assert found["three"]["outcome"] == "passed"  # what was left out is not proved yet
    prove(out, {"one": BAD, "two": GOOD})  # all of them, anew
    assert results(out)["two"]["began"] > found["two"]["began"]
    assert results(out)["one"]["outcome"] == "failed"


def test_the_stages_and_their_limits_are_those_of_the_docs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from proof import test_stages
    from proof.steps import BOUNDS

    tests = {n: t for n, t in vars(test_stages).items() if n.startswith("test_")}
    limits = [
        (name.removeprefix("test_"), mark.kwargs["limit"], mark.kwargs["seconds"])
        for name, test in tests.items()
        for mark in test.pytestmark
    ]
    assert all(0 <= seconds < limit for _, limit, seconds in limits)
    docs = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\d+) \|.*\|$", docs, re.MULTILINE)
    assert rows == [(name, f"{limit:g}") for name, limit, _ in limits]
    for dtype, bounds in BOUNDS.items():
        (row,) = re.findall(rf"^\| {dtype}, at most \|(.*)\|$", docs, re.MULTILINE)
        assert [float(cell) for cell in row.split("|")] == [*bounds.values()]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_stages_name_files_and_options_that_are_there(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from proof import test_stages

    class Asked(Exception):
        """What a stage would run."""

    class Asking:
        def __init__(self) -> None:
            self.device, self.on_gpu = device, device == "cuda"

        def run(self, words: str, ranks: int = 1) -> None:
            raise Asked(words)

        run_tests = run

    checked = 0
    for stage in [test for name, test in vars(test_stages).items() if name.startswith("test_")]:
        patch = [monkeypatch] * ("monkeypatch" in stage.__code__.co_varnames)
        with pytest.raises(Asked) as asked:
            stage(Asking(), *patch)
        words = str(asked.value).removeprefix("-m ").split()
        name = words[0] if "/" in words[0] else f"tools/{words[0].replace('.', '/')}.py"
        text = (ROOT / name).read_text(encoding="utf-8")
        options = [word.split("=")[0] for word in words if word.startswith("--")]
        assert all(f'"{option}"' in text for option in options), f"{name} has not all of {options}"
        checked += len(options)
    assert checked > 30


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
    stages: Stages = {"environment": REPORT % ("{'gpus': 0}", "[]"), "one": GOOD}
    if "--continue" in options:
        prove(tmp_path / "out", stages)
    code, _, stderr = prove(tmp_path / "out", stages, *options, device=device)
    assert code == 2
    assert message in stderr and stderr.count("\n") == 1
