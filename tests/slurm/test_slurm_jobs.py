"""The job scripts on a real cluster: the shipped model on the CPU, a few steps. What
they do with exit codes, containers and options, without SLURM: unit/test_job_scripts.py.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml
from forked_cli import ForkedCli
from run_differences import read_lines
from slurm_cluster import QUICKSTART, SCRIPT, SETTINGS, SlurmCluster, on
from small_run import SMALL_RUN


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def test_every_rank_knows_its_place_the_gpus_of_its_node_and_the_cpus_of_the_smallest(
    cluster: SlurmCluster,
) -> None:
    probe = cluster.directory / "probe.sh"
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
    names += ("SLURM_CPUS_PER_TASK", "OMP_NUM_THREADS")  # of six on n1 and four on n2
    probe.write_text(f"#!/bin/sh\necho {' '.join(f'${name}' for name in names)} $SLURMD_NODENAME\n")
    probe.chmod(0o755)
    resources = ["--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2"]
    settings = {"CONFIG": QUICKSTART, "PYTHON": str(probe), "OMP_NUM_THREADS": ""}
    job = cluster.submit(["sbatch", *resources, SCRIPT], settings)
    assert cluster.wait(job) == "COMPLETED", cluster.output(job)
    logs = [cluster.logs / f"opsft-7b-{job}/node-{node}.log" for node in range(2)]
    lines = [sorted(log.read_text().splitlines()) for log in logs]
    assert lines == [
        ["0: 0 4 0 2 0,1 2 2 n1", "1: 1 4 1 2 0,1 2 2 n1"],
        ["2: 2 4 0 2 0,1 2 2 n2", "3: 3 4 1 2 0,1 2 2 n2"],
    ]


def test_an_array_s_task_makes_its_run_of_a_study(cluster: SlurmCluster, cli: ForkedCli) -> None:
    """It trains and evaluates on all ranks; the page then says which runs there are."""
    study, out = cluster.directory / "study.yaml", cluster.directory / "study"
    words = [*SMALL_RUN, "verify.judge=math", "run.steps=1"]
    small = dict(word.split("=", 1) for word in words)
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
    rows = read_json(out / "table.json")
    errors = [(row["name"], row["error"]) for row in rows]
    assert errors == [("base", "not made yet"), ("ours", None)]
    assert rows[1]["training"]["steps"] == 1
    assert read_json(out / "runs/ours-s0/train/manifest.json")["world_size"] == 2


def test_scaling_on_one_and_two_nodes(cluster: SlurmCluster, cli: ForkedCli) -> None:
    """One job submits a run for each number of nodes; `report` has them beside the plan."""
    out = cluster.directory / "scaling"
    settings = {**SETTINGS, "NODES": "1 2", "STEPS": "4", "OUT": str(out)}
    words = ["sbatch", "slurm/scaling.sh", *on(1, 1)[1:], QUICKSTART, *SMALL_RUN]
    submitter = cluster.submit(words, settings)
    assert cluster.wait(submitter) == "COMPLETED", cluster.output(submitter)
    *submitted, last = cluster.output(submitter).splitlines()
    assert last.endswith(f"megatron-opsft report {out}")
    for job in (line.rpartition(" ")[2] for line in submitted[:2]):
        assert cluster.wait(job) == "COMPLETED", cluster.output(job)
    for nodes in (1, 2):
        run = out / f"nodes_{nodes}"
        assert read_json(run / "manifest.json")["world_size"] == nodes
        assert len(read_lines(run / "metrics.jsonl")) == 4
        assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000004"]
    ended = cli.run(["report", out])
    assert ended.exit_code == 0, ended.stderr
    rows = [line.split() for line in ended.stdout.splitlines() if line.endswith("%)")]
    assert [row[:2] for row in rows] == [["1", "1"], ["2", "2"]]
    assert "measured (planned for cpu)" in ended.stdout and (out / "report.html").is_file()
