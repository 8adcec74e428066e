"""The wheel, made from the sdist, outside the checkout: every command finds what it needs."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest
from forked_cli import ROOT

CONFIG = "examples/configs/quickstart.yaml"
BUILD = "import sys; from setuptools import build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"

pytestmark = pytest.mark.slow


def python(*words: object, cwd: Path, path: object = "") -> str:
    """The output of `python *words`."""
    env = os.environ | {"PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
    call = [sys.executable, *map(str, words)]
    ended = subprocess.run(call, cwd=cwd, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, f"{words}:\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made as `pip install` of the sdist makes it; the checkout is left as it is."""
    directory = tmp_path_factory.mktemp("build")
    ignored = shutil.ignore_patterns(".*", "runs", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, directory / "checkout", symlinks=True, ignore=ignored)
    python("-c", BUILD, "build_sdist", directory, cwd=directory / "checkout")
    (sdist,) = directory.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(directory, filter="data")
    python("-c", BUILD, "build_wheel", directory, cwd=directory / sdist.name[: -len(".tar.gz")])
    (made,) = directory.glob("*.whl")
    return made


def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    """Every file of the package that git knows, links followed."""
    with ZipFile(wheel) as archive:
        names = archive.namelist()
    held = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    package = ROOT / "megatron_opsft"
    wanted = {
        path.relative_to(ROOT).as_posix()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.name[0] != "."
    }
    linked = {"commands/launch/scripts": "*.sh", "assets/examples": "**/*.yaml"}
    for link, pattern in linked.items():
        target = (package / link).resolve()
        found = [path.relative_to(target).as_posix() for path in target.glob(pattern)]
        wanted |= {f"megatron_opsft/{link}/{name}" for name in found if "cluster" not in name}
    assert held == wanted
    assert "megatron_opsft/py.typed" in held


def test_commands_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """A plan of a shipped configuration and its model there, and a job script."""
    site = tmp_path / "site"
    options = ["--quiet", "--no-deps", "--no-index", "--no-compile", "--target", site]
    python("-m", "pip", "--disable-pip-version-check", "install", *options, wheel, cwd=tmp_path)

    def run(*words: str) -> str:
        return python(site / "bin/megatron-opsft", *words, cwd=tmp_path, path=site)

    assert run("--version") == "megatron-opsft 0.1.0\n"
    script, config = run("launch", "slurm", CONFIG, "--dry-run").split()[-2:]
    for named in (script, config):
        assert Path(named).is_relative_to(site) and Path(named).is_file(), named
    assert (Path(script).parent / "common.sh").is_file()
    assert '"fits": true' in run("plan", CONFIG, "--json")
