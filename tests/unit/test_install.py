"""What the install scripts take: tested versions that fit the ranges, PyTorch's CPU build first;
and every script of tools/ and benchmarks/ explains itself, and does nothing else when asked for
--help.
"""

import os
import runpy
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from forked_cli import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name as canonical

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SETS = {
    "cpu-py311": ("cpu", "test"),
    "cpu-py312": ("cpu", "test"),
    "cpu-py313": ("cpu", "test"),
    "gpu-py312": ("gpu", "test"),
}

# Stands for the environment's Python: its pip writes down what is asked for. `$INDEX` says whether
# PyTorch's index answers, `$NEEDS` what torch of pip's own index requires.
PYTHON = """#!/bin/bash
case "$*" in
*importlib.metadata*) exit 1 ;;
*version_info*) echo py399 ;;
--version) echo "Python 3.99" ;;
*json.load*) python3 "$@" ;;
*--report*) echo "{\\"install\\": [{\\"metadata\\": {\\"requires_dist\\": [\\"$NEEDS\\"]}}]}" ;;
*--index-url*) echo "$@" >>"$ASKED"; exit "$INDEX" ;;
*) echo "$@" >>"$ASKED" ;;
esac
"""


@pytest.mark.parametrize("name", SETS)
def test_tested_versions_fit_the_ranges(name: str) -> None:
    lines = (ROOT / f"constraints/{name}.txt").read_text().splitlines()
    pins = (line.split("==") for line in lines if not line.startswith("#"))
    pinned = {canonical(package): version for package, version in pins}
    extras = [need for extra in SETS[name] for need in PROJECT["optional-dependencies"][extra]]
    for need in map(Requirement, [*PROJECT["dependencies"], *extras]):
        is_needed = not need.marker or need.marker.evaluate({"python_version": f"3.{name[-2:]}"})
        if is_needed and need.name != "setuptools":  # which pip freeze leaves out
            assert need.specifier.contains(pinned[canonical(need.name)]), need
    compiler = (pinned.get(f"nvidia-{part}", "") for part in ("cuda-nvcc", "cuda-crt", "nvvm"))
    assert len({version.rpartition(".")[0] for version in compiler}) == 1


def test_the_container_copies_what_is_there() -> None:
    text = (ROOT / "docker/Dockerfile").read_text()
    copied = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY ")]
    names = {name for names in copied for name in names if not name.startswith(("-", "/"))}
    assert names >= {"pyproject.toml", "constraints"} and all((ROOT / n).exists() for n in names)


OFFLINE = """#!/bin/bash
case "$*" in
*torch.version.cuda*) echo 13.0 ;;
*"import nvidia"*) echo "$NVIDIA" ;;
*" pip install"*) echo "$PIP_NO_INDEX $PIP_FIND_LINKS $*" >>"$ASKED" ;;
*" pip freeze "*) printf "pip==26.3\ntorch==2.13.0+cu130\n" ;;
*" pip wheel "*)
  echo "$CUDA_HOME $NVTE_BUILD_USE_NVIDIA_WHEELS $MAX_JOBS $*" >>"$ASKED"
  while [[ $1 != --wheel-dir ]]; do shift; done
  touch "$2/torch-2.13.0-cp312.whl" ;;
esac
"""


