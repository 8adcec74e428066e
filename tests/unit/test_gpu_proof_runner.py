"""How tools/gpu_proof.sh runs stages, on small ones; its own: tests/gloo/test_gpu_proof.py."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from forked_cli import ROOT

from megatron_opsft.config.load import load_config

MAIN = "import pathlib, sys, gpu_proof; gpu_proof.main(pathlib.Path(sys.argv.pop(1)))"
REPORT = "import json; print(json.dumps({'figures': {'figure': %s}, 'problems': %s}))"
GOOD, NAN = REPORT % ("1.5", "[]"), REPORT % ("float('nan')", "[]")
BAD = REPORT % ("2.5", "['norm: relative error 0.5, bound 0.1']")
SECOND = """
import json, os, pathlib
found = json.loads((pathlib.Path(os.environ["OUT"]) / "gpu_proof.json").read_text())["stages"]
print(json.dumps({"figures": found[0]["figures"] | {"stages": len(found)}, "problems": []}))
"""
TESTS = """
import pytest
def test_bad(): assert 1 == 2, "more"
def test_besides(): pass
def test_off(): pytest.skip("needs two GPUs")
"""
SLEEPER = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"],
                         start_new_session=True)
print(child.pid, file=open(os.environ["OUT"] + "/pids", "a"), flush=True)
"""
LATE = SLEEPER + "time.sleep(300)"
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do
  [[ $1 != --export=* ]] || export $(tr , ' ' <<<"${1#--export=ALL,}")
  shift
done
for rank in 0 1; do SLURM_PROCID=$rank SLURM_NTASKS=2 SLURM_LOCALID=0 "$@" & done
wait
"""
STAGE = """
@needs(**{needs})
def test_{name}(stage):
    '''that {name} runs'''
    stage.{method}({words!r})
