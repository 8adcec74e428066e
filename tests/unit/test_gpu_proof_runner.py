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
REPORT = "import json; print(json.dumps({'figures': %s, 'problems': %s, 'details': {}}))"
GOOD = REPORT % ("{'figure': 1.5}", "[]")
BAD = REPORT % ("{'figure': 2.5}", "['norm: relative error 0.5, bound 0.1']")
DIVERGED = (REPORT % ("{'loss': float('nan'), 'norm': 1.0}", "[]")).replace(
    "'details': {}", "'details': {'losses': [float('inf'), 2.0]}"
)
SECOND = """
import json, os, pathlib
found = json.loads((pathlib.Path(os.environ["OUT"]) / "gpu_proof.json").read_text())["stages"]
figures = {"stages": len(found), "earlier": found[0]["figures"]["figure"]}
print(json.dumps({"figures": figures, "problems": []}))
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
SRUN = """
while [[ $1 == --* ]]; do
  for pair in $(tr , ' ' <<<"${1#--export=ALL,}"); do [[ $pair == --* ]] || export "$pair"; done
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

Stages = dict[str, str | dict[str, Any]]  # its code, or also its method and what it needs


def start(out: Path, stages: Stages, *options: str, device: str = "cpu") -> subprocess.Popen[str]:
    """The proof of stages that are pieces of Python."""
    out.mkdir(exist_ok=True)
    text = "from proof.test_stages import needs\n"
    for name, given in {"environment": GOOD, **stages}.items():
        needs = {"code": given} if isinstance(given, str) else dict(given)
        method, code = needs.pop("method", "run"), needs.pop("code", GOOD)
        words = "-c " + shlex.quote(code)
        if method == "run_tests":
            words = str(out.parent / f"test_of_{name}.py")
            Path(words).write_text(code)
        needs = {"seconds": 0, "limit": 60, "modules": (), "gpus": 0, **needs}
        text += STAGE.format(needs=needs, name=name, method=method, words=words)
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


def left_running(out: Path) -> list[int]:
    """Which of the processes that `SLEEPER` started are still there."""
    return [pid for pid in map(int, (out / "pids").read_text().split()) if psutil.pid_exists(pid)]


