"""The job files of examples/cluster against what their programs accept.

The models below are the parts in use of Kubeflow's v1 API (the models of kubeflow-training 1.9),
of Kubernetes' pods, and of SkyPilot's task schema (0.14); a key that they do not have is an error.
"""

import shlex
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron_opsft.config.load import load_config

EXAMPLES = Path(__file__).parents[2] / "examples"
COMMAND = ["-m", "megatron_opsft", "train"]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class EnvVar(Strict):
    name: str = Field(pattern="^[a-zA-Z_][a-zA-Z0-9_]*$")
    value: str


class VolumeMount(Strict):
    name: str
    mountPath: str


class Resources(Strict):
    limits: dict[str, int | str]


class Container(Strict):
    name: str
    image: str
    command: list[str]
    args: list[str]
    env: list[EnvVar]
    resources: Resources
    volumeMounts: list[VolumeMount]


class Claim(Strict):
    claimName: str


class EmptyDir(Strict):
    medium: Literal["", "Memory"]


class Volume(Strict):
    name: str
    persistentVolumeClaim: Claim | None = None
    emptyDir: EmptyDir | None = None


class PodSpec(Strict):
    containers: list[Container]
    volumes: list[Volume]


class PodTemplate(Strict):
    spec: PodSpec


class ReplicaSpec(Strict):
    replicas: int
    restartPolicy: Literal["Always", "OnFailure", "Never", "ExitCode"]
    template: PodTemplate


class RunPolicy(Strict):
    cleanPodPolicy: Literal["Running", "All", "None"]
    backoffLimit: int


class PyTorchJobSpec(Strict):
    nprocPerNode: str
    runPolicy: RunPolicy
    pytorchReplicaSpecs: dict[Literal["Master", "Worker"], ReplicaSpec]


class Metadata(Strict):
    name: str = Field(pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)


class PyTorchJob(Strict):
    apiVersion: Literal["kubeflow.org/v1"]
    kind: Literal["PyTorchJob"]
    metadata: Metadata
    spec: PyTorchJobSpec


class SkyResources(Strict):
    accelerators: str = Field(pattern=r"^[A-Z0-9-]+:\d+$")
    network_tier: Literal["standard", "best"]


class SkyStorage(Strict):
    name: str
    mode: Literal["MOUNT", "COPY", "MOUNT_CACHED"]


class SkyTask(Strict):
    name: str
    num_nodes: int
    resources: SkyResources
    workdir: str
    file_mounts: dict[str, SkyStorage | str]
    envs: dict[str, str | None]
    setup: str
    run: str


def read(name: str) -> Any:
    return yaml.safe_load((EXAMPLES / "cluster" / name).read_text(encoding="utf-8"))


def check_run(words: list[str], world_size: int) -> None:
    """The configuration loads with its overrides and cuts so many ranks."""
    config, *overrides = [word for word in words if not word.startswith("--")]
    loaded = load_config(EXAMPLES.parent / config, overrides)
    assert str(loaded.run.dir).startswith("/shared/")
    assert world_size == 32 and world_size % (loaded.parallel.tp * loaded.parallel.pp) == 0
    assert "--resume=auto" in words


def test_pytorchjob_is_what_kubeflow_s_operator_takes() -> None:
    job = PyTorchJob.model_validate(read("pytorchjob.yaml"))
    specs = job.spec.pytorchReplicaSpecs
    assert specs["Master"].replicas == 1  # rank 0's node
    for spec in specs.values():
        (container,) = spec.template.spec.containers
        assert container.name == "pytorch"
        assert container.command == ["torchrun", *COMMAND]
        assert str(container.resources.limits["nvidia.com/gpu"]) == job.spec.nprocPerNode
        volumes = {volume.name for volume in spec.template.spec.volumes}
        assert {mount.name for mount in container.volumeMounts} == volumes
        num_nodes = sum(spec.replicas for spec in specs.values())
        check_run(container.args, num_nodes * int(job.spec.nprocPerNode))


def test_skypilot_file_is_a_task_of_its() -> None:
    task = SkyTask.model_validate(read("skypilot.yaml"))
    words = shlex.split(task.run.replace("\\\n", ""))
    assert words[0] == ".venv/bin/torchrun"  # of tools/install_gpu.sh
    start = words.index("-m")
    assert words[start : start + 3] == COMMAND
    assert words[1:start:2] == [
        *("--nnodes", "--node-rank", "--nproc-per-node", "--master-addr", "--master-port")
    ]
    check_run(words[start + 3 :], task.num_nodes * int(task.resources.accelerators.split(":")[1]))


def test_a_key_that_is_not_theirs_is_seen() -> None:
    job = read("pytorchjob.yaml")
    job["spec"]["nprocPerNode"] = 8  # a string in their schema
    with pytest.raises(ValidationError, match="nprocPerNode"):
        PyTorchJob.model_validate(job)
    with pytest.raises(ValidationError, match="nodes"):
        SkyTask.model_validate(read("skypilot.yaml") | {"nodes": 4})
