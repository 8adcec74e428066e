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


class Installed:
    """The package in a directory of its own; dependencies are this environment's."""

    def __init__(self, site: Path, cwd: Path) -> None:
        self.site, self.cwd = site, cwd
        self._env = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}

    def run(self, *words: str) -> str:
        """The output of `megatron-opsft *words`, as installed."""
        words = (sys.executable, str(self.site / "bin/megatron-opsft"), *words)
        ended = subprocess.run(words, cwd=self.cwd, env=self._env, capture_output=True, text=True)
        assert ended.returncode == 0, f"{words}:\n{ended.stdout}\n{ended.stderr}"
        return ended.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made as `pip install` of the sdist makes it; the checkout is left as it is."""
    directory = tmp_path_factory.mktemp("build")
    ignored = shutil.ignore_patterns(".*", "runs", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, directory / "checkout", symlinks=True, ignore=ignored)
    build(directory / "checkout", "build_sdist", directory)
    (sdist,) = directory.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(directory, filter="data")
    build(directory / sdist.name.removesuffix(".tar.gz"), "build_wheel", directory)
    (made,) = directory.glob("*.whl")
    return made


def build(source: Path, what: str, out: Path) -> None:
    env = os.environ | {"PYTHONPATH": ""}
    words = [sys.executable, "-c", BUILD, what, str(out)]
    ended = subprocess.run(words, cwd=source, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    site, cwd = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("elsewhere")
    options = ["--quiet", "--no-deps", "--no-index", "--no-compile", "--target", str(site)]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
    subprocess.run([*pip, *options, str(wheel)], check=True, cwd=cwd)
    return Installed(site, cwd)


def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    """Every file of the package that git knows, links followed."""
    with ZipFile(wheel) as archive:
        names = archive.namelist()
    held = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    package = ROOT / "megatron_opsft"
    wanted = {
        path.relative_to(ROOT).as_posix()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    linked = {"launch/scripts": "*.sh", "assets/examples": "**/*.yaml"}
    for link, pattern in linked.items():
        target = (package / link).resolve()
        found = [path.relative_to(target).as_posix() for path in target.glob(pattern)]
        wanted |= {f"megatron_opsft/{link}/{name}" for name in found if "cluster" not in name}
    assert held == wanted
    assert "megatron_opsft/py.typed" in held


def test_commands_outside_the_checkout(installed: Installed) -> None:
    """A plan of a shipped configuration and its model there, and a job script."""
    assert installed.run("--version") == "megatron-opsft 0.1.0\n"
    job = installed.run("launch", "slurm", CONFIG, "--dry-run")
    script, config = job.split()[-2:]
    for named in (script, config):
        assert Path(named).is_relative_to(installed.site) and Path(named).is_file(), named
    assert (Path(script).parent / "common.sh").is_file()
    assert '"fits": true' in installed.run("plan", CONFIG, "--json")
