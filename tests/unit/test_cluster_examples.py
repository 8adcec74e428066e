"""The job files of examples/cluster: the commands in them train, on as many ranks as they start."""

import shlex
from pathlib import Path
from typing import Any

import yaml

from megatron_opsft.config.load import load_config

EXAMPLES = Path(__file__).parents[2] / "examples"
COMMAND = ["-m", "megatron_opsft", "train"]


def read(name: str) -> Any:
    return yaml.safe_load((EXAMPLES / "cluster" / name).read_text(encoding="utf-8"))


def check_run(words: list[str], world_size: int) -> None:
    """The configuration loads with its overrides, and that number of ranks can hold the model."""
    config, *overrides = [word for word in words if not word.startswith("--")]
    loaded = load_config(EXAMPLES.parent / config, overrides)
    assert str(loaded.run.dir).startswith("/shared/") and "--resume=auto" in words
    assert world_size == 32 and world_size % loaded.parallel.replica_size == 0


def test_pytorchjob_starts_a_rank_for_each_gpu() -> None:
    spec = read("pytorchjob.yaml")["spec"]
    replicas, per_node = spec["pytorchReplicaSpecs"], spec["nprocPerNode"]
    assert isinstance(per_node, str)  # a number is an error of Kubeflow's
    assert replicas.keys() == {"Master", "Worker"} and replicas["Master"]["replicas"] == 1
    num_ranks = sum(each["replicas"] for each in replicas.values()) * int(per_node)
    for pod in (each["template"]["spec"] for each in replicas.values()):
        (container,) = pod["containers"]
        assert container["name"] == "pytorch"  # where the operator puts torchrun's variables
        assert container["command"] == ["torchrun", *COMMAND]
        assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == per_node
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        check_run(container["args"], num_ranks)


def test_skypilot_starts_a_rank_for_each_gpu() -> None:
    task = read("skypilot.yaml")
    words = shlex.split(task["run"].replace("\\\n", ""))
    assert words[0] == ".venv/bin/torchrun"  # of tools/install_gpu.sh
    start = words.index("-m")
    assert words[start : start + 3] == COMMAND
    options = ["--nnodes", "--node-rank", "--nproc-per-node", "--master-addr", "--master-port"]
    assert words[1:start:2] == options
    _, per_node = task["resources"]["accelerators"].split(":")
    check_run(words[start + 3 :], task["num_nodes"] * int(per_node))
