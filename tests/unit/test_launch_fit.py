"""`launch` says before a run starts that its plan does not fit, and never refuses it for that."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from forked_cli import ROOT

from megatron_opsft.commands.cli import PROGRAM
from megatron_opsft.commands.command_line import invoke
from megatron_opsft.commands.launch import fit
from megatron_opsft.commands.launch.commands import Local
from megatron_opsft.commands.launch.fit import hardware_of_machine, hardware_of_slurm, warn_of_fit
from megatron_opsft.commands.launch.local_ranks import LocalRanks
from megatron_opsft.commands.plan.assumptions import load_hardware
from megatron_opsft.config.load import load_config

LARGE = ROOT / "examples/configs/r1_distill_7b_paper.yaml"
QUICKSTART = ROOT / "examples/configs/quickstart.yaml"
H100 = load_hardware("h100")
ON_H100 = ["--sbatch=--gres=gpu:h100:8"]


def submitted(caplog: pytest.LogCaptureFixture, *words: str) -> list[str]:
    """What the launch of the paper's 7B run on one node says beside its command line."""
    caplog.clear()
    invoke(PROGRAM, ["launch", "slurm", str(LARGE), "--dry-run", *words])
    return caplog.messages


def test_a_job_that_does_not_fit_is_submitted_with_one_line(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    too_much = ["parallel.tp=1", "train.recompute=none"]
    (said,) = submitted(caplog, *ON_H100, *too_much)
    assert said.startswith("the plan for 8 x h100: DOES NOT FIT. rollout: stage 0 needs ")
    assert said.endswith(" (`megatron-opsft plan CONFIG --search` looks for a layout)")
    assert "\n" not in said and " sbatch --job-name=" in capsys.readouterr().out
    tight = ["rollout.gpu_memory_fraction=0.68", "--sbatch=--constraint=H100"]
    (said,) = submitted(caplog, *tight)
    assert said.startswith("the plan for 8 x h100: FITS TIGHTLY, with ") and "hours" not in said
    (said,) = submitted(caplog, *ON_H100, "train.routing_replay=true")
    assert said.startswith("the plan for 8 x h100 refuses this run: train.routing_replay=true: ")


@pytest.mark.parametrize(
    "words",
    [
        ON_H100,
        ["parallel.tp=1"],  # no sinfo here
        ["parallel.tp=1", "--sbatch=--gres=gpu:a10:8"],
        ["parallel.tp=1", "--gpus-per-node=0", *ON_H100],
        ["parallel.tp=1", "run.device=cpu", *ON_H100],
        ["parallel.tp=1", "model.path=/on/the/nodes/alone", *ON_H100],
        ["parallel.tp=1", "model.path=nobody/has_this", *ON_H100],
        ["parallel.tp=1", "model.path=no name/of the hub", *ON_H100],
        ["parallel.tp=1", f"model.path={ROOT / 'docs'}", *ON_H100],
    ],
)
def test_nothing_is_said_of_what_fits_and_of_what_is_not_known(
    caplog: pytest.LogCaptureFixture, words: list[str]
) -> None:
    assert submitted(caplog, *words) == []


@pytest.mark.parametrize(
    ("gres", "device"),
    [
        ("gpu:h200:8(S:0-1)\n(null)", "h200"),
        ("gpu:nvidia_a100-sxm4-80gb:4,lustre:1", "a100"),
        ("gpu:h100:8\ngpu:v100:4", None),
        ("gpu:8", None),
        ("", None),
    ],
)
def test_sinfo_tells_the_gpus_of_a_partition(
    monkeypatch: pytest.MonkeyPatch, gres: str, device: str | None
) -> None:
    asked = []

    def output_of(*command: str) -> str:
        asked.append(command)
        return gres

    monkeypatch.setattr(fit, "_output_of", output_of)
    found = hardware_of_slurm(["--qos=high"], "fast", 4)
    assert (found and found.name) == device
    assert found is None or found.gpus_per_node == 4
    assert asked == [("sinfo", "--noheader", "--format=%G", "--partition=fast")]


@pytest.mark.parametrize(
    ("shown", "device", "gigabytes"),
    [
        ("NVIDIA H100 80GB HBM3, 81559\nNVIDIA H100 80GB HBM3, 81559", "h100", 84.9),
        ("NVIDIA A100-SXM4-40GB, 40960", "a100", 42.9),
        ("NVIDIA GeForce RTX 4090, 24564", None, 0),
        ("NVIDIA H100, [N/A]", None, 0),
    ],
)
def test_the_gpus_of_this_machine_are_asked_for_their_name_and_memory(
    monkeypatch: pytest.MonkeyPatch, shown: str, device: str | None, gigabytes: float
) -> None:
    monkeypatch.setattr(fit, "_output_of", lambda *command: shown)
    found = hardware_of_machine(load_config(LARGE), 2)
    assert (found and found.name) == device
    if found is not None:
        assert round(found.memory_bytes / 1e9, 1) == gigabytes
    on_cpu = hardware_of_machine(load_config(LARGE, ["run.device=cpu"]), 2)
    assert on_cpu is not None and on_cpu.name == "cpu"
    assert on_cpu.memory_bytes == on_cpu.host_memory_bytes > 1e9


def test_ranks_of_this_machine_start_whatever_the_plan_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(LocalRanks, "run", lambda self, arguments: 0)
    keys = (f"run.dir={tmp_path / 'run'}", "run.device=cpu")
    assert Local(config=QUICKSTART, keys=keys).run() == 0
    assert caplog.messages == []
    small = load_hardware("cpu").model_copy(update={"memory_bytes": 5e8})
    monkeypatch.setattr(
        "megatron_opsft.commands.launch.commands.hardware_of_machine", lambda *given: small
    )
    assert Local(config=QUICKSTART, keys=keys).run() == 0
    (said,) = caplog.messages
    assert said.startswith("the plan for 1 x cpu: DOES NOT FIT. ")


def test_a_plan_before_a_launch_loads_no_torch() -> None:
    program = (
        "import sys; from megatron_opsft.commands.cli import main; sys.argv[1:] = "
        f"{['launch', 'slurm', str(LARGE), '--dry-run', *ON_H100]!r}\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('megatron_opsft.commands.plan.seconds' in sys.modules, 'torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.stdout.splitlines()[-1] == "True False", ended.stderr


def test_none_is_no_device(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    config = load_config(LARGE, ["parallel.tp=1", "train.recompute=none"])
    warn_of_fit(config, 8, None)
    assert caplog.messages == []
    warn_of_fit(config, 8, H100)
    assert len(caplog.messages) == 1