@pytest.mark.slow
def test_every_outcome_has_its_reason_and_the_next_stage_runs(tmp_path: Path) -> None:
    """And its result is on disk before."""
    missing = "exit code 1: ModuleNotFoundError: No module named 'torch_that_is_not_there'"
    no_test = {"method": "run_tests", "code": TESTS.replace("def test_b", "def b")}
    outcomes: dict[str, tuple[Any, str, str]] = {
        "second": (SECOND, "passed", ""),
        "beyond": (BAD, "failed", "norm: relative error 0.5, bound 0.1"),
        "crash": ("import torch_that_is_not_there", "failed", missing),
        "silent": ("print('no report')", "failed", "it printed no figures"),
        "diverged": (DIVERGED, "failed", "loss is NaN"),
        "tests": (
            {"method": "run_tests", "code": TESTS},
            "failed",
            "test_of_tests.py::test_bad - AssertionError: more",
        ),
        "package": ({"modules": ["json", "no_such_package"]}, "left out", "needs no_such_package"),
        "gpu": ({"cpu": False}, "left out", "needs a GPU"),
        "skipped": (no_test, "left out", "needs two GPUs"),
        "slow": ({"seconds": 7200}, "left out", " s are left"),
        "last": (GOOD, "passed", ""),
    }
    stages: Stages = {name: stage for name, (stage, _, _) in outcomes.items()}
    code, stdout, _ = prove(tmp_path / "out", stages)
    assert code == 1
    whole, found = summary(tmp_path / "out"), results(tmp_path / "out")
    for name, (_, outcome, reason) in outcomes.items():
        assert found[name]["outcome"] == outcome and found[name]["reason"].endswith(reason)
        assert found[name]["proves"] == f"that {name} runs"
    assert whole["outcome"] == "failed" and list(whole["left_out"])[-1] == "slow"
    assert whole["failed"] == [n for n, (_, outcome, _) in outcomes.items() if outcome == "failed"]
    assert found["second"]["figures"] == {"stages": 1, "earlier": 1.5}
    assert found["beyond"]["figures"] == {"figure": 2.5} and "figure 1.5" in stdout
    assert found["diverged"]["figures"] == {"norm": 1.0}
    assert found["diverged"]["details"]["losses"] == ["Infinity", 2.0]
    assert found["tests"]["figures"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert f"FAILED: crash: {missing}" in stdout and "logs/crash.err" in stdout
    assert "left out, so not proved: package, gpu, skipped, slow" in stdout


@pytest.mark.slow
def test_what_a_stage_started_ends_with_it(tmp_path: Path) -> None:
    late = {"code": SLEEPER + "time.sleep(300)", "limit": 1.5}
    assert prove(tmp_path / "out", {"late": late, "untidy": SLEEPER + GOOD})[0] == 1
    found = results(tmp_path / "out")
    assert found["late"]["reason"] == "killed after 2 s, with all it had started"
    assert found["untidy"]["outcome"] == "passed"
    assert left_running(tmp_path / "out") == []


@pytest.mark.slow
def test_a_stopped_proof_leaves_nothing_running(tmp_path: Path) -> None:
    process = start(tmp_path / "out", {"long": SLEEPER + "time.sleep(300)"})
    pids, deadline = tmp_path / "out/pids", time.monotonic() + 30
    while not pids.exists() or not pids.read_text().strip():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 143
    assert left_running(tmp_path / "out") == []
    assert list(results(tmp_path / "out")) == ["environment"]
    assert [path.name for path in tmp_path.glob("opsft-*")] == []


@pytest.mark.slow
def test_the_time_of_all_stages_is_bounded(tmp_path: Path) -> None:
    stages: Stages = {"long": "import time; time.sleep(300)", "last": GOOD}
    assert prove(tmp_path / "out", stages, "--minutes", "0.1")[0] == 1
    found = results(tmp_path / "out")
    assert found["long"]["outcome"] == "failed" and found["long"]["seconds"] < 10
    assert found["last"]["reason"] == "no time: takes about 0 s, 0 s are left"


@pytest.mark.slow
def test_only_and_continue_keep_what_is_there(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def began(stages: Stages, *options: str) -> tuple[int, dict[str, float]]:
        code, _, _ = prove(out, stages, *options)
        return code, {name: stage["began"] for name, stage in results(out).items()}

    code, first = began({"one": GOOD, "two": BAD, "three": {"seconds": 7200}})
    good: Stages = {"one": GOOD, "two": GOOD, "three": GOOD}
    code, only = began(good, "--only", "one")
    assert code == 1 and only["one"] > first["one"] and only["two"] == first["two"]
    code, rest = began(good, "--continue")  # what was left out is not proved yet
    assert code == 0 and results(out)["three"]["outcome"] == "passed"
    assert rest["one"] == only["one"] and rest["two"] > only["two"]
    code, anew = began({"one": BAD, "two": GOOD})
    assert code == 1 and anew["two"] > rest["two"]


def stages_of_the_proof(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from proof import test_stages

    return {n.removeprefix("test_"): t for n, t in vars(test_stages).items() if n[:5] == "test_"}


def test_the_docs_name_every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    docs = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .*\? \| (`.*) \|$", docs, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(stages_of_the_proof(monkeypatch))


def test_on_a_gpu_the_stages_name_files_and_options_that_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU tests/gloo/test_gpu_proof.py runs them."""

    def ask(words: str, ranks: int = 1) -> None:
        raise InterruptedError(words)

    stage: Any = SimpleNamespace(device="cuda", on_gpu=True, run=ask, run_tests=ask)
    stage.run_on_2_nodes = ask
    for test in stages_of_the_proof(monkeypatch).values():
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


@pytest.mark.parametrize("preset", ["r1_distill_1p5b_paper", "r1_distill_7b_paper"])
def test_the_presets_take_what_the_proof_sets(monkeypatch: pytest.MonkeyPatch, preset: str) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests/gpu"))
    from test_runs_gpu import CAPPED

    config = load_config(ROOT / f"examples/configs/{preset}.yaml", CAPPED)
    assert config.rollout.max_response_tokens == 512 and config.eval.data is None


def test_quick_runs_no_vllm_and_fits_into_6_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = [t.pytestmark[0].kwargs for t in stages_of_the_proof(monkeypatch).values()]
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
    (tmp_path / "bin").mkdir()
    for name, text in {"srun": SRUN, "scontrol": "echo n1; echo n2"}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}")
        (tmp_path / "bin" / name).chmod(0o755)
    code = (
        "import json, os; world = int(os.environ['WORLD_SIZE']), os.environ['RANK'] in '01'; "
        "print(json.dumps({'figures': {'world': world[0]}, 'problems': [] if world[1] "
        "and os.environ['MASTER_ADDR'] == 'n1' else ['address']}))"
    )
    stages: Stages = {"nodes": {"code": code, "method": "run_on_2_nodes", "nodes": 2}}
    assert prove(tmp_path / "out", stages)[0] == 0
    assert results(tmp_path / "out")["nodes"]["reason"] == "needs a SLURM job of 2 nodes"
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    assert prove(tmp_path / "out", stages)[0] == 0
    assert results(tmp_path / "out")["nodes"]["figures"] == {"world": 2}


@pytest.mark.slow
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
