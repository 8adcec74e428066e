"""What a start says before anything heavy is imported, and the lock of a run's directory."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import SoftFileLease
from forked_cli import ROOT

from megatron_opsft.config import Config
from megatron_opsft.config.load import load_config, to_yaml
from megatron_opsft.errors import NothingLeft, UserError
from megatron_opsft.models.storage.model_paths import ASSETS, TINY_REASONER, resolve_config
from megatron_opsft.run.start.check import check_responses, check_run, is_finished, opened_run
from megatron_opsft.run.start.run_directory import RunDir
from megatron_opsft.runtime import owned_directory as locks
from megatron_opsft.runtime.owned_directory import LOCK

QUICKSTART = ROOT / "examples/configs/quickstart.yaml"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(locks, "SILENT_SECONDS", 0.3)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def write_lock(directory: Path, pid: int, *, host: str | None = None, start: bool = False) -> None:
    """As another process would write it; start: with what tells this process from another."""
    path, own = directory / LOCK, {"pid": str(pid)} | ({} if host is None else {"host": host})
    with SoftFileLease(path, lease_duration=locks.SILENT_SECONDS, heartbeat_interval=0.02):
        lines = path.read_text().splitlines()
    fields = [line.partition("=") for line in lines if start or not line.startswith("start=")]
    path.write_text("".join(f"{name}{sign}{own.get(name, old)}\n" for name, sign, old in fields))


def take(directory: Path) -> float:
    """Seconds until this process has the directory."""
    begin = time.monotonic()
    with RunDir(directory).locked():
        assert SoftFileLease(directory / LOCK).pid == os.getpid()
        return time.monotonic() - begin


def test_on_this_machine_a_living_owner_is_named_and_a_dead_one_is_none(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as owner:
        write_lock(tmp_path, owner.pid)
        said = f"by process {owner.pid} on {socket.gethostname()}; st"
        with pytest.raises(UserError, match=said):
            take(tmp_path)
        assert f"pid={owner.pid}\n" in (tmp_path / LOCK).read_text()
        write_lock(tmp_path, owner.pid, start=True)  # of this process: a later one has its number
        take(tmp_path)
        owner.kill()
    write_lock(tmp_path, owner.pid)
    assert take(tmp_path) < 0.3
    assert list(tmp_path.iterdir()) == []


def test_another_machine_keeps_its_lock_as_long_as_it_touches_it(tmp_path: Path) -> None:
    write_lock(tmp_path, 1, host="node7")
    ended = threading.Event()

    def touch() -> None:
        while not ended.wait(0.02):
            os.utime(tmp_path / LOCK)

    beat = threading.Thread(target=touch)
    beat.start()
    with pytest.raises(UserError, match="in use by process 1 on node7"):
        take(tmp_path)
    ended.set()
    beat.join()
    assert take(tmp_path) >= 0.3


def config_of(run_dir: Path, *overrides: str) -> Config:
    return load_config(QUICKSTART, [f"run.dir={run_dir}", *overrides])


HOLDS_A_DIRECTORY = """
import sys, time
from pathlib import Path
from megatron_opsft.run.start.run_directory import RunDir
from megatron_opsft.runtime import owned_directory as locks
locks.BEAT_SECONDS, locks.SILENT_SECONDS = 0.05, 0.5
with RunDir(Path(sys.argv[1])).locked():
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_process_whose_directory_another_has_taken_over_ends_at_once(tmp_path: Path) -> None:
    """It was silent for too long, and the other writes there now."""
    words = [sys.executable, "-c", HOLDS_A_DIRECTORY, str(tmp_path)]
    with subprocess.Popen(words, stdout=-1, stderr=-1, text=True, cwd=ROOT) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        (tmp_path / LOCK).unlink()
        write_lock(tmp_path, 4711, host="elsewhere")
        _, said = holder.communicate(timeout=30)
    assert holder.returncode == 2
    assert "was taken over by process 4711 on elsewhere" in said and "no sign of life" in said


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert not is_finished(config)
    RunDir(tmp_path).write_manifest({})
    (tmp_path / "summary.json").write_text('{"steps": 24}')
    (tmp_path / "hf").mkdir()
    assert not is_finished(config)  # killed before the export
    (tmp_path / "hf/config.json").touch()
    with pytest.raises(NothingLeft), opened_run(config, resume=True, overwrite=False):
        pass
    more = config_of(tmp_path, "run.steps=25", "optimizer.schedule=constant")
    with opened_run(more, resume=True, overwrite=False):
        assert (tmp_path / LOCK).is_file()


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), None])
def test_a_run_whose_summary_cannot_be_read_is_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError | None
) -> None:
    """So that a resumed run writes it again."""
    (tmp_path / "summary.json").write_text('{"steps": 24')
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").touch()

    def read_bytes(path: Path) -> bytes:
        if error:
            raise error
        return path.read_text().encode()

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    assert not is_finished(config_of(tmp_path))