@pytest.fixture
def venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With `OFFLINE` as its Python, on a machine of 16 cores with a compiler, and CUDA in
    `tmp_path`/cu13.
    """
    venv, commands = tmp_path / "venv", tmp_path / "commands"
    write_python(venv, OFFLINE)
    (tmp_path / "cu13/lib").mkdir(parents=True)
    commands.mkdir()
    for name, line in {"nproc": "echo 16", "c++": "exit 1"}.items():
        (commands / name).write_text(f"#!/bin/sh\n{line}\n")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("NVIDIA", str(tmp_path))
    monkeypatch.delenv("MAX_JOBS", raising=False)
    return venv


def run(script: str, *words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    call = ["bash", str(ROOT / "tools" / script), *words]
    given = os.environ | {"ASKED": str(cwd / "asked")} | env
    return subprocess.run(call, env=given, cwd=cwd, capture_output=True, text=True)


def write_python(venv: Path, text: str) -> None:
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/python").write_text(text)
    (venv / "bin/python").chmod(0o755)


def test_a_folder_of_wheels_needs_no_network_and_no_compiler(tmp_path: Path, venv: Path) -> None:
    wheels, saved = tmp_path / "wheels", tmp_path / "saved"
    install = partial(run, "install_gpu.sh", cwd=tmp_path)
    refused = install("--wheels", "wheels", str(venv))
    assert refused.returncode == 2 and "holds no torch-*.whl; make it with" in refused.stderr
    assert install("--wheel", "x").stderr.startswith("error: there is no option --wheel;")
    wheels.mkdir()
    (wheels / "torch-2.13.0-cp312.whl").touch()
    ended = install("--wheels", "wheels", str(venv))
    assert ended.returncode == 0, ended.stderr
    calls = (tmp_path / "asked").read_text().splitlines()
    assert len(calls) == 5 and all(call.startswith(f"1 {wheels} ") for call in calls)
    last = ended.stdout.splitlines()[-1]
    assert last.startswith(f"next, in {ROOT}: source {venv}/bin/activate; megatron-opsft plan ")
    assert calls[3].endswith("transformer-engine[core-cu13,pytorch]==2.20.2")
    assert (tmp_path / "cu13/lib64/libcudart.so").readlink() == Path("libcudart.so.13")
    kept = install("--save-wheels", "saved", str(venv))  # what is installed stays as it is
    assert kept.returncode == 0 and f"1 wheels in {saved}; install_gpu.sh --wheels" in kept.stdout
    assert (saved / "versions.txt").read_text() == "pip==26.3\ntorch==2.13.0\n"
    (call,) = (tmp_path / "asked").read_text().splitlines()[5:]
    assert "--no-deps --no-build-isolation" in call
    assert call.endswith(f"--wheel-dir {saved} -r {saved}/versions.txt")


def test_transformer_engine_is_compiled_once_into_a_wheel_that_is_saved(
    tmp_path: Path, venv: Path
) -> None:
    """And where that wheel is gone, it is compiled in the same environment again: with the headers
    of CUDA's wheels.
    """
    ended = run("install_gpu.sh", "--save-wheels", "saved", str(venv), cwd=tmp_path, MAX_JOBS="3")
    assert ended.returncode == 0, ended.stderr
    calls = (tmp_path / "asked").read_text().splitlines()
    compiled, saved = (call for call in calls if " pip wheel " in call)
    made = f"{venv}/wheels/torch-2.13.0"  # not taken for another torch
    found = f"--find-links {made}"
    name = "transformer-engine-torch==2.20.2"
    assert compiled.endswith(f" {found} --wheel-dir {made} {name}")
    assert saved.endswith(f" {found} --wheel-dir {tmp_path}/saved -r {tmp_path}/saved/versions.txt")
    environment = f"{tmp_path}/cu13 1 3 "
    assert compiled.startswith(environment) and saved.startswith(environment)
    installed = calls[calls.index(compiled) + 1]
    assert installed.endswith(f"{found} transformer-engine[core-cu13,pytorch]==2.20.2")


GIB = 2**30
V1 = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
V2 = "sys/fs/cgroup", "memory.max"


@pytest.mark.parametrize(
    ("groups", "limits", "jobs"),
    [
        ("0::/\n", {}, 12),  # the machine's 24 GiB: 25 GB
        ("0::/job/step\n", {"job/step": "max", "job": str(8 * GIB), "": str(12 * GIB)}, 4),
        ("0::/job/step\n", {"job/step": str(6 * GIB), "job": str(8 * GIB)}, 3),
        ("0::/outside/the/container\n", {"": str(4 * GIB)}, 2),
        ("0::/\n", {"": str(GIB)}, 1),
        ("4:cpu,memory:/job/step\n3:cpuset:/\n0::/\n", {"job": str(16 * GIB)}, 8),
        ("4:memory:/job\n", {"job": str(2**63 - 4096)}, 12),  # no limit
    ],
)
def test_compile_jobs_fit_the_memory_that_the_control_group_may_use(
    tmp_path: Path, venv: Path, groups: str, limits: dict[str, str], jobs: int
) -> None:
    """At 2 GB each."""
    system = tmp_path / "system"
    (system / "proc/self").mkdir(parents=True)
    (system / "proc/meminfo").write_text(f"MemTotal: {24 * 2**20} kB\nMemFree: 1 kB\n")
    (system / "proc/self/cgroup").write_text(groups)
    folder, file = V1 if "memory" in groups else V2
    for group, limit in limits.items():
        (system / folder / group).mkdir(parents=True, exist_ok=True)
        (system / folder / group / file).write_text(f"{limit}\n")
    ended = run("install_gpu.sh", str(venv), cwd=tmp_path, SYSTEM_ROOT=str(system))
    assert ended.returncode == 0, ended.stderr
    calls = (tmp_path / "asked").read_text().splitlines()
    (compiled,) = (call for call in calls if " pip wheel " in call)
    assert compiled.startswith(f"{tmp_path}/cu13 1 {jobs} ")


@pytest.mark.parametrize(
    ("index", "needs", "said"),
    [
        ("0", "filelock", "CPU build, 0.2 GB, from http://index"),
        ("1", "filelock", "CPU build, 0.2 GB, from pip's own index"),
        ("1", "nvidia-cublas", "CUDA build, which runs on a CPU too"),
    ],
)
def test_torch_for_cpus(tmp_path: Path, index: str, needs: str, said: str) -> None:
    write_python(tmp_path, PYTHON)
    env = {"TORCH_INDEX_URL": "http://index", "INDEX": index, "NEEDS": needs}
    ended = run("make_venv.sh", "cpu", cwd=tmp_path, VENV=str(tmp_path), **env)
    assert ended.returncode == 0 and said in ended.stderr, ended.stderr
    first, *others = (tmp_path / "asked").read_text().splitlines()
    assert first.endswith("--timeout 3 --retries 0 --index-url http://index torch==2.13.0")
    plain = [line for line in others if line.endswith("--disable-pip-version-check torch==2.13.0")]
    assert bool(plain) == (index == "1")
    assert others[-1].endswith("-e .[cpu]")
    again = run("make_venv.sh", "cpu", cwd=tmp_path, VENV=str(tmp_path), **env)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == [first, *others] and again.stderr == ""  # nothing is installed twice
    config = "examples/configs/quickstart.yaml"
    said = f"source {tmp_path}/bin/activate; megatron-opsft train {config}"
    assert ended.stdout == again.stdout == f"next, in {ROOT}: {said}\n"
    assert (ROOT / config).is_file()


FILES = sorted([*ROOT.glob("tools/*.py"), *ROOT.glob("benchmarks/*.py")])
SCRIPTS = [file for file in FILES if '"__main__"' in file.read_text(encoding="utf-8")]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_help(script: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.syspath_prepend(str(script.parent))
    monkeypatch.setattr(Path, "write_text", lambda *a, **k: pytest.fail("it writes"))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.lower().startswith("usage") and len(shown.splitlines()) >= 3


@pytest.mark.parametrize("script", sorted(ROOT.glob("t*s/*.sh")), ids=lambda path: path.stem)
def test_a_shell_script_explains_itself_and_installs_nothing(script: Path) -> None:
    words, environment = ["bash", script, "--help"], {"PATH": "/bin:/usr/bin"}
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=20)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.strip() or script.stem == "find_python"  # sourced, never run
