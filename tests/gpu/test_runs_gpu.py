"""Runs as users start them, by torchrun: a preset with random weights, one that is killed, and the
quickstart to its end.

On a CPU, small: PROOF_DEVICE=cpu.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from forked_cli import ROOT
from processes import apart, python_path, skip_without_vllm
from small_run import FEW_PROBLEMS, QUICKSTART
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from megatron_opsft.rollout.limits import ENGINES
from megatron_opsft.runtime.libraries import is_installed

DEVICE = os.environ.get("PROOF_DEVICE", "cuda")
ON_CPU = DEVICE == "cpu"
RANKS = 1 if ON_CPU else torch.cuda.device_count()
ASSETS = ROOT / "megatron_opsft/assets"
MEAN_TOKENS, LIMIT = (30, 96) if ON_CPU else (150, 512)
CAPPED = [
    *("run.steps=2", "data.train=arithmetic", "verify.judge=own_judges:half_of_them"),
    *(f"rollout.max_response_tokens={LIMIT}", f"eval.max_response_tokens={LIMIT}"),
    *("eval.data=null", "eval.num_problems=4", "eval.samples_per_problem=1"),
]
LARGE_BATCHES = ["rollout.batch_size=512", "train.max_tokens_per_microbatch=32768"]
TINY = ["model.dtype=float32", "data.prompts_per_step=4", "rollout.group_size=2"]
TINY += ["eval.num_problems=1"]


def write_random_model(directory: Path, name: str, device: str) -> None:
    """Of a shipped config.json, with the shipped tokenizer; one token in MEAN_TOKENS is an end."""
    config = AutoConfig.from_pretrained(ASSETS / name)
    config.vocab_size = max(config.vocab_size, 1000)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny_reasoner")
    ends = [*range(len(tokenizer), len(tokenizer) + config.vocab_size // MEAN_TOKENS)]
    tokenizer.add_tokens([f"<end{number}>" for number in ends], special_tokens=True)
    tokenizer.save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))


def start(run_dir: Path, *words: str, ranks: int = RANKS) -> subprocess.Popen[bytes]:
    """`megatron-opsft train WORDS`, by default on all GPUs of this machine."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"]
    torchrun += ["--nproc-per-node", str(ranks), "-m", "megatron_opsft", "train"]
    keys = [f"run.dir={run_dir}", f"run.device={DEVICE}", "run.tensorboard=false"]
    path = python_path(ROOT / "tests/support", ROOT)
    environment = os.environ | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.Popen([sys.executable, *torchrun, *words, *keys], env=environment, cwd=ROOT)


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []


def kill_after(
    process: subprocess.Popen[bytes], is_over: Callable[[], object], seconds: float
) -> None:
    """Kill the ranks as soon as it is over; torchrun ends with them."""
    deadline = time.monotonic() + seconds
    while not is_over():
        assert process.poll() is None, f"the run ended with exit code {process.returncode}"
        assert time.monotonic() < deadline, "the run is too slow"
        time.sleep(0.3)
    for each in psutil.Process(process.pid).children():
        each.kill()
    process.wait(60)


def used_bytes() -> int:
    """Of the fullest GPU, whoever uses it; on a CPU of the processes below this one."""
    if ON_CPU:
        below = psutil.Process().children(recursive=True)
        return sum(each.memory_info().rss for each in below if each.is_running()) // RANKS
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    told = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    return max(map(int, told.split())) * 2**20