"""

Stages = dict[str, Any]  # of each its code, or a dict: also its method and what it needs


def start(out: Path, stages: Stages, *options: str, device: str = "cpu") -> subprocess.Popen[str]:
    """The proof of stages that are pieces of Python."""
    out.mkdir(exist_ok=True)
    text = "from proof.test_stages import needs\n"
    for name, given in {"environment": GOOD, **stages}.items():
        needs = {"seconds": 0, "limit": 60, "modules": (), "gpus": 0, "code": GOOD, "method": "run"}
        needs |= {"code": given} if isinstance(given, str) else given
        method, code = needs.pop("method"), str(needs.pop("code"))
        words = "-c " + shlex.quote(code)
        if method == "run_tests":
            words = str(out.parent / f"test_of_{name}.py")
            Path(words).write_text(code)
        text += STAGE.format(needs=needs, name=name, method=method, words=words)
    file = out.parent / "test_made_stages.py"
    file.write_text(text)
    words = [sys.executable, "-c", MAIN, str(file), "--device", device, *options]
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tools'}"}
    env |= {"OUT": str(out), "TMPDIR": str(out.parent)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(words, env=env, text=True, **pipes)


def prove(out: Path, *given: Any, **device: str) -> tuple[int, str, str, dict[str, dict[str, Any]]]:
    """Of what is started: exit code, standard output, standard error, and the results by stage."""
    process = start(out, *given, **device)
    stdout, stderr = process.communicate(timeout=60)
    return process.returncode, stdout, stderr, results(out)


def results(out: Path) -> dict[str, dict[str, Any]]:
    stages = json.loads((out / "gpu_proof.json").read_text())["stages"]
    return {stage["name"]: stage for stage in stages}


def left_running(out: Path) -> list[int]:
    """Which of the processes that `SLEEPER` started are still there."""
    return [pid for pid in map(int, (out / "pids").read_text().split()) if psutil.pid_exists(pid)]


@pytest.mark.slow
def test_every_outcome_has_its_reason_and_the_next_stage_runs(tmp_path: Path) -> None:
    """And its result is on disk before."""
    missing = "exit code 1: ModuleNotFoundError: No module named 'torch_that_is_not_there'"
    bad, no_test = "test_of_tests.py::test_bad", TESTS.replace("def test_b", "def b")
    outcomes: dict[str, tuple[Any, str, str]] = {
        "second": (SECOND, "passed", ""),
        "beyond": (BAD, "failed", "norm: relative error 0.5, bound 0.1"),
        "crash": ("import torch_that_is_not_there", "failed", missing),
        "silent": ("print('no report')", "failed", "it printed no figures"),
        "diverged": (NAN, "failed", "figure is NaN"),
        "tests": (
            {"method": "run_tests", "code": TESTS},
            "failed",
            f"{bad} - AssertionError: more",
        ),
        "package": ({"modules": ["json", "no_such_package"]}, "left out", "needs no_such_package"),
        "gpu": ({"cpu": False}, "left out", "needs a GPU"),
        "skipped": ({"method": "run_tests", "code": no_test}, "left out", "needs two GPUs"),
        "nodes": ({"nodes": 2}, "left out", "needs a SLURM job of 2 nodes"),
        "slow": ({"seconds": 7200}, "left out", " s are left"),
        "last": (GOOD, "passed", ""),
    }
    stages = {name: stage for name, (stage, _, _) in outcomes.items()}
    code, stdout, _, found = prove(tmp_path / "out", stages)
    assert code == 1
    for name, (_, outcome, reason) in outcomes.items():
        assert found[name]["outcome"] == outcome and found[name]["reason"].endswith(reason)
        assert found[name]["proves"] == f"that {name} runs"
    assert found["second"]["figures"] == {"stages": 1, "figure": 1.5}
    assert found["beyond"]["figures"] == {"figure": 2.5} and "figure 1.5" in stdout
    assert found["tests"]["figures"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert f"FAILED: crash: {missing}" in stdout and "logs/crash.err" in stdout
    assert "left out, so not proved: package, gpu, skipped, nodes, slow" in stdout


@pytest.mark.slow
def test_what_a_stage_started_ends_with_it_and_all_stages_with_their_time(tmp_path: Path) -> None:
    stages = {"late": {"code": LATE, "limit": 1.5}, "untidy": SLEEPER + GOOD}
    stages |= {"long": LATE, "last": GOOD}
    code, _, _, found = prove(tmp_path / "out", stages, "--minutes", "0.15")
    assert code == 1
    assert found["late"]["reason"] == "killed after 2 s, with all it had started"
    assert found["untidy"]["outcome"] == "passed"
    assert found["long"]["outcome"] == "failed" and found["long"]["seconds"] < 9
    assert found["last"]["reason"] == "no time: takes about 0 s, 0 s are left"
    assert left_running(tmp_path / "out") == []


@pytest.mark.slow
def test_a_stopped_proof_leaves_nothing_running(tmp_path: Path) -> None:
    process = start(tmp_path / "out", {"long": LATE})
    pids, deadline = tmp_path / "out/pids", time.monotonic() + 30
    while not pids.exists() or not pids.read_text().strip():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 143 and left_running(tmp_path / "out") == []
    assert list(results(tmp_path / "out")) == ["environment"] and not [*tmp_path.glob("opsft-*")]


@pytest.mark.slow
def test_only_and_continue_keep_what_is_there_and_bad_input_is_one_line(tmp_path: Path) -> None:
    def began(stages: Stages, *options: str) -> tuple[int, dict[str, float]]:
        code, _, _, found = prove(tmp_path / "out", stages, *options)
        return code, {name: stage["began"] for name, stage in found.items()}

    _, first = began({"one": GOOD, "two": BAD, "three": {"seconds": 7200}})
    good = dict.fromkeys(("one", "two", "three"), GOOD)
    code, only = began(good, "--only", "one")
    assert code == 1 and only["one"] > first["one"] and only["two"] == first["two"]
    code, rest = began(good, "--continue")  # what was left out is not proved yet
    assert code == 0 and rest["three"] > only["three"]
    assert rest["one"] == only["one"] and rest["two"] > only["two"]
    code, anew = began({"one": BAD, "two": GOOD})
    assert code == 1 and anew["two"] > rest["two"]
    for device, option, error in (
        ("cpu", "--only=nine", "error: --only nine: there is no such stage"),
        ("cuda", "--continue", "holds results of another device"),
        ("cuda", "--quick", "error: torch sees no GPU here"),
    ):
        stages = {"environment": REPORT.replace("figure'", "gpus'") % ("0", "[]")}
        code, _, stderr, _ = prove(tmp_path / "out", stages, option, device=device)
        assert code == 2 and error in stderr and stderr.count("\n") == 1


@pytest.fixture
def proof(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The stages of the real proof."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from proof import test_stages

    return {n.removeprefix("test_"): t for n, t in vars(test_stages).items() if n[:5] == "test_"}


def test_on_a_gpu_the_stages_name_files_and_options_that_are_there(
    proof: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU tests/gloo/test_gpu_proof.py runs them. The docs name all of them, and presets take
    what their runs set.
    """
    docs = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .*\? \| (`.*) \|$", docs, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(proof)

    def ask(words: str, ranks: int = 1) -> None:
        raise InterruptedError(words)

    methods = dict.fromkeys(("run", "run_tests", "run_on_2_nodes"), ask)
    stage: Any = SimpleNamespace(device="cuda", on_gpu=True, **methods)
    for test in proof.values():
        with pytest.raises(InterruptedError) as asked:
            test(stage, *[monkeypatch] * ("monkeypatch" in test.__code__.co_varnames))
        name, *words = str(asked.value).removeprefix("-m ").split()
        file = name if "/" in name else f"tools/{name.replace('.', '/')}.py"
        text = (ROOT / file).read_text(encoding="utf-8")
        if "from ranks import" in text:
            text += (ROOT / "benchmarks/ranks.py").read_text(encoding="utf-8")
        options = [word.split("=")[0] for word in words if word.startswith("--")]
        assert all(f'"{option}"' in text for option in options), f"{file}: {options}"
        if "-k" in words:
            assert re.search(rf"^def test_\w*{words[-1]}", text, re.MULTILINE), words
    monkeypatch.syspath_prepend(str(ROOT / "tests/gpu"))
    from test_runs_gpu import CAPPED

    for preset in ("r1_distill_1p5b_paper", "r1_distill_7b_paper"):
        load_config(ROOT / f"examples/configs/{preset}.yaml", CAPPED)


def test_quick_runs_no_vllm_and_fits_into_6_minutes(proof: dict[str, Any]) -> None:
    marks = [test.pytestmark[0].kwargs for test in proof.values()]
    quick = [needs for needs in marks if needs["quick"]]
    modules = {name for needs in quick for name in needs["modules"]}
    assert "megatron" in modules and not modules & {"vllm", "transformer_engine"}
    assert sum(needs["seconds"] for needs in quick) < 6 * 60
    one_gpu = [each for each in marks if each["gpus"] < 2 and each["nodes"] == 1]
    assert sum(needs["seconds"] for needs in one_gpu) <= 25 * 60
    assert all(needs["fix"] for needs in marks)


@pytest.mark.slow
def test_a_stage_on_two_nodes_is_started_by_srun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/bash\necho n1; echo n2"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    code = "import os; assert os.environ['RANK'] in '01' and os.environ['MASTER_ADDR'] == 'n1'\n"
    code += REPORT % ("int(os.environ['WORLD_SIZE'])", "[]")
    stages = {"nodes": {"code": code, "method": "run_on_2_nodes", "nodes": 2}}
    ended, _, _, found = prove(tmp_path / "out", stages)
    assert ended == 0 and found["nodes"]["figures"] == {"figure": 2}
