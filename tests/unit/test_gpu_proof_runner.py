"""How tools/gpu_proof.sh runs stages, on small ones; its own: tests/gloo/test_gpu_proof.py."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from forked_cli import ROOT
from processes import python_path

from megatron_opsft.config.load import load_config

MAIN = "import pathlib, sys, gpu_proof; gpu_proof.main(pathlib.Path(sys.argv.pop(1)))"
REPORT = "import json; print(json.dumps({'figures': {'figure': %s}, 'problems': %s}))"
GOOD, NAN = REPORT % ("1.5", "[]"), REPORT % ("float('nan')", "[]")
BAD = REPORT % ("2.5", "['norm: relative error 0.5, bound 0.1']")
# As torchrun, which names the error that it ends with after those of its ranks.
ON_RANKS = """
import sys, traceback
try:
    %s
except ImportError:
    sys.stderr.write(traceback.format_exc().replace("\\n", "\\n[rank1]: "))
    sys.exit("torch.distributed.elastic.multiprocessing.errors.ChildFailedError:")
"""
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
    text = "from proof.stages import needs\n"
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
    env = os.environ | {
        "PYTHONPATH": python_path(ROOT, ROOT / "tools", ROOT / "tests/gpu", ROOT / "tests/support")
    }
    env |= {"OUT": str(out), "TMPDIR": str(out.parent), "CALLED_FROM": str(out.parent)}
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
    broken = "exit code 1: ModuleNotFoundError: No module named 'email.no_part'"
    bad, no_test = "test_of_tests.py::test_bad", TESTS.replace("def test_b", "def b")
    outcomes: dict[str, tuple[Any, str, str]] = {
        "second": (SECOND, "passed", ""),
        "beyond": (BAD, "failed", "norm: relative error 0.5, bound 0.1"),
        "crash": ("raise OSError('no room')", "failed", "exit code 1: OSError: no room"),
        "broken": ("import email.no_part", "failed", broken),
        "own": ("import hf_referense", "failed", "No module named 'hf_referense'"),
        "lacks": ("import transformer_engine", "left out", "needs transformer_engine"),
        "ranks": (ON_RANKS % "import transformer_engine", "left out", "needs transformer_engine"),
        "lacks_too": (
            {"method": "run_tests", "code": "import transformer_engine"},
            "left out",
            "needs transformer_engine",
        ),
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
    assert "FAILED: crash: exit code 1: OSError" in stdout and "logs/crash.err" in stdout
    assert "not proved: lacks, ranks, lacks_too, package, gpu, skipped, nodes, slow" in stdout


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
def test_a_proof_goes_on_elsewhere_from_the_results_of_its_bundle(tmp_path: Path) -> None:
    """As on a machine that empties the folder of results and brings few files back."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    stages = {"one": GOOD, "two": BAD, "three": {"seconds": 7200}}
    code, stdout, _, first = prove(here / "out", stages, "--bundle", "found.tgz")
    assert code == 1
    with tarfile.open(here / "found.tgz") as bundle:
        bundle.extractall(there, filter="data")
    bundled = there / "found"
    assert (bundled / "gpu_proof.json").read_bytes() == (here / "out/gpu_proof.json").read_bytes()
    assert (bundled / "table.txt").read_text().strip() in stdout
    assert json.loads((bundled / "logs/two.out").read_text())["figures"] == {"figure": 2.5}
    assert sorted(path.name for path in here.iterdir() if path.name.startswith(".")) == []
    words = ["--continue", "found/gpu_proof.json", "--bundle", "found.tgz"]
    code, _, _, found = prove(there / "out", dict.fromkeys(stages, GOOD), *words)
    assert code == 0
    assert found["one"] == first["one"]  # had passed, and is not run again
    assert found["two"]["outcome"] == found["three"]["outcome"] == "passed"
    # An earlier version said nothing to the user.
    older = json.loads((bundled / "gpu_proof.json").read_text())
    del older["stages"][1]["says"]
    (there / "older.json").write_text(json.dumps(older))
    code, stdout, _, _ = prove(there / "out", stages, "--continue=older.json", "--only=one")
    assert code == 1 and "FAILED: two: norm" in stdout
    (there / "foreign.json").write_text('{"device": "cpu", "stages": [{"name": "one"}]}')
    for word, error in (
        ("--continue=no.json", "no.json: there is no such file"),
        ("--continue=foreign.json", "foreign.json is no gpu_proof.json of this version"),
        ("--bundle=no/found.tgz", "in a folder that can be written to"),
        ("--bundle=found", "must be a file"),
    ):
        code, _, stderr, _ = prove(there / "out", stages, word)
        assert code == 2 and error in stderr and stderr.count("\n") == 1


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
        ("cuda", "--continue", "holds results of --device cpu, not of cuda"),
        ("cuda", "--quick", "error: torch sees no GPU here"),
    ):
        stages = {"environment": REPORT.replace("figure'", "gpus'") % ("0", "[]")}
        code, _, stderr, _ = prove(tmp_path / "out", stages, option, device=device)
        assert code == 2 and error in stderr and stderr.count("\n") == 1


@pytest.fixture
def proof(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The stages of the real proof."""
    monkeypatch.syspath_prepend(str(ROOT / "tests/gpu"))
    from proof import stages

    return {n.removeprefix("test_"): t for n, t in vars(stages).items() if n[:5] == "test_"}


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
        file = name if "/" in name else f"tests/gpu/{name.replace('.', '/')}.py"
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


def imported_by(module: str) -> set[str]:
    """Packages that must be there for a module of this project to be imported: what it and all
    that it imports name outside of functions.
    """
    packages: set[str] = set()
    seen, waiting = set(), [module]
    while waiting:
        name = waiting.pop()
        path = ROOT.joinpath(*name.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if name in seen or not path.is_file():
            continue
        seen.add(name)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names] + [str(node.module)]
            else:
                continue
            waiting += [name for name in names if name.startswith("megatron_opsft")]
            packages |= {name.partition(".")[0] for name in names}
    return packages - sys.stdlib_module_names - {"megatron_opsft"}


@pytest.mark.parametrize(
    ("stage", "module"),
    [
        ("quickstart", "megatron_opsft.run.train"),
        ("kill_and_resume", "megatron_opsft.commands.cli"),
        ("evaluation", "megatron_opsft.commands.evaluate.run"),
        ("convert_speed", "megatron_opsft.commands.convert.run"),
    ],
)
def test_a_stage_names_every_package_that_it_imports(
    proof: dict[str, Any], stage: str, module: str
) -> None:
    """Else it would fail where it should be left out."""
    needs = proof[stage].pytestmark[0].kwargs
    named = {name.partition(".")[0] for name in needs["modules"]}
    assert imported_by(module) <= named


def test_quick_runs_no_vllm_and_fits_into_6_minutes(proof: dict[str, Any]) -> None:
    marks = [test.pytestmark[0].kwargs for test in proof.values()]
    quick = [needs for needs in marks if needs["quick"]]
    modules = {name for needs in quick for name in needs["modules"]}
    assert "megatron" in modules and not modules & {"vllm", "transformer_engine"}
    assert sum(needs["seconds"] for needs in quick) < 6 * 60
    one_gpu = [each for each in marks if each["gpus"] < 2 and each["nodes"] == 1]
    assert sum(needs["seconds"] for needs in one_gpu) <= 34 * 60
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
