"""tools/borrowed_card.sh and the run.sh that it makes, with a pip and a proof that only write down
what they are asked for; the real ones: tests/gpu_contract/test_old_torch.py.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from card import pieces
from card.pins import canonical, read_pins
from forked_cli import ROOT
from packaging.requirements import Requirement
from proof import stages

# `pip download`: writes down its words, and a wheel for each pin, the first as large as said.
PIP = """
import os, sys, zipfile
from pathlib import Path
Path(os.environ["ASKED"]).open("a").write(" ".join(sys.argv[1:]) + "\\n")
folder = Path(sys.argv[sys.argv.index("--dest") + 1])
size = int(os.environ.get("WHEEL_BYTES", "0"))
for pin in (word for word in sys.argv if "==" in word):
    name = pin.replace("-", "_").replace("==", "-") + "-py3-none-any.whl"
    with zipfile.ZipFile(folder / name, "w") as wheel:
        wheel.writestr("content", bytes(size))
    size = 0
"""
PROOF = """#!/bin/bash
printf '%s\\n' "$@" "$OUT" "$WHEELS" "$PYTHON" "${PYTHONPATH:-}" >"$SAID"
mkdir -p "$OUT/logs"
echo '{"stages": []}' >"$OUT/gpu_proof.json"
while [[ $1 != --bundle ]]; do shift; done
echo all >"$2"
exit "${PROOF_CODE:-0}"
"""


def call(script: Path, *words: object, **env: object) -> subprocess.CompletedProcess[str]:
    given = os.environ | {name: str(value) for name, value in env.items()}
    command = ["bash", script, *words]
    return subprocess.run(list(map(str, command)), env=given, capture_output=True, text=True)


def refused(ended: subprocess.CompletedProcess[str]) -> str:
    """The one line of bad input."""
    assert ended.returncode == 2, ended.stdout + ended.stderr
    (line,) = ended.stderr.splitlines()
    return line


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """Calls borrowed_card.sh with another pip, which notes in `asked` what it is asked for."""
    (tmp_path / "site/pip").mkdir(parents=True)
    (tmp_path / "site/pip/__init__.py").touch()
    (tmp_path / "site/pip/__main__.py").write_text(PIP)
    env = {"PYTHON": sys.executable, "PYTHONPATH": tmp_path / "site", "ASKED": tmp_path / "asked"}
    return lambda *words, **more: call(ROOT / "tools/borrowed_card.sh", *words, **env, **more)


@pytest.fixture
def card(tmp_path: Path) -> Path:
    """A folder whose proof is `PROOF`."""
    folder = tmp_path / "card"
    (folder / "wheels").mkdir(parents=True)
    (folder / "made.txt").write_text("megatron_opsft, commit abc\n")
    shutil.copy(ROOT / "tools/card/run.sh", folder)
    (folder / "project/tools/card").mkdir(parents=True)
    (folder / "project/tools/gpu_proof.sh").write_text(PROOF)
    shutil.copy(ROOT / "tools/card/pieces.py", folder / "project/tools/card")
    return folder


def run(card: Path, *words: object, **env: object) -> subprocess.CompletedProcess[str]:
    places = {name: card.parent / name.lower() for name in ("SAID", "PROOF_DIR", "VLLM_DIR")}
    return call(card / "run.sh", *words, **places, PYTHON=sys.executable, **env)


def write_pieces(card: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Three pieces of a small tree: random bytes cannot be compressed."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 10_000)

    def fill(tree: Path) -> None:
        (tree / "vllm").mkdir()
        (tree / "vllm/__init__.py").write_text("version = 'as sent'\n")
        (tree / "vllm/kernels.so").write_bytes(os.urandom(25_000))

    sizes = pieces.make_pieces(card / "vllm", "a tree", fill)
    assert len(sizes) == 3 and sizes[:2] == [10_000, 10_000]
    return sorted((card / "vllm").glob("part-*"))


def test_the_folder_has_the_checkout_the_wheels_and_what_to_call(make: Any, tmp_path: Path) -> None:
    """Made again, it has the files that are there then, and the wheels it had."""
    folder = tmp_path / "card"
    ended = make(folder)
    assert ended.returncode == 0, ended.stderr
    found = {path.name for path in folder.iterdir()}
    assert found == {"project", "wheels", "run.sh", "made.txt"}
    assert re.search(r"run\.sh, \d+\.\d MB$", ended.stdout, re.MULTILINE)
    assert ended.stdout.endswith("next, on the other machine: bash card/run.sh a\n")
    tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split("\n")[:-1]
    there = [name for name in tracked if (ROOT / name).is_file()]
    assert all((folder / "project" / name).is_file() for name in there)
    linked = folder / "project/megatron_opsft/assets/examples"
    assert linked.is_dir() and not any(path.is_symlink() for path in folder.rglob("*"))
    assert (linked / "quickstart.sh").read_text() == (ROOT / "examples/quickstart.sh").read_text()
    assert len([*(folder / "wheels").glob("*.whl")]) == len(read_pins("brought")) == 12
    (asked,) = (tmp_path / "asked").read_text().splitlines()
    assert asked.startswith("download ") and "--python-version 3.12 " in asked
    assert "--no-deps --only-binary=:all: " in asked and "manylinux_2_28_x86_64" in asked
    (folder / "project/left.py").touch()
    (folder / "results").mkdir()
    assert make(folder).returncode == 0
    assert not (folder / "project/left.py").exists() and (folder / "results").is_dir()
    assert len((tmp_path / "asked").read_text().splitlines()) == 1
    (damaged, *_) = (folder / "wheels").glob("dill-*")
    damaged.write_bytes(damaged.read_bytes()[:10])
    assert make(folder).returncode == 0
    assert len((tmp_path / "asked").read_text().splitlines()) == 2


def test_a_folder_that_is_too_large_or_another_s_is_refused(make: Any, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis").touch()
    error = refused(make(tmp_path / "mine"))
    assert error == (
        f"error: {tmp_path}/mine is there and was not made by this command; name another folder"
    )
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis"]
    error = refused(make(tmp_path / "card", WHEEL_BYTES=30_000_000))
    assert re.fullmatch(rf"error: {tmp_path}/card has 3\d\.\d MB; at most 30 may travel", error)


STAGES = {
    "a": "--quick",
    "b": "--only moe_steps,step_tests,push_and_rollouts,loss_speed,push_speed,save_speed,"
    "kill_and_resume,evaluation",
    "c": "--only shorter_answers",
    "d": "--only vllm_quickstart,vllm_speed",
    "e": "--only vllm_push,vllm_sleeps",
}


@pytest.mark.parametrize("part", STAGES)
def test_a_part_runs_its_stages_and_leaves_two_files(
    card: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Wherever the folder was copied to; the exit code is the proof's."""
    moved = card.rename(card.parent / "copied")
    if part in "de":
        write_pieces(moved, monkeypatch)
    earlier = moved.parent / "earlier.json"
    earlier.touch()
    out, proof = moved.parent / "out", moved.parent / "proof_dir"
    ended = run(moved, part, earlier, OUT=out, PROOF_CODE=1, PYTHONPATH="/of/the/caller")
    assert ended.returncode == 1 and "commit abc" in ended.stdout, ended.stderr
    bundle = out / f"proof_{part}.tgz"
    words = f"--device cuda --minutes 9 --bundle {bundle} {STAGES[part]} --continue {earlier}"
    said = (moved.parent / "said").read_text().splitlines()
    assert " ".join(said[:-4]) == words
    path = f"{moved.parent}/vllm_dir/tree:" * (part in "de") + "/of/the/caller"
    assert said[-4:] == [str(proof), str(moved / "wheels"), sys.executable, path]
    assert sorted(out.iterdir()) == [out / "gpu_proof.json", bundle]
    assert (out / "gpu_proof.json").read_text() == '{"stages": []}\n'
    if part in "de":
        joined = moved.parent / "vllm_dir/tree/vllm/__init__.py"
        assert joined.read_text() == "version = 'as sent'\n"


