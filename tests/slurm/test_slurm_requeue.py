"""The job scripts on a real cluster where a job is stopped, a node is lost, and a GPU fails."""

import json
import shlex
from contextlib import suppress

import pytest
from forked_cli import ForkedCli
from processes import wait_until
from run_differences import compare_runs, read_lines
from slurm_cluster import QUICKSTART, SCRIPT, SETTINGS, SlurmCluster, on
from small_run import SMALL_RUN

SMALL = [*SMALL_RUN, "run.steps=8"]
# A rank whose GPU on n1 is bad.
RANK = """#!/bin/sh
if [ "$SLURMD_NODENAME" = n1 ]; then
  echo "error: rank 0 on a in phase train of step 3: AcceleratorError: CUDA error:" \
    "uncorrectable ECC error encountered" >&2
  exit 1
fi
echo "trained on $SLURMD_NODENAME"
"""


def test_two_nodes_and_on_them_a_stop_and_a_lost_node(
    cluster: SlurmCluster, cli: ForkedCli
) -> None:
    """Both lead to a requeue and an exact resume: USR1 after the first step, before a checkpoint is
    due, and a node that SLURM takes away later. Undisturbed: what `launch slurm --dry-run` prints.
    """
    undisturbed, disturbed = (cluster.directory / name for name in ("undisturbed", "disturbed"))
    resources = ["--nodes=2", "--ranks-per-node=1", "--gpus-per-node=0", "--dry-run"]
    launch = ["launch", "slurm", QUICKSTART, *SMALL, f"run.dir={undisturbed}", *resources]
    printed = cli.run(launch).stdout
    job = cluster.submit(shlex.split(printed), {"OMP_NUM_THREADS": "1"})
    assert cluster.wait(job) == "COMPLETED", cluster.output(job)
    assert [row["step"] for row in read_lines(undisturbed / "metrics.jsonl")] == [*range(1, 9)]
    assert json.loads((undisturbed / "manifest.json").read_text())["world_size"] == 2
    assert json.loads((undisturbed / "summary.json").read_text())["steps"] == 8
    assert (undisturbed / "hf/model.safetensors").is_file()
    logs = {path.name: path.read_text() for path in cluster.logs.glob(f"*-undisturbed-{job}/*")}
    assert sorted(logs) == ["node-0.log", "node-1.log"]
    merged = cluster.output(job)
    assert all("\n0: step 8/8  loss" in text for text in (merged, logs["node-0.log"]))
    assert "2 ranks on n[1-2], rendezvous at 127.0.0.1:" in merged
    words = ["sbatch", *on(2, 1), SCRIPT, *SMALL, f"run.dir={disturbed}", "checkpoint.every=2"]
    job = cluster.submit(words, SETTINGS)
    wait_until(lambda: bool(read_lines(disturbed / "metrics.jsonl")))
    cluster.call(["scancel", "--signal=USR1", job])
    wait_until(lambda: cluster.field(job, "Restarts") == "1")
    assert "stopped with a checkpoint, as asked" in cluster.output(job)
    stopped, saved = len(read_lines(disturbed / "metrics.jsonl")), disturbed / "checkpoints"
    assert (saved / f"step_{stopped:06d}").exists() and stopped < 5
    wait_until((saved / f"step_{stopped // 2 * 2 + 2:06d}").exists)
    cluster.call(["scontrol", "update", "nodename=n2", "state=down", "reason=test"])
    wait_until(lambda: cluster.field(job, "Restarts") == "2")
    with suppress(AssertionError):  # its slurmd lives: SLURM may have taken it back by itself
        cluster.call(["scontrol", "update", "nodename=n2", "state=resume"])
    assert cluster.wait(job) == "COMPLETED", cluster.output(job)
    assert "DUE TO NODE FAILURE" in cluster.output(job)
    assert cluster.field(job, "Restarts") == "2"
    assert compare_runs(undisturbed, disturbed) == []


@pytest.mark.parametrize(
    ("options", "excluded", "node"), [([], "n1", "n2"), (["--exclude=n2"], "n2,n1", "n3")]
)
def test_a_job_leaves_the_node_whose_gpu_fails_and_the_nodes_that_its_user_excludes(
    cluster: SlurmCluster, options: list[str], excluded: str, node: str
) -> None:
    rank = cluster.directory / "rank"
    rank.write_text(RANK)
    rank.chmod(0o755)
    settings = {"CONFIG": QUICKSTART, "PYTHON": str(rank)}
    job = cluster.submit(["sbatch", *on(1, 1), *options, SCRIPT], settings)
    assert cluster.wait(job) == "COMPLETED", cluster.output(job)
    said = cluster.output(job)
    assert "n1 failed (uncorrectable ECC error); requeued without it, the job goes on" in said
    assert f"start 1.0: 1 ranks on {node}," in said and f"0: trained on {node}\n" in said
    fields = ("Restarts", "NodeList", "ExcNodeList")
    assert [cluster.field(job, name) for name in fields] == ["1", node, excluded]
