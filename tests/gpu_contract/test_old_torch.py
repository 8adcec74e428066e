"""The folder for a borrowed card (tools/borrowed_card.sh) in an environment with that machine's
packages, torch 2.11 among them: the oldest one that is tested. Takes half an hour and 6 GB
in .venv-card the first time.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import python_path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PYTHON = ROOT / ".venv-card/bin/python"
FOLDER = ROOT / ".venv-card/folder"  # kept with it: its pieces take minutes to compress
# An empty pip configuration: a machine that is set up for CPU builds would get those.
SETUP = {"PIP_CONFIG_FILE": "/dev/null", "PIP_FIND_LINKS": ""}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def run(*words: object, **env: object) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, **SETUP, **{name: str(value) for name, value in env.items()}}
    return subprocess.run(
        list(map(str, words)), cwd=ROOT, env=given, capture_output=True, text=True
    )


def check(ended: subprocess.CompletedProcess[str]) -> str:
    """What a command printed that must succeed."""
    assert ended.returncode == 0, f"{ended.stdout[-3000:]} {ended.stderr[-6000:]}"
    return ended.stdout


@pytest.fixture(scope="session")
def card() -> Path:
    """The folder; and the environment is there."""
    check(run("bash", "tools/card/venv.sh"))
    check(run("bash", "tools/borrowed_card.sh", FOLDER))
    return FOLDER


@pytest.fixture(scope="session")
def brought(card: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheels as files, as the proof installs them."""
    site = tmp_path_factory.mktemp("brought")
    pip = [PYTHON, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    check(run(*pip, "--target", site, *sorted((card / "wheels").glob("*.whl"))))
    return site


PASSED = {
    "a": {"environment", "losses", "steps", "step_speed", "quickstart"},
    "b": {"environment", "moe_steps", "loss_speed", "push_speed", "save_speed", "kill_and_resume"},
}


@pytest.mark.parametrize("part", PASSED)
def test_a_part_passes_on_torch_2_11_but_for_what_needs_a_gpu(
    card: Path, tmp_path: Path, part: str
) -> None:
    """With what that machine has and the folder brings: the project is not installed there."""
    out, proof = tmp_path / "out", tmp_path / "proof"
    words = {"OUT": out, "PROOF_DIR": proof, "PYTHON": PYTHON, "DEVICE": "cpu", "PYTHONPATH": ""}
    check(run("bash", card / "run.sh", part, **words))
    assert {path.name for path in out.iterdir()} == {"gpu_proof.json", f"proof_{part}.tgz"}
    found = json.loads((out / "gpu_proof.json").read_text())
    assert found["machine"]["versions"]["torch"].partition("+")[0] == "2.11.0"
    assert set(found["left_out"].values()) == {"needs a GPU"}
    assert {s["name"] for s in found["stages"]} - found["left_out"].keys() == PASSED[part]


def test_its_triton_compiles_the_kernels_for_an_h100_without_spills(brought: Path) -> None:
    """test_compiled_kernels.py in that environment."""
    test = HERE / "test_compiled_kernels.py::test_kernels_compile_without_spills[90]"
    words = [PYTHON, "-m", "pytest", "--noconftest", "-p", "no:cacheprovider", test]
    said = check(run(*words, PYTHONPATH=f"{ROOT}:{brought}", CUDA_VISIBLE_DEVICES=""))
    assert "1 passed" in said


@pytest.fixture(scope="session")
def with_vllm(
    card: Path, brought: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    """Runs a script of this folder beside vLLM, joined from its pieces; its last line, as JSON."""
    check(run("bash", "tools/borrowed_card.sh", "--vllm", card))
    joined = tmp_path_factory.mktemp("vllm")
    check(run("bash", card / "run.sh", "join", VLLM_DIR=joined, PYTHON=PYTHON))
    places = [HERE, HERE.parent / "support", ROOT, ROOT / "tests/gpu", brought, joined / "tree"]
    environment = {
        "PYTHONPATH": python_path(*places),
        "PYTHONWARNINGS": "ignore",
        "CUDA_VISIBLE_DEVICES": "",
        "VLLM_NO_USAGE_STATS": "1",
    }

    def run_script(script: str, *words: str) -> Any:
        said = check(run(PYTHON, HERE / script, *words, **environment))
        return json.loads(said.splitlines()[-1])

    return run_script


def test_joined_vllm_loads_imports_and_builds_dense_models(with_vllm: Callable[..., Any]) -> None:
    """On torch 2.11, its libraries with every symbol of torch that they name."""
    told = with_vllm("vllm_pieces.py")
    assert told["refused"] == {}
    needed = {"_C_stable_libtorch.abi3.so", "_vllm_fa3_C.abi3.so", "cumem_allocator.abi3.so"}
    assert needed <= set(told["loaded"]) and told["imported"] > 15
    assert told["parameters"] == {"R1-Distill-Qwen-1.5B": {}, "Llama-3.1-8B": {}}


def test_joined_vllm_takes_every_shipped_configuration(with_vllm: Callable[..., Any]) -> None:
    told = with_vllm("real_configs.py", "vllm")
    assert told.keys() >= {path.stem for path in (ROOT / "examples/configs").glob("*.yaml")}
    assert {case: wrong for case, wrong in told.items() if wrong} == {}