def test_a_run_that_has_given_up_is_finished_unless_it_is_asked_to_go_on(tmp_path: Path) -> None:
    summary = {"steps": 7, "worse_in_a_row": 2}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").touch()
    for most, finished in ((0, False), (1, True), (2, True), (3, False)):
        config = config_of(tmp_path, f"eval.stop_when_worse={most}", "run.eval_every=1")
        assert is_finished(config) == finished


def test_an_early_end_needs_evaluations(tmp_path: Path) -> None:
    problems = tmp_path / "problems.jsonl"
    problems.write_text('{"problem": "1+1?", "answer": "2"}\n')
    ends = ("eval.stop_when_worse=2", f"data.train={problems}")
    for keys, said in (
        (("eval.stop_when_worse=2", "run.eval_every=0"), "set run.eval_every"),
        ((*ends, "run.eval_every=5"), "set eval.data or eval.holdout"),
    ):
        config = config_of(tmp_path / "run", *keys)
        with pytest.raises(UserError, match=f"eval.stop_when_worse=2 needs .*{said}"):
            check_run(config, resume=False, overwrite=False, must_exist=False, world_size=1)


def test_a_file_of_responses_goes_with_a_method_of_fixed_data_alone(tmp_path: Path) -> None:
    stored = tmp_path / "crst.parquet"
    fixed, own = "method.name=crst", "method.name=on_policy_sft"
    for keys, said in (
        ((own, f"data.responses={stored}"), "method.name=on_policy_sft samples its own; leave it"),
        ((fixed,), "set data.responses to a file that `megatron-opsft data crst` wrote"),
        ((fixed, f"data.responses={stored}"), "there is no such file; make it with"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            check_responses(config_of(tmp_path, *keys))
    stored.touch()
    check_responses(config_of(tmp_path, fixed, f"data.responses={stored}"))
    check_responses(config_of(tmp_path, own))


HEAVY = ("torch", "transformers", "megatron.core", "datasets", "numpy", "pyarrow")
TRAIN, SHIPPED, OUT = "train", str(QUICKSTART), "run.dir=free"


@pytest.fixture(scope="module")
def light() -> Iterator["subprocess.Popen[str]"]:
    """Calls commands, of which nothing heavy is imported before their errors; forks for each."""
    program = (
        "import sys, os, json, megatron_opsft.commands.cli as cli\n"
        "for line in sys.stdin:\n"
        "    if not (pid := os.fork()):\n"
        "        directory, words = json.loads(line)\n"
        "        os.chdir(directory); sys.argv[1:] = words\n"
        "        try: cli.invoke(cli.PROGRAM); error = 'no error'\n"
        "        except BaseException as found: error = str(found)\n"
        f"        heavy = [name for name in {HEAVY} if name in sys.modules]\n"
        "        print(json.dumps([error, heavy]), flush=True)\n"
        "        os._exit(0)\n"
        "    os.waitpid(pid, 0)"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], text=True, **pipes) as process:
        yield process  # which ends with its input


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ((TRAIN, "no.yaml"), "config file no.yaml does not exist"),
        ((TRAIN, SHIPPED, "optimizer.lrr=1"), "did you mean optimizer.lr"),
        ((TRAIN, SHIPPED, "run.dir=run"), "already holds a run"),
        (
            (TRAIN, SHIPPED, "run.dir=run", "--resume", "optimizer.weight_decay=1"),
            "started with optimizer",
        ),
        ((TRAIN, SHIPPED, OUT, "--resume"), "has no run to continue"),
        ((TRAIN, SHIPPED, "run.dir=other"), "no manifest.json of a run; name another directory"),
        ((TRAIN, SHIPPED, "run.dir=/proc/run"), "cannot be written"),
        ((TRAIN, SHIPPED, "run.dir=/dev/null"), "run.dir=/dev/null is a file; name a directory"),
        ((TRAIN, SHIPPED, f"run.dir={'a' * 300}"), "cannot be written (File name too long)"),
        ((TRAIN, SHIPPED, OUT, "model.path=lora"), "a LoRA adapter and not the whole model; merge"),
        ((TRAIN, SHIPPED, OUT, "data.train=no.jsonl"), "there is no file no.jsonl"),
        ((TRAIN, SHIPPED, OUT, "data.train=empty.jsonl"), "empty.jsonl is empty: it has no rows"),
        ((TRAIN, SHIPPED, OUT, "data.template=no.jinja"), "data.template=no.jinja cannot be read"),
        (("eval", "--model=tiny_reasoner", "--out=new", "template=no.jinja"), "template=no.jinja"),
        ((TRAIN, SHIPPED, OUT, "eval.data=/no/where"), "eval.data: there is no file /no/where"),
        ((TRAIN, SHIPPED, OUT, "model.path=./no"), "is not a directory"),
        ((TRAIN, SHIPPED, OUT, "parallel.tp=3"), "parallel.tp=3 does not divide"),
        ((TRAIN, SHIPPED, OUT, "rollout.engine=sglang"), "no such engine"),
        ((TRAIN, SHIPPED, OUT, "rollout.tp=2"), "works only with vLLM"),
        ((TRAIN, SHIPPED, OUT, "method.name=crst"), "trains on fixed data"),
        ((TRAIN, SHIPPED, OUT, "method.name=crst", "data.responses=absent"), "no such file"),
        ((TRAIN, SHIPPED, OUT, "data.responses=absent"), "samples its own"),
        ((TRAIN, SHIPPED, OUT, "run.wandb=online"), "needs the wandb package: pip install wandb"),
        (("launch", "local", SHIPPED, "run.dir=run"), "already holds a run"),
        (("launch", "local", SHIPPED, "parallel.tp=2", "--ranks", "3"), "not a multiple"),
        (("launch", "slurm", SHIPPED, "parallel.tp=3"), "world size 8 is not a multiple of"),
        (("eval", "--model", "./no", "--out", "free"), "--model=./no is not a directory"),
        (("eval", "--model", "run/checkpoints", "--out", "x"), "give one of them, such as run"),
        (("eval", "--model", "tiny_reasoner", "--out", "run"), "something other than an eval"),
        (("eval", "--model", "tiny_reasoner", "--out", "a", "--data", "m=no.jsonl"), "no file no"),
        (("eval", "no.yaml"), "config file no.yaml does not exist"),
        (("plan", "no.yaml"), "config file no.yaml does not exist"),
        (("plan", SHIPPED, "--gpu", "no"), "--gpu=no is not in"),
        (("report", "no"), "no run there"),
        (("convert", "to-hf", "--megatron", "no", "--out", "a"), "is not a directory"),
        (("convert", "to-megatron", "--hf", "tiny_reasoner", "--out", "run"), "already exists"),
        (("data", "crst", SHIPPED, "--out", "run"), "already exists"),
    ],
    ids=lambda value: " ".join(value[:4]).replace(SHIPPED, "") if type(value) is tuple else "",
)
def test_errors_that_need_nothing_heavy_import_nothing_heavy(
    tmp_path: Path, light: "subprocess.Popen[str]", words: tuple[str, ...], error: str
) -> None:
    for name, text in {
        "run/checkpoints/step_000001/complete.json": "",
        "run/config.yaml": to_yaml(config_of(Path("run"))),
        "run/manifest.json": '{"kind": "run"}',
        "other/metrics.jsonl": "",
        "lora/adapter_config.json": '{"peft_type": "LORA"}',
        "empty.jsonl": "",
        "wandb/a": "",  # W&B's own folder; Python imports it as an empty package
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    before = sorted(tmp_path.rglob("*"))
    assert light.stdin is not None and light.stdout is not None
    light.stdin.write(json.dumps([str(tmp_path), words]) + "\n")
    light.stdin.flush()
    said, heavy = json.loads(light.stdout.readline())
    assert error in said and heavy == []
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "name", ["model.safetensors", "tokenizer.json", "config.json", "a.jsonl", "b.parquet", "set"]
)
def test_a_pointer_of_git_lfs_names_the_command_that_fetches_the_file(
    tmp_path: Path, name: str
) -> None:
    model = shutil.copytree(ASSETS / TINY_REASONER, tmp_path / "model")
    of_model = (model / name).exists()
    pointer = (model if of_model else tmp_path) / name
    key = f"model.path={model}" if of_model else f"data.train={pointer}"
    config = config_of(tmp_path / "run", key)
    if name == "set":  # as written by save_to_disk
        pointer = pointer / "train/data-00000-of-00001.arrow"
        pointer.parent.mkdir(parents=True)
    pointer.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{64 * '4'}\n")
    said = (
        f"{pointer} is only Git LFS's pointer to the file: run `git lfs pull` in {pointer.parent}"
    )
    with pytest.raises(UserError, match=re.escape(said)):
        check_run(config, resume=False, overwrite=False, must_exist=False, world_size=1)
    if name == "model.safetensors":
        assert resolve_config(str(model)) == model  # for a plan, config.json is enough
