"""The job scripts on a real cluster: two nodes, the shipped model on the CPU, a few steps.

What they do with exit codes, containers and options, without SLURM: unit/test_job_scripts.py.
"""

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from forked_cli import ForkedCli
from run_differences import compare_runs, read_lines
from slurm_cluster import SlurmCluster, running_cluster
from small_run import SMALL_RUN

QUICKSTART = "examples/configs/quickstart.yaml"
SCRIPT = "slurm/train_7b.sh"
SETTINGS = {"CONFIG": QUICKSTART, "VENV": sys.prefix, "OMP_NUM_THREADS": "1"}
SMALL = [*SMALL_RUN, "run.steps=8"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with running_cluster() as running:
        yield running


def on(nodes: int, ranks: int) -> list[str]:
    """sbatch's options for so many nodes and ranks on each, without GPUs."""
    return [f"--nodes={nodes}", f"--ntasks-per-node={ranks}", "--gpus-per-node=0"]


def wait_until(condition: Callable[[], bool], timeout: float = 300) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_two_nodes_and_on_them_a_stop_and_a_lost_node(
    cluster: SlurmCluster, cli: ForkedCli
) -> None:
    """Both lead to a requeue and an exact resume: USR1 after the first step, before a checkpoint is
    due, and a node that SLURM takes away later.
    """
    undisturbed, disturbed = (cluster.directory / name for name in ("undisturbed", "disturbed"))
    check_two_nodes(cluster, submit_as_printed(cluster, cli, undisturbed), undisturbed)
    words = ["sbatch", *on(2, 1), SCRIPT, *SMALL, f"run.dir={disturbed}", "checkpoint.every=2"]
    job = cluster.submit(words, SETTINGS)
    wait_until(lambda: bool(read_lines(disturbed / "metrics.jsonl")))
    cluster.call(["scancel", "--signal=USR1", job])
    wait_until(lambda: cluster.field(job, "Restarts") == "1")
    assert "stopped with a checkpoint, as asked" in cluster.output(job)
    stopped_after = len(read_lines(disturbed / "metrics.jsonl"))
    assert (disturbed / f"checkpoints/step_{stopped_after:06d}").exists()
    assert stopped_after < 5
    wait_until((disturbed / f"checkpoints/step_{stopped_after // 2 * 2 + 2:06d}").exists)
    cluster.call(["scontrol", "update", "nodename=n2", "state=down", "reason=test"])
    wait_until(lambda: cluster.field(job, "Restarts") == "2")
    with suppress(AssertionError):  # its slurmd lives: SLURM may have taken it back by itself
        cluster.call(["scontrol", "update", "nodename=n2", "state=resume"])
    assert cluster.wait(job) == "COMPLETED", cluster.output(job)
    assert "DUE TO NODE FAILURE" in cluster.output(job)
    assert cluster.field(job, "Restarts") == "2"
    assert compare_runs(undisturbed, disturbed) == []


def submit_as_printed(cluster: SlurmCluster, cli: ForkedCli, run_dir: Path) -> str:
    """The job of what `launch slurm --dry-run` prints for a run on two nodes of one rank."""
    resources = ["--nodes=2", "--ranks-per-node=1", "--gpus-per-node=0"]
    config = [QUICKSTART, *SMALL, f"run.dir={run_dir}"]
    printed = cli.run(["launch", "slurm", *config, *resources, "--dry-run"])
    assert printed.exit_code == 0, printed.stderr
    return cluster.submit(shlex.split(printed.stdout), {"OMP_NUM_THREADS": "1"})


def check_two_nodes(cluster: SlurmCluster, job: str, run_dir: Path) -> None:
    """What a job on two nodes of one rank leaves behind."""
    assert cluster.wait(job) == "COMPLETED", cluster.output(job)
    assert [line["step"] for line in read_lines(run_dir / "metrics.jsonl")] == list(range(1, 9))
    assert json.loads((run_dir / "manifest.json").read_text())["world_size"] == 2
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 8
    assert (run_dir / "hf/model.safetensors").is_file()
    logs = cluster.directory / "logs" / f"opsft-undisturbed-{job}"
    assert "\n0: step 8/8  loss" in (logs / "node-0.log").read_text()
    assert sorted(path.name for path in logs.iterdir()) == ["node-0.log", "node-1.log"]
    merged = cluster.output(job)
    assert "\n0: step 8/8  loss" in merged
    assert "2 ranks on n[1-2], rendezvous at 127.0.0.1:" in merged


def test_every_rank_knows_its_place_and_sees_the_gpus_of_its_node(cluster: SlurmCluster) -> None:
    probe = cluster.directory / "probe.sh"
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
    names += ("SLURM_CPUS_PER_TASK",)  # of the four of a node
    probe.write_text(f"#!/bin/sh\necho {' '.join(f'${name}' for name in names)} $SLURMD_NODENAME\n")
    probe.chmod(0o755)
    resources = ["--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2"]
    job = cluster.submit(["sbatch", *resources, SCRIPT], {**SETTINGS, "PYTHON": str(probe)})
    assert cluster.wait(job) == "COMPLETED", cluster.output(job)
    logs = cluster.directory / "logs" / f"opsft-7b-{job}"
    lines = [sorted((logs / f"node-{n}.log").read_text().splitlines()) for n in range(2)]
    assert lines == [
        ["0: 0 4 0 2 0,1 2 n1", "1: 1 4 1 2 0,1 2 n1"],
        ["2: 2 4 0 2 0,1 2 n2", "3: 3 4 1 2 0,1 2 n2"],
    ]


def test_an_array_s_task_makes_its_run_of_a_study(cluster: SlurmCluster, cli: ForkedCli) -> None:
    """It trains and evaluates on all ranks; the page then says which runs there are."""
    study, out = cluster.directory / "study.yaml", cluster.directory / "study"
    small = dict(word.split("=", 1) for word in [*SMALL_RUN, "run.steps=1"])
    tree = {
        "title": "Array",
        "config": QUICKSTART,
        "set": {key: yaml.safe_load(value) for key, value in small.items() if key != "run.dir"},
        "eval": {"benchmarks": "arithmetic", "limit": 4, "samples": 1, "max_tokens": 32},
        "baseline": "base",
        "sections": {"all": {"title": "All", "runs": {"base": {"train": False}, "ours": {}}}},
    }
    study.write_text(yaml.safe_dump(tree, sort_keys=False))
    settings = {"STUDY": str(study), "OUT": str(out), "VENV": sys.prefix, "OMP_NUM_THREADS": "1"}
    job = cluster.submit(["sbatch", *on(1, 2), "--array=1", "slurm/study.sh"], settings)
    assert cluster.wait(f"{job}_1") == "COMPLETED", cluster.output(f"{job}_1")
    ended = cli.run(["study", study, "--out", out, "--page"])
    assert ended.exit_code == 0, ended.stderr
    rows = json.loads((out / "table.json").read_text())
    errors = [(row["name"], row["error"]) for row in rows]
    assert errors == [("base", "not made yet"), ("ours", None)]
    assert rows[1]["training"]["steps"] == 1
    assert json.loads((out / "runs/ours-s0/train/manifest.json").read_text())["world_size"] == 2


def test_scaling_on_one_and_two_nodes(cluster: SlurmCluster, cli: ForkedCli) -> None:
    """One job submits a run for each number of nodes; `report` has them beside the plan."""
    out = cluster.directory / "scaling"
    settings = {**SETTINGS, "NODES": "1 2", "STEPS": "4", "OUT": str(out)}
    each = [option for option in on(1, 1) if not option.startswith("--nodes")]
    words = ["sbatch", "slurm/scaling.sh", *each, QUICKSTART, *SMALL_RUN]
    submitter = cluster.submit(words, settings)
    assert cluster.wait(submitter) == "COMPLETED", cluster.output(submitter)
    said = cluster.output(submitter).splitlines()
    assert said[-1].endswith(f"megatron-opsft report {out}")
    for line in said[:2]:
        job = line.rpartition(" ")[2]
        assert cluster.wait(job) == "COMPLETED", cluster.output(job)
    for nodes in (1, 2):
        run = out / f"nodes_{nodes}"
        assert json.loads((run / "manifest.json").read_text())["world_size"] == nodes
        assert len(read_lines(run / "metrics.jsonl")) == 4
        assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000004"]
    ended = cli.run(["report", out])
    assert ended.exit_code == 0, ended.stderr
    rows = [line.split() for line in ended.stdout.splitlines() if line.endswith("%)")]
    assert [row[:2] for row in rows] == [["1", "1"], ["2", "2"]]
    assert "measured (planned for cpu)" in ended.stdout and (out / "report.html").is_file()