def test_without_an_earlier_result_a_part_begins_anew_beside_run_sh(card: Path) -> None:
    assert run(card, "a", DEVICE="cpu").returncode == 0
    said = (card.parent / "said").read_text().splitlines()
    assert said[:2] == ["--device", "cpu"] and "--continue" not in said
    names = [path.name for path in sorted((card / "results").iterdir())]
    assert names == ["gpu_proof.json", "proof_a.tgz"]


def test_an_unknown_part_or_earlier_result_is_one_line(card: Path) -> None:
    known = "there are a, b, c, d, e and join"
    assert refused(run(card, "f")) == f"error: there is no part 'f'; {known}"
    assert refused(run(card)) == f"error: there is no part ''; {known}"
    assert refused(run(card, "a", "no.json")).startswith("error: there is no no.json; name the ")
    assert not (card.parent / "said").exists()


def test_pieces_are_joined_when_the_last_has_come_and_a_damaged_one_is_named(
    card: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "pieces.json; make this folder with" in refused(run(card, "join"))
    parts = write_pieces(card, monkeypatch)
    with_all = {path: path.read_bytes() for path in parts}
    for path in parts[1:]:
        path.unlink()
    error = refused(run(card, "d"))
    assert error.startswith("error: part-01, part-02 of 3 pieces did not come yet; send what is")
    parts[0].unlink()  # it came, and is kept
    parts[1].write_bytes(with_all[parts[1]][:-1] + b"x")
    assert refused(run(card, "join")) == f"error: {parts[1]} is damaged; send it again"
    parts[1].write_bytes(with_all[parts[1]])
    assert "part-02 of 3 pieces" in refused(run(card, "join"))
    parts[2].write_bytes(with_all[parts[2]])
    ended = run(card, "join")
    tree = card.parent / "vllm_dir/tree"
    assert ended.returncode == 0 and ended.stdout == f"joined 3 pieces: {tree}\n"
    assert len((tree / "vllm/kernels.so").read_bytes()) == 25_000
    for path in parts:
        path.unlink(missing_ok=True)
    again = run(card, "join")
    assert again.returncode == 0 and again.stdout == ""


def test_pieces_are_made_again_only_when_they_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = write_pieces(tmp_path, monkeypatch)
    first = [path.read_bytes() for path in parts]
    write_pieces(tmp_path, monkeypatch)  # of other random bytes, if they were made
    assert [path.read_bytes() for path in parts] == first
    parts[1].write_bytes(b"x")
    write_pieces(tmp_path, monkeypatch)
    manifest = json.loads((tmp_path / "vllm/pieces.json").read_text())
    assert parts[1].read_bytes() != b"x" and manifest["content"] == "a tree"
    assert list(manifest["pieces"]) == ["part-00", "part-01", "part-02"]


def test_the_stages_of_the_parts_are_stages_of_the_proof() -> None:
    text = (ROOT / "tools/card/run.sh").read_text()
    named = re.findall(r'--only "?([\w,]+)', text)
    assert [f"--only {names}" for names in named] == [STAGES[part] for part in "bcde"]
    for name in ",".join(named).split(","):
        assert hasattr(stages, f"test_{name}"), name


def test_what_the_machine_lacks_is_brought_in_the_versions_that_were_tested() -> None:
    """Nothing is missing of what the project needs, and nothing is brought that is there."""

    def versions(pins: list[str]) -> dict[str, str]:
        return {canonical(name): version for name, _, version in (p.partition("==") for p in pins)}

    has, brought, vllm = (versions(read_pins(name)) for name in ("has", "brought", "vllm"))
    assert len(has | brought | vllm) == len(has) + len(brought) + len(vllm)
    lines = (ROOT / "constraints/gpu-py312.txt").read_text().splitlines()
    tested = versions([line for line in lines if not line.startswith("#")])
    assert brought | vllm == {name: tested[name] for name in brought | vllm}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for need in map(Requirement, project["dependencies"]):
        assert need.specifier.contains((has | brought)[canonical(need.name)]), need
