"""The job scripts on a real cluster where a job is stopped and a node is lost."""

import json
import shlex
from contextlib import suppress

from forked_cli import ForkedCli
from processes import wait_until
from run_differences import compare_runs, read_lines
from slurm_cluster import QUICKSTART, SCRIPT, SETTINGS, SlurmCluster, on
from small_run import SMALL_RUN

SMALL = [*SMALL_RUN, "run.steps=8"]


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