def planned(words: list[str]) -> dict[str, Any]:
    """What `megatron-opsft plan` says of the same run."""
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    gpu = next((one for one in ("h200", "a100", "b200", "cpu") if one in name.lower()), "h100")
    command = ["plan", *words, "--gpu", gpu, "--gpus-per-node", str(RANKS), "--json"]
    command += ["--mean-tokens", str(MEAN_TOKENS), "--acceptance", "0.5"]
    ended = subprocess.run(
        [sys.executable, "-m", "megatron_opsft", *command], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode in (0, 4), ended.stderr
    return json.loads(ended.stdout)


def test_a_preset_steps_as_planned(tmp_path: Path, record_property: Any) -> None:
    """The second of two steps; what it takes is shown beside the plan and not bounded by it."""
    if DEVICE == "cuda":
        skip_without_vllm()
    preset, name = (
        "r1_distill_1p5b_paper",
        "model_configs/deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    )
    if ON_CPU:
        preset, name = "quickstart", "tiny_reasoner"
    elif RANKS >= 8:
        preset, name = preset.replace("1p5b", "7b"), name.replace("1.5B", "7B")
    model = tmp_path / "model", name, DEVICE
    if ON_CPU:
        write_random_model(*model)
    else:  # its GPU memory goes with the process
        apart(write_random_model, *model)
    words = [f"examples/configs/{preset}.yaml", f"model.path={tmp_path / 'model'}", *CAPPED]
    words += TINY * (ON_CPU)
    run_dir, peaks = tmp_path / "run", [0]

    def is_over() -> bool:
        peaks.append(used_bytes())
        return len(lines_of(run_dir)) > 1

    kill_after(start(run_dir, *words), is_over, seconds=540)
    line, plan = lines_of(run_dir)[1], planned(words)
    record_property("step_seconds", line["step_seconds"])
    record_property("planned_step_seconds", plan["seconds"]["total"])
    for phase in ("rollout", "train", "sync"):
        record_property(f"{phase}_seconds", line[f"{phase}_seconds"])
    record_property("peak_gb", max(peaks) / 1e9)
    phases = [stage[phase] for stage in plan["stages"] for phase in ("rollout", "train", "sync")]
    record_property("planned_peak_gb", max(phases) / 1e9)
    assert line["num_accepted"] > 0.2 * line["num_rollouts"]
    assert line["logprob_diff_mean"] < 0.05


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path, record_property: Any) -> None:
    run_dir = tmp_path / "run"
    small = ["run.steps=4", "checkpoint.every=1", "eval.num_problems=4", "verify.workers=1"]
    words = [QUICKSTART, *FEW_PROBLEMS, *small, "rollout.max_response_tokens=64"]
    if DEVICE == "cuda":
        words.append("model.dtype=bfloat16")
    checkpoints = run_dir / "checkpoints"
    kill_after(start(run_dir, *words), lambda: [*checkpoints.glob("step_*2")], seconds=200)
    before = lines_of(run_dir)
    began = time.monotonic()
    assert start(run_dir, *words, "--resume=auto").wait(200) == 0
    record_property("resumed_seconds", time.monotonic() - began)
    after = lines_of(run_dir)
    assert [line["step"] for line in after] == [1, 2, 3, 4]
    assert after[:2] == before[:2] and (run_dir / "hf/config.json").exists()


def test_answers_become_shorter_and_stay_right(tmp_path: Path, record_property: Any) -> None:
    """The quickstart as it is shipped, on one GPU in bfloat16 and with vLLM where it is installed:
    what README says of it on a CPU.
    """
    run_dir = tmp_path / "run"
    words = [QUICKSTART]
    if not ON_CPU:
        words += ["model.dtype=bfloat16", *LARGE_BATCHES]
        if is_installed(*ENGINES["vllm"].packages):
            words.append("rollout.engine=vllm")
    assert start(run_dir, *words, ranks=1).wait(480) == 0
    summary = json.loads((run_dir / "summary.json").read_text())
    base, final = summary["base"], summary["final"]
    tokens = base["mean_response_tokens"], final["mean_response_tokens"]
    accuracy = 100 * base["accuracy"], 100 * final["accuracy"]
    record_property("tokens_before", tokens[0])
    record_property("tokens_after", tokens[1])
    record_property("accuracy_before", accuracy[0])
    record_property("accuracy_after", accuracy[1])
    record_property("training_seconds", summary["seconds"])
    record_property(
        "says",
        f"{summary['steps']} steps in {summary['seconds']:.0f} s made held-out answers "
        f"{1 - tokens[1] / tokens[0]:.1%} shorter, {tokens[0]:.1f} -> {tokens[1]:.1f} tokens, at "
        f"an accuracy of {accuracy[0]:.1f} -> {accuracy[1]:.1f} % ({base['samples']} samples)",
    )
    assert tokens[0] > 100 and tokens[1] < 0.3 * tokens[0]
    assert accuracy[0] > 97 and accuracy[1] > 97
